#!/usr/bin/env bash
# A run on SLURM, one process per GPU: sbatch scripts/slurm.sh out=FOLDER [arguments of python -m logra_jax.train]
# The numbers below are to be changed here or on the command line (sbatch --nodes=2 ...). out= has to stand there, also
# where a --config has one, and to lie on a disk that all nodes share. At the time limit the run saves, and the job is
# queued again to go on where it stopped: with --resume, if out= holds a run.
#SBATCH --job-name=logra_jax
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# --ntasks-per-node, --gres   as many processes as GPUs; all of them see all GPUs of the node, and take one each
# --signal                    SIGTERM to the processes so many seconds before the limit: one update, and saving
# PYTHON                      interpreter, on all nodes (default: python)
set -uo pipefail
out=
arguments=()
for argument in "$@"; do
  if [[ "$argument" == out=* ]]; then out="${argument#out=}"; fi
  # Queued again, the job goes on with what the first start may have had to delete.
  if [[ "$argument" != --overwrite || "${SLURM_RESTART_COUNT:-0}" -eq 0 ]]; then arguments+=("$argument"); fi
done
if [[ -z "$out" ]]; then
  echo "error: give out=FOLDER on the command line: when the job is queued again, that is where it looks for its run" >&2
  exit 2
fi
if [[ -f "$out/config.yaml" && "${SLURM_RESTART_COUNT:-0}" -gt 0 ]]; then arguments+=(--resume); fi

# The processes find each other by the variables that srun sets; when one fails, srun ends the others.
srun --kill-on-bad-exit=1 --gpu-bind=none --label "${PYTHON:-python}" -u -m logra_jax.train "${arguments[@]}"
code=$?
# 143: stopped by SIGTERM and saved. A job that is being cancelled is no longer RUNNING.
if ((code == 143)) && [[ "$(squeue --noheader --job "$SLURM_JOB_ID" --format %T)" == RUNNING ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
