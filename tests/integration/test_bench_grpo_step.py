"""The bench of a GRPO step drives the trainer's parts itself: it must keep up with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "scripts/bench/grpo_step.py"
LIMIT_S = 900.0
"""It takes a quarter of a minute."""


def test_a_step_of_ours_is_measured_against_the_plain_loop(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--steps", "1", "--response-tokens", "4", "--subjects", "plain", "local"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "200"}
    command = [sys.executable, str(BENCH), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    logs = "".join(path.read_text() for path in tmp_path.glob("*/*.log"))
    assert done.returncode == 0, done.stderr + logs
    rows = {cells[1].strip(): cells for line in done.stdout.splitlines() if len(cells := line.split("│")) > 3}
    ours = rows["rlhub, in process"]
    assert float(ours[2]) > 0 and float(ours[4]) > 0, done.stdout
