"""A sampler goes on exactly where it stopped: two cases of scripts/checks/resume_samplers.py, with whole training runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_samplers_resume_bit_exactly_and_async_draws_what_sync_draws() -> None:
    """A curriculum, and a mixture whose sources have an estimator and a reward of their own."""
    command = [sys.executable, str(ROOT / "scripts/checks/resume_samplers.py"), "--only", "curriculum-async", "sources-async"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("holds") == 6 and "2 of 2 cases hold" in done.stdout, done.stdout
