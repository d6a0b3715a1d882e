#!/usr/bin/env bash
# All tests a CPU machine can run, from nothing: environment, unit, integration, end to end.  Arguments go to pytest.
#
#   bash scripts/test.sh                 everything (35 to 45 minutes on two cores)
#   bash scripts/test.sh -k checkpoint   what matches
#   bash scripts/test.sh --oldest ...    the same in .venv-oldest, with the oldest versions (setup_env.sh --oldest)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
SECONDS=0
VENV=.venv setup=()
if [ "${1:-}" = --oldest ]; then VENV=.venv-oldest setup=(--oldest); shift; fi
bash scripts/setup_env.sh "${setup[@]}" || exit 1

# One thread a process: the tests start several processes on few cores.  Nothing may depend on a network.
# Hundreds of processes import the package; without compiled files each would compile it anew.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0

NOTHING_MATCHED=5 # pytest's exit code when -k or -m left no test
failed=() summary=()
NUM_CORES="$(env -u OMP_NUM_THREADS nproc)" # which would answer with that variable
for suite in unit integration e2e; do
  started=$SECONDS
  echo "=== tests/$suite"
  # The other suites start processes of their own, mostly one after the other: two files at a time keep two cores busy, and the
  # tests of a file stay together because they share what was costly to make.  Long files come first (tests/support/order.py).
  case "$suite" in
    unit) parallel=(-n "$((NUM_CORES > 4 ? 4 : NUM_CORES))" --dist worksteal) ;;
    *) parallel=(-n "$((NUM_CORES > 2 ? 2 : NUM_CORES))" --dist loadfile --no-loadscope-reorder) ;;
  esac
  "$VENV/bin/python" -m pytest "tests/$suite" --durations=10 "${parallel[@]}" "$@"
  code=$?
  took="$((SECONDS - started)) s"
  if [ $code -eq 0 ]; then summary+=("tests/$suite passed in $took")
  elif [ $code -eq $NOTHING_MATCHED ] && [ $# -gt 0 ]; then summary+=("tests/$suite has nothing that matches")
  else summary+=("tests/$suite FAILED in $took"); failed+=("$suite"); fi
done

echo "==="
printf '%s\n' "${summary[@]}" "total: $((SECONDS / 60)) min $((SECONDS % 60)) s"
[ ${#failed[@]} -eq 0 ]
