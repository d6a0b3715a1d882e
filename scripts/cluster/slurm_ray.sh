#!/usr/bin/env bash
#SBATCH --job-name=rlhub
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@300
# Trains on the machines of a Slurm job: Ray on all of them, the program with the training loop on the first.
#
#   sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=64 scripts/cluster/slurm_ray.sh data.train_files=... actor_rollout_ref.model.path=...
#
# Submit it from the repository's root, in a folder that all machines see; arguments are settings of the program.  README.md in
# this folder lists the variables.  300 s before the time limit the program is told to save and stop; the same command continues.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?slurm_ray.sh runs in a Slurm job: submit it with sbatch}"
. scripts/cluster/slurm_job.sh

# Ray runs what reaches its ports; without this token nobody else on the network can join.
RAY_AUTH_TOKEN="$(python -c 'import secrets; print(secrets.token_hex(32))')"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

rm -f "$(start_log 0)" # of a job that Slurm has queued again
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 bash scripts/cluster/ray_node.sh &
NODES=$!
wait_until "$NODES" "it had started" has_started 0 # the head, on this machine

run_program python -m "$PROGRAM" "trainer.ray_init.address=$HEAD:$PORT" "${SETTINGS[@]}" "$@"
kill -TERM "$NODES" 2>/dev/null || true
wait "$NODES" || true
exit "$STATUS"
