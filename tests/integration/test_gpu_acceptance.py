"""The program of the first GPU measurements: parts in processes of their own, and all sections at the small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from scripts.gpu.measure import PartError, apart
from scripts.gpu.sections.correctness import WITHIN, distance
from scripts.gpu.sections.training import check_gradients

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 2400.0
"""It takes three minutes on two idle cores."""


def test_all_sections_at_the_small_size(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/gpu/acceptance.py", "--small", "--device=cpu", "--minutes=39", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    logs = "".join(path.read_text() for path in (tmp_path / "logs").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    found = json.loads((tmp_path / "results.json").read_text())
    rows = {row["what"]: row for row in found["rows"]}
    assert found["size"] == "small" and found["machine"]["device"] == "CPU"
    assert rows["matmul float32 512"]["value"] > 0 and rows["copies to and from the host"]["status"] == "not there"
    gradient = rows["gradient in float32, distance from plain Hugging Face in float64"]
    assert gradient["status"] == "ok" and 0 < gradient["value"] < 1e-5, "float32 against float64, not one against itself"
    assert all(row["status"] in ("measured", "ok", "not there", "skipped") for row in found["rows"])
    rates = [row["value"] for row in found["rows"] if row["section"] == "C" and row["unit"] == "tokens/s"]
    assert len(rates) > 5 and min(rates) > 0
    assert {row["section"] for row in found["rows"] if row["status"] in ("measured", "ok")} == set("ABCDEFGHIJ")
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "machine.json", "results.json", "results.md", "rows"}


def quotient(above: int, below: int) -> tuple[int, float]:
    return os.getpid(), above / below


def vanishes() -> None:
    os._exit(3)


def test_a_part_in_a_process_of_its_own() -> None:
    pid, value = apart(quotient, 6, 3, limit_s=300)
    assert value == 2 and pid != os.getpid()
    with pytest.raises(PartError, match="ZeroDivisionError: division by zero"):
        apart(quotient, 6, 0, limit_s=300)
    with pytest.raises(PartError, match="without an answer, exit status 3"):
        apart(vanishes, limit_s=300)
    started = time.monotonic()
    with pytest.raises(PartError, match="sleep was ended after 1 s"):
        apart(time.sleep, 600, limit_s=1)
    assert time.monotonic() - started < 300


def test_the_rate_of_an_update_without_a_gradient_is_an_error() -> None:
    check_gradients([0.3, 0.2])
    for norms in ([0.3, 0.0], [float("nan")], []):
        with pytest.raises(ValueError, match="computed nothing"):
            check_gradients(norms)


def test_a_wrong_gradient_is_far_from_the_right_one() -> None:
    exact = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    assert distance({name: gradient * 1.02 for name, gradient in exact.items()}, exact) == pytest.approx(0.02)
    assert distance(exact | {"a": -exact["a"]}, exact) == pytest.approx(1.2) and distance(exact, exact) == 0.0 < WITHIN
    with pytest.raises(ValueError, match="different weights: .'b'"):
        distance({"a": exact["a"]}, exact)
