"""Agents of OpenAI's SDK run unchanged against the endpoint, over both of its interfaces, and every turn is one record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)

from tests.unit.agents.openai_server.endpoint import END, LIMITS, endpoint

CALL = 'I add.<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
HANDOFF = '<tool_call>{"name": "transfer_to_poet", "arguments": {}}</tool_call>'
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_traces_leave() -> Iterator[None]:
    set_tracing_disabled(True)
    yield
    set_tracing_disabled(False)


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


INTERFACES: list[Any] = [OpenAIResponsesModel, OpenAIChatCompletionsModel]


async def run(interface: Any, *, stream: bool, **options: Any) -> tuple[Any, list[str], Any]:
    """Runs two tasks in a conversation; returns what the agent said, its texts and the record."""
    async with endpoint([CALL + END, "It is 4." + END, "Yes." + END]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        model = interface(model="policy", openai_client=at.client(session))
        agent: Agent[Any] = Agent(name="adder", instructions="You add.", tools=[add], model=model, **options)
        memory = SQLiteSession("conversation")
        said = []
        for question in ("2+2?", "Sure?"):
            if stream:
                streamed = Runner.run_streamed(agent, question, session=memory)
                async for _ in streamed.stream_events():
                    pass
                said.append(streamed.final_output)
            else:
                said.append((await Runner.run(agent, question, session=memory)).final_output)
        memory.close()
        made = session.trajectory()
        assert made is not None
        return said, [at.engine.tokenizer.decode(made.prompt_ids), at.engine.tokenizer.decode(made.response_ids)], made


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_agent_with_a_tool_leaves_one_record_whichever_interface_it_uses(stream: bool) -> None:
    records = []
    for interface in INTERFACES:
        said, (_, response), made = await run(interface, stream=stream)
        assert said == ["It is 4.", "Yes."], interface
        assert response.startswith(CALL + END) and "<tool_response>\n4\n</tool_response>" in response
        assert made.metrics["openai/segments"] == 1 and made.metrics["openai/mismatches"] == 0
        records.append((made.prompt_ids, made.response_ids, made.response_mask, made.rollout_log_probs))
    assert records[0] == records[1], "byte-equal tokens, the tools' schemas included"


@pytest.mark.parametrize("interface", INTERFACES)
async def test_handoffs_and_settings(interface: Any) -> None:
    async with endpoint([HANDOFF + END, "Roses are red." + END]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        model = interface(model="policy", openai_client=at.client(session))
        poet: Agent[Any] = Agent(name="poet", instructions="You write poems.", model=model)
        settings = ModelSettings(temperature=1.0, top_p=1.0, max_tokens=200, tool_choice="auto", store=False)
        desk: Agent[Any] = Agent(name="desk", instructions="You pass on.", handoffs=[poet], model=model, model_settings=settings)
        result = await Runner.run(desk, "A poem!", run_config=RunConfig(tracing_disabled=True))
        assert result.last_agent.name == "poet" and result.final_output == "Roses are red."
        assert sum(1 for _ in session.leaves()) == 2, "the poet has instructions of its own"
        made = session.episode()
        assert made is not None and made.metrics["openai/untrained_tokens"] == 0
