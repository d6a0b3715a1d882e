#!/usr/bin/env bash
# Runs Ray on one machine of a Slurm job until it is ended; the first machine is the head.  slurm_ray.sh starts it on each.
set -euo pipefail
. scripts/cluster/slurm_job.sh
OPTIONS=(--num-cpus="${SLURM_CPUS_ON_NODE:-$(nproc)}" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats --block)
if [ "$SLURM_NODEID" = 0 ]; then
  exec ray start --head --node-ip-address="$HEAD" --port="$PORT" --temp-dir="/tmp/ray-$SLURM_JOB_ID" --include-dashboard=false \
    "${OPTIONS[@]}"
fi
wait_for_port $$
exec ray start --address="$HEAD:$PORT" "${OPTIONS[@]}"
