"""How many accepted episodes a second the whole executor does where episodes take no time, against plain uvloop.

    python scripts/bench/async_executor.py [--episodes 20000] [--rounds 3]

Everything an episode passes is in it: prompt, ledger, admission, runner, tracked engine, group, bound on staleness, delivery to
the training thread.  The floor is as many coroutines, gathered.  The best of some rounds, in one run; the CPU's rate beside the
clock's tells how much of the machine others had.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvloop
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
from rlhub.utils.aio.task_runner import AsyncTaskRunner

REQUIRED = 5000.0
BATCH = 64
CASES = ((1, 0), (1, 4), (8, 0), (8, 4))  # samples of a prompt, max_staleness


class Trivial(RolloutWorkflow):
    """One generation, which is there at once."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory:
        completion = await engine.agenerate(self.request(data), self.parts.sampling)
        return Trajectory(
            prompt_ids=list(data.prompt_ids),
            response_ids=completion.token_ids,
            response_mask=[1] * len(completion.token_ids),
            rollout_log_probs=completion.log_probs,
            versions=completion.versions,
        )


class Nothing:
    """An engine that waits for nothing."""

    version = 0

    async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        return Completion(token_ids=[1, 2], log_probs=[-0.5, -0.5], finish_reason="stop", versions=[self.version] * 2)


async def no_score(row: object, text: str) -> tuple[float, dict[str, float]]:
    return 0.0, {}


def parts() -> WorkflowParts:
    sampling = SamplingParams(max_new_tokens=2)
    return WorkflowParts(tokenizer=None, sampling=sampling, max_prompt_length=2, max_response_length=2, score=no_score)


def prompts() -> Iterator[PromptItem]:
    ordinal = 0
    while True:
        yield PromptItem(prompt_ids=(1, 2), ordinal=ordinal)
        ordinal += 1


def run_executor(episodes: int, group_size: int, max_staleness: int) -> int:
    """Train so many steps; how many episodes were delivered."""
    runner, engine, workflow = AsyncTaskRunner(), Nothing(), Trivial(parts())
    executor = WorkflowExecutor(
        runner=runner,
        engine=engine,  # type: ignore[arg-type]  # nothing asks it
        workflow_for=lambda row: workflow,
        staleness=StalenessManager(BATCH, max_staleness),
        ledger=PromptLedger(),
        options=ExecutorOptions(group_size=group_size),
    )
    executor.start(prompts())
    delivered, step = 0, 0
    while delivered < episodes:
        step += 1
        delivered += sum(len(group.trajectories) for group in executor.next_groups(BATCH, 60))
        engine.version = step
        executor.set_version(step)
    executor.close()
    runner.close()
    return delivered


def run_floor(episodes: int) -> int:
    """Coroutines that return a number."""

    async def nothing() -> int:
        return 1

    async def all_of_them() -> int:
        done = 0
        while done < episodes:
            done += sum(await asyncio.gather(*(asyncio.create_task(nothing()) for _ in range(BATCH))))
        return done

    return uvloop.run(all_of_them())


def best(work: Callable[[], int], rounds: int) -> tuple[float, float]:
    """(a second, a CPU second), each the best of the rounds."""
    rates = []
    for _ in range(rounds):
        clock, cpu = time.perf_counter(), time.process_time()
        done = work()
        rates.append((done / (time.perf_counter() - clock), done / (time.process_time() - cpu)))
    return max(rate for rate, _ in rates), max(rate for _, rate in rates)


def executor_rate(episodes: int = 20_000, rounds: int = 3) -> bool:
    """Print the table; whether every case is fast enough."""
    table = Table("what", "episodes/s", "episodes/CPU s", "required")
    floor = best(lambda: run_floor(10 * episodes), rounds)
    table.add_row("uvloop create_task + gather", f"{floor[0]:,.0f}", f"{floor[1]:,.0f}", "")
    enough = True
    for group_size, max_staleness in CASES:
        clock, cpu = best(lambda size=group_size, bound=max_staleness: run_executor(episodes, size, bound), rounds)  # type: ignore[misc]
        name = f"executor, groups of {group_size}, max_staleness {max_staleness}"
        table.add_row(name, f"{clock:,.0f}", f"{cpu:,.0f}", f"{REQUIRED:,.0f}")
        enough = enough and clock >= REQUIRED
    Console(width=120).print(table)
    return enough


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    return 0 if executor_rate(arguments.episodes, arguments.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
