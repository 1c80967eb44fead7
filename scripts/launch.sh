#!/usr/bin/env bash
# One run of several processes on this machine: scripts/launch.sh N [arguments of python -m logra_jax.train]
# Process i works on GPU i; without GPUs each has one CPU device. Lines of process i begin with [i].
# SIGTERM and Ctrl-C are passed on, and all stop together. When one process fails, the others have END_AFTER seconds
# to end by themselves; the exit code is that of the first failure.
#   PYTHON      interpreter (default: python)
#   COMMAND     train (default) or evaluate
#   PORT        where the processes meet (default: a free one)
#   END_AFTER   seconds (default: 30)
set -uo pipefail
if ! [[ "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
  echo "error: usage: scripts/launch.sh N [arguments], N being the number of processes" >&2
  exit 2
fi
count="$1"
shift
python="${PYTHON:-python}"
free='import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
port="${PORT:-$("$python" -c "$free")}" || exit 2
ends="$(mktemp -d)" || exit 2 # exit codes by process: what bash says of them is lost where a signal ends the waiting
trap 'rm -rf "$ends"' EXIT

member() {
  # What signals the group is for Python, which sets its own handlers, and not for the rest of the pipeline.
  trap '' INT TERM
  JAX_COORDINATOR_ADDRESS="127.0.0.1:$port" JAX_NUM_PROCESSES="$count" JAX_PROCESS_ID="$1" JAX_LOCAL_DEVICE_IDS="$1" \
    "$python" -u -m "logra_jax.${COMMAND:-train}" "${@:2}" 2>&1 | sed -u "s/^/[$1] /"
  echo "${PIPESTATUS[0]}" > "$ends/$1"
}

set -m # a process group each: Ctrl-C reaches this script alone, and is passed on once
groups=()
pass_on() {
  trap '' TERM INT # bash would run this within itself, as deep as signals keep coming, until it has no stack left
  kill "-$1" -- "${groups[@]}" 2>/dev/null
  listen
}
listen() {
  trap 'pass_on TERM' TERM
  trap 'pass_on INT' INT
}
listen # before anything is started: a signal that ended this script alone would leave the others behind
for ((i = 0; i < count; i++)); do
  member "$i" "$@" &
  groups+=("-$!")
done

code=0
left="$count" nobody=
while ((left)); do
  for file in "$ends"/*; do
    [[ -s "$file" ]] || continue
    read -r status < "$file"
    rm "$file"
    left=$((left - 1))
    if ((status && !code)); then
      code="$status"
      (sleep "${END_AFTER:-30}"; kill -KILL -- "${groups[@]}") 2>/dev/null &
      killer="-$!"
      disown
    fi
  done
  if ((left)) && [[ -n "$nobody" ]]; then # one was killed before it could say how it ended
    exit "$((code ? code : 1))"
  fi
  wait -n
  if (($? == 127)); then nobody=yes; fi
done
if [[ -n "${killer:-}" ]]; then kill -- "$killer" 2>/dev/null; fi
exit "$code"
