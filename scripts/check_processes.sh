#!/usr/bin/env bash
# Several processes on the CPUs of this machine, a few minutes: a run of the demo by two processes, of which one is
# killed, and which one process finishes, gives the bytes of a run by one process with two devices.
#   PYTHON   interpreter (default: python)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHON="${PYTHON:-python}" PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" JAX_PLATFORMS=cpu
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
settings=(rollout.prompts=8 kl.probe_responses=8 kl.check_responses=8 eval.every=0 eval.before=false eval.max_prompts=64
  checkpoint.every=2 log.tensorboard=false)

"$root/scripts/launch.sh" 2 "${settings[@]}" steps=1000 "out=$folder/killed" > "$folder/log" 2>&1 &
until grep -q "update 5/" "$folder/log"; do
  kill -0 $! || { cat "$folder/log"; exit 1; }
  sleep 1
done
kill -KILL "$(pgrep -f -- "-m logra_jax.train .*out=$folder/killed" | tail -n 1)"
began="$SECONDS"
code=0
wait $! || code=$?
echo "one process killed: exit code $code after $((SECONDS - began)) s"
grep -m 1 "has lost another one\|another task died" "$folder/log"
((code != 0))
steps=$(($(find "$folder/killed/checkpoints" -maxdepth 1 -name '[0-9]*' -not -name '*.*' -printf '%f\n' | sort -n | tail -n 1) + 2))

export JAX_NUM_CPU_DEVICES=2
"$PYTHON" -m logra_jax.train "${settings[@]}" "steps=$steps" "out=$folder/killed" --resume | tail -n 1
"$PYTHON" -m logra_jax.train "${settings[@]}" "steps=$steps" "out=$folder/whole" | tail -n 1
cmp "$folder/killed/hf/model.safetensors" "$folder/whole/hf/model.safetensors"
unset JAX_NUM_CPU_DEVICES
"$root/scripts/launch.sh" 2 "${settings[@]}" "steps=$steps" "out=$folder/two" | tail -n 1
cmp "$folder/two/hf/model.safetensors" "$folder/whole/hf/model.safetensors"
echo "the same model, three times"
