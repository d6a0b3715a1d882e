#!/usr/bin/env bash
# Runs Ray on one machine of a Slurm job until it is ended; the first machine is the head.  slurm_ray.sh starts it on each.
set -euo pipefail
. scripts/cluster/slurm_job.sh
ATTEMPTS=3 # Ray gives its processes 30 s, which a machine that is busy for a while may exceed
OPTIONS=(--num-cpus="${SLURM_CPUS_ON_NODE:-$(nproc)}" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats --block)
mkdir -p "$RAY_FOLDER"
if [ "$SLURM_NODEID" = 0 ]; then
  OPTIONS+=(--head --node-ip-address="$HEAD" --port="$PORT" --temp-dir="$RAY_FOLDER" --include-dashboard=false)
else
  wait_until $$ "it listened on $HEAD:$PORT" listens
  OPTIONS+=(--address="$HEAD:$PORT")
fi

for ((attempt = 1; attempt <= ATTEMPTS; attempt++)); do
  log="$(start_log "$SLURM_NODEID")"
  exec 3> >(trap '' TERM INT; exec tee "$log")
  output=$!
  run_program ray start "${OPTIONS[@]}" >&3 2>&1
  exec 3>&-
  wait "$output" || true # until all is written
  if [ -n "$TOLD" ] || has_started "$SLURM_NODEID"; then break; fi
  echo "slurm: Ray did not start on machine $SLURM_NODEID: attempt $attempt of $ATTEMPTS" >&2
done
exit "$STATUS"
