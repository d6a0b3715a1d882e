#!/usr/bin/env bash
# What to run before every commit, under 150 s on two cores: lint, format, types, architecture and unit tests.
# Runs all, then says what failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
SECONDS=0
bash scripts/setup_env.sh || exit 1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
PY=.venv/bin/python
NUM_CORES="$(env -u OMP_NUM_THREADS nproc)" # which would answer with that variable

failed=()
step() {
  local name="$1" started=$SECONDS
  shift
  echo "--- $name"
  if "$@"; then echo "$name: ok ($((SECONDS - started)) s)"; else failed+=("$name"); fi
}
step "lint" "$PY" -m ruff check .
step "format" "$PY" -m ruff format --check .
step "types" "$PY" -m mypy rlhub scripts recipes
step "unit tests" "$PY" -m pytest -q -n "$((NUM_CORES > 4 ? 4 : NUM_CORES))" --dist worksteal tests/unit

echo "--- total: $SECONDS s"
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
