"""Whether every rank may run the loop: the same jobs under one driver, on every rank under Ray, and under torchrun without Ray.

    python scripts/checks/every_rank.py [--only grpo,gae] [--ranks 1 2 4] [--torchrun-only] [--kills 0 1] [--quickstart STEPS]

Each job is one of golden_runs.py: three steps of two optimizer steps on CPU.  Every tensor of its last checkpoint is compared bit
for bit with that under one driver, and every metric that is no duration to its last digit.  The controls, on two ranks, must
differ: the outputs of the ranks gathered in another order, and the prompts of one rank shifted by one.

--kills: SIGKILL of these ranks of two in turn; the other ends with an error that names it, and a second start comes to the
weights of a job that was left alone.  --quickstart: so many steps of the task of the quickstart with hf on two ranks in all ways.
Exit status 1 where anything is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlhub.utils.ports import free_port
from scripts import golden_runs
from scripts.checks.jobs import MAIN, ROOT, Task, final_weights
from scripts.golden_runs import Outcome

CONFIGURATIONS = ("grpo", "gae", "kl_in_reward", "reinforce_plus_plus", "dapo_filter", "separate_pools")
SETTINGS = {"reinforce_plus_plus": ("grpo", ("algorithm.adv_estimator=reinforce_plus_plus",))}
"""Configurations that are another of golden_runs.py with further settings."""
LIMIT_S = 900.0  # of what takes less than a minute, unless the machine has much else to do
END_S = 240.0
"""For the other rank to end after one was killed, far above what it takes."""


class Report:
    """Prints one line for each check and remembers whether all were as they should be."""

    def __init__(self) -> None:
        self.failed = 0

    def line(self, name: str, good: bool, more: str = "") -> None:
        self.failed += not good
        print(f"{'ok ' if good else 'BAD'} {name}{': ' + more if more else ''}", flush=True)


def matrix(report: Report, inputs: Path, only: Sequence[str], ranks: Sequence[int], *, with_ray: bool) -> None:
    """Compares every configuration on so many ranks with one driver."""
    with golden_runs.cluster(ROOT, needed=True) as joined:
        for name in only:
            base, more = SETTINGS.get(name, (name, ()))
            for num in ranks if name != "separate_pools" else [2]:
                sized = [f"trainer.n_gpus_per_node={num}", *more]
                single = golden_runs.train(base, "ray", inputs, ROOT, [*joined, *sized])
                ways = [("torchrun", "torchrun", sized)]
                if with_ray:
                    ways.append(("every rank under Ray", "ray", [*joined, *sized, "trainer.controller=multi"]))
                for way, backend, given in ways:
                    started = time.monotonic()
                    other = golden_runs.train(base, backend, inputs, ROOT, given)
                    lines = golden_runs.differences(single, other)
                    facts = f"{len(other.tensors)} tensors, {len(other.metrics[0])} metrics, {time.monotonic() - started:.0f} s"
                    report.line(f"{name}, {num} ranks, {way}", not lines, "; ".join(lines[:3]) or facts)


def permuted(wait: Callable[[Any], dict[int, Any]]) -> Callable[[Any], dict[int, Any]]:
    """Gives the outputs of a call to the ranks in reverse."""

    def swapped(call: Any) -> dict[int, Any]:
        outputs = wait(call)
        return dict(zip(sorted(outputs), (outputs[rank] for rank in sorted(outputs, reverse=True)), strict=True))

    return swapped


def shifted(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Shifts the prompts of rank 1 by one."""

    def sample_shifted(source: Any, prompts: Iterator[Any], step: int) -> Any:
        if os.environ["RANK"] != "1":
            return sample(source, prompts, step)
        batch = next(prompts)
        return sample(source, iter([batch.select_idxs([*range(1, len(batch)), 0])]), step)

    return sample_shifted


def controls(report: Report, inputs: Path) -> None:
    """Shows that the comparison notices what would be wrong."""
    from rlhub.single_controller import replicated
    from rlhub.trainer.ppo import sync_source

    two = ["trainer.n_gpus_per_node=2"]
    right = golden_runs.train("grpo", "torchrun", inputs, ROOT, two)
    broken = {
        "gather order permuted": mock.patch.object(replicated._Gathered, "wait", permuted(replicated._Gathered.wait)),
        "prompts of rank 1 shifted": mock.patch.object(sync_source.SyncSource, "sample", shifted(sync_source.SyncSource.sample)),
    }
    for name, patch in broken.items():
        with patch:  # the ranks are forked from this process
            try:
                lines = golden_runs.differences(right, golden_runs.train("grpo", "torchrun", inputs, ROOT, two))
            except RuntimeError as error:
                lines = [str(error).strip().splitlines()[-1]]
        report.line(
            f"control: {name}", bool(lines), f"{len(lines)} differences, such as {lines[-1][:120]}" if lines else "the same"
        )


def start_ranks(size: int, arguments: Sequence[str], log: Path) -> list[subprocess.Popen[bytes]]:
    """Starts main_ppo on every rank with the variables of torchrun, but without its agent, which would end the others."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")), "WORLD_SIZE": str(size)}
    ranks = []
    for rank in range(size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        environment = {**golden_runs.environment(ROOT), **meeting, **place}
        with Path(f"{log}.{rank}").open("wb") as output:
            command = [sys.executable, "-m", MAIN, *arguments]
            ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=log.parent))
    return ranks


def lines_of(run: Path) -> int:
    """The steps that a run has logged."""
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def kills(report: Report, folder: Path, victims: Sequence[int]) -> None:
    """Kills one of two ranks in its fourth step."""
    task = Task(folder=folder / "task", seconds=0.1).write()
    more = ("trainer.backend=ray", "trainer.controller=multi", "trainer.n_gpus_per_node=2", "trainer.record_batches=False")

    def start(run: Path, log: str) -> list[subprocess.Popen[bytes]]:
        return start_ranks(2, task.arguments(run, *more, deadline_s=LIMIT_S), folder / log)

    codes = [rank.wait(LIMIT_S) for rank in start(folder / "whole", "whole")]
    report.line("a job left alone", codes == [0, 0], f"exit {codes}")
    for victim in victims:
        run = folder / f"killed-{victim}"
        ranks = start(run, f"killed-{victim}")
        while lines_of(run) < 3:
            time.sleep(0.02)
        ranks[victim].send_signal(signal.SIGKILL)
        struck = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            ranks[1 - victim].wait(END_S)
        seconds, code = time.monotonic() - struck, ranks[1 - victim].poll()
        said = Path(f"{folder / f'killed-{victim}'}.{1 - victim}").read_text()
        named = f"error: [loop rank {victim} on 127.0.0.1] process {ranks[victim].pid} died" in said
        report.line(
            f"rank {victim} killed", code == 1 and named, f"the other ended with {code} after {seconds:.1f} s, named: {named}"
        )
        ranks[1 - victim].kill()
        codes = [rank.wait(LIMIT_S) for rank in start(run, f"again-{victim}")]
        same = final_weights(run) == final_weights(folder / "whole")
        report.line(
            f"resumed after rank {victim}", codes == [0, 0] and same, f"exit {codes}, weights {'the same' if same else 'DIFFER'}"
        )


def quickstart(report: Report, folder: Path, steps: int) -> None:
    """The quickstart's reinforcement learning after its warm start, in all three ways."""
    from recipes.arithmetic import run as recipe

    options = recipe.parse(["--out", str(folder / "recipe"), "--steps", str(steps), "actor_rollout_ref.rollout.name=hf"])
    warm_start, python = recipe.prepare(options), [sys.executable, "-m"]
    torchrun = [*python, "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    ways = {
        "one driver": (python, ()),
        "every rank under Ray": (python, ("trainer.controller=multi",)),
        "torchrun": (torchrun, ("trainer.controller=multi",)),
    }
    found: dict[str, Outcome] = {}
    for way, (command, more) in ways.items():
        run, started = folder / way.replace(" ", "-"), time.monotonic()
        settings = [*recipe.rl_settings(options, warm_start, run), *more]
        with (folder / f"{run.name}.log").open("wb") as log, mock.patch.object(golden_runs, "STEPS", steps):
            process = subprocess.Popen(
                [*command, MAIN, *settings], cwd=ROOT, env=golden_runs.environment(ROOT), stdout=log, stderr=log
            )
            rays = watched(process)
            report.line(
                f"quickstart, {way}", process.returncode == 0, f"{time.monotonic() - started:.0f} s, Ray processes: {rays}"
            )
            found[way] = outcome_of(run, steps)
        learned = [row["val/pass@1"] for row in found[way].metrics if "val/pass@1" in row]
        print(f"    right in validation: {' '.join(f'{value:.3f}' for value in learned)}", flush=True)
        lines = golden_runs.differences(found["one driver"], found[way])
        report.line(f"quickstart, {way}: as under one driver", not lines, "; ".join(lines[:3]))
        report.line(f"quickstart, {way}: Ray", (rays > 0) == (way != "torchrun"), f"{rays} processes")


def watched(process: subprocess.Popen[bytes]) -> int:
    """Waits for a command, and returns the largest number of Ray's processes that were among its descendants."""
    import psutil

    most = 0
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(process.pid).children(recursive=True)
            names = [" ".join(child.cmdline()) for child in below]
            most = max(most, sum("raylet" in name or "gcs_server" in name or "ray::" in name for name in names))
        time.sleep(1.0)
    return most


def outcome_of(run: Path, steps: int) -> Outcome:
    """The metrics and the last checkpoint of a run of so many steps."""
    import json

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last, tensors = run / f"global_step_{steps}", dict[str, Any]()
    for path in sorted(last.rglob("*.safetensors")):
        tensors |= {f"{path.relative_to(last)}:{name}": tensor for name, tensor in golden_runs.tensors_in(path).items()}
    return Outcome(metrics=rows, tensors=tensors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CONFIGURATIONS), help=f"of {', '.join(CONFIGURATIONS)}; empty: none")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--torchrun-only", action="store_true", help="leave out every rank under Ray")
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--kills", type=int, nargs="*", choices=(0, 1), default=[], metavar="RANK")
    parser.add_argument("--quickstart", type=int, default=0, metavar="STEPS")
    arguments = parser.parse_args()
    report, folder = Report(), Path(tempfile.mkdtemp(prefix="every-rank-"))
    try:
        inputs = folder / "inputs"
        inputs.mkdir()
        golden_runs.forked(lambda: golden_runs.write_inputs(inputs, ROOT), folder / "log")
        if only := [name for name in arguments.only.split(",") if name]:
            matrix(report, inputs, only, arguments.ranks, with_ray=not arguments.torchrun_only)
        if not arguments.no_controls:
            controls(report, inputs)
        if arguments.kills:
            kills(report, folder, arguments.kills)
        if arguments.quickstart:
            quickstart(report, folder, arguments.quickstart)
    finally:
        shutil.rmtree(folder)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
