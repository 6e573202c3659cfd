#!/usr/bin/env bash
# Run tests/kv_cache and tests/press with every supported pair of kvpress and transformers, then print a table. Each release
# is a folder put before the environment's own packages, so torch is installed once. Fails if any test of any pair fails.
#
#   usage: scripts/kvpress_versions.sh PYTHON [KVPRESS:TRANSFORMERS ...]     PYTHON: of the KVPress environment
#
#   TQ_TEST_CACHE   where releases are kept   (default: tq-offload-tests in the user's cache folder)
#   TQ_TEST_JOBS    pairs run at a time       (default: one for two cores)
#   PYTEST_ARGS     more arguments for pytest
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${1:?usage: scripts/kvpress_versions.sh PYTHON [KVPRESS:TRANSFORMERS ...]}
shift
cache=${TQ_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tq-offload-tests}
jobs=${TQ_TEST_JOBS:-$((($(nproc) + 1) / 2))}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 HF_HUB_OFFLINE=1
pairs=("$@")
if [ $# -eq 0 ]; then
  pairs=(0.5.5:4.57.6 0.5.5:5.2.0 0.5.5:5.3.0 0.5.5:5.4.0 0.5.5:5.9.0 0.5.5:5.16.1 0.5.5:5.19.0 0.5.5:5.24.0
    0.5.2:4.57.6 0.5.2:5.19.0 0.5.3:5.2.0 0.5.4:5.2.0)
fi

companions() { # what a release of transformers needs beside it, where the environment's is too new or too old
  case $1 in
    4.*) echo "huggingface_hub<1.0 datasets<4.5" ;;
    5.[0-9].* | 5.1[0-4].*) ;;
    *) echo "tokenizers>=0.23.1,<0.24" ;;
  esac
}

fetch() { # package, version, companions: an unpacked release in the cache, complete or absent
  local folder=$cache/for-kvpress/$1-$2 new
  [ -d "$folder" ] && return
  mkdir -p "$cache/for-kvpress"
  new=$(mktemp -d "$folder.XXXXXX")
  # shellcheck disable=SC2086
  if ! "$python" -m pip install -q --no-deps --no-compile --target "$new" "$1==$2" ${3:-} >"$new.log" 2>&1; then
    cat "$new.log" >&2
    printf 'kvpress_versions: %s %s cannot be had\n  what to do: let pip reach its index, or put the unpacked release at %s\n' \
      "$1" "$2" "$folder" >&2
    exit 1
  fi
  mv "$new" "$folder"
  rm -f "$new.log"
}

run() { # kvpress, transformers: the output of pytest, and its exit status
  local base=$cache/for-kvpress status=0
  PYTHONPATH=$base/kvpress-$1:$base/transformers-$2${PYTHONPATH:+:$PYTHONPATH} \
    "$python" -m pytest -q -p no:cacheprovider --tb=short tests/kv_cache tests/press \
    ${PYTEST_ARGS:-} >"$results/$1-$2.txt" 2>&1 || status=$?
  echo "$status" >"$results/$1-$2.status"
  printf 'kvpress %s, transformers %s: %s\n' "$1" "$2" "$(tail -n 1 "$results/$1-$2.txt")"
}

count() { # file, word: the number before it in pytest's last line
  tail -n 1 "$1" | grep -oE "[0-9]+ $2" | grep -oE '[0-9]+' || echo 0
}

cd "$root"
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
for pair in "${pairs[@]}"; do
  fetch kvpress "${pair%:*}"
  fetch transformers "${pair#*:}" "$(companions "${pair#*:}")"
done
for pair in "${pairs[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
  run "${pair%:*}" "${pair#*:}" &
done
wait

failures=0
for pair in "${pairs[@]}"; do
  name=${pair%:*}-${pair#*:}
  if [ "$(cat "$results/$name.status")" != 0 ]; then
    failures=$((failures + 1))
    printf '\n==== kvpress %s, transformers %s\n' "${pair%:*}" "${pair#*:}"
    grep -E '^(FAILED|ERROR|E  )' "$results/$name.txt" || tail -n 20 "$results/$name.txt"
  fi
done
printf '\n%-8s %-13s %7s %7s %8s  %s\n' kvpress transformers passed failed skipped 'why skipped'
for pair in "${pairs[@]}"; do
  file=$results/${pair%:*}-${pair#*:}.txt
  why=$(sed -nE 's/^SKIPPED \[[0-9]+\] [^ ]+ (.*)/\1/p' "$file" | sort -u | paste -sd ';')
  printf '%-8s %-13s %7s %7s %8s  %s\n' "${pair%:*}" "${pair#*:}" "$(count "$file" passed)" \
    "$(($(count "$file" failed) + $(count "$file" error)))" "$(count "$file" skipped)" "$why"
done
[ "$failures" -eq 0 ] || { printf '\n%s of %s pairs failed\n' "$failures" "${#pairs[@]}" >&2 && exit 1; }
