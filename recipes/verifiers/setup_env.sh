#!/usr/bin/env bash
# Makes a Python environment for the library verifiers: its packages and nothing of rlhub's, 0.6 GB, no torch.
#
#   bash recipes/verifiers/setup_env.sh [folder]
#
# It goes to .venv-verifiers in the repository, or to `folder`, and finds the environments of this recipe and the harness rlhub_chat
# by their names.  Install other environments into it with its pip.  PYTHON=/path/to/python3.11 chooses the interpreter (3.11 to
# 3.14).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
VENV="${1:-.venv-verifiers}"
[ -x "$VENV/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$VENV"
"$VENV/bin/python" -m pip install --quiet "verifiers==0.4.0"
SITE="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
printf '%s\n' "$PWD/recipes/verifiers/environments" "$PWD/rlhub/agents/verifiers" > "$SITE/rlhub_recipe.pth"
echo "[verifiers] $VENV is ready"
