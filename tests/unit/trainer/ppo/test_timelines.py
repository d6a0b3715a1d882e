"""Spans of single episodes, measured around their workflow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, Generated, RemoteGeneration, RolloutWorkflow
from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, SamplingParams
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
from rlhub.tracking.spans import EpisodeSpans, Span
from rlhub.trainer.ppo.timelines import Timelines
from tests.support.episodes import parts, trajectory

pytestmark = pytest.mark.anyio
DATA = EpisodeData(prompt_ids=(5, 6), ordinal=4, sample=1, seed=9)
PAUSE_S = 0.02


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Slow:
    """An engine whose generations take a while."""

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        await asyncio.sleep(PAUSE_S)
        return Completion(token_ids=[3, 4], log_probs=[-0.5] * 2, finish_reason="stop", versions=[0] * 2)


class Turns(RolloutWorkflow):
    """Waits, generates, works, and generates twice at the same time; fails where its row says so."""

    keeps_time = True

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory:
        await asyncio.sleep(PAUSE_S)
        first = await engine.agenerate(self.request(data), self.parts.sampling)
        await asyncio.sleep(PAUSE_S)
        await asyncio.gather(*(engine.agenerate(self.request(data), self.parts.sampling) for _ in range(2)))
        if data.row.get("fails"):
            await asyncio.sleep(PAUSE_S)
            raise OSError("the simulator fell over")
        return trajectory(*first.versions)


async def no_score(group: Group) -> None:
    await asyncio.sleep(PAUSE_S)


def timelines(workflow: RolloutWorkflow) -> Timelines:
    return Timelines(lambda row: workflow, no_score, EpisodeSpans())


async def test_an_episodes_time_is_divided_without_gaps() -> None:
    inner = Turns(parts())
    made = timelines(inner)
    workflow = made.workflow({})
    assert made.workflow({}) is workflow and workflow.keeps_time
    result = await workflow.arun_episode(Slow(), DATA)
    assert isinstance(result, Trajectory)
    await made.on_group(Group(item=PromptItem(prompt_ids=(5,), ordinal=4), trajectories=[trajectory(0), result]))
    spans = made.spans.latest()
    assert {span.lane for span in spans} == {"episode 4-1"}
    assert [span.name for span in spans] == ["queue", "generate", "tool", "generate", "generate", "tool", "reward"]
    assert spans[0].args == {"seed": 9} and spans[1].args == {"tokens": 2}
    assert all(span.end - span.start >= PAUSE_S / 2 for span in (*spans[:5], spans[6]))  # the last tool span is next to nothing
    assert [one.end for one in spans[:3]] == [two.start for two in spans[1:4]]


async def test_a_failed_episode_says_so() -> None:
    made = timelines(Turns(parts()))
    with pytest.raises(OSError, match="fell over"):
        await made.workflow({}).arun_episode(
            Slow(), EpisodeData(prompt_ids=(5,), ordinal=0, sample=0, seed=1, row={"fails": True})
        )
    last: Span = made.spans.latest()[-1]
    assert last.name == "tool" and last.args["failed"] == "OSError"


async def test_generations_that_another_process_asks_for_count() -> None:
    class Placed(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: EpisodeData) -> Trajectory:
            async def send(*given: Any) -> Any: ...

            async def written() -> None: ...

            await engine.aplace(RemoteGeneration(session="", cost=1, send=send, written=written))
            return trajectory(0)

    class Placing(Slow):
        async def aplace(self, generation: Any) -> Any:
            await asyncio.sleep(PAUSE_S)
            return Generated(num_tokens=7, finish_reason="stop")

    made = timelines(Placed(parts()))
    await made.workflow({}).arun_episode(Placing(), DATA)
    (generated,) = [span for span in made.spans.latest() if span.name == "generate"]
    assert generated.args == {"tokens": 7}
