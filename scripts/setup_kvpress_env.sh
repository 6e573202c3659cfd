#!/usr/bin/env bash
# Make the virtual environment of the KVPress tests and benchmarks: torch, kvpress, the developer tools and this package
# (editable). Can be run again at any time: each finished step leaves a stamp and is skipped until what it installs changes.
#
#   usage: scripts/setup_kvpress_env.sh [DIR]        DIR: where the environment goes (default: .venv-kvpress)
#
#   TQ_BASE_PYTHON, TQ_TORCH, PIP_*: as for scripts/setup_env.sh
set -euo pipefail

program=setup_kvpress_env
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv-kvpress}
lock=$root/scripts/constraints-kvpress.txt
. "$root/scripts/env_lib.sh"
make_environment 'kvpress, numba, optimum.quanto, redis, torch, triton'
