#!/usr/bin/env bash
#SBATCH --job-name=rlhub
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@300
# Trains on the machines of a Slurm job without Ray: every rank runs the training loop (trainer.controller=multi), started by torchrun.
#
#   sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=64 scripts/cluster/slurm_torchrun.sh data.train_files=... actor_rollout_ref.model.path=...
#
# Submit it from the repository's root, in a folder that all machines see; arguments are settings of the program.  README.md in
# this folder lists the variables.  300 s before the time limit the ranks are told to save and stop; the same command continues.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?slurm_torchrun.sh runs in a Slurm job: submit it with sbatch}"
. scripts/cluster/slurm_job.sh

# Ranks are numbered as Slurm numbers the machines, so that rank 0, which has the run folder, is on the first.
# shellcheck disable=SC2016  # each machine puts in its own number
run_program srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
  bash -c 'exec torchrun --node-rank="$SLURM_NODEID" "$@"' torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="$RANKS" \
  --master-addr="$HEAD" --master-port="$PORT" --shutdown-timeout=280 \
  -m "$PROGRAM" trainer.controller=multi "${SETTINGS[@]}" "$@"
exit "$STATUS"
