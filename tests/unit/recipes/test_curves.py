"""embodied_reach's curves: the conditions on them, the table, and the CPU time of a program and all below it."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("mujoco") is None:  # not importorskip: how it renders is set before its import
    pytest.skip("the extra 'envs' is not installed: bash scripts/setup_env.sh", allow_module_level=True)

from recipes import cpu_time
from recipes.cpu_time import CPUTime
from recipes.embodied_reach import curves
from recipes.embodied_reach.curves import CASES, table
from recipes.embodied_reach.plain_loop import Curve, Settings
from recipes.embodied_reach.run import main

WORK = """
import sys, time
from pathlib import Path

file, latest = Path(sys.argv[1]), time.monotonic() + 300
while not file.exists() and time.monotonic() < latest:
    time.sleep(0.02)
end = time.process_time() + 0.6
while time.process_time() < end:
    pass
while file.exists() and time.monotonic() < latest:
    time.sleep(0.02)
"""
"""Takes so much CPU time once the file is there, and ends with it."""


def curve(*success: float, other: float = 0.05, blind: float = 0.05) -> Curve:
    return Curve(success=dict(zip(range(0, 100, 25), success, strict=False)), other_color=other, blindfolded=blind)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("ppo", [curve(0.3, 0.56), curve(0.31, 0.6)], [curve(0.3, 0.54), curve(0.31, 0.6)]),
        ("ppo", [curve(0.3, 0.6)], [curve(0.3, 0.6, other=0.21)]),
        ("ppo", [curve(0.3, 0.6)], [curve(0.4, 0.6)]),
        ("black", [curve(0.06, 0.4, 0.13)], [curve(0.06, 0.05), curve(0.06, 0.15)]),
        ("shuffled", [curve(0.3, 0.1)], [curve(0.3, 0.39)]),
        ("frozen", [curve(0.3, 0.34)], [curve(0.3, 0.24)]),
        ("grpo", [curve(0.3, 0.4), curve(0.3, 0.61)], [curve(0.3, 0.45), curve(0.3, 0.5)]),
        ("clone", [curve(0.5)], [curve(0.5), curve(0.49)]),
        ("scratch", [curve(0.0, 0.45)], [curve(0.0, 0.44)]),
    ],
)
def test_a_condition_is_that_of_all_seeds(name: str, good: list[Curve], bad: list[Curve]) -> None:
    assert table({name: good})[1] and not table({name: bad})[1]


def test_srpo_is_as_fast_as_sparse_over_all_checks() -> None:
    slow, fast = [curve(0.3, 0.4, 0.6)], [curve(0.3, 0.45, 0.56)]
    assert table({"sparse": slow, "srpo": fast})[1] and not table({"sparse": fast, "srpo": slow})[1]


def test_the_table_names_what_does_not_hold() -> None:
    text, good = table({"ppo": [curve(0.3, 0.6), curve(0.32, 0.61)], "black": [curve(0.05, 0.5)]})
    rows = text.splitlines()
    assert not good and len(rows) == 4 and "0.300 to 0.600, 0.320 to 0.610" in rows[2] and rows[2].endswith("| yes |")
    assert rows[3].startswith("| black | 0.050 to 0.500 |") and rows[3].endswith("| NO |")


def test_cases_are_settings_of_both_ways() -> None:
    for name, case in CASES.items():
        Settings(**case.settings)
        assert case.overrides is None or all("=" in text or text == "--from-scratch" for text in case.overrides), name
    assert curves.settings_of(["iterations=3", "lr=1e-3"]) == {"iterations": 3, "lr": 1e-3}


def test_the_program_runs_its_cases_from_one_clone(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["iterations=1", "episodes=16", "checked=16", "demonstrations=8", "clone_updates=10"]
    assert curves.main(["--seeds", "1", "--cases", "frozen", "sparse", "srpo", "--set", *short]) in (0, 1)
    rows = capsys.readouterr().out.splitlines()[-3:]
    assert [row.split()[1] for row in rows] == ["frozen", "sparse", "srpo"]
    starts = {row.split("|")[2].split()[0] for row in rows}
    assert len(starts) == 1


def test_cpu_time_counts_what_has_left_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_time, "INTERVAL_S", 0.1)
    program, left = tmp_path / "work.py", tmp_path / "left"
    program.write_text(WORK)
    starter = ["bash", "-c", f"setsid {sys.executable} -S {program} {left} > /dev/null & echo $!; read; true"]
    with CPUTime() as cpu, subprocess.Popen(starter, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tree:
        assert tree.stdout is not None
        pid, latest = int(tree.stdout.readline()), time.monotonic() + 60.0
        while pid not in [seen for seen, _ in list(cpu._seen)]:
            assert time.monotonic() < latest, "it is not seen below its starter"
            time.sleep(0.05)
        tree.communicate("end")
        left.touch()
        while (others := cpu.seconds - time.process_time()) < 0.5:
            assert time.monotonic() < latest, f"{others:.2f} s of others"
            time.sleep(0.05)
        seen = cpu.seconds
        left.unlink()
    assert cpu.seconds >= seen
    with CPUTime() as idle:
        time.sleep(0.3)
    assert idle.seconds >= time.process_time() - 0.5, "the program itself counts"


def test_the_recipe_says_its_cpu_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level("INFO"):
        assert main([f"--out={tmp_path / 'file' / 'below'}"]) != 0
    assert "CPU time of all processes" in caplog.text
