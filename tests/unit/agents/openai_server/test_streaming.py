"""Streams: what a client is told while the answer is being sampled, and that it is a beginning of the whole answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from rlhub.agents.openai_server import answers
from rlhub.agents.openai_server.streaming import StableText
from rlhub.agents.trajectory import Trajectory
from rlhub.errors import EngineError
from rlhub.tools.formats import parse_hermes, parse_json
from tests.unit.agents.openai_server.endpoint import END, LIMITS, Endpoint, endpoint

QUESTION = {"role": "user", "content": "2+2?"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Reader:
    """A client that reads along."""

    def __init__(self, at: Endpoint, **options: Any) -> None:
        self.at = at
        self.session = at.server.open_session("a", seed=5, limits=LIMITS)
        self.chunks: list[Any] = []
        self.task = asyncio.create_task(self._read({"messages": [QUESTION], **options}))

    async def _read(self, options: dict[str, Any]) -> None:
        client = self.at.client(self.session)
        async for chunk in await client.chat.completions.create(model="any", stream=True, **options):
            self.chunks.append(chunk)

    def choices(self, index: int = 0) -> list[Any]:
        return [chunk.choices[0] for chunk in self.chunks if chunk.choices and chunk.choices[0].index == index]

    def text(self, index: int = 0) -> str:
        return "".join(choice.delta.content or "" for choice in self.choices(index))

    def calls(self, index: int = 0) -> list[tuple[str, str]]:
        """Names and arguments, put together; what says that a call begins comes once."""
        made: list[tuple[str, str]] = []
        for part in [part for choice in self.choices(index) for part in choice.delta.tool_calls or ()]:
            assert (part.id is None) == (part.type is None) == (part.function.name is None) == (part.index < len(made))
            if part.index == len(made):
                made.append((part.function.name, ""))
            name, arguments = made[part.index]
            made[part.index] = (name, arguments + part.function.arguments)
        return made

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                assert not self.task.done() or not self.task.exception(), self.task.exception()
                await asyncio.sleep(0.001)

    async def stays(self) -> None:
        """Time in which more would have come."""
        await asyncio.sleep(0.03)


async def test_text_comes_while_the_answer_is_being_sampled() -> None:
    async with endpoint(["four it is" + END]) as at:
        at.engine.given = 3
        reader = Reader(at, logprobs=True, extra_body={"return_token_ids": True}, stream_options={"include_usage": True})
        await reader.until(lambda: reader.text() == "fo")  # the token after may still change the last one's text
        at.engine.given = 5
        await reader.until(lambda: reader.text() == "four")
        assert at.engine.ended == 0 and len(reader.chunks) >= 3
        assert all(choice.finish_reason is None for choice in reader.choices())
        at.engine.given = None
        await asyncio.wait_for(reader.task, 60)
        assert reader.text() == "four it is"
        assert [choice.finish_reason for choice in reader.choices()][-2:] == [None, "stop"]
        assert reader.chunks[-1].usage.completion_tokens == 11
        parts = [part for choice in reader.choices() if choice.logprobs for part in choice.logprobs.content]
        assert [part.token for part in parts] == [*"four it is", END]
        assert [part.logprob for part in parts] == [-0.01 * (place + 1) for place in range(11)]
        extras = [choice.model_extra for choice in reader.choices() if choice.model_extra]
        assert [token for extra in extras for token in extra["token_ids"]] == at.engine.ids("four it is" + END)
        assert [version for extra in extras for version in extra["token_versions"]] == [7] * 11
        assert extras[0]["prompt_token_ids"] == list(at.engine.requests[0].prompt_ids)


async def test_characters_of_several_tokens_come_whole() -> None:
    smile = "\U0001f600"
    async with endpoint([f"gr\u00fc\u00df {smile}{smile}." + END]) as at:
        at.engine.given = 0
        reader = Reader(at)
        for given in range(len(f"gr\u00fc\u00df {smile}{smile}.".encode()) + 1):
            at.engine.given = given
            await asyncio.sleep(0.004)
            assert f"gr\u00fc\u00df {smile}{smile}.".startswith(reader.text())
        await reader.until(lambda: smile in reader.text())
        assert at.engine.ended == 0
        at.engine.given = None
        await asyncio.wait_for(reader.task, 60)
        assert reader.text() == f"gr\u00fc\u00df {smile}{smile}."


async def record(
    answer: str, *, stream: bool, every: int = 1, **options: Any
) -> tuple[str, Trajectory, list[tuple[str, str]], str, list[Any]]:
    """Text, record, calls, reason and log-probs of one answer; as a stream its tokens come by twos and threes."""
    async with endpoint([answer]) as at:
        if stream:
            at.engine.given = 0
            reader = Reader(at, logprobs=True, **options)
            while not reader.task.done():
                at.engine.given += every
                await asyncio.sleep(0.001)
            await reader.task
            text, reason, session = reader.text(), reader.choices()[-1].finish_reason, reader.session
            calls = reader.calls()
            told = [part for choice in reader.choices() if choice.logprobs for part in choice.logprobs.content]
        else:
            session = at.server.open_session("a", seed=5, limits=LIMITS)
            create = at.client(session).chat.completions.create
            choice = (await create(model="any", messages=[QUESTION], logprobs=True, **options)).choices[0]
            text, reason = choice.message.content or "", choice.finish_reason
            calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
            told = choice.logprobs.content
        made = session.trajectory()
        assert made is not None
        return text, made, calls, reason, told


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        ("gr\u00fc\u00df dich, \U0001f600!" + END, {}),
        ("never ended", {"max_tokens": 7}),
        ("one. stop. and more" + END, {"stop": ["stop"]}),
        ("one. st" + END, {"stop": ["stop"]}),
        ("abcdX" + END, {"stop": ["bcdX", "cd"]}),
        ("stop" + END, {"stop": "stop"}),
        ("\n Let me see. \n" + CALL + "\n" + CALL + END, {"tools": [TOOL]}),
        (" " + CALL + END, {"tools": [TOOL]}),
        ("a " + CALL + " b" + END, {"tools": [TOOL]}),
        ("a < b <tool_x> " + END, {"tools": [TOOL]}),
        ("broken <tool_call>{ it " + END, {"tools": [TOOL]}),
        ("  spaces  " + END, {"tools": [TOOL]}),
        (CALL + END, {}),
        ("see " + CALL + " stop" + END, {"tools": [TOOL], "stop": ["stop"]}),
        (CALL.replace("2", "oops") + END, {"tools": [TOOL]}),
        (CALL, {"tools": [TOOL], "max_tokens": 50}),
        ("see " + CALL + CALL + END, {"tools": [TOOL], "parallel_tool_calls": False}),
        (
            '{"a": {"b": 2}}}</tool_call>' + END,
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        ),
        ('add", "arguments": {}}</tool_call> so' + END, {"tools": [TOOL], "tool_choice": "required"}),
        ("nothing" + END, {"tools": [TOOL], "tool_choice": "required"}),
    ],
)
async def test_a_stream_says_and_records_what_the_whole_answer_does(answer: str, options: dict[str, Any]) -> None:
    whole = await record(answer, stream=False, **options)
    assert await record(answer, stream=True, every=3, **options) == whole


async def test_what_may_begin_a_stop_text_waits_and_the_text_ends_the_generation() -> None:
    async with endpoint(["one stone, one stop, more" + END]) as at:
        at.engine.given = 7
        reader = Reader(at, stop=["stop"])
        await reader.until(lambda: reader.text() == "one ")
        await reader.stays()
        assert reader.text() == "one "  # "st" and one more token
        at.engine.given = 20
        await asyncio.wait_for(reader.task, 60)
        assert reader.text() == "one stone, one "
        assert (at.engine.cancelled, at.engine.ended) == (1, 0)
        assert reader.choices()[-1].finish_reason == "stop"
        made = reader.session.trajectory()
        assert made is not None and made.response_ids == at.engine.ids("one stone, one stop")


async def test_a_stop_text_ends_the_generation_of_an_answer_that_is_not_streamed() -> None:
    async with endpoint(["one stop, more" + END]) as at:
        at.engine.given = 9
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        answer = await at.client(session).chat.completions.create(model="any", messages=[QUESTION], stop="stop")
        assert answer.choices[0].message.content == "one "
        assert at.engine.cancelled == 1


async def test_tool_calls_come_as_calls_and_never_as_text() -> None:
    async with endpoint(["I see. " + CALL + END, "four" + END]) as at:
        at.engine.given = 20
        reader = Reader(at, tools=[TOOL])
        await reader.until(lambda: reader.text() == "I see.")
        await reader.stays()
        assert reader.text() == "I see." and at.engine.ended == 0
        at.engine.given = None
        await asyncio.wait_for(reader.task, 60)
        assert reader.choices()[-1].finish_reason == "tool_calls"
        client = at.client(at.server.open_session("b", seed=5, limits=LIMITS))
        async with client.chat.completions.stream(model="any", messages=[QUESTION], tools=[TOOL]) as events:
            assert (await events.get_final_completion()).choices[0].message.content == "four"
        ((name, arguments),) = reader.calls()
        assert json.loads(arguments) == {"a": 2}
        call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
        said = {"role": "assistant", "content": reader.text(), "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "1", "content": "4"}
        again = at.client(reader.session).chat.completions.create
        await again(model="any", messages=[QUESTION, said, result], tools=[TOOL])
        assert reader.session.num_mismatches == 0 and len(list(reader.session.leaves())) == 1


async def test_a_call_s_arguments_come_while_they_are_being_sampled() -> None:
    async with endpoint(["I see. " + CALL + END]) as at:
        at.engine.given = len("I see. " + CALL) - len("2}}</tool_call>")
        reader = Reader(at, tools=[TOOL])
        await reader.until(lambda: reader.calls() == [("add", '{"a":')])  # the space may still be joined to what follows
        assert reader.text() == "I see." and at.engine.ended == 0
        at.engine.given = None
        await asyncio.wait_for(reader.task, 60)
        assert reader.calls() == [("add", '{"a": 2}')]


@pytest.mark.parametrize("form", ["hermes", "json", "own"])
async def test_openais_client_puts_a_stream_together_as_the_whole_answer(form: str) -> None:
    first, second = '{"name": "add", "arguments": {"a": "{2}\\"</tool_"}}', '{"name": "sub", "arguments": {}}'
    calls = f"{first} and {second}" if form == "json" else f"<tool_call>{first}</tool_call> <tool_call>\n{second}\n</tool_call>"
    parse = {"hermes": parse_hermes, "json": parse_json, "own": lambda text: parse_hermes(text)}[form]
    async with endpoint([f" A <tool {{x}}: {calls} so." + END], find_calls=parse) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        asked: dict[str, Any] = {"model": "any", "messages": [QUESTION], "tools": [TOOL]}
        whole = (await at.client(session).chat.completions.create(**asked)).choices[0]
        async with at.client(session).chat.completions.stream(**asked) as events:
            kinds = [event.type async for event in events]
            told = (await events.get_final_completion()).choices[0]
        assert ("tool_calls.function.arguments.delta" in kinds) and kinds.count("tool_calls.function.arguments.done") == 2
        assert told.finish_reason == whole.finish_reason == "tool_calls"
        assert told.message.content == whole.message.content
        assert [(call.type, call.function.name, call.function.arguments) for call in told.message.tool_calls] == [
            (call.type, call.function.name, call.function.arguments) for call in whole.message.tool_calls
        ]
        assert len({call.id for call in (*told.message.tool_calls, *whole.message.tool_calls)}) == 4


async def test_choices_come_side_by_side() -> None:
    async with endpoint(["one and one" + END, "two and two" + END]) as at:
        at.engine.given = 4
        reader = Reader(at, n=2)
        await reader.until(lambda: (reader.text(0), reader.text(1)) == ("one", "two"))
        at.engine.given = None
        await asyncio.wait_for(reader.task, 60)
        assert (reader.text(0), reader.text(1)) == ("one and one", "two and two")
        assert [reader.choices(index)[-1].finish_reason for index in (0, 1)] == ["stop", "stop"]


async def test_completions_come_as_they_are_sampled_with_their_places() -> None:
    async with endpoint(["one two" + END, "three" + END]) as at:
        at.engine.given = 4
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        create = at.client(session).completions.create
        texts, offsets = ["", ""], []
        async for chunk in await create(model="any", prompt=["a", "b"], stream=True, logprobs=0):
            choice = chunk.choices[0]
            texts[choice.index] += choice.text
            offsets += choice.logprobs.text_offset if choice.logprobs and choice.index == 0 else []
            if texts[0] == "one" and at.engine.given is not None:  # both generations stand still until here
                assert at.engine.ended == 0
                at.engine.given = None
        assert texts == ["one two", "three"]
        assert offsets == list(range(8))


async def test_a_client_that_leaves_in_the_middle_ends_the_generation() -> None:
    async with endpoint(["one two" + END]) as at:
        at.engine.given = 5
        reader = Reader(at)
        await reader.until(lambda: reader.text() != "")
        reader.task.cancel()
        async with asyncio.timeout(60):
            while not at.engine.cancelled:
                await asyncio.sleep(0.001)
        assert reader.session.turns == []


async def test_a_client_that_leaves_while_it_is_written_to_is_no_error_of_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection is closing, and the request's handler was not cancelled yet."""

    async def closing(response: web.StreamResponse, data: bytes) -> None:
        assert response.prepared
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "write", closing)
    async with endpoint(["one two" + END]) as at:
        reader = Reader(at)
        await asyncio.wait_for(asyncio.wait([reader.task]), 60)
        assert reader.chunks == []
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize("error", [EngineError("the device is gone"), ZeroDivisionError("the device is gone")])
async def test_an_error_in_the_middle_ends_the_stream_with_an_error(error: Exception) -> None:
    async with endpoint(["one two" + END]) as at:
        at.engine.given, at.engine.fails = 5, error
        reader = Reader(at)
        with pytest.raises(openai.APIError, match="the device is gone"):
            await asyncio.wait_for(reader.task, 60)
        assert reader.session.turns == []


@pytest.mark.parametrize("error", [EngineError("the device is gone"), ConnectionResetError("the device is gone")])
async def test_an_error_before_the_first_token_has_its_own_status(error: Exception) -> None:
    async with endpoint(["one two" + END]) as at:
        at.engine.given, at.engine.fails = 0, error
        with pytest.raises(openai.InternalServerError, match="the device is gone"):
            await asyncio.wait_for(Reader(at).task, 60)


async def test_silence_is_broken_by_comments_also_while_text_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "HEARTBEAT_S", 0.02)
    async with endpoint([CALL + END]) as at:
        at.engine.given = 0
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        body = {"messages": [QUESTION], "tools": [TOOL], "stream": True}
        headers = {"Authorization": f"Bearer {session.token}"}
        url = at.server.base_url(session) + "/chat/completions"
        comments = 0
        async with at.http.stream("POST", url, json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                comments += line == ": working"
                if comments < 4:
                    at.engine.given += 3
                else:
                    at.engine.given = None
        assert comments >= 4 and at.engine.ended == 1


def by_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def by_runs(ids: list[int]) -> str:
    """As tokenizers with byte tokens do: a run of bytes that is no text is all of it replaced."""
    made, run = "", b""
    for token in [*ids, 1000]:
        if token < 256:
            run += bytes([token])
            continue
        try:
            made += run.decode()
        except UnicodeDecodeError:
            made += "\ufffd" * len(run)
        made, run = made + (chr(token - 1000) if token > 1000 else ""), b""
    return made


WORDS = [" So", " it", " is", " .", " They", " do", " n", "'t", " "]


def tidied(ids: list[int]) -> str:
    """As tokenizers that clean spaces up do, and that drop the first one."""
    return "".join(WORDS[token] for token in ids).replace(" .", ".").replace(" n't", "n't").removeprefix(" ")


EMOJI = "ab\u00e9 \U0001f600\U0001f600, done \u00e9\u00e9. " * 20
RUNS = [token for part in EMOJI for token in ([ord(part) + 1000] if part.isascii() else part.encode())]


@pytest.mark.parametrize(
    ("decode", "ids"),
    [
        (by_bytes, list(EMOJI.encode())),
        (by_bytes, list(b"a\xffb\xf0\x9fc" * 20)),
        (by_runs, RUNS),
        (tidied, list(range(len(WORDS))) * 20),
    ],
    ids=["bytes", "broken", "runs", "tidied"],
)
def test_stable_text_is_a_beginning_of_the_whole_and_close_behind(decode: Callable[[list[int]], str], ids: list[int]) -> None:
    whole, text = decode(ids), StableText(decode)
    for count, token in enumerate(ids, start=1):
        text.add(token)
        assert whole.startswith(text.stable), (count, whole[: count + 4], text.stable[-9:])
        assert len(text.stable) >= len(decode(ids[:count])) - 12
        assert text.stable + text.unsure == decode(ids[:count])
