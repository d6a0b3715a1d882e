#!/usr/bin/env bash
# From nothing to a trained model: makes the environment, then runs the arithmetic recipe (data, tiny model, supervised
# warm start, GRPO with two FSDP2 ranks and vLLM through Ray) and says where the report is.
#
#   bash scripts/quickstart.sh [--torch-index URL] [--pip] [arguments of recipes/arithmetic/run.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
setup=()
recipe=()
while [ $# -gt 0 ]; do
  case "$1" in
    --torch-index) setup+=("$1" "${2:?--torch-index needs a URL}"); shift 2 ;;
    --pip) setup+=("$1"); shift ;;
    -h|--help) sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) recipe+=("$1"); shift ;;
  esac
done
bash scripts/setup_env.sh "${setup[@]}"
exec .venv/bin/python recipes/arithmetic/run.py "${recipe[@]}"
