#!/usr/bin/env bash
# Make the virtual environment that the tests and the demo run in: torch, vLLM for CPU, LMCache, the developer tools and this
# package (editable). Can be run again at any time: each finished step leaves a stamp and is skipped until what it installs changes.
#
#   usage: scripts/setup_env.sh [DIR]        DIR: where the environment goes (default: .venv)
#
#   TQ_BASE_PYTHON   the interpreter to make it with   (default: the first of python3.11, python3 that is >= 3.10)
#   TQ_TORCH         what to install as torch          (default: torch at the version in constraints.txt)
#   PIP_*            pip's own settings, e.g. PIP_INDEX_URL for a mirror or an index of CPU-only torch builds
set -euo pipefail

program=setup_env
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv}
lock=$root/scripts/constraints.txt
. "$root/scripts/env_lib.sh"
make_environment 'lmcache, numba, torch, transformers, vllm'
