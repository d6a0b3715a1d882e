"""One knob: how fast is training when episodes wait on slow tools, synchronously, one step ahead, and fully asynchronously?

    python scripts/bench/async_modes.py [--seeds 1 2 3] [--steps 120] [--backend local|ray] [--staleness 4] [--out FOLDER]
    python scripts/bench/async_modes.py --pacing     # only trainer.pacing=adaptive against fixed

Each episode is a real one: the hf engine writes a few tokens, a tool takes its time (0.05 to 1 s, a spread of 1:20, most of them
short), and the engine goes on.  The job is main_ppo with the same model, placement, seeds and number of steps for all modes; only
trainer.max_staleness differs (0, 1, --staleness).  The policy learns to write words that end in an even digit.

Wanted: fully asynchronous at least 2.5x the samples a second of synchronous, one step ahead in between, and a final reward that
is equal within two standard errors over the seeds.  Then the other end of the scale: episodes of 0.1 s against 0.1 s of training,
where a step takes at most 1.15x of the larger.  One thread of torch a process.  The exit status is 1 if something is missed.

With --pacing the same job runs with both settings of trainer.pacing, as it is and with training lengthened by a sleep, so that
the median group takes at most half of a step.  Wanted: as it is, a median staleness at least 1 below that of fixed pacing for
at most 0.05 more of the trainer's time idle; with longer training a median of at most 1 where fixed pacing has the bound, for at
most 0.03 more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the jobs
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.tiny_model import build

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 64
BATCH, SAMPLES, PROMPTS = 16, 2, 256
WARM_UP = 3  # steps: the pipeline fills
WANTED_RATIO, WANTED_STANDARD_ERRORS, WANTED_STEP = 2.5, 2.0, 1.15
SHORT_S = 0.1

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    words = solution_str.split()
    return sum(word[-1:] in "02468" for word in words) / max(len(words), 1)
"""
WORKFLOW = """
import asyncio
import random
from dataclasses import replace

from rlhub.agents.workflows.base import RolloutWorkflow
from rlhub.agents.trajectory import Trajectory

SHORTEST_S, SPREAD, SHAPE = {shortest_s}, {spread}, 4


def latency_s(data):
    return SHORTEST_S * SPREAD ** (random.Random(data.seed).random() ** SHAPE)


class SlowTool(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        half = replace(self.parts.sampling, max_new_tokens=self.parts.max_response_length // 2, ignore_eos=True)
        first = await engine.agenerate(self.request(data), half)
        await asyncio.sleep(latency_s(data))
        tokens = [*data.prompt_ids, *first.token_ids]
        request = replace(self.request(data), prompt_ids=tokens, start=0, seed=data.seed ^ 1)
        then = await engine.agenerate(request, half)
        parts = (first, then)
        response = [token for part in parts for token in part.token_ids]
        return Trajectory(
            prompt_ids=list(data.prompt_ids),
            response_ids=response,
            response_mask=[1] * len(response),
            rollout_log_probs=[value for part in parts for value in part.log_probs],
            versions=[version for part in parts for version in part.versions],
        )
"""


SLOW_TRAINING = """
import time

from rlhub.algorithms.advantages.grpo import GRPOKnobs, grpo
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("slow_grpo", requires={{"groups"}}, knobs=GRPOKnobs)
def slow_grpo(inputs, knobs):
    time.sleep({seconds})
    return grpo(inputs, knobs)
"""
TRAINING_S = 0.4


@dataclass(slots=True, kw_only=True, frozen=True)
class PacingCase:
    """A job in which adaptive pacing is compared with fixed pacing.

    more: its settings.  oldest: the largest median staleness that is wanted.  idle: by how much the trainer's idle share may
    grow.
    """

    name: str
    more: tuple[str, ...]
    oldest: float
    idle: float


@dataclass(slots=True, kw_only=True)
class Measured:
    """Of one run after the warm-up.  reward: mean of the last quarter of the steps."""

    samples_per_s: float
    step_s: float
    reward: float
    rows: list[dict[str, Any]]


def task(folder: Path, *, shortest_s: float, spread: float) -> None:
    """Model, prompts, reward and workflow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    build(folder / "model", hidden=64, layers=2, vocab_size=VOCABULARY)
    rows = [
        {
            "prompt": " ".join(f"w{2 + (7 * row + 5 * word + row * word) % (VOCABULARY - 2)}" for word in range(4)),
            "data_source": "words",
            "reward_model": {"style": "rule", "ground_truth": str(row)},
        }
        for row in range(PROMPTS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    (folder / "slow_training.py").write_text(SLOW_TRAINING.format(seconds=TRAINING_S))
    (folder / "workflow.py").write_text(WORKFLOW.format(shortest_s=shortest_s, spread=spread))


def run(folder: Path, name: str, staleness: int, seed: int, options: argparse.Namespace, *more: str) -> Measured:
    """One job in a process of its own."""
    out = options.out / f"{name}-seed{seed}"
    command = [
        sys.executable,
        *("-m", "rlhub.trainer.main_ppo"),
        f"data.train_files={folder / 'train.parquet'}",
        f"data.train_batch_size={BATCH}",
        f"data.seed={seed}",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.mode=async",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={folder / 'workflow.py'}:SlowTool",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        f"custom_reward_function.path={folder / 'reward.py'}",
        "reward_model.num_workers=1",
        "trainer.device=cpu",
        f"trainer.backend={options.backend}",
        f"trainer.max_staleness={staleness}",
        f"trainer.total_training_steps={options.steps}",
        "trainer.total_epochs=1000",
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={out}",
        *more,
    ]
    log = options.out / f"{name}-seed{seed}.log"
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    with log.open("w") as stream:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=variables,
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=options.timeout_s,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{name} failed, see {log}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    step_s = statistics.mean(row["timing_s/step"] for row in rows)
    last = rows[-max(len(rows) // 4, 1) :]
    reward = statistics.mean(row["reward/mean"] for row in last)
    return Measured(samples_per_s=BATCH * SAMPLES / step_s, step_s=step_s, reward=reward, rows=rows)


def mean(runs: list[Measured], metric: str) -> float:
    return statistics.mean(row.get(metric, 0.0) for run in runs for row in run.rows)


def median_staleness(runs: list[Measured]) -> int:
    """Returns the median over the samples of all steps, from the steps' histograms."""
    shares = {age: mean(runs, f"staleness/share_{age}") for age in range(8)}
    return next(age for age in shares if sum(shares[younger] for younger in range(age + 1)) >= 0.5)


def standard_error(runs: list[Measured], others: list[Measured]) -> float:
    """Of the difference of two means over the seeds; of counting even words where the seeds happen to agree."""
    spread = sum(statistics.variance([r.reward for r in side]) / len(side) for side in (runs, others) if len(side) > 1)
    words = BATCH * SAMPLES * 8 * max(len(runs[0].rows) // 4, 1) * len(runs)
    rate = min(max(statistics.mean(r.reward for r in runs), 0.01), 0.99)
    return math.sqrt(max(spread, 2 * rate * (1 - rate) / words))


def compare_modes(options: argparse.Namespace, console: Console) -> bool:
    """The long tail; whether everything wanted is there."""
    folder = options.out / "task"
    task(folder, shortest_s=0.05, spread=20)
    modes = {"synchronous": 0, "one step ahead": 1, "fully asynchronous": options.staleness}
    runs = {
        name: [run(folder, name.replace(" ", "-"), staleness, seed, options) for seed in options.seeds]
        for name, staleness in modes.items()
    }
    rates = {name: statistics.mean(r.samples_per_s for r in found) for name, found in runs.items()}
    table = Table(title=f"tools of 0.05 to 1 s, {options.backend} backend, {options.steps} steps, seeds {options.seeds}")
    for column in (
        "mode",
        "samples/s",
        "ratio",
        "step s",
        "trainer idle",
        "rollout idle",
        "staleness p50 p95 max",
        "dropped",
        "reward",
    ):
        table.add_column(column)
    for name, found in runs.items():
        quantiles = " ".join(f"{mean(found, f'staleness/{q}'):.1f}" for q in ("p50", "p95"))
        oldest = max(row["staleness/max"] for r in found for row in r.rows)
        dropped = sum(row["staleness/dropped_groups"] for r in found for row in r.rows)
        share = dropped / max(dropped + BATCH * sum(len(r.rows) for r in found), 1)
        idle = [f"{mean(found, f'{side}/idle_share'):.0%}" for side in ("trainer", "rollout")]
        seconds = f"{statistics.mean(r.step_s for r in found):.2f}"
        rewards = " ".join(f"{r.reward:.3f}" for r in found)
        ratio = f"{rates[name] / rates['synchronous']:.2f}x"
        table.add_row(name, f"{rates[name]:.1f}", ratio, seconds, *idle, f"{quantiles} {oldest:.0f}", f"{share:.1%}", rewards)
    console.print(table)
    print_histograms(runs, console)
    names = list(runs)
    speed_up = rates[names[2]] / rates[names[0]]
    between = rates[names[0]] < rates[names[1]] < rates[names[2]]
    console.print(
        f"fully asynchronous {speed_up:.2f}x of synchronous, wanted {WANTED_RATIO}x; one step ahead in between: {between}"
    )
    equal = True
    for name in names[1:]:
        difference = statistics.mean(r.reward for r in runs[name]) - statistics.mean(r.reward for r in runs[names[0]])
        error = standard_error(runs[names[0]], runs[name])
        equal &= abs(difference) <= WANTED_STANDARD_ERRORS * error
        console.print(f"{name}: final reward {difference:+.4f} from synchronous, {abs(difference) / error:.2f} standard errors")
    return speed_up >= WANTED_RATIO and between and equal


def compare_pacing(options: argparse.Namespace, console: Console) -> bool:
    """Both settings of trainer.pacing; whether everything wanted is there."""
    folder = options.out / "task"
    task(folder, shortest_s=0.05, spread=20)
    longer = ("trainer.plugins=[slow_training]", "algorithm.adv_estimator=slow_grpo")
    cases = (
        PacingCase(name="as it is", more=(), oldest=options.staleness - 1, idle=0.05),
        PacingCase(name="longer training", more=longer, oldest=1, idle=0.03),
    )
    table = Table(title=f"staleness at most {options.staleness}, {options.steps} steps, seeds {options.seeds}")
    for column in (
        "job",
        "pacing",
        "step s",
        "samples/s",
        "trainer idle",
        "staleness p50",
        "p95",
        "mean",
        "lead",
        "dropped groups",
    ):
        table.add_column(column)
    good = True
    for case in cases:
        fixed, adaptive = (paced(folder, case, pacing, options) for pacing in ("fixed", "adaptive"))
        for pacing, runs in (("fixed", fixed), ("adaptive", adaptive)):
            ages = [f"{mean(runs, f'staleness/{name}'):.2f}" for name in ("p95", "mean")]
            more = [f"{mean(runs, 'rollout/lead'):.2f}", f"{mean(runs, 'staleness/dropped_groups'):.2f} a step"]
            idle = " ".join(f"{mean([one], 'trainer/idle_share'):.3f}" for one in runs)
            speeds = [f"{statistics.mean(getattr(one, name) for one in runs):.3g}" for name in ("step_s", "samples_per_s")]
            table.add_row(case.name, pacing, *speeds, idle, str(median_staleness(runs)), *ages, *more)
        idle_more = mean(adaptive, "trainer/idle_share") - mean(fixed, "trainer/idle_share")
        wanted = min(case.oldest, median_staleness(fixed) - 1)
        good &= median_staleness(adaptive) <= wanted and idle_more <= case.idle
    console.print(table)
    return good


def paced(folder: Path, case: PacingCase, pacing: str, options: argparse.Namespace) -> list[Measured]:
    """Runs the job of the case with every seed."""
    name = f"{case.name}-{pacing}".replace(" ", "-")
    return [run(folder, name, options.staleness, seed, options, f"trainer.pacing={pacing}", *case.more) for seed in options.seeds]


def print_histograms(runs: dict[str, list[Measured]], console: Console) -> None:
    """How many steps had which largest staleness, for each mode."""
    for name, found in runs.items():
        ages = [int(row["staleness/max"]) for r in found for row in r.rows]
        console.print(
            f"{name}: steps by largest staleness " + ", ".join(f"{age}: {ages.count(age)}" for age in sorted(set(ages)))
        )


def short_episodes(options: argparse.Namespace, console: Console) -> bool:
    """Episodes of 0.1 s beside 0.1 s of training: whatever the bound, a step is hardly longer than the larger of the two."""
    from scripts.bench.async_short import measure_step

    ok = True
    for staleness in (1, options.staleness):
        step = measure_step(staleness, SHORT_S, SHORT_S)
        ratio = step.seconds / SHORT_S
        ok &= ratio <= WANTED_STEP
        console.print(
            f"episodes of {SHORT_S} s, training of {SHORT_S} s, max_staleness={staleness}: {step.seconds:.3f} s a step, "
            f"{ratio:.2f}x of the larger (wanted {WANTED_STEP}x); beside training {1e3 * step.cpu_s:.1f} ms of its thread, "
            f"{1e3 * step.process_cpu_s:.1f} ms of CPU in all (load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores)"
        )
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--backend", default="local")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--timeout-s", type=float, default=1200.0)
    parser.add_argument("--pacing", action="store_true", help="only adaptive against fixed pacing")
    parser.add_argument("--only-short", action="store_true", help="only the 0.1 s line")
    options = parser.parse_args()
    options.out = options.out or Path(tempfile.mkdtemp(prefix="async-modes-"))
    options.out.mkdir(parents=True, exist_ok=True)
    console, started = Console(width=150), time.monotonic()
    if options.pacing:
        good = compare_pacing(options, console)
    else:
        good = short_episodes(options, console)
        good &= options.only_short or compare_modes(options, console)
    console.print(f"{time.monotonic() - started:.0f} s; logs and metrics in {options.out}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
