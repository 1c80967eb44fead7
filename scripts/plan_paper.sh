#!/usr/bin/env bash
# Memory of the paper's main runs, 1.5B, 7B and 27B, on GPUs that need not be present; arguments go to the planner.
#   GPU, GPUS      kind and number of GPUs (default: h100-80gb, 4); each works on one answer at a time
#   PYTHON, VENV   as in quickstart.sh; the environment gets the extra `plan` (a compiler for GPUs, 0.7 GB)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/environment.sh"
make_environment "$root" plan
count="${GPUS:-4}"
for model in qwen2.5-math-1.5b qwen2.5-math-7b qwen3.8-27b; do
  "$VENV/bin/python" -m logra_jax.plan --config "$root/configs/paper/$model.yaml" \
    --gpu "${GPU:-h100-80gb}" --gpus "$count" "loss.micro_batch=$count" "$@"
  echo
done
