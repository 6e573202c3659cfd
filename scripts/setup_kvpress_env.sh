#!/usr/bin/env bash
# Make the virtual environment of the KVPress tests and benchmarks: torch, kvpress, the developer tools and this package
# (editable). Can be run again at any time: each finished step leaves a stamp and is skipped until what it installs changes.
#
#   usage: scripts/setup_kvpress_env.sh [DIR]        DIR: where the environment goes (default: .venv-kvpress)
#
#   TQ_BASE_PYTHON, TQ_TORCH, PIP_*: as for scripts/setup_env.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv-kvpress}
lock=$root/scripts/constraints-kvpress.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

fail() { # message, what to do
  printf '\nsetup_kvpress_env: %s\n  what to do: %s\n' "$1" "$2" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in ${TQ_BASE_PYTHON:-python3.11 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python >= 3.10 found" "install Python 3.11, or name an interpreter: TQ_BASE_PYTHON=/path/to/python3.11 $0"
}

pip_install() { # pip's arguments; the log is kept, its tail is shown on failure
  local log=$venv/setup.log
  if ! "$venv/bin/python" -m pip install --progress-bar off --no-compile "$@" >>"$log" 2>&1; then
    tail -n 15 "$log" >&2
    fail "pip could not install: $*" "check the network and the free disk, then run this again; it resumes here. Log: $log"
  fi
}

step() { # NAME FINGERPRINT FUNCTION: run FUNCTION unless it finished before with the same FINGERPRINT
  local stamp=$venv/.stamps/$1
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$2" ] && return
  printf '[setup %4ss] %s ...\n' "$SECONDS" "$1"
  "$3"
  mkdir -p "$venv/.stamps"
  printf '%s\n' "$2" >"$stamp"
}

make_venv() { "$base_python" -m venv "$venv" || fail "$base_python cannot make a virtual environment" "install its venv package"; }
install_torch() { pip_install -c "$lock" "$torch" 'setuptools==78.1.1'; }
install_locked() { # no resolution, so that torch is not replaced
  grep -vE '^(torch==|#)' "$lock" >"$venv/locked.txt"
  pip_install --no-deps -r "$venv/locked.txt"
  "$venv/bin/python" -c 'import kvpress, numba, optimum.quanto, torch' >>"$venv/setup.log" 2>&1 ||
    fail "the installed packages do not import" "see $venv/setup.log; the versions are pinned for Linux x86-64, Python 3.11"
}
install_project() { pip_install --no-deps --no-build-isolation -e "$root"; }

base_python=$(find_python)
[ -n "$base_python" ] || exit 1
torch=${TQ_TORCH:-$(grep '^torch==' "$lock")}
[ "$venv" -ef "$root" ] && fail "the environment cannot be the checkout itself" "name another folder"
if [ -d "$venv" ] && ! "$venv/bin/python" -c '' 2>/dev/null; then rm -rf "$venv"; fi # moved, or its interpreter is gone

step venv "$("$base_python" --version)" make_venv
step torch "$torch" install_torch
step packages "$(cksum <"$lock")" install_locked
step tq-offload "$root $(cksum <"$root/pyproject.toml")" install_project
printf '[setup %4ss] ready: %s\n' "$SECONDS" "$venv"
