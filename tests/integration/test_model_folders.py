"""A small sample of scripts/checks/model_folders.py, and that it would see what it looks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlhub.errors import ConfigError
from scripts.checks.model_folders import Outputs, outcome

ROOT = Path(__file__).resolve().parents[2]


def test_a_damage_of_each_kind_is_an_error_with_a_name_or_harmless() -> None:
    command = [sys.executable, str(ROOT / "scripts/checks/model_folders.py"), "--count", "12", "--seed", "5"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert found.returncode == 0 and "12 damages of seed 5: 0 wrong" in found.stdout, found.stdout + found.stderr


def test_what_is_accepted_or_nameless_is_seen(tmp_path: Path) -> None:
    sound = Outputs(weights="a", log_probs=[-1.0], tokens=[3])

    def refuse(path: Path) -> Outputs:
        raise ConfigError("something is wrong")

    def fail(path: Path) -> Outputs:
        raise KeyError("model.norm.weight")

    for load in (lambda path: Outputs(weights="b", log_probs=[-1.1], tokens=[3]), refuse, fail):
        assert not outcome(tmp_path, load, sound, ("model.norm.weight",))[0]
    assert outcome(tmp_path, lambda path: sound, sound, ())[0]
    assert outcome(tmp_path, refuse, sound, ("wrong",)) == (True, "error, wrong")
