"""scripts/gpu: the rows and their verdicts, sections that fail or hang, and the bundle for a machine without network."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from scripts.gpu import acceptance
from scripts.gpu.bundle.pack import NEVER, NOT_ON_HOPPER, pack
from scripts.gpu.measure import covered
from scripts.gpu.rows import BAD, NotThere, Recorder, Row, Skip, markdown, number, read_rows, table
from tests.support.processes import all_end

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "scripts" / "gpu"


def recorder(folder: Path, *, judged: bool) -> Recorder:
    return Recorder("C", folder / "C.jsonl", judged=judged)


@pytest.mark.parametrize(
    ("judged", "slow", "fast"), [(True, "missed", "ok"), (False, "measured", "measured")], ids=["on a GPU", "small"]
)
def test_bounds_of_speed_are_judged_on_a_gpu_only(tmp_path: Path, judged: bool, slow: str, fast: str) -> None:
    rows = recorder(tmp_path, judged=judged)
    rows.compare("slow", 94.0, "tokens/s", baseline=100.0, at_least=0.95)
    rows.compare("fast", 95.0, "tokens/s", baseline=100.0, at_least=0.95)
    rows.compare("long", 1.06, "s", baseline=1.0, at_most=1.05)
    rows.compare("nothing to compare with", 1.0, "s", baseline=0.0, at_most=1.05)
    rows.check("wrong", 0.02, at_most=0.01)
    rows.check("right", 0.995, at_least=0.99)
    found = read_rows(rows.file)
    assert [row.status for row in found] == [slow, fast, slow, slow, "missed", "ok"]
    assert found[0].ratio == pytest.approx(0.94) and found[0].bound == "at least 0.95x" and found[2].bound == "at most 1.05x"


def test_a_figure_that_fails_is_a_row_and_the_section_goes_on(tmp_path: Path) -> None:
    class OutOfMemoryError(RuntimeError):  # the name of torch's
        pass

    rows = recorder(tmp_path, judged=True)
    errors = (OutOfMemoryError("CUDA out of memory. Tried"), ValueError("first\nsecond"), NotThere("no GPU"), Skip("no time"))
    for error in errors:
        with rows.trying("x"):
            raise error
    rows.measured("y", 1.0, "s")
    found = [(row.status, row.note) for row in read_rows(rows.file)]
    assert found == [
        ("failed", "out of GPU memory: CUDA out of memory. Tried"),
        ("failed", "ValueError: first"),
        ("not there", "no GPU"),
        ("skipped", "no time"),
        ("measured", ""),
    ]


def test_a_stop_is_no_row(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), recorder(tmp_path, judged=True).trying("x"):
        raise KeyboardInterrupt


def test_rows_of_a_section_that_was_ended_while_it_wrote(tmp_path: Path) -> None:
    rows = recorder(tmp_path, judged=True)
    rows.measured("whole", 2.0, "s", baseline=1.0)
    with rows.file.open("a") as file:
        file.write('{"section": "C", "wha')
    assert read_rows(rows.file) == [Row(section="C", what="whole", value=2.0, unit="s", baseline=1.0)]
    assert read_rows(tmp_path / "none.jsonl") == []


def test_tables() -> None:
    rows = [Row(section="A", what="a|b", value=1234.5, unit="s", baseline=1000.0, note="why"), Row(section="B", what="c")]
    assert "| A | a/b | 1,234 s | 1,000 | 1.23x |  | measured | why |" in markdown(rows).replace("1,235", "1,234")
    lines = table(rows).splitlines()
    assert len(lines) == 3 and lines[1].index("measured") == lines[2].index("measured")
    assert [number(x) for x in (None, 0.0, 0.0123, 12.34, 1e-5, float("nan"))] == ["", "0", "0.0123", "12.3", "1.00e-05", "nan"]


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0.0), ([(0, 1), (2, 3)], 2.0), ([(2, 6), (0, 4), (3, 5)], 6.0), ([(0, 9), (1, 2), (9, 10)], 10.0)],
)
def test_time_in_which_kernels_run_counts_once(spans: list[tuple[float, float]], length: float) -> None:
    assert covered(spans) == length


def test_sections_fit_into_the_time_and_exist() -> None:
    sections = acceptance.SECTIONS
    assert "".join(sections) == "ABCDEFGHIJ" and sum(section.limit_s for section in sections.values()) <= 60 * acceptance.MINUTES
    for section in sections.values():
        module, _, name = section.target.partition(":")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    readme = (GPU / "README.md").read_text()
    assert all(f"| {letter} | {section.title} |" in readme for letter, section in sections.items())


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert acceptance.parse(["--sections", "h,A", "--out", str(tmp_path)]).sections == ["A", "H"]
    with pytest.raises(SystemExit):
        acceptance.parse(["--sections", "A,Z"])
    assert "no section Z; known: A, B" in capsys.readouterr().err


RUNNER = """
import json, subprocess, sys, time
from pathlib import Path
letter = sys.argv[1]
out = Path(next(text for text in sys.argv if text.startswith("--out=")).removeprefix("--out="))
(out / "work").mkdir(exist_ok=True)
(out / "work" / "model").write_text("gigabytes")
if letter != "C":
    row = {"section": letter, "what": "before", "value": 1.0}
    (out / "rows" / f"{letter}.jsonl").write_text(json.dumps(row) + chr(10))
if letter == "A":  # hangs, and its child has a session of its own and ignores SIGTERM
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
    (out / "pid").write_text(str(process.pid))
    time.sleep(600)
if letter == "B":
    raise ValueError("broken section")
"""
DRIVER = """
import dataclasses, sys
from pathlib import Path
from scripts.gpu import acceptance
acceptance.RUNNER, acceptance.GRACE_S = Path(sys.argv[1]), 2.0
limits = {"A": 6.0}
acceptance.SECTIONS = {
    letter: dataclasses.replace(section, limit_s=limits.get(letter, 60.0)) for letter, section in acceptance.SECTIONS.items()
}
sys.exit(acceptance.main(sys.argv[2:]))
"""


def test_sections_that_hang_or_fail_are_rows_and_leave_no_process(tmp_path: Path) -> None:
    runner, driver, out = tmp_path / "runner.py", tmp_path / "driver.py", tmp_path / "out"
    runner.write_text(RUNNER)
    driver.write_text(DRIVER)
    (out / "mine").mkdir(parents=True)
    command = [sys.executable, str(driver), str(runner), "--sections=A,B,C,D", f"--out={out}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert all_end([int((out / "pid").read_text())])
    found = json.loads((out / "results.json").read_text())
    rows = [(row["section"], row["what"], row["status"]) for row in found["rows"]]
    assert rows == [
        ("A", "before", "measured"),
        ("A", "ceilings of the machine", "failed"),
        ("B", "before", "measured"),
        ("B", "correctness", "failed"),
        ("C", "update", "failed"),
        ("D", "before", "measured"),
    ]
    notes = {row["section"]: row["note"] for row in found["rows"] if row["status"] in BAD}
    assert "time limit of 6 s" in notes["A"] and "ValueError: broken section" in notes["B"] and "no row" in notes["C"]
    assert found["sections"]["A"]["exit_code"] is None and found["sections"]["A"]["num_ended"] == 2
    assert (out / "mine").is_dir() and not (out / "work").exists(), "only what the program made is removed"
    assert "| B | correctness |" in (out / "results.md").read_text()


def test_a_process_that_ends_while_it_is_looked_at_was_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose own parent takes note of its end."""
    gone = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    found = [psutil.Process(gone.pid)]
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [found.pop()] if found else [])
    monkeypatch.setattr(psutil.Process, "is_running", lambda _: True)
    gone.communicate(b"\n")
    assert acceptance.end_descendants() == 0


def test_sections_after_the_last_minute_are_skipped(tmp_path: Path) -> None:
    runner, driver = tmp_path / "runner.py", tmp_path / "driver.py"
    runner.write_text(RUNNER)
    driver.write_text(DRIVER)
    command = [sys.executable, str(driver), str(runner), "--sections=D,E", f"--out={tmp_path / 'out'}", "--minutes=0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.count("the 0 minutes were over") == 2, done.stdout + done.stderr


def test_one_gpu_is_seen_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, first in ((None, "0"), ("3,5", "3"), ("", ""), ("MIG-abc", "MIG-abc")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = acceptance.environment()
        assert found["CUDA_VISIBLE_DEVICES"] == first and found["HF_HUB_OFFLINE"] == "1"


# --- the bundle --------------------------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as out:
        for path, text in files.items():
            out.writestr(path, text)


def packed(folder: Path, dropped: tuple[str, ...] = NEVER) -> Path:
    """Pieces of 1 KiB in folder/pieces, with unpack.sh, as bundle.sh leaves them."""
    wheels, pieces = folder / "wheels", folder / "pieces"
    for made in (wheels, pieces):
        made.mkdir()
    noise = f"# {random.Random(0).randbytes(5000).hex()}"
    wheel(wheels, "one", {"one/__init__.py": noise, "one.data/purelib/two.py": "VALUE = 2\n", "one/lib.so": "x"})
    wheel(wheels, "vllm", {"vllm/_moe_C.abi3.so": "kernels", "vllm/a.py": "", "ray/jars/x.jar": ""})
    pack(wheels, pieces / "all.txz", dropped)
    split = "sha256sum < all.txz > sum && split --bytes 1K --numeric-suffixes all.txz piece- && rm all.txz"
    subprocess.run(["bash", "-c", split], cwd=pieces, check=True)
    (pieces / "unpack.sh").write_text((GPU / "bundle" / "unpack.sh").read_text())
    assert len(list(pieces.glob("piece-*"))) > 1
    return pieces


def unpack(pieces: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(pieces / "unpack.sh"), str(site)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("dropped", "has_kernels"), [(NEVER, True), (NEVER + NOT_ON_HOPPER, False)])
def test_pieces_become_packages_again(tmp_path: Path, dropped: tuple[str, ...], has_kernels: bool) -> None:
    site = tmp_path / "site"
    done = unpack(packed(tmp_path, dropped), site)
    assert done.returncode == 0, done.stderr
    assert (site / "packages/vllm/_moe_C.abi3.so").exists() == has_kernels and not (site / "packages/ray").exists()
    assert os.access(site / "packages/one/lib.so", os.X_OK)
    line = f". {site}/env.sh && cd / && {sys.executable} -c 'import one, two; print(two.VALUE)'"
    run = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == "2\n", run.stderr


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_damaged_pieces_are_refused(tmp_path: Path, damage: str) -> None:
    pieces = packed(tmp_path)
    first = sorted(pieces.glob("piece-*"))[0]
    first.unlink() if damage == "missing" else first.write_bytes(b"?" + first.read_bytes()[1:])
    done = unpack(pieces, tmp_path / "site")
    assert done.returncode == 1 and "not whole" in done.stderr and not (tmp_path / "site/env.sh").exists()


def test_bundle_explains_itself_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(GPU / "bundle.sh"), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    shown = run("--help")
    assert shown.returncode == 0 and all(option in shown.stdout for option in ("--tier", "--hopper", "--piece", "unpack.sh"))
    for arguments, said in ((["--nonsense"], "--nonsense"), (["x", "--tier", "all"], "no tier all"), ([], "name a folder")):
        refused = run(*arguments)
        assert refused.returncode == 2 and said in refused.stderr and not list(tmp_path.iterdir())


def test_what_is_bundled_is_pinned_and_no_host_is_named() -> None:
    lines = [line for file in (GPU / "bundle").glob("*.txt") for line in file.read_text().splitlines() if line[:1] != "#"]
    assert len(lines) > 60 and all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    names = [line.partition("==")[0].lower() for line in lines]
    assert len(names) == len(set(names)) and {"ray", "vllm", "tensordict", "megatron-core"} <= set(names)
    files = [path for path in GPU.rglob("*") if path.is_file() and path.suffix in (".py", ".sh", ".txt", ".md")]
    assert not [path for path in files if re.search(r"https?://|index-url", path.read_text())]
