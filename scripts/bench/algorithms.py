"""Does every registered algorithm learn?  A short run each on the quickstart's task, at the algorithm's own defaults.

    python scripts/bench/algorithms.py [--only NAME ...] [--steps 30] [--jobs 2] [--out outputs/bench_algorithms]

Each advantage estimator with the default policy loss, and each policy loss with one group estimator; what a part needs besides
(a critic, several samples per prompt) follows from its registry row.  In process, hf engine, one rank, 32 problems x 8 samples a
step in two mini-batches, so that the second is off-policy and clips bind.  Each run is a fork of a process that has loaded the
libraries.  The warm start is made once by the quickstart's recipe.  A run that is done is not repeated; --again does.

Wanted of each run: accuracy (1,024 held-out problems, temperature 1) up by at least 0.10, the last at least 0.9 of the best,
every metric finite and no step skipped.  The exit status is 1 if one misses it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from rlhub.config.sections.actor import PolicyLossConfig

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "arithmetic"
BESIDE_LOSSES = "grpo"
"""The estimator that every loss is run with: it needs no critic and has no knob to tune."""
LEARNING_RATE, CRITIC_LEARNING_RATE = 3e-4, 1e-3
WANTED_GAIN, WANTED_SHARE_OF_BEST = 0.10, 0.9
VALIDATIONS = 3
"""After the start, evenly over the run."""
RUN_TIMEOUT_S = 1200.0
POLL_S = 0.2
MAIN = "rlhub.trainer.main_ppo"
HEAVY = (
    "torch",
    "hydra",
    "pyarrow.parquet",
    "transformers.models.qwen2.modeling_qwen2",
    "torch.distributed.fsdp",
    "rlhub.trainer.ppo.trainer",
    "rlhub.engines.rollout.hf.engine",
    "rlhub.engines.training.fsdp.engine",
)
"""What every run would load for itself; none of it starts a thread or a process."""
ACCURACY = "val/pass@1"


@dataclass(slots=True, kw_only=True)
class Subject:
    """One run: the part under test and what stands beside it."""

    kind: str
    estimator: str
    loss: str

    @property
    def name(self) -> str:
        return self.estimator if self.kind == "estimator" else self.loss

    @property
    def label(self) -> str:
        return f"{self.kind}-{self.name}"


@dataclass(slots=True, kw_only=True)
class Figures:
    """accuracy: at the start and at each validation; the others are means over the steps, NaN where nobody measured them.
    faults: what should not have happened."""

    accuracy: list[float]
    clip_fraction: float
    kl: float
    seconds: float
    faults: list[str]

    @property
    def problems(self) -> list[str]:
        """What is wrong with the run; [] if it learned."""
        if len(self.accuracy) < 2:
            return self.faults or ["no validation"]
        first, best, last = self.accuracy[0], max(self.accuracy), self.accuracy[-1]
        found = list(self.faults)
        if last - first < WANTED_GAIN:
            found.append(f"gain {last - first:+.3f}")
        if last < WANTED_SHARE_OF_BEST * best:
            found.append(f"last {last / best:.2f} of best")
        return found


def subjects(only: list[str]) -> Iterator[Subject]:
    """Everything registered, or what is named; not the estimators over episodes, which the task does not have."""
    default_loss = PolicyLossConfig().loss_mode
    for name in (name for name in ADVANTAGE_ESTIMATORS.names() if "episodes" not in ADVANTAGE_ESTIMATORS.row(name).requires):
        if not only or name in only or f"estimator-{name}" in only:
            yield Subject(kind="estimator", estimator=name, loss=default_loss)
    for name in POLICY_LOSSES.names():
        if not only or name in only or f"loss-{name}" in only:
            yield Subject(kind="loss", estimator=BESIDE_LOSSES, loss=name)


def warm_start(folder: Path) -> Path:
    """Data, model and warm start of the recipe, made if they are not there.  Its last stage is cut to one step that nobody
    reads, for the recipe has no option to stop before it."""
    result = folder / "sft" / "global_step_400" / "model" / "huggingface"
    if not result.is_dir():
        quick = ["trainer.backend=local", "actor_rollout_ref.rollout.name=hf", "trainer.val_before_train=False"]
        command = [sys.executable, str(RECIPE / "run.py"), f"--out={folder}", "--ranks=1", "--steps=1", "--name=unused", *quick]
        subprocess.run(command, check=True, env=environment(), cwd=ROOT)
    return result


def environment() -> dict[str, str]:
    """One thread a run: on few cores, runs that each take all of them wait for one another."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def settings_of(subject: Subject, warm: Path, model: Path, folder: Path, steps: int) -> list[str]:
    """Of main_ppo for one run.  Learning rate and steps are the same for all; knobs keep their defaults."""
    needs = ADVANTAGE_ESTIMATORS.row(subject.estimator).requires
    return [
        f"data.train_files={warm / 'data/train.parquet'}", f"data.val_files={warm / 'data/val.parquet'}",
        "data.train_batch_size=32", "data.max_prompt_length=8", "data.max_response_length=8",
        f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16", f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={subject.loss}",
        "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True", "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        f"algorithm.adv_estimator={subject.estimator}",
        f"custom_reward_function.path={RECIPE / 'reward.py'}", "custom_reward_function.name=compute_parts",
        "reward_model.num_workers=1",
        "trainer.device=cpu", "trainer.backend=local", f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={max(1, steps // VALIDATIONS)}", f"trainer.default_local_dir={folder}",
        *([f"critic.optim.lr={CRITIC_LEARNING_RATE}"] if "values" in needs else []),
    ]  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Plan:
    """Where and how long."""

    warm: Path
    model: Path
    out: Path
    steps: int

    def folder(self, subject: Subject) -> Path:
        return self.out / f"{self.steps}_steps" / subject.label

    def log(self, subject: Subject) -> Path:
        return self.folder(subject).with_name(f"{subject.label}.log")

    def finished(self, subject: Subject) -> Path:
        """The run's last file, with its seconds."""
        return self.folder(subject) / "seconds.json"

    def result(self, subject: Subject, code: int, seconds: float) -> Figures:
        if code == 0:
            return figures(self.folder(subject), seconds)
        fault = f"ended with status {code}, see {self.log(subject)}"
        return Figures(accuracy=[], clip_fraction=math.nan, kl=math.nan, seconds=seconds, faults=[fault])


def start(subject: Subject, plan: Plan) -> int:
    """Fork a run; returns its process id."""
    folder = plan.folder(subject)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    sys.argv = [MAIN, *settings_of(subject, plan.warm, plan.model, folder, plan.steps)]
    if (pid := os.fork()) == 0:
        os._exit(in_child(plan.log(subject)))
    return pid


def in_child(log: Path) -> int:
    """The main, as `python -m` runs it, with its output in a file; returns the exit status."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        runpy.run_module(MAIN, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # a process boundary: the parent reports the status
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def run_all(chosen: list[Subject], plan: Plan, jobs: int, report_one: Callable[[Subject, Figures], None]) -> None:
    """At most `jobs` at a time; whatever ends this ends the runs."""
    waiting = []
    for subject in chosen:
        if plan.finished(subject).exists():
            report_one(subject, plan.result(subject, 0, json.loads(plan.finished(subject).read_text())))
        else:
            waiting.append(subject)
    running: dict[int, tuple[Subject, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                subject = waiting.pop(0)
                running[start(subject, plan)] = (subject, time.monotonic())
            time.sleep(POLL_S)
            for pid, (subject, since) in list(running.items()):
                if time.monotonic() - since > RUN_TIMEOUT_S:
                    os.killpg(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del running[pid]
                    code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - since
                    if code == 0:
                        plan.finished(subject).write_text(json.dumps(seconds))
                    report_one(subject, plan.result(subject, code, seconds))
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)


def figures(folder: Path, seconds: float) -> Figures:
    """From the run's metrics."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    bad = sorted({name for row in rows for name, value in row.items() if not is_finite(value)})
    skipped = sum(row.get("actor/skipped_steps", 0.0) for row in rows)
    faults = [f"not finite: {', '.join(bad[:3])}"] if bad else []
    faults += [f"{skipped:.0f} steps skipped"] if skipped else []
    return Figures(
        accuracy=[row[ACCURACY] for row in rows if ACCURACY in row],
        clip_fraction=mean_of(rows, "actor/pg_clipfrac"),
        kl=mean_of(rows, "actor/ppo_kl"),
        seconds=seconds,
        faults=faults,
    )


def is_finite(value: object) -> bool:
    """A metric that is no number was not a finite one: JSON has no other way to say it."""
    return isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))


def mean_of(rows: list[dict[str, float]], name: str) -> float:
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.fmean(values) if values else math.nan


def shown(value: float, digits: int = 3) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def report(console: Console, results: dict[str, tuple[Subject, Figures]], steps: int) -> None:
    """The table."""
    table = Table(title=f"Quickstart task, {steps} steps of 32 x 8 in 2 mini-batches, learning rate {LEARNING_RATE:g}, one rank")
    for column in ("", "name", "start", "best", "final", "clip fraction", "KL", "seconds", "verdict"):
        table.add_column(column)
    for subject, found in results.values():
        accuracy = found.accuracy or [math.nan]
        row = [shown(value) for value in (accuracy[0], max(accuracy), accuracy[-1], found.clip_fraction)]
        verdict = "learns" if not found.problems else "; ".join(found.problems)
        table.add_row(subject.kind, subject.name, *row, shown(found.kl, 4), shown(found.seconds, 0), verdict)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="these parts alone; estimator-X or loss-X to be exact"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_algorithms"))
    parser.add_argument("--again", action="store_true", help="repeat runs that are done")
    arguments = parser.parse_args()
    console, out = Console(width=150), arguments.out.absolute()
    chosen = list(subjects(arguments.only))
    if not chosen:
        known = ", ".join([*ADVANTAGE_ESTIMATORS.names(), *POLICY_LOSSES.names()])
        parser.error(f"--only {' '.join(arguments.only)}: nothing of that name is registered; known: {known}")
    if arguments.again:
        for subject in chosen:
            shutil.rmtree(out / f"{arguments.steps}_steps" / subject.label, ignore_errors=True)
    warm = out / "warm"
    plan = Plan(warm=warm, model=warm_start(warm), out=out, steps=arguments.steps)
    os.environ.update(environment())
    for name in HEAVY:
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results: dict[str, tuple[Subject, Figures]] = {}

    def report_one(subject: Subject, found: Figures) -> None:
        results[subject.label] = (subject, found)
        curve = " ".join(f"{value:.3f}" for value in found.accuracy)
        verdict = "; ".join(found.problems) or "learns"
        console.print(f"[{len(results)}/{len(chosen)}] {subject.label}: {curve} ({found.seconds:.0f} s) {verdict}", markup=False)

    run_all(chosen, plan, arguments.jobs, report_one)
    report(console, dict(sorted(results.items())), arguments.steps)
    return int(any(found.problems for _, found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
