"""hadolint and shellcheck, as the development environment has them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lint(linter: str, *arguments: str | Path) -> str:
    """Returns what the linter finds, "" for nothing."""
    program = shutil.which(str(Path(sys.executable).with_name(linter))) or shutil.which(linter)
    assert program, f"{linter} is missing: it comes with the extra `dev` (bash scripts/setup_env.sh)"
    done = subprocess.run([program, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode == 0) == (not done.stdout), done.stderr
    return done.stdout
