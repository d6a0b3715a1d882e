"""The first measurements on a GPU: is it correct, how close is it to the hardware and to bare loops, in at most 25 minutes.

    python scripts/gpu/acceptance.py                              # all sections on one GPU
    python scripts/gpu/acceptance.py --sections A,C --out FOLDER
    python scripts/gpu/acceptance.py --small                      # all sections at tiny sizes, also on a CPU

It computes on one GPU, the first that CUDA_VISIBLE_DEVICES allows, and needs no network: models have random weights in the
shapes of public ones.  Each section is a process of its own with a time limit; what fails or takes too long is a row of the table
and the others go on.  When a section has ended, every process that it left is ended too.  FOLDER gets results.json, results.md
and a log for each section.  The exit status is 1 if a row failed or missed its bound.  scripts/gpu/README.md explains the rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from rlhub.utils.children.supervisor import PR_SET_CHILD_SUBREAPER, set_process
from scripts.gpu.rows import BAD, Row, markdown, read_rows, table

ROOT = Path(__file__).resolve().parents[2]
RUNNER = Path(__file__).with_name("run_section.py")
GRACE_S = 10.0
"""Seconds between the request to end and the kill."""
MINUTES = 25.0
SMALL_LIMIT_S = 300.0
WORK = "work"
"""The folder of models and runs inside the folder of results; it is removed at the end."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "offline",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(slots=True, kw_only=True, frozen=True)
class Section:
    """A part of the program.

    target: "module:function"; the function gets a Context (scripts/gpu/measure.py).
    limit_s: the time limit; at a small size SMALL_LIMIT_S, since a CPU may be slow and busy.
    needs_gb: GiB of GPU memory that must be free at full size.
    """

    title: str
    target: str
    limit_s: float
    needs_gb: float


SECTIONS: Mapping[str, Section] = {
    "A": Section(title="ceilings of the machine", target="scripts.gpu.sections.hardware:ceilings", limit_s=40, needs_gb=4),
    "B": Section(title="correctness", target="scripts.gpu.sections.correctness:correctness", limit_s=120, needs_gb=16),
    "C": Section(title="update", target="scripts.gpu.sections.training:update", limit_s=345, needs_gb=12),
    "D": Section(title="log-prob pass and offloading", target="scripts.gpu.sections.training:passes", limit_s=75, needs_gb=24),
    "E": Section(title="rollout", target="scripts.gpu.sections.rollout:throughput", limit_s=240, needs_gb=12),
    "F": Section(title="weight sync", target="scripts.gpu.sections.weights:sync", limit_s=120, needs_gb=20),
    "G": Section(title="weights through a folder", target="scripts.gpu.sections.weights:folder", limit_s=80, needs_gb=10),
    "H": Section(title="mismatch", target="scripts.gpu.sections.rollout:mismatch", limit_s=150, needs_gb=20),
    "I": Section(title="a whole GRPO step", target="scripts.gpu.sections.jobs:grpo_step", limit_s=150, needs_gb=24),
    "J": Section(title="quickstart", target="scripts.gpu.sections.jobs:quickstart", limit_s=180, needs_gb=8),
}
"""The sections in the order in which they run.  Their limits add up to MINUTES."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Outcome:
    """The end of a section.

    seconds: its duration.
    exit_code: of its process; None where the time limit ended it.
    num_ended: the processes that it had left, and that were ended.
    """

    seconds: float
    exit_code: int | None
    num_ended: int


class Stopped(BaseException):
    """A signal asked the program to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen sections, prints the table, and returns the exit status."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    set_process(PR_SET_CHILD_SUBREAPER, 1)  # what a section leaves becomes a child of this process, and is found
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    chosen = {letter: SECTIONS[letter] for letter in options.sections}
    try:
        rows, outcomes = run_sections(chosen, options)
    except Stopped:
        return 130
    finally:
        end_descendants()
        if not options.keep:
            shutil.rmtree(options.out / WORK, ignore_errors=True)
    return 1 if any(row.status in BAD for row in rows) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    listed = "\n".join(f"  {letter}  {section.title} (at most {section.limit_s:.0f} s)" for letter, section in SECTIONS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"sections:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", type=_letters, default=list(SECTIONS), metavar="A,C", help="default: all")
    parser.add_argument("--out", type=_folder, default=_folder("outputs/gpu"), metavar="FOLDER", help="default: outputs/gpu")
    parser.add_argument("--small", action="store_true", help="tiny models and few rows; bounds of speed are not judged")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda where torch can use it")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit of the whole program (default: %(default)g)")
    parser.add_argument("--keep", action="store_true", help="keep the models and run folders that the sections made")
    return parser.parse_args(arguments)


def _letters(text: str) -> list[str]:
    letters = [part.strip().upper() for part in text.split(",") if part.strip()]
    if unknown := [letter for letter in letters if letter not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"no section {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
    return sorted(set(letters), key=list(SECTIONS).index)


def _folder(text: str) -> Path:
    return Path(os.path.abspath(text))


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise Stopped


def run_sections(sections: Mapping[str, Section], options: argparse.Namespace) -> tuple[list[Row], dict[str, Outcome]]:
    """Runs sections one after the other and writes the results after each, so that an early end loses none of them."""
    for name in ("rows", "logs"):
        shutil.rmtree(options.out / name, ignore_errors=True)
        (options.out / name).mkdir(parents=True)
    (options.out / "machine.json").unlink(missing_ok=True)
    rows: list[Row] = []
    outcomes: dict[str, Outcome] = {}
    deadline = time.monotonic() + 60 * options.minutes
    for letter, section in sections.items():
        limit_s = min(SMALL_LIMIT_S if options.small else section.limit_s, deadline - time.monotonic())
        print(f"{letter}: {section.title} (at most {max(limit_s, 0):.0f} s)", flush=True)
        if limit_s <= 0:
            note = f"the {options.minutes:g} minutes were over"
            found = [Row(section=letter, what=section.title, status="skipped", note=note)]
        else:
            outcomes[letter] = run_section(letter, section, options, limit_s)
            found = rows_of(letter, section, options.out, outcomes[letter], limit_s)
        rows += found
        print(table(found), flush=True)
        write_results(options, rows, outcomes)
    print(summary(rows, outcomes, options.out), flush=True)
    return rows, outcomes


def run_section(letter: str, section: Section, options: argparse.Namespace, limit_s: float) -> Outcome:
    """Runs one section in a process of its own, in a session of its own, and ends all that it leaves."""
    command = [sys.executable, str(RUNNER), letter, section.target, f"--out={options.out}", f"--device={options.device}"]
    command += [f"--limit-s={limit_s}", f"--needs-gb={section.needs_gb}", *["--small"] * options.small]
    started = time.monotonic()
    with (options.out / "logs" / f"{letter}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log, start_new_session=True)
        try:
            exit_code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        seconds = time.monotonic() - started
        return Outcome(seconds=seconds, exit_code=exit_code, num_ended=end_descendants())


def environment() -> dict[str, str]:
    """Returns the environment of a section: no network, one GPU, and this repository first on the path."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return {**ENVIRONMENT, **os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": visible}


def end_descendants() -> int:
    """Ends every process that descends from this one; returns how many there were."""
    living = [process for process in psutil.Process().children(recursive=True) if _lives(process)]
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for process in psutil.Process().children(recursive=True):
            try:
                ask(process)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(psutil.Process().children(recursive=True), GRACE_S)
    return len(living)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it has ended since it was found
        return False


def rows_of(letter: str, section: Section, out: Path, outcome: Outcome, limit_s: float) -> list[Row]:
    """Returns a section's rows, with one more if it did not end by itself or as it should."""
    rows = read_rows(out / "rows" / f"{letter}.jsonl")
    if outcome.exit_code is None:
        why = f"ended by its time limit of {limit_s:.0f} s; rows until then stand"
        rows.append(Row(section=letter, what=section.title, status="failed", note=why))
    elif outcome.exit_code:
        why = f"exit status {outcome.exit_code}: {last_line(out / 'logs' / f'{letter}.log')}"
        rows.append(Row(section=letter, what=section.title, status="failed", note=why[:300]))
    elif not rows:
        rows.append(Row(section=letter, what=section.title, status="failed", note="the section wrote no row"))
    return rows


def last_line(log: Path) -> str:
    """Returns the last line with text of a log: of a Python program that failed, its error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def write_results(options: argparse.Namespace, rows: Sequence[Row], outcomes: Mapping[str, Outcome]) -> None:
    """Writes results.json and results.md."""
    machine = options.out / "machine.json"
    facts = json.loads(machine.read_text()) if machine.is_file() else {}
    content = {
        "size": "small" if options.small else "full",
        "machine": facts,
        "sections": {letter: dataclasses.asdict(outcome) for letter, outcome in outcomes.items()},
        "rows": [dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows],
    }
    (options.out / "results.json").write_text(json.dumps(content, indent=1))
    lines = "".join(f"- {name}: {value}\n" for name, value in facts.items())
    (options.out / "results.md").write_text(f"Size: {content['size']}\n\n{lines}\n{markdown(rows)}")


def summary(rows: Sequence[Row], outcomes: Mapping[str, Outcome], out: Path) -> str:
    """Returns one line on all rows, and where they are."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    counted = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    seconds = sum(outcome.seconds for outcome in outcomes.values())
    times = ", ".join(f"{letter} {outcome.seconds:.0f} s" for letter, outcome in outcomes.items())
    return f"{len(rows)} rows: {counted}; {seconds:.0f} s ({times}); {out}/results.md"


if __name__ == "__main__":
    sys.exit(main())
