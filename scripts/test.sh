#!/usr/bin/env bash
# All checks in one command: style, types, tests. Arguments go to pytest.
#   PYTHON, VENV   as in quickstart.sh
#   EXTRAS         of the package to install (default: test; with test,tasks nothing of Reasoning-Gym is skipped)
#   WORKERS        test processes (default: 2; most of the time goes into compiling, one core each)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/environment.sh"
make_environment "$root" "${EXTRAS:-test}"
cd "$root"
echo "== ruff"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check --quiet .
echo "== mypy"
"$VENV/bin/mypy"
echo "== pytest"
"$VENV/bin/python" -m pytest --numprocesses "${WORKERS:-2}" --dist loadscope "$@"
