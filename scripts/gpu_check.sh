#!/usr/bin/env bash
# Does the package work on the GPU of this machine, and how much memory and time does an update take? In under 8 minutes:
# numbers against references, two updates of the demo, then 1.5B, 7B and the largest model that fits, as Markdown.
# Installs and downloads nothing; random weights.
#   PYTHON     a Python with the package's dependencies and jax for this GPU (default: python3)
#   OUT        folder for the figures as JSON (default: none)
#   PLATFORM   cpu: the same steps with tiny models, to try the script itself
set -uo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}" platform="${PLATFORM:-gpu}" limit=470 demo=100
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
[[ "$platform" == cpu ]] && export JAX_PLATFORMS=cpu limit=2000 demo=500
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
out="${OUT:-$work}"
mkdir -p "$out"
failed=0

# Seconds that a step may take: what it asks for, or what is left.
seconds() { echo $(($1 < limit - SECONDS ? $1 : limit - SECONDS)); }

step() { # step SECONDS NAME COMMAND...: bounded; its standard error is shown where it fails
  local most name="$2" code
  most="$(seconds "$1")"
  shift 2
  if ((most < 10)); then
    echo "skipped: $name (no time left)"
    return
  fi
  timeout --kill-after=5 "$most" "$@" 2> "$work/errors"
  code=$?
  if ((code)); then
    failed=1
    echo "**$name: $([[ $code == 124 ]] && echo "not done after $most s" || echo "exit code $code")**"
    grep -v "^measuring" "$work/errors" | tail -n 5
  fi
}

card="$(timeout 120 "$python" - "$platform" 2> "$work/errors" << 'PY'
import sys

import jax

devices = jax.devices()
if sys.argv[1] == "gpu" and devices[0].platform != "gpu":
    sys.exit(f"error: jax {jax.__version__} sees no GPU, only {devices[0].platform}: set PYTHON to one with jax[cuda13]")
total = ((devices[0].memory_stats() or {}).get("bytes_limit", 0)) / 0.75 / 2**30
print(f"{devices[0].device_kind};{total:.0f};jax {jax.__version__}, Python {sys.version.split()[0]}")
PY
)" || { tail -n 1 "$work/errors" >&2; exit 2; }
IFS=';' read -r kind gib versions <<< "$card"
driver="$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2> /dev/null | head -n 1)"
revision="$(git -C "$root" rev-parse --short HEAD 2> /dev/null || echo unknown)"
echo "## ${driver:-$kind}"
echo
echo "$versions, logra_jax at $revision"
echo
step 100 "device checks" "$python" "$root/scripts/device_checks.py" --json "$out/checks.json"
echo
step "$demo" "two updates of the demo" bash -c 'exec "$@" > "$0"' "$work/demo.log" "$python" -m logra_jax.train \
  "out=$work/demo" steps=2 eval.before=false eval.max_prompts=8 log.tensorboard=false log.progress=false
tail -n 1 "$work/demo.log"

# model LABEL SECONDS OPTIMIZERS SETTINGS...: one table. 16 answers of 2048 tokens, 4 at a time.
model() {
  local label="$1" most="$2" optimizers="$3" each name
  shift 3
  name="${label//[^A-Za-z0-9.]/-}"
  each=$(($(seconds "$most") / $(tr ',' '\n' <<< "$optimizers" | wc -l)))
  echo
  echo "### $label"
  echo
  ((each < 10)) && { echo "skipped: no time left"; return; }
  step "$((each * 3))" "$label" "$python" "$root/scripts/bench_update.py" "--optimizers=$optimizers" --timeout "$each" \
    --repeats 2 --json "$out/$name.json" model.compute_dtype=bfloat16 data.max_prompt_length=1536 \
    rollout.max_new_tokens=512 rollout.prompts=4 rollout.generations=4 loss.micro_batch=4 optimizer.rank=256 \
    kl.check_every=0 kl.probe_responses=8 model.remat=full mesh.fsdp=1 model.path= "$@"
}

shape() { # shape NAME LAYERS HIDDEN MLP HEADS KV VOCABULARY: a folder with no more than a config.json
  mkdir -p "$work/$1"
  cat > "$work/$1/config.json" << JSON
{"model_type": "qwen2", "num_hidden_layers": $2, "hidden_size": $3, "intermediate_size": $4,
 "num_attention_heads": $5, "num_key_value_heads": $6, "vocab_size": $7, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
 "max_position_embeddings": 32768, "tie_word_embeddings": false, "hidden_act": "silu"}
JSON
}

if [[ "$platform" == cpu ]]; then
  shape tiny 2 64 128 4 2 256
  model "tiny float32" 800 logra,adamw "model.path=$work/tiny" data.max_prompt_length=8 rollout.max_new_tokens=8 \
    optimizer.rank=8
  model "tiny bfloat16" 800 logra --brief "model.path=$work/tiny" data.max_prompt_length=8 rollout.max_new_tokens=8 \
    optimizer.rank=8 model.param_dtype=bfloat16
else
  one=(loss.micro_batch=1 model.param_dtype=bfloat16) # a small card takes one answer at a time
  if ((gib >= 60)); then
    model "1.5B, float32 weights" 140 logra,adamw model.preset=qwen2.5-1.5b
    model "7B, float32 weights" 120 logra,adamw --brief model.preset=qwen2.5-7b
  else
    model "1.5B, bfloat16 weights" 140 logra,adamw model.preset=qwen2.5-1.5b "${one[@]}"
    model "7B, bfloat16 weights" 120 logra,adamw --brief model.preset=qwen2.5-7b "${one[@]}"
  fi
  # The layers of Qwen2.5-32B take 1.03 GiB each (bfloat16 weights, float32 sketches, saved inputs), the rest 7 GiB.
  layers=$(((gib * 93 - 700) / 103))
  ((layers > 64)) && layers=64
  if ((layers >= 28)); then
    shape largest "$layers" 5120 27648 40 8 152064
    model "$layers layers of 32B, bfloat16 weights" 120 logra --brief "model.path=$work/largest" "${one[@]}"
  fi
fi
echo
echo "$SECONDS s in all"
exit "$failed"
