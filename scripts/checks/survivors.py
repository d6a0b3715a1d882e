"""What do failing episodes cost, and do they choose what trains?  Groups lost, extra episodes, trained share by difficulty.

    python scripts/checks/survivors.py [--prompts 192] [--seeds 1 2 3 4 5] [--samples 8] [--failures 0.1]

A prompt's episodes have 1 to 8 turns, which is its difficulty, and each turn fails with the same probability, so long episodes
fail more; on average a tenth of them does.  The executor runs them with each setting of rollout.agent.episode_retries and
rollout.agent.min_samples.  Of the trained share it prints the slope of a logistic regression on the number of turns, in standard
errors of its own: of samples, and of prompts (a prompt trains or is given up).

Wanted of the defaults: at most 2 % of the groups lost, at most 12 % extra episodes, and with every seed both slopes within 2
standard errors of 0; without retries the slope of the samples must be beyond them.  Two retries lose about 2 samples in 1000,
most of them long, so that ten times as many prompts show a slope again; three lose 1 in 10,000.  The exit status is 1 if
something is missed.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.rollout_service.executor.episode_groups import PromptItem
from rlhub.rollout_service.executor.executor import ExecutorOptions, WorkflowExecutor
from rlhub.rollout_service.executor.ledger import PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.rollout_service.executor.statistics import logistic_slope
from rlhub.utils.aio.task_runner import AsyncTaskRunner

TURNS = range(1, 9)
LOST, EXTRA, STANDARD_ERRORS = 0.02, 0.12, 2.0
"""The largest share of groups lost and of extra episodes, and the largest slope in standard errors."""
DEADLINE_S = 300.0


@dataclass(slots=True, frozen=True)
class Setting:
    """Of rollout.agent; min_samples as a share of the group."""

    retries: int
    least: float

    def __str__(self) -> str:
        return f"{self.retries} retries, {'all' if self.least == 1 else 'half'} of the samples"


WITHOUT, DEFAULT = Setting(0, 0.5), Setting(2, 0.5)
SETTINGS = (Setting(0, 1.0), WITHOUT, Setting(1, 0.5), Setting(2, 1.0), DEFAULT, Setting(3, 0.5))


@dataclass(slots=True, frozen=True)
class Outcome:
    """Of one run.  samples, prompts: the slopes of the trained shares in standard errors."""

    lost: float
    extra: float
    trained: float
    samples: float
    prompts: float


class Turns(RolloutWorkflow):
    """Writes a token a turn; each turn may fail."""

    def __init__(self, failure: float) -> None:
        super().__init__(
            WorkflowParts(
                tokenizer=None,
                sampling=SamplingParams(max_new_tokens=1),
                max_prompt_length=1,
                max_response_length=len(TURNS),
                score=no_score,
                kwargs={},
            )
        )
        self.failure, self.num_begun = failure, 0

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory:
        self.num_begun += 1
        chance, turns = random.Random(data.seed), data.row["turns"]
        if any(chance.random() < self.failure for _ in range(turns)):
            raise OSError("the simulator fell over")
        return Trajectory(
            prompt_ids=list(data.prompt_ids),
            response_ids=[1] * turns,
            response_mask=[1] * turns,
            rollout_log_probs=[-0.5] * turns,
            versions=[0] * turns,
        )


async def no_score(row: object, text: str) -> tuple[float, dict[str, float]]:
    return 0.0, {}


class NoEngine:
    """The episodes generate nothing."""

    async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        raise NotImplementedError


def turn_failure(failures: float) -> float:
    """Returns the probability with which a turn fails where so large a share of episodes does, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = statistics.mean(1 - (1 - middle) ** turns for turns in TURNS)
        low, high = (middle, high) if mean < failures else (low, middle)
    return low


def run(setting: Setting, seed: int, num_prompts: int, n: int, failures: float) -> Outcome:
    """Runs all prompts once."""
    runner, workflow = AsyncTaskRunner(), Turns(turn_failure(failures))
    turns = [TURNS[ordinal % len(TURNS)] for ordinal in range(num_prompts)]
    executor = WorkflowExecutor(
        runner=runner,
        engine=NoEngine(),
        workflow_for=lambda row: workflow,
        staleness=StalenessManager(batch=num_prompts, max_staleness=0),
        ledger=PromptLedger(),
        options=ExecutorOptions(
            group_size=n,
            seed=seed,
            episode_retries=setting.retries,
            min_samples=max(1, round(n * setting.least)),
            max_failed_batches=num_prompts,
        ),
    )
    try:
        executor.start(items(turns))
        groups = executor.next_groups(num_prompts, DEADLINE_S)
    finally:
        executor.close()
        runner.close()
    trained = [0] * num_prompts
    for group in groups:
        trained[group.ordinal] = len(group.trajectories)
    samples = logistic_slope(turns, trained, [n] * num_prompts)
    prompts = logistic_slope(turns, [int(count > 0) for count in trained], [1] * num_prompts)
    return Outcome(
        lost=1 - len(groups) / num_prompts,
        extra=workflow.num_begun / (num_prompts * n) - 1,
        trained=sum(trained) / (num_prompts * n),
        samples=samples[0] / samples[1],
        prompts=prompts[0] / prompts[1],
    )


def items(turns: list[int]) -> Iterator[PromptItem]:
    return (PromptItem(prompt_ids=(1,), ordinal=ordinal, row={"turns": count}) for ordinal, count in enumerate(turns))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--failures", type=float, default=0.1, help="share of the episodes that fail")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # one for each failure
    console = Console(width=150)
    table = Table(title=f"{options.prompts} prompts of {options.samples} samples, {options.failures:.0%} of the episodes fail")
    for column in ("setting", "groups lost", "extra episodes", "samples trained", "slope of samples / SE", "of prompts / SE"):
        table.add_column(column)
    found = {}
    for setting in SETTINGS:
        found[setting] = [run(setting, seed, options.prompts, options.samples, options.failures) for seed in options.seeds]
        means = [statistics.mean(getattr(one, name) for one in found[setting]) for name in ("lost", "extra", "trained")]
        slopes = (" ".join(f"{getattr(one, name):+.1f}" for one in found[setting]) for name in ("samples", "prompts"))
        table.add_row(str(setting), *(f"{mean:.2%}" for mean in means), *slopes)
    console.print(table)
    good = verdict(found[DEFAULT], found[WITHOUT])
    console.print("as wanted" if good else "not as wanted")
    return 0 if good else 1


def verdict(default: list[Outcome], without: list[Outcome]) -> bool:
    """Returns whether everything that the module docstring wants is there."""
    return (
        statistics.mean(one.lost for one in default) <= LOST
        and statistics.mean(one.extra for one in default) <= EXTRA
        and all(max(abs(one.samples), abs(one.prompts)) <= STANDARD_ERRORS for one in default)
        and all(abs(one.samples) > STANDARD_ERRORS for one in without)
    )


if __name__ == "__main__":
    sys.exit(main())
