#!/usr/bin/env bash
# What the scripts for Slurm share: it is sourced in the repository's root, in a job or on one of its machines.
# It sets HEAD and PORT (where the machines meet), RAY_FOLDER, RANKS (on a machine), PROGRAM and SETTINGS.
# shellcheck disable=SC2034  # the scripts that source it read them
: "${SLURM_JOB_ID:?this is no Slurm job: submit it with sbatch}"
[ -d .venv ] && export PATH="$PWD/.venv/bin:$PATH"
START_S="${RLHUB_RAY_START_S:-180}"
fail() { echo "slurm: $*" >&2; exit 1; }

address_of() {  # address_of NAME: its IPv4 address; on the machine itself not that of the loopback interface
  local found
  found="$(getent ahostsv4 "$1" | awk 'NR == 1 {print $1}')"
  case "$found" in 127.*|"") found="$(hostname -I | awk '{print $1}')" ;; esac
  echo "$found"
}

wait_until() {  # wait_until PROCESS WHAT COMMAND ...: until COMMAND is true of Ray; ends the script where PROCESS has ended, or late
  local process="$1" what="$2" deadline=$((SECONDS + START_S))
  shift 2
  until ("$@") 2>/dev/null; do
    kill -0 "$process" 2>/dev/null || fail "Ray ended before $what; its output is above"
    [ "$SECONDS" -lt "$deadline" ] || fail "Ray took more than $START_S s before $what; set RLHUB_RAY_START_S higher"
    sleep 1
  done
}

listens() { exec 3<>"/dev/tcp/$HEAD/$PORT"; }  # whether Ray's head listens
start_log() { echo "$RAY_FOLDER/start-$1.log"; }  # start_log MACHINE: the file with the output of `ray start` on that machine
has_started() { grep -qs "Ray runtime started" "$(start_log "$1")"; }  # has_started MACHINE: whether Ray runs on that machine

run_program() {  # run_program COMMAND ...: passes on the signal to save and stop, and sets STATUS to the exit status
  "$@" &
  local program=$!
  TOLD=
  trap 'TOLD=yes; kill -TERM '"$program"' 2>/dev/null || true' TERM INT
  STATUS=0
  wait "$program" || STATUS=$?
  while kill -0 "$program" 2>/dev/null; do # a signal ends `wait` before the program ends
    STATUS=0
    wait "$program" || STATUS=$?
  done
}

export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}" # else srun gives each machine one core
RANKS="${RLHUB_RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}"
PROGRAM="rlhub.trainer.${RLHUB_PROGRAM:-main_ppo}"
PORT="${RLHUB_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
HEAD="${RLHUB_HEAD_ADDRESS:-$(address_of "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)")}"
RAY_FOLDER="/tmp/ray-$SLURM_JOB_ID"
SETTINGS=("trainer.nnodes=$SLURM_NNODES" "trainer.n_gpus_per_node=$RANKS")
export RLHUB_HEAD_ADDRESS="$HEAD" # the other machines need not ask Slurm again
