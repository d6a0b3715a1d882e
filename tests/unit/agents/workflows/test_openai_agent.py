from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from rlhub.agents.trajectory import Episode, Trajectory, answer_of
from rlhub.agents.workflows import openai_agent
from rlhub.agents.workflows.base import EpisodeData, WorkflowParts, build_workflow
from rlhub.engines.rollout.base import SamplingParams
from rlhub.errors import ConfigError, WorkflowError
from rlhub.sandboxes.registry import load_sandbox
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


async def run(engine: Told | None = None, *, response: int = 500, **kwargs: Any) -> Any:
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


async def test_every_answer_of_parallel_conversations_trains() -> None:
    """The control is segment=last, which trains one of the two conversations."""
    made = await run(agent=f"{AGENTS}:parallel", reward="agent")
    assert isinstance(made, Episode) and len(made.trajectories) == 2
    assert made.metrics["openai/untrained_tokens"] == 0 and made.metrics["openai/turns"] == 6
    assert [sum(row.rewards or ()) for row in made.trajectories] == [0.25, 0.25]
    last = await run(agent=f"{AGENTS}:parallel", reward="agent", segment="last")
    assert last is not None and 2 * last.metrics["openai/untrained_tokens"] >= made.num_tokens - 2
    assert last.num_tokens + last.metrics["openai/untrained_tokens"] == made.num_tokens


async def test_roles_have_rewards_of_their_own_and_may_be_frozen() -> None:
    roles = {"proposer": "trained", "solver": "trained", "judge": "frozen"}
    made = await run(agent=f"{AGENTS}:self_play", reward="agent", roles=roles)
    assert isinstance(made, Episode)
    rewards = [(row.comparison, sum(row.rewards or ())) for row in made.trajectories]
    assert rewards == [("proposer", 0.5), ("solver", -1.0), ("solver", -1.0)]
    assert made.metrics["openai/untrained_tokens"] == 0 and made.metrics["openai/frozen_tokens"] == 4
    alone = await run(agent=f"{AGENTS}:self_play", reward="agent", roles=dict.fromkeys(roles, "frozen") | {"proposer": "trained"})
    assert isinstance(alone, Trajectory) and alone.comparison == "proposer" and sum(alone.rewards or ()) == 0.5
    with pytest.raises(WorkflowError, match="no reward for the role 'judge', which trains"):
        await run(agent=f"{AGENTS}:self_play", reward="agent", roles=dict.fromkeys(roles, "trained"))
    with pytest.raises(Reject, match="nothing that trains"):
        await run(agent=f"{AGENTS}:self_play", reward="agent", roles=dict.fromkeys(roles, "frozen"))


async def test_rewards_by_response_become_returns_of_the_answers() -> None:
    made = await run(agent=f"{AGENTS}:by_response", reward="agent", turn_discount=0.5)
    assert isinstance(made, Episode)
    assert [sum(row.rewards or ()) for row in made.trajectories] == [1.0 + 0.5 * 4.0, 4.0, 8.0]
    assert [row.comparison for row in made.trajectories] == ["/0", "/1", "/2"]
    assert made.metrics["openai/untrained_tokens"] == 0
    assert [row.num_tokens for row in made.trajectories] == [5, 4, 4]
    for row in made.trajectories:
        assert isinstance(row, Trajectory) and row.response_mask[-row.num_tokens :] == [1] * row.num_tokens
    with pytest.raises(WorkflowError, match="rewards for 'chatcmpl-0'; name either roles"):
        await run(agent=f"{AGENTS}:unknown_response", reward="agent")
    with pytest.raises(WorkflowError, match="several rewards, which need segment=all"):
        await run(agent=f"{AGENTS}:by_response", reward="agent", segment="last")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0.5", 0.5),
        ('{"reward": 2}', 2.0),
        ('{"rewards": {"a": 1}}', {"a": 1.0}),
        ({"rewards": {"a": 1}}, {"a": 1.0}),
        ({}, None),
        (None, None),
    ],
)
def test_what_an_agent_may_give_as_reward(given: Any, expected: Any) -> None:
    assert openai_agent.as_result(given).reward == expected


@pytest.mark.parametrize("given", ["fine", "{", {"rewards": [1]}, {"rewards": {"a": "b"}}, {"reward": "b"}, object()])
def test_what_is_no_reward_is_shown(given: Any) -> None:
    with pytest.raises(WorkflowError, match="expected a number"):
        openai_agent.as_result(given)


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
        ({"agent": AGENTS, "segment": "last", "roles": {"a": "trained"}}, "segment=last with roles"),
        ({"agent": AGENTS, "roles": {"a": "thawed"}}, "roles.a='thawed'"),
        ({"agent": AGENTS, "turn_discount": -1}, "turn_discount=-1"),
        ({"agent": AGENTS, "rewrd": "agent"}, "rewrd"),
    ],
)
async def test_settings_that_cannot_work_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await run(**kwargs)


SPY = """
import json, os, pathlib, socket, sys, urllib.request
row = json.load(sys.stdin)
found = 0
try:
    socket.create_connection(("127.0.0.1", {port}), 5)
    found += 10
except OSError:
    pass
if os.path.exists({secret!r}):
    found += 100
if "RLHUB_TEST_TOKEN" in os.environ:
    found += 1000
for _ in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({{"model": "any", "messages": [{{"role": "user", "content": row["question"]}}]}}).encode(),
        {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(found + len(answer))
"""


@pytest.mark.parametrize(("sandbox", "reward"), [(None, 1113.0), ("bwrap", 3.0)])
async def test_a_program_in_a_sandbox_reaches_its_endpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: str | None, reward: float
) -> None:
    """The control is the program without a sandbox, which finds a port, a file and a variable of the user."""
    if sandbox is not None:
        try:
            load_sandbox(sandbox, where="sandbox")
        except ConfigError as error:
            pytest.skip(str(error))
    monkeypatch.setenv("RLHUB_TEST_TOKEN", "secret")
    (tmp_path / "secret").write_text("token")
    (tmp_path / "agent").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = tmp_path / "agent" / "spy.py"
        program.write_text(SPY.format(port=server.getsockname()[1], secret=str(tmp_path / "secret")))
        made = await run(agent=str(program), reward="agent", sandbox=sandbox)
    assert sum(answer_of(made).rewards or ()) == reward


async def test_a_function_in_a_sandbox_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"agent.kwargs.sandbox=bwrap: .* is a function.*name a program"):
        await run(agent=f"{AGENTS}:parallel", reward="agent", sandbox="bwrap")
