#!/usr/bin/env bash
# Sets up an environment (once) and trains the packaged demo; arguments go to `python -m logra_jax.train`.
#   PYTHON   interpreter to use, 3.11 or newer (default: the first one found)
#   VENV     folder of the environment (default: .venv in the repository)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/environment.sh"
make_environment "$root"
"$VENV/bin/python" -m logra_jax.train "$@"
