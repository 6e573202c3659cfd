# What the scripts that make an environment share; to be sourced. They set: program, root, venv, lock.
# shellcheck shell=bash
# shellcheck disable=SC2154
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
started=$SECONDS

fail() { # message, what to do
  printf '\n%s: %s\n  what to do: %s\n' "$program" "$1" "$2" >&2
  exit 1
}

say() { printf '[setup %4ss] %s\n' "$((SECONDS - started))" "$*"; }

find_python() {
  local candidate
  for candidate in ${TQ_BASE_PYTHON:-python3.11 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python >= 3.10 found (tried: ${TQ_BASE_PYTHON:-python3.11 python3})" \
    "install Python 3.11, or name an interpreter: TQ_BASE_PYTHON=/path/to/python3.11 $0"
}

pip_install() { # pip's arguments; the log is kept, its tail is shown on failure
  local log=$venv/setup.log
  if ! "$venv/bin/python" -m pip install --progress-bar off --no-compile "$@" >>"$log" 2>&1; then
    tail -n 15 "$log" >&2
    fail "pip could not install: $*" \
      "check the network and the free disk (4 GiB are needed), then run this again; it resumes here. Log: $log"
  fi
}

# step NAME FINGERPRINT FUNCTION: run FUNCTION unless it finished before with the same FINGERPRINT.
step_number=0
step() {
  local stamp=$venv/.stamps/$1
  step_number=$((step_number + 1))
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$2" ]; then
    say "$step_number/4 $1: done before"
    return
  fi
  say "$step_number/4 $1 ..."
  "$3"
  mkdir -p "$venv/.stamps"
  printf '%s\n' "$2" >"$stamp"
}

make_venv() {
  "$base_python" -m venv "$venv" ||
    fail "$base_python cannot make a virtual environment" "install its venv package (Debian: apt-get install python3-venv)"
}

install_torch() { pip_install -c "$lock" "$torch" 'setuptools==78.1.1'; }

install_list() { # modules that must import then. No dependency resolution, so nothing is replaced
  grep -vE '^(torch==|#)' "$lock" >"$venv/locked.txt"
  pip_install --no-deps -r "$venv/locked.txt"
  "$venv/bin/python" -c "import $1" >>"$venv/setup.log" 2>&1 || {
    tail -n 15 "$venv/setup.log" >&2
    fail "the installed packages do not import" "remove $venv and run this again; the versions are pinned for Linux x86-64, Python 3.11"
  }
}

install_project() {
  pip_install --no-deps --no-build-isolation -e "$root"
  (cd "$venv" && bin/python -c 'import tq_offload') || fail "tq_offload does not import" "see the message above"
}

make_environment() { # MODULES: all the steps
  local modules=$1
  [ "$(uname -s)" = Linux ] || fail "the pinned versions are for Linux (this is $(uname -s))" "use a Linux machine or container"
  base_python=$(find_python)
  [ -n "$base_python" ] || exit 1
  torch=${TQ_TORCH:-$(grep '^torch==' "$lock")}
  [ "$venv" -ef "$root" ] && fail "the environment cannot be the checkout itself" "name another folder"

  # An environment that was moved or whose interpreter is gone is made anew.
  if [ -d "$venv" ] && ! "$venv/bin/python" -c '' 2>/dev/null; then
    say "$venv has no working interpreter: made anew"
    rm -rf "$venv"
  fi
  install_locked() { install_list "$modules"; }

  step venv "$("$base_python" --version)" make_venv
  step torch "$torch" install_torch
  step packages "$(cksum <"$lock")" install_locked
  step tq-offload "$root $(cksum <"$root/pyproject.toml")" install_project
  say "ready: $venv"
}
