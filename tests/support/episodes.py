"""Episodes without a model: a policy that only has a version, workflows that wait for nothing or for what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.rollout_service.executor.episode_groups import PromptItem
from rlhub.rollout_service.executor.executor import ExecutorOptions, WorkflowExecutor
from rlhub.rollout_service.executor.ledger import PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.utils.aio.task_runner import AsyncTaskRunner

PROMPT = (5, 6)


async def no_score(row: Any, text: str) -> tuple[float, dict[str, float]]:
    return 0.0, {}


def parts(**kwargs: Any) -> WorkflowParts:
    sampling = SamplingParams(max_new_tokens=8)
    return WorkflowParts(
        tokenizer=None, sampling=sampling, max_prompt_length=8, max_response_length=8, score=no_score, kwargs=kwargs
    )


def trajectory(*versions: int, prompt: tuple[int, ...] = PROMPT) -> Trajectory:
    """One token of each of these versions."""
    length = len(versions)
    return Trajectory(
        prompt_ids=list(prompt),
        response_ids=[3 + index for index in range(length)],
        response_mask=[1] * length,
        rollout_log_probs=[-0.5] * length,
        versions=list(versions),
    )


class Policy:
    """An engine: all tokens of the present version."""

    def __init__(self) -> None:
        self.version = 0

    async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        return Completion(token_ids=[3, 4], log_probs=[-0.5] * 2, finish_reason="stop", versions=[self.version] * 2)


class Immediate(RolloutWorkflow):
    """Ends at once."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        completion = await engine.agenerate(self.request(data), self.parts.sampling)
        return trajectory(*completion.versions, prompt=data.prompt_ids)


class Held(Immediate):
    """Generates, then waits for `release` where `hold(data)` says so; `after(data)` may raise or give another end."""

    def __init__(self, hold: Callable[[EpisodeData], bool] = lambda _: False) -> None:
        super().__init__(parts())
        self.hold, self.gates = hold, {}
        self.started: list[str] = []

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        self.started.append(data.session)
        result = await super().arun_episode(engine, data)
        if self.hold(data):
            await self.gates.setdefault(data.ordinal, asyncio.Event()).wait()
        return result

    def release(self, executor: WorkflowExecutor, ordinal: int) -> None:
        """Returns when the episode has ended."""

        async def open_gate() -> None:
            self.gates[ordinal].set()
            while executor._scoring or any(work.item.ordinal == ordinal for work, _ in executor._episodes.values()):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(open_gate(), executor.runner.loop).result(60)


def prompts(first: int = 0, end: int = 1 << 40) -> Iterator[PromptItem]:
    return (PromptItem(prompt_ids=PROMPT, ordinal=ordinal, row={"index": ordinal}) for ordinal in range(first, end))


@contextmanager
def executing(
    workflow: RolloutWorkflow,
    *,
    staleness: StalenessManager,
    engine: Any = None,
    ledger: PromptLedger | None = None,
    group_size: int = 1,
    **kwargs: Any,
) -> Iterator[WorkflowExecutor]:
    """An executor over one workflow; options go by their names."""
    names = ExecutorOptions.__dataclass_fields__
    options = ExecutorOptions(group_size=group_size, **{name: kwargs.pop(name) for name in list(kwargs) if name in names})
    runner = AsyncTaskRunner()
    executor = WorkflowExecutor(
        runner=runner,
        engine=engine or Policy(),
        workflow_for=lambda row: workflow,
        staleness=staleness,
        ledger=ledger or PromptLedger(),
        options=options,
        **kwargs,
    )
    try:
        yield executor
    finally:
        executor.close()
        runner.close()
