from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows import openai_agent
from rlhub.agents.workflows.base import EpisodeData, WorkflowParts, build_workflow
from rlhub.engines.rollout.base import SamplingParams
from rlhub.errors import ConfigError, WorkflowError
from rlhub.utils.aio.results import Reject
from tests.unit.agents.openai_server.endpoint import END, Told, tokenizer

pytestmark = pytest.mark.anyio
AGENTS = str(Path(__file__).with_name("agents.py"))
PROGRAM = str(Path(__file__).with_name("agent_program.py"))
DATA = EpisodeData(prompt_ids=(1,), ordinal=3, sample=1, seed=11, row={"question": "2+2?"})


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def score(row: Any, text: str) -> tuple[float, dict[str, float]]:
    raise AssertionError("not the workflow's business")


async def run(engine: Told | None = None, *, response: int = 500, **kwargs: Any) -> Trajectory | None:
    made = tokenizer()
    engine = engine or Told(made, ["four" + END, "yes" + END])
    parts = WorkflowParts(
        tokenizer=made,
        sampling=SamplingParams(stop_token_ids=(made.eos_token_id,)),
        max_prompt_length=200,
        max_response_length=response,
        score=score,
        kwargs=kwargs,
    )
    workflow = build_workflow("openai_agent", parts)
    try:
        return await workflow.arun_episode(engine, DATA)
    finally:
        await workflow.aclose()


async def test_a_function_of_two_turns_gives_its_reward() -> None:
    made = await run(agent=f"{AGENTS}:two_turns", reward="agent")
    assert made is not None
    assert made.rewards == [0.0] * (len(made.response_ids) - 1) + [0.25]
    assert made.metrics["openai/turns"] == 2
    assert tokenizer().decode(made.response_ids) == f"four{END}\n<|im_start|>user\nsure?{END}\n<|im_start|>assistant\nyes{END}"


async def test_a_plain_function_runs_in_a_thread_and_is_scored_later() -> None:
    engine = Told(tokenizer(), ["four" + END])
    made = await run(engine, agent=f"{AGENTS}:plain")
    assert made is not None
    assert made.rewards is None
    assert engine.requests[0].seed == 11
    assert engine.requests[0].session == "3-1"


async def test_a_program_reads_the_row_and_prints_its_reward() -> None:
    made = await run(agent=PROGRAM, args=["--deep"], reward="agent")
    assert made is not None
    assert made.rewards is not None
    assert made.rewards[-1] == 4.0


async def test_an_agent_whose_conversation_is_full_has_ended() -> None:
    made = await run(agent=f"{AGENTS}:endless", response=150)
    assert made is not None
    assert made.finish_reason == "length"
    assert len(made.response_ids) <= 150


async def test_endpoints_with_one_port_in_the_settings_stand_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workflows are what two processes are: the second finds the port taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert await run(agent=f"{AGENTS}:two_turns", reward="agent", port=port) is not None
        monkeypatch.setattr(openai_agent, "MAX_ENDPOINTS", 1)
        with pytest.raises(ConfigError, match=f"no free port on 127.0.0.1: tried {port};"):
            await run(agent=f"{AGENTS}:two_turns", reward="agent", port=port)


async def test_agents_that_give_nothing() -> None:
    with pytest.raises(Reject, match="nothing"):
        await run(agent=f"{AGENTS}:silent")
    with pytest.raises(KeyError, match="no such thing"):
        await run(agent=f"{AGENTS}:broken")
    with pytest.raises(WorkflowError, match="gave no reward"):
        await run(agent=f"{AGENTS}:plain", reward="agent")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "agent is not set"),
        ({"agent": "nowhere.py"}, "no such file"),
        ({"agent": f"{AGENTS}:none"}, "none"),
        ({"agent": AGENTS, "segment": "first"}, "segment='first'"),
        ({"agent": AGENTS, "segment": "random"}, "segment=random with reward=score"),
        ({"agent": AGENTS, "rewrd": "agent"}, "rewrd"),
    ],
)
async def test_settings_that_cannot_work_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await run(**kwargs)
