"""Every field of OpenAI's interface, by its own client: each is followed, changes nothing, or is refused by name."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from anthropic.types import message_count_tokens_params as count_params
from anthropic.types import message_create_params as message_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from rlhub.agents.openai_server.bodies import CHAT, COMPLETION, IGNORED, REFUSED
from rlhub.agents.openai_server.messages import MESSAGES, MESSAGES_IGNORED, MESSAGES_REFUSED
from rlhub.agents.openai_server.responses import RESPONSES, RESPONSES_IGNORED, RESPONSES_REFUSED
from rlhub.agents.openai_server.shaping import SHAPING
from rlhub.engines.rollout.base import Shaping
from rlhub.tools.formats import parse_hermes, parse_json
from tests.unit.agents.openai_server.endpoint import END, LIMITS, endpoint

QUESTION = {"role": "user", "content": "2+2?"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}, "strict": True},
}
NAMED = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


BAD_CHATS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ("temperature", {"temperature": -1}),
    ("top_p", {"top_p": 0}),
    ("n", {"n": 0}),
    ("max_tokens", {"max_tokens": "many"}),
    ("max_completion_tokens", {"max_completion_tokens": 0, "max_tokens": 5}),
    ("seed", {"seed": 0.5}),
    ("stop", {"stop": [""]}),
    ("logprobs", {"logprobs": 1}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"top_logprobs": 5}),
    ("echo", {"extra_body": {"echo": True}}),
    ("stream_options", {"stream": True, "stream_options": []}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": "yes"}}),
    ("presence_penalty", {"presence_penalty": 1}),
    ("logit_bias", {"logit_bias": {"5": 100}}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}),
    ("tools[0]", {"tools": [{"type": "function"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "any"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}),
    ("parallel_tool_calls", {"tools": [TOOL], "parallel_tool_calls": "no"}),
    ("functions", {"functions": [{"name": "add"}]}),
    ("function_call", {"function_call": {"name": "add"}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("reasoning_effort", {"reasoning_effort": "high"}),
    ("verbosity", {"verbosity": "low"}),
    ("temprature", {"extra_body": {"temprature": 0.5}}),
    ("guided_json", {"extra_body": {"guided_json": {}}}),
]
BAD_COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": []}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"extra_body": {"logprobs": True}}),
    ("echo", {"extra_body": {"echo": "yes"}}),
    ("max_tokens", {"max_tokens": 0}),
    ("stream", {"max_tokens": 0, "echo": True, "stream": True}),
    ("suffix", {"suffix": "end"}),
    ("best_of", {"best_of": 3, "n": 2}),
    ("messages", {"extra_body": {"messages": []}}),
]


async def test_what_cannot_be_followed_is_refused_by_name() -> None:
    async with endpoint() as at:
        client = at.client(at.server.open_session("a", seed=5, limits=LIMITS))
        asked = [
            *((client.chat.completions, {"messages": [QUESTION]}, case) for case in BAD_CHATS),
            *((client.completions, {"prompt": "x"}, case) for case in BAD_COMPLETIONS),
        ]
        for interface, needed, (field, options) in asked:
            with pytest.raises(openai.BadRequestError) as caught:
                await interface.create(**{"model": "any", **needed, **options})
            assert caught.value.param == field and caught.value.message.count(field), options
        assert "did you mean temperature?" in str((await _error(client, temprature=1)).message)
        assert at.engine.requests == []


REMEDIES: list[tuple[str, Any, str]] = [
    ("presence_penalty", 0.5, "Leave presence_penalty out or send 0"),
    ("frequency_penalty", 0.5, "Leave frequency_penalty out or send 0"),
    ("repetition_penalty", 1.1, "Leave repetition_penalty out or send 1"),
    ("logit_bias", {"5": 1}, "Leave logit_bias out or send {}"),
    ("response_format", {"type": "json_object"}, 'answers of this session train, .* or send {"type": "text"}'),
    ("top_logprobs", 5, "got 5 without logprobs: send logprobs=true too"),
    ("echo", True, "no such field here; leave it out"),
    ("best_of", 3, "use n, and choose yourself. Leave best_of out or send 1"),
    ("moderation", "on", "Leave moderation out$"),
    ("guided_json", {}, "no such field here; leave it out"),
]


async def test_refusals_say_what_to_send_instead() -> None:
    async with endpoint() as at:
        client = at.client(at.server.open_session("a", seed=5, limits=LIMITS))
        for field, value, remedy in REMEDIES:
            error = (await _error(client, **{field: value})).body
            assert isinstance(error, dict) and re.search(f"^{field}: .*{remedy}", error["message"]), error
        with pytest.raises(openai.BadRequestError, match=r"logprobs: got 21, expected an integer of at least 0 and at most 20"):
            await client.completions.create(model="any", prompt="x", logprobs=21)
        assert (await client.completions.create(model="any", prompt="x", logprobs=0)).choices[0].logprobs is not None
        with pytest.raises(openai.BadRequestError, match="no room left") as caught:
            await client.completions.create(model="any", prompt="x" * (LIMITS.prompt + 1))
        assert caught.value.param == "prompt"


SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}}
SHAPED: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}},
    "extra_body": {"repetition_penalty": 1.1, "min_p": 0.1, "min_tokens": 3},
}


async def test_what_shapes_the_distribution_is_served_where_nothing_trains() -> None:
    async with endpoint() as at:
        asked: dict[str, Any] = {"messages": [QUESTION], **SHAPED}
        await at.raw_client(f"{at.origin}/v1", "master").chat.completions.create(model="any", **asked)
        roles = {"judge": "frozen", "pupil": "trained"}
        client = at.client(at.server.open_session("a", seed=5, limits=LIMITS, roles=roles))
        await client.chat.completions.create(model="judge", **asked)
        shaping = Shaping(
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.1,
            min_p=0.1,
            min_tokens=3,
            logit_bias=((5, 1.0),),
            schema=json.dumps(SCHEMA),
        )
        assert [params.shaping for params in at.engine.params] == [shaping, shaping]
        form = {"type": "json_schema", "name": "sum", "schema": SCHEMA}
        for model in ("pupil", "other"):
            with pytest.raises(openai.BadRequestError, match="presence_penalty: got 0.5, but the answers of this session train"):
                await client.chat.completions.create(model=model, **asked)
            with pytest.raises(openai.BadRequestError, match="text.format: got .* the answers of this session train") as caught:
                await client.responses.create(model=model, input="x", text={"format": form})
            assert caught.value.param == "text.format"
        await client.responses.create(model="judge", input="x", text={"format": form})
        assert at.engine.params[-1].shaping == Shaping(schema=json.dumps(SCHEMA)) and len(at.engine.params) == 3


BAD_SHAPES: list[tuple[str, Any]] = [
    ("presence_penalty", 3),
    ("repetition_penalty", 0),
    ("min_p", "some"),
    ("min_tokens", 1.5),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 1000}),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
]


async def test_shapes_out_of_their_range_are_refused_by_name() -> None:
    async with endpoint() as at:
        client = at.raw_client(f"{at.origin}/v1", "master")
        for field, value in BAD_SHAPES:
            error = await _error(client, **{field: value})
            assert error.param == field and "expected" in error.message, error


async def _error(client: Any, **unknown: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="any", messages=[QUESTION], extra_body=unknown)
    return caught.value


def test_every_field_that_the_clients_have_is_decided_upon() -> None:
    """A field of a later client would be refused as unknown, which misleads."""
    decided = {*IGNORED, *REFUSED}
    assert set(chat_params.CompletionCreateParamsBase.__annotations__) <= CHAT | decided
    assert set(completion_params.CompletionCreateParamsBase.__annotations__) <= COMPLETION | decided
    assert not decided & (CHAT | COMPLETION)
    decided = {*RESPONSES_IGNORED, *RESPONSES_REFUSED}
    assert set(response_params.ResponseCreateParamsBase.__annotations__) <= RESPONSES | decided
    assert not decided & RESPONSES
    decided = {*MESSAGES_IGNORED, *MESSAGES_REFUSED}
    assert set(message_params.MessageCreateParamsBase.__annotations__) <= MESSAGES | decided
    assert set(count_params.MessageCountTokensParams.__annotations__) <= MESSAGES | decided
    assert not decided & MESSAGES


async def test_what_changes_nothing_or_asks_for_nothing_is_passed_over() -> None:
    async with endpoint(["four" + END]) as at:
        client = at.client(at.server.open_session("a", seed=5, limits=LIMITS))
        neutral = {name: values[0] for name, (values, _) in REFUSED.items() if values} | SHAPING
        harmless: dict[str, Any] = dict.fromkeys(IGNORED, "x") | neutral | {"user": "me", "reasoning_effort": None}
        answer = await client.chat.completions.create(
            model="any", messages=[QUESTION], tool_choice="auto", parallel_tool_calls=True, stop=None, extra_body=harmless
        )
        assert answer.choices[0].message.content == "four"
        assert (await client.completions.create(model="any", prompt="x", n=2, best_of=2)).choices[1].text == "four"


async def test_lengths_choices_and_usage() -> None:
    async with endpoint(["one two" + END]) as at:
        client = at.raw_client(f"{at.origin}/v1", "master")
        chat = client.chat.completions.create
        cut = await chat(model="any", messages=[QUESTION], max_completion_tokens=3, max_tokens=9, n=2)
        assert [(one.index, one.message.content, one.finish_reason) for one in cut.choices] == [
            (0, "one", "length"),
            (1, "one", "length"),
        ]
        prompt = len(at.engine.requests[0].prompt_ids)
        assert (cut.usage.prompt_tokens, cut.usage.completion_tokens) == (prompt, 6)
        at.engine.given = 0
        asking = asyncio.create_task(client.completions.create(model="any", prompt=["ab", "cde"], n=2, max_tokens=3))
        while len(at.engine.requests) < 6:  # all at once, in their order
            await asyncio.sleep(0.001)
        at.engine.given = None
        many = await asking
        assert [one.index for one in many.choices] == [0, 1, 2, 3]
        assert (many.usage.prompt_tokens, many.usage.completion_tokens, many.usage.total_tokens) == (5, 12, 17)
        events = await chat(model="any", messages=[QUESTION], stream=True, stream_options={"include_usage": True}, n=2)
        *others, last = [chunk async for chunk in events]
        assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in others), "as OpenAI's own say it"
        assert last.choices == [] and last.usage.completion_tokens == 16 and last.usage.prompt_tokens == prompt
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
            await client.models.retrieve("gpt")
        with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
            await client.embeddings.create(model="any", input="x")


@pytest.mark.parametrize("form", ["hermes", "json"])
@pytest.mark.parametrize("choice", ["required", "named"])
async def test_a_call_that_must_be_is_begun_for_the_policy(form: str, choice: str) -> None:
    """What the prompt has begun is not the policy's, and the conversation goes on from it."""
    mark = {"hermes": ("<tool_call>\n", "</tool_call>"), "json": ("", "")}[form]
    given = mark[0] + ('{"name": "' if choice == "required" else '{"name": "add", "arguments": ')
    written = ('add", "arguments": ' if choice == "required" else "") + '{"a": 2}}' + mark[1]
    parse = {"hermes": parse_hermes, "json": parse_json}[form]
    async with endpoint([written + END, "four" + END], find_calls=parse) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        create = at.client(session).chat.completions.create
        asked = {"model": "any", "tools": [TOOL], "tool_choice": NAMED if choice == "named" else "required"}
        answer = (await create(messages=[QUESTION], **asked)).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        (call,) = answer.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2})
        assert at.engine.tokenizer.decode(at.engine.requests[0].prompt_ids).endswith(given)
        result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        more = [QUESTION, answer.message, result]
        assert (await create(messages=more, model="any", tools=[TOOL])).choices[0].message.content == "four"
        made = session.trajectory()
        assert made is not None and made.metrics["openai/segments"] == 1 and session.num_mismatches == 0
        sampled = [token for token, mask in zip(made.response_ids, made.response_mask, strict=True) if mask]
        assert at.engine.tokenizer.decode(sampled) == written + END + "four" + END


async def test_one_call_at_a_time_ends_the_answer_with_the_first() -> None:
    async with endpoint(["I see. " + CALL + CALL + END]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        create = at.client(session).chat.completions.create
        asked: dict[str, Any] = {"model": "any", "messages": [QUESTION], "tools": [TOOL]}
        both = (await create(**asked)).choices[0].message
        assert len(both.tool_calls) == 2, "the control"
        at.engine.given = len("I see. " + CALL) + 3
        one = (await create(**asked, parallel_tool_calls=False)).choices[0]
        assert len(one.message.tool_calls) == 1 and one.finish_reason == "tool_calls" and one.message.content == "I see."
        assert at.engine.cancelled == 1, "the rest is not sampled"
        made = session.trajectory()
        assert made is not None and at.engine.tokenizer.decode(made.response_ids) == "I see. " + CALL


async def test_a_format_of_one_s_own_is_read_at_the_end_only() -> None:
    async with endpoint([CALL + END], find_calls=lambda text: parse_hermes(text)) as at:
        create = at.raw_client(f"{at.origin}/v1", "master").chat.completions.create
        asked: dict[str, Any] = {"model": "any", "messages": [QUESTION], "tools": [TOOL]}
        for field, value in (("tool_choice", "required"), ("parallel_tool_calls", False)):
            with pytest.raises(openai.BadRequestError, match="whole answers only") as caught:
                await create(**asked, **{field: value})
            assert caught.value.param == field
        assert len((await create(**asked)).choices[0].message.tool_calls) == 1
