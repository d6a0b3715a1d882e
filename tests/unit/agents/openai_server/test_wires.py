"""Three wires and one record: the same conversation by each client leaves the same tokens, whole or streamed, with tools too."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from rlhub.agents.openai_server.sessions import Session
from rlhub.tools.call_streams import CallStream, ReasoningPart, ReplyPart
from tests.unit.agents.openai_server.endpoint import END, LIMITS, Endpoint, endpoint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
SYSTEM, QUESTION, THANKS = "You add.", "2+2?", "Thanks, and 1+1?"
CALLS = (
    'Let me add.<tool_call>{"name": "add", "arguments": {"b": 2,  "a": 2}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
)
ANSWERS = [CALLS + END, "It is 4, é" + END, "2" + END]
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def anthropic_client(at: Endpoint, session: Session) -> AsyncAnthropic:
    url = at.server.base_url(session).removesuffix("/v1")
    return AsyncAnthropic(base_url=url, api_key=session.token, max_retries=0, http_client=anthropic.DefaultAsyncHttpxClient())


async def by_chat(at: Endpoint, session: Session, stream: bool) -> list[Any]:
    client = at.client(session)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    tool = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA, "strict": True}}

    async def ask() -> Any:
        if not stream:
            answer = await client.chat.completions.create(model="any", messages=messages, tools=[tool])
        else:
            async with client.chat.completions.stream(model="any", messages=messages, tools=[tool]) as events:
                answer = await events.get_final_completion()
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        return answer.choices[0].message

    first = await ask()
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in first.tool_calls]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in first.tool_calls]
    second = await ask()
    messages.append({"role": "user", "content": THANKS})
    return [first.content, calls, second.content, (await ask()).content]


async def by_responses(at: Endpoint, session: Session, stream: bool) -> list[Any]:
    return await _by_responses(at, session, stream, stored=False)


async def by_stored_responses(at: Endpoint, session: Session, stream: bool) -> list[Any]:
    return await _by_responses(at, session, stream, stored=True)


async def _by_responses(at: Endpoint, session: Session, stream: bool, *, stored: bool) -> list[Any]:
    """stored: later requests send `previous_response_id` and the new items alone."""
    client, before = at.client(session), None
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tool = {"type": "function", "strict": True, "parameters": SCHEMA, "name": "add", "description": "adds"}

    async def ask() -> Any:
        nonlocal before
        given = {"model": "any", "instructions": SYSTEM, "input": items, "tools": [tool], "previous_response_id": before}
        if not stream:
            answer = await client.responses.create(**given)
        else:
            async with client.responses.stream(**given) as events:
                kinds = [event.type async for event in events]
                assert kinds[0] == "response.created"
                answer = await events.get_final_response()
        assert answer.status in ("completed", "incomplete")
        items.extend([] if stored else [item.model_dump(exclude_none=True) for item in answer.output])
        if stored:
            before = answer.id
            items.clear()
        return answer

    first = await ask()
    calls = [item for item in first.output if item.type == "function_call"]
    items.extend({"type": "function_call_output", "call_id": call.call_id, "output": "4"} for call in calls)
    second = await ask()
    items.append({"role": "user", "content": [{"type": "input_text", "text": THANKS}]})
    named = [(call.name, json.loads(call.arguments)) for call in calls]
    return [first.output_text, named, second.output_text, (await ask()).output_text]


async def by_messages(at: Endpoint, session: Session, stream: bool) -> list[Any]:
    client = anthropic_client(at, session)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tool = {"name": "add", "input_schema": SCHEMA, "description": "adds"}

    async def ask() -> Any:
        given: Any = {"model": "any", "system": SYSTEM, "messages": messages, "tools": [tool], "max_tokens": 500}
        counted = await client.messages.count_tokens(**{name: given[name] for name in ("model", "system", "messages", "tools")})
        if not stream:
            answer = await client.messages.create(**given)
        else:
            async with client.messages.stream(**given) as events:
                answer = await events.get_final_message()
        assert answer.usage.input_tokens == counted.input_tokens == len(at.engine.requests[-1].prompt_ids)
        messages.append({"role": "assistant", "content": answer.content})
        return answer

    def text(answer: Any) -> str:
        return "".join(block.text for block in answer.content if block.type == "text")

    first = await ask()
    assert first.stop_reason == "tool_use"
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "4"} for call in calls]
    messages.append({"role": "user", "content": results})
    second = await ask()
    assert second.stop_reason == "end_turn"
    messages.append({"role": "user", "content": [{"type": "text", "text": THANKS}]})
    return [text(first), [(call.name, call.input) for call in calls], text(second), text(await ask())]


Talk = Callable[[Endpoint, Session, bool], Awaitable[list[Any]]]
WIRES: list[Talk] = [by_chat, by_responses, by_stored_responses, by_messages]


async def record_of(talk: Talk, stream: bool) -> tuple[list[Any], Any]:
    async with endpoint(ANSWERS) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        told = await talk(at, session, stream)
        made = session.trajectory()
        assert made is not None
        seeds = [request.seed for request in at.engine.requests]
        return told, (made.prompt_ids, made.response_ids, made.response_mask, made.rollout_log_probs, made.versions, seeds)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_every_wire_leaves_the_same_tokens(stream: bool) -> None:
    told, expected = await record_of(by_chat, stream=False)
    assert told[1] == [("add", {"a": 2, "b": 2}), ("add", {"a": 1, "b": 1})] and told[2:] == ["It is 4, é", "2"]
    for talk in WIRES:
        said, found = await record_of(talk, stream)
        assert said == told, talk.__name__
        assert found == expected, talk.__name__


async def test_a_changed_history_leaves_another_record() -> None:
    async def trims(at: Endpoint, session: Session, stream: bool) -> list[Any]:
        client = at.client(session)
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        first = await client.responses.create(model="any", input=items)
        items += [{"role": "assistant", "content": first.output_text + " "}, {"role": "user", "content": THANKS}]
        await client.responses.create(model="any", input=items)
        return [session.num_mismatches]

    (mismatches,), _ = await record_of(trims, stream=False)
    assert mismatches == 1


async def test_stops_lengths_and_errors_have_their_wire_s_words() -> None:
    async with endpoint(["one two" + END]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client, other = anthropic_client(at, session), at.client(session)
        asked: Any = {"model": "any", "messages": [{"role": "user", "content": "count"}]}
        answer = await client.messages.create(**asked, max_tokens=100, stop_sequences=[" two"])
        assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", " two", "one")
        cut = await client.messages.create(**asked, max_tokens=3)
        assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 3)
        response = await other.responses.create(model="any", input="count", max_output_tokens=3)
        assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
        assert response.usage.output_tokens == 3 and response.output_text == "one"
        logged = await other.responses.create(model="any", input="count", include=["message.output_text.logprobs"])
        assert len(logged.output[0].content[0].logprobs) == len("one two") + 1
        with pytest.raises(anthropic.BadRequestError, match="max_tokens") as refused:
            await client.messages.create(**asked, max_tokens=0)
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await client.with_options(api_key="wrong").messages.create(**asked, max_tokens=5)
        assert unknown.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(openai.NotFoundError, match="send the whole input"):
            await other.responses.create(model="any", input="x", previous_response_id="resp_0")


class Thoughts(CallStream):
    """Reads what comes before </think> as reasoning."""

    def __init__(self) -> None:
        super().__init__()
        self._thinks, self._text = True, ""

    def add(self, text: str) -> list[ReplyPart]:
        self._text += text
        if not self._thinks:
            return self.end()
        thought, mark, self._text = self._text.partition("</think>")
        if mark:
            self._thinks = False
            return [ReasoningPart(text=thought), *self.end()]
        self._text = thought
        return []

    def end(self) -> list[ReplyPart]:
        text, self._text = self._text, ""
        return [text] if text else []


class Thinker:
    def stream(self, tools: Any, prompt_ids: Any) -> CallStream:
        return Thoughts()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_thoughts_come_in_each_wire_s_form_and_the_record_keeps_its_tokens(stream: bool) -> None:
    written = "Hm.</think>Four." + END
    for talk in (thinks_by_chat, thinks_by_responses, thinks_by_messages):
        async with endpoint([written], parser=Thinker()) as at:
            session = at.server.open_session("a", seed=5, limits=LIMITS)
            assert await talk(at, session, stream) == ["Hm.", "Four."], talk.__name__
            made = session.trajectory()
            assert made is not None and made.metrics["openai/segments"] == 1 and session.num_mismatches == 0, talk.__name__
            sampled = [token for token, mask in zip(made.response_ids, made.response_mask, strict=True) if mask]
            assert sampled == [*at.engine.ids(written), *at.engine.ids(written)], talk.__name__


async def thinks_by_chat(at: Endpoint, session: Session, stream: bool) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        given: Any = {"model": "any", "messages": messages}
        if stream:
            async with at.client(session).chat.completions.stream(**given) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await at.client(session).chat.completions.create(**given)).choices[0].message
        messages += [message.model_dump(exclude_none=True), {"role": "user", "content": THANKS}]
    return [message.reasoning_content, message.content]


async def thinks_by_responses(at: Endpoint, session: Session, stream: bool) -> list[Any]:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        given: Any = {"model": "any", "input": items}
        if stream:
            async with at.client(session).responses.stream(**given) as events:
                answer = await events.get_final_response()
        else:
            answer = await at.client(session).responses.create(**given)
        items += [*(item.model_dump(exclude_none=True) for item in answer.output), {"role": "user", "content": THANKS}]
    return [answer.output[0].content[0].text, answer.output_text]


async def thinks_by_messages(at: Endpoint, session: Session, stream: bool) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        given: Any = {
            "model": "any",
            "messages": messages,
            "max_tokens": 100,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        if stream:
            async with anthropic_client(at, session).messages.stream(**given) as events:
                answer = await events.get_final_message()
        else:
            answer = await anthropic_client(at, session).messages.create(**given)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": THANKS}]
    return [answer.content[0].thinking, answer.content[1].text]


BAD_RESPONSES: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": []}),
    ("input[0]", {"input": [{"type": "web_search_call"}]}),
    ("input[0].content[0]", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("tools[0]", {"tools": [{"type": "web_search"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("text.verbosity", {"text": {"verbosity": "low"}}),
    ("reasoning.effort", {"reasoning": {"effort": "high"}}),
    ("truncation", {"truncation": "auto"}),
    ("background", {"background": True}),
    ("conversation", {"conversation": "conv_1"}),
    ("inputs", {"extra_body": {"inputs": "x"}}),
]
BAD_MESSAGES: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is"}]}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ("tools[0]", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("stop_sequences", {"stop_sequences": [""]}),
    ("output_config.effort", {"output_config": {"effort": "high"}}),
    ("container", {"container": "c"}),
    ("stopsequences", {"extra_body": {"stopsequences": ["x"]}}),
]


async def test_what_a_wire_cannot_follow_is_refused_by_its_own_name() -> None:
    async with endpoint() as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client, other = at.client(session), anthropic_client(at, session)
        for field, options in BAD_RESPONSES:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(**{"model": "any", "input": "x", **options})
            assert caught.value.param == field and caught.value.message.count(field), (field, caught.value.message)
        for field, options in BAD_MESSAGES:
            asked = {"model": "any", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], **options}
            with pytest.raises(anthropic.BadRequestError) as refused:
                await other.messages.create(**asked)
            assert refused.value.body["error"]["message"].startswith(f"{field}:"), (field, refused.value.body)
        assert at.engine.requests == []


async def test_an_error_in_the_middle_of_a_stream_has_its_wire_s_form() -> None:
    async with endpoint(["one two three" + END]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        at.engine.given, at.engine.fails = 4, RuntimeError("broken")
        events = [event async for event in await at.client(session).responses.create(model="any", input="x", stream=True)]
        assert events[-1].type == "response.failed" and "broken" in events[-1].response.error.message
        assert [event.sequence_number for event in events] == list(range(len(events)))
        asked: Any = {"model": "any", "messages": [{"role": "user", "content": "x"}], "max_tokens": 50}
        with pytest.raises(anthropic.APIStatusError, match="broken"):
            async for _ in await anthropic_client(at, session).messages.create(**asked, stream=True):
                pass
