"""The bench of the curriculum trains through main_sft and main_ppo: a few steps of it, with its table and a control's class."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
import sys
from pathlib import Path

import scripts.bench.curriculum as bench

bench.DEMONSTRATIONS = dict.fromkeys(bench.DICE, 256)
bench.NUM_VALIDATION, bench.SFT_STEPS, bench.PROMPTS, bench.SAMPLES, bench.TEST_FREQ = 8, 10, 16, 2, 2
sys.argv = ["curriculum.py", "--seeds", "1", "--only", "curriculum", "shuffled", "--steps", "2", "--out", sys.argv[1]]
sys.exit(bench.main())
"""
LIMIT_S = 1200.0
"""It takes half a minute."""


def test_each_variant_trains_from_one_warm_start_and_stands_in_the_table(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SMALL, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    logs = "".join(path.read_text() for path in tmp_path.glob("seed1/*.log"))
    assert "wanted: curriculum at most 0.75" in done.stdout, done.stdout + done.stderr + logs
    assert done.returncode == 1, "two steps do not reach the target"
    curves = [json.loads((tmp_path / f"seed1/{name}.json").read_text()) for name in ("uniform", "curriculum", "shuffled")]
    assert all([step for step, _ in curve] == [0, 2] for curve in curves)
    assert len({curve[0][1] for curve in curves}) == 1, "all start from the same weights and are checked on the same problems"
