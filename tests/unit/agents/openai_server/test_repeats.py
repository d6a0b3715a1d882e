"""Requests that the clients of OpenAI and Anthropic repeat, because a proxy has dropped their answers, are recorded once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from rlhub.agents.openai_server.repeats import ATTEMPT, CUT, KEY, ClientCall, ClientCalls
from rlhub.agents.openai_server.sessions import Session
from tests.unit.agents.openai_server.endpoint import END, LIMITS, Endpoint, endpoint

ENDS = (b'"usage":', b"data: [DONE]", b"event: message_stop", b"event: response.completed")
"""What the last bytes of an answer contain."""
CHAT: Any = {"model": "any", "messages": [{"role": "user", "content": "2+2?"}]}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ANSWERS = ["first" + END, "second" + END, "third" + END, "fourth" + END]
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients repeat at once."""
    for client in ("openai", "anthropic"):
        monkeypatch.setattr(f"{client}._base_client.INITIAL_RETRY_DELAY", 0.01)
        monkeypatch.setattr(f"{client}._base_client.MAX_RETRY_DELAY", 0.01)


@dataclass
class Proxy:
    """Passes connections on to a server.  drops: of so many answers it closes the connection in place of passing them on.  after:
    passes on so many bytes of them first, and waits until the server has sent all."""

    origin: str
    drops: int = 0
    after: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, to_server = await asyncio.open_connection(urlsplit(self.origin).hostname, urlsplit(self.origin).port)
        sending = asyncio.create_task(self.pass_on(reader, to_server))
        try:
            while data := await upstream.read(1 << 16):
                if self.drops:
                    self.drops -= 1
                    writer.write(data[: self.after])
                    await writer.drain()
                    while not any(end in data for end in ENDS) and (more := await upstream.read(1 << 16)):
                        data += more
                    break
                writer.write(data)
                await writer.drain()
        finally:
            sending.cancel()
            writer.close()
            to_server.close()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
            writer.close()


@asynccontextmanager
async def cut(at: Endpoint, **how: Any) -> AsyncIterator[Proxy]:
    proxy = Proxy(at.origin, **how)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()


def openai_at(at: Endpoint, proxy: Proxy, session: Session, retries: int = 2) -> AsyncOpenAI:
    client = at.client(session)
    return client.with_options(base_url=str(client.base_url).replace(at.origin, proxy.url), max_retries=retries)


def anthropic_at(at: Endpoint, proxy: Proxy, session: Session) -> AsyncAnthropic:
    url = at.server.base_url(session).removesuffix("/v1").replace(at.origin, proxy.url)
    return AsyncAnthropic(base_url=url, api_key=session.token, max_retries=2, http_client=anthropic.DefaultAsyncHttpxClient())


async def by_chat(at: Endpoint, proxy: Proxy, session: Session, stream: bool) -> tuple[str, str]:
    completions = openai_at(at, proxy, session).chat.completions
    if stream:
        async with completions.stream(**CHAT) as events:
            answer = await events.get_final_completion()
    else:
        answer = await completions.create(**CHAT)
    return answer.id, answer.choices[0].message.content


async def by_completions(at: Endpoint, proxy: Proxy, session: Session, stream: bool) -> tuple[str, str]:
    create = openai_at(at, proxy, session).completions.create
    if not stream:
        answer = await create(model="any", prompt="2+2")
        return answer.id, answer.choices[0].text
    chunks = [chunk async for chunk in await create(model="any", prompt="2+2", stream=True)]
    return chunks[0].id, "".join(chunk.choices[0].text for chunk in chunks)


async def by_responses(at: Endpoint, proxy: Proxy, session: Session, stream: bool) -> tuple[str, str]:
    responses = openai_at(at, proxy, session).responses
    if stream:
        async with responses.stream(model="any", input="2+2?") as events:
            answer = await events.get_final_response()
    else:
        answer = await responses.create(model="any", input="2+2?")
    return answer.id, answer.output_text


async def by_messages(at: Endpoint, proxy: Proxy, session: Session, stream: bool) -> tuple[str, str]:
    messages = anthropic_at(at, proxy, session).messages
    if stream:
        async with messages.stream(**CHAT, max_tokens=50) as events:
            answer = await events.get_final_message()
    else:
        answer = await messages.create(**CHAT, max_tokens=50)
    return answer.id, answer.content[0].text


Talk = Callable[[Endpoint, Proxy, Session, bool], Awaitable[tuple[str, str]]]
WIRES: list[Talk] = [by_chat, by_completions, by_responses, by_messages]


async def answered(talk: Talk, stream: bool) -> tuple[tuple[str, str], Session, Endpoint]:
    async with endpoint(ANSWERS) as at, cut(at, drops=2) as proxy:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        return await talk(at, proxy, session, stream), session, at


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("talk", WIRES)
async def test_an_answer_that_was_dropped_twice_is_given_again_and_recorded_once(talk: Talk, stream: bool) -> None:
    (name, said), session, at = await answered(talk, stream)
    assert said == "first" and len(at.engine.requests) == 1
    assert [turn.request_id for turn in session.turns] == [name.replace("_", "-").rpartition("-")[2]]
    made = session.episode()
    assert made is not None and made.num_tokens == len("first") + 1
    assert made.metrics["openai/requests"] == 1 and made.metrics["openai/segments"] == 1


async def test_the_test_above_notices_an_endpoint_that_records_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientCalls, "of", lambda *_: ClientCall())
    (_, said), session, _ = await answered(by_chat, False)
    assert said == "third" and len(session.turns) == 3 and session.episode().num_tokens > 10  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_generation_that_was_cut_starts_again_with_its_seed(stream: bool) -> None:
    async with endpoint(ANSWERS, delay_s=30.0) as at, cut(at) as proxy:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        create = openai_at(at, proxy, session).with_options(timeout=1.0).chat.completions.create
        with pytest.raises(openai.APITimeoutError):
            await create(**CHAT, stream=stream)
        await until(lambda: at.engine.cancelled == len(at.engine.requests))
        assert len({request.seed for request in at.engine.requests}) == 1 < len(at.engine.requests)
        assert session.num_requests == 1 and session.turns == []


async def test_calls_in_a_stream_that_is_sent_again_have_their_ids() -> None:
    async with endpoint([CALL + END, "never" + END]) as at, cut(at, drops=1) as proxy:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client, given = openai_at(at, proxy, session), {**CHAT, "tools": [TOOL], "extra_headers": {KEY: "one"}}
        answers = []
        for _ in range(2):
            async with client.chat.completions.stream(**given) as events:
                answers.append(await events.get_final_completion())
        assert answers[0].choices[0].message.tool_calls[0].id == answers[1].choices[0].message.tool_calls[0].id
        assert answers[0].model_dump() == answers[1].model_dump() and len(session.turns) == 1
        messages = [*CHAT["messages"], answers[0].choices[0].message.model_dump(exclude_none=True)]
        await client.chat.completions.create(model="any", messages=[*messages, {"role": "user", "content": "?"}], tools=[TOOL])
        assert session.num_mismatches == 0 and session.turns[1].parent is session.turns[0]


async def test_a_stream_that_broke_in_the_middle_is_sent_again_whole_under_its_key() -> None:
    async with endpoint(ANSWERS) as at, cut(at, drops=1, after=1 << 16) as proxy:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client, given = openai_at(at, proxy, session), {**CHAT, "stream": True, "extra_headers": {KEY: "one"}}
        texts = ["", ""]
        at.engine.given = 3
        with pytest.raises(openai.APIConnectionError):
            async for chunk in await client.chat.completions.create(**given):
                texts[0] += chunk.choices[0].delta.content or ""
                at.engine.given = None
        async for chunk in await client.chat.completions.create(**given):
            texts[1] += chunk.choices[0].delta.content or ""
        assert texts[1] == "first" and texts[0] in ("", "fi", "fir") and len(session.turns) == len(at.engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_repetition_joins_the_generation_that_runs(stream: bool) -> None:
    async with endpoint(ANSWERS) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        at.engine.given = 3
        create = at.client(session).chat.completions.create

        async def ask(headers: dict[str, str]) -> tuple[str, str]:
            answer = await create(**CHAT, stream=stream, extra_headers=headers)
            if not stream:
                return answer.id, answer.choices[0].message.content
            chunks = [chunk async for chunk in answer]
            return chunks[0].id, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        for once, again in (({KEY: "one"}, {KEY: "one"}), ({}, {ATTEMPT: "1"})):
            at.engine.given, before = 3, len(at.engine.requests)
            asked = asyncio.create_task(ask(once))
            await until(lambda: len(at.engine.requests) > before)  # noqa: B023  it is called at once
            repeated = asyncio.create_task(ask(again))
            await until(lambda: session.num_answering == 2)
            asked.cancel()  # the first connection ends, and the generation goes on for the second
            await until(lambda: session.num_answering == 1)
            at.engine.given = None
            assert (await repeated)[1] == ANSWERS[before].removesuffix(END)
            assert len(at.engine.requests) == before + 1 and at.engine.cancelled == 0
        assert len(session.turns) == 2 == session.num_requests


async def test_the_last_one_to_leave_ends_the_generation() -> None:
    async with endpoint(ANSWERS) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        at.engine.given = 3
        create = at.client(session).chat.completions.create
        asked = [asyncio.create_task(create(**CHAT, extra_headers={KEY: "one"})) for _ in range(2)]
        await until(lambda: session.num_answering == 2)
        for task in asked:
            assert at.engine.cancelled == 0
            task.cancel()
        await until(lambda: at.engine.cancelled == 1 and not session.num_answering)
        assert session.turns == []


async def test_equal_requests_that_repeat_nothing_are_samples_of_their_own() -> None:
    async with endpoint(ANSWERS) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        create = at.client(session).chat.completions.create
        said = [answer.choices[0].message.content for answer in await asyncio.gather(*(create(**CHAT) for _ in range(3)))]
        # The client says that it repeats a request, but all that came here were received: that one was lost on the way here.
        said.append((await create(**CHAT, extra_headers={ATTEMPT: "1"})).choices[0].message.content)
        assert sorted(said) == sorted(answer.removesuffix(END) for answer in ANSWERS) and len(session.turns) == 4
        keyed = [await create(**CHAT, extra_headers={KEY: name}) for name in ("one", "two", "one")]
        assert keyed[0].id == keyed[2].id != keyed[1].id and len(session.turns) == 6


async def test_a_refused_request_that_comes_again_takes_no_other_s_answer() -> None:
    async with endpoint(ANSWERS, max_concurrent=1) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client = at.client(session).with_options(max_retries=8)
        answers = await asyncio.gather(*(client.chat.completions.create(**CHAT) for _ in range(3)))
        assert len({answer.id for answer in answers}) == 3 == len(session.turns)


async def test_a_failed_answer_is_sampled_again_in_its_place() -> None:
    async with endpoint(ANSWERS) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        at.engine.given, at.engine.fails = 0, RuntimeError("broken")
        client = at.client(session)
        for headers in ({ATTEMPT: "0"}, {ATTEMPT: "1"}):
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(**CHAT, extra_headers=headers)
        at.engine.given = None
        await client.chat.completions.create(**CHAT, extra_headers={ATTEMPT: "2"})
        assert len({request.seed for request in at.engine.requests}) == 1 and session.num_requests == len(session.turns) == 1


async def test_an_attempt_that_never_came_here_does_not_hide_the_one_before() -> None:
    async with endpoint(ANSWERS) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        create = at.client(session).chat.completions.create
        first = await create(**CHAT, extra_headers={"Connection": "close"})
        (call,) = session.calls._calls
        await until(lambda: call.state == CUT)
        again = await create(**CHAT, extra_headers={ATTEMPT: "2"})
        assert again.id == first.id and len(session.turns) == 1
        reply = [*CHAT["messages"], again.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "?"}]
        await create(model="any", messages=reply)
        last = await create(**CHAT, extra_headers={ATTEMPT: "3"})
        assert last.id != first.id, "the agent has replied to the first one, so it has it"
        session.forget()
        assert (await create(**CHAT, extra_headers={ATTEMPT: "4"})).id not in (first.id, last.id)


async def test_a_key_belongs_to_one_body() -> None:
    async with endpoint(ANSWERS) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        create = at.client(session).chat.completions.create
        await create(**CHAT, extra_headers={KEY: "one"})
        with pytest.raises(openai.BadRequestError, match="sent with another body in this session") as caught:
            await create(**CHAT, max_tokens=3, extra_headers={KEY: "one"})
        assert caught.value.code == "idempotency_key_reused" and len(session.turns) == 1


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not holds():
            await asyncio.sleep(0.005)
