from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from aiohttp import web

from rlhub.agents.openai_server import answers
from rlhub.agents.openai_server.sessions import SessionLimits
from rlhub.agents.trajectory import NOT_SAMPLED, Trajectory
from rlhub.agents.workflows.turns import turn_seed
from rlhub.errors import EngineError, RequestError, WorkerError
from tests.unit.agents.openai_server.endpoint import END, LIMITS, Endpoint, endpoint
from tests.unit.data.templates import HEADERS, INSTRUCTIONS, THINKING

QUESTION = {"role": "user", "content": "2+2?"}
pytestmark = pytest.mark.anyio

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}
CALL = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_chat_is_recorded_token_for_token() -> None:
    async with endpoint(["four" + END]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        answer = await at.client(session).chat.completions.create(model="any", messages=[QUESTION], logprobs=True)
        assert answer.choices[0].message.content == "four"
        assert answer.choices[0].finish_reason == "stop"
        assert [part.token for part in answer.choices[0].logprobs.content] == [*"four", END]
        assert [part.logprob for part in answer.choices[0].logprobs.content] == [-0.01, -0.02, -0.03, -0.04, -0.05]
        assert answer.usage.completion_tokens == 5
        assert at.engine.requests[0].seed == 5
        assert at.engine.requests[0].session == "a"
        made = session.trajectory()
        assert made is not None
        assert made.prompt_ids == list(at.engine.requests[0].prompt_ids)
        assert made.response_ids == at.engine.ids("four" + END)
        assert made.rollout_log_probs == [-0.01, -0.02, -0.03, -0.04, -0.05]
        assert made.versions == [7] * 5


async def talk(at: Endpoint, messages: list[Any], turns: int, **options: Any) -> Trajectory:
    """An agent that always says "go on", and what it left."""
    session = at.server.open_session("a", seed=5, limits=LIMITS)
    client = at.client(session)
    for turn in range(turns):
        answer = await client.chat.completions.create(model="any", messages=messages, **options)
        messages = [*messages, answer.choices[0].message]
        if turn + 1 < turns:
            messages.append({"role": "user", "content": f"go on {turn}"})
    made = session.trajectory()
    assert made is not None
    return made


@pytest.mark.parametrize("template", [None, HEADERS, THINKING, INSTRUCTIONS], ids=["chatml", "headers", "thinking", "inst"])
async def test_later_turns_continue_the_recorded_tokens(template: str | None) -> None:
    """Whatever a template does to earlier answers, what the policy saw is what is recorded."""
    options = {} if template is None else {"template": template}
    async with endpoint(["  one " + END, "two" + END, "three" + END], **options) as at:
        made = await talk(at, [QUESTION], 3)
        assert made.metrics["openai/segments"] == 1
        assert made.metrics["openai/mismatches"] == 0
        whole = made.prompt_ids + made.response_ids
        last = list(at.engine.requests[-1].prompt_ids)
        assert whole[: len(last)] == last
        assert END + END not in at.engine.tokenizer.decode(whole).replace(" ", "")
        written = [token for token, mask in zip(made.response_ids, made.response_mask, strict=True) if mask]
        assert written == at.engine.ids("  one " + END) + at.engine.ids("two" + END) + at.engine.ids("three" + END)
        assert {v for v, mask in zip(made.versions, made.response_mask, strict=True) if not mask} == {NOT_SAMPLED}


async def test_a_whole_conversation_reads_as_the_template_would_write_it() -> None:
    async with endpoint(["one" + END, "two" + END]) as at:
        made = await talk(at, [QUESTION], 2)
        told = [QUESTION, {"role": "assistant", "content": "one"}, {"role": "user", "content": "go on 0"}]
        text = at.engine.tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
        assert at.engine.tokenizer.decode(made.prompt_ids + made.response_ids) == text + "two" + END


async def test_an_answer_that_was_cut_off_is_closed_by_the_template() -> None:
    async with endpoint(["one and more" + END, "two" + END]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client = at.client(session)
        first = await client.chat.completions.create(model="any", messages=[QUESTION], max_tokens=3)
        assert first.choices[0].finish_reason == "length"
        more = [QUESTION, first.choices[0].message, {"role": "user", "content": "?"}]
        await client.chat.completions.create(model="any", messages=more)
        assert f"one{END}\n<|im_start|>user\n?{END}" in at.engine.tokenizer.decode(list(at.engine.requests[1].prompt_ids))


async def test_a_changed_history_starts_a_segment_and_is_counted() -> None:
    async with endpoint(["one" + END, "two" + END]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client = at.client(session)
        await client.chat.completions.create(model="any", messages=[QUESTION])
        changed = [QUESTION, {"role": "assistant", "content": "one!"}, {"role": "user", "content": "go on"}]
        await client.chat.completions.create(model="any", messages=changed)
        made = session.trajectory()
        assert made is not None
        assert made.metrics["openai/segments"] == 2
        assert made.metrics["openai/mismatches"] == 1
        assert made.metrics["openai/untrained_tokens"] == 4
        assert made.response_ids == at.engine.ids("two" + END)
        assert "one!" in at.engine.tokenizer.decode(made.prompt_ids)
        longest = session.trajectory("longest")
        assert longest is not None
        assert longest.response_ids == at.engine.ids("one" + END)
        drawn = []
        for session.seed in (*range(40), *range(40)):
            one = session.trajectory("random")
            assert one is not None
            drawn.append(at.engine.tokenizer.decode(one.response_ids))
        assert drawn[:40] == drawn[40:]
        assert 10 <= drawn[:40].count("one" + END) == 40 - drawn[:40].count("two" + END) <= 30


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_parsed_and_their_results_masked(stream: bool) -> None:
    async with endpoint([CALL + END, "four" + END]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client = at.client(session)
        if stream:
            async with client.chat.completions.stream(model="any", messages=[QUESTION], tools=[TOOL]) as events:
                first = await events.get_final_completion()
        else:
            first = await client.chat.completions.create(model="any", messages=[QUESTION], tools=[TOOL])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content == "Let me see."
        assert message.tool_calls[0].function.name == "add"
        assert json.loads(message.tool_calls[0].function.arguments) == {"a": 2, "b": 2}
        assistant = {"role": "assistant", "content": message.content, "tool_calls": [message.tool_calls[0].model_dump()]}
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}
        second = await client.chat.completions.create(model="any", messages=[QUESTION, assistant, result], tools=[TOOL])
        assert second.choices[0].message.content == "four"
        made = session.trajectory()
        assert made is not None
        assert made.metrics["openai/segments"] == 1
        unwritten = [token for token, mask in zip(made.response_ids, made.response_mask, strict=True) if not mask]
        assert "<tool_response>\n4\n</tool_response>" in at.engine.tokenizer.decode(unwritten)
        assert at.engine.tokenizer.decode(made.response_ids).startswith(CALL + END)


async def test_choices_have_seeds_of_their_own_and_either_can_be_continued() -> None:
    async with endpoint(["one" + END, "two" + END, "three" + END]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client = at.client(session)
        answer = await client.chat.completions.create(model="any", messages=[QUESTION], n=2)
        assert len({request.seed for request in at.engine.requests}) == 2
        more = [QUESTION, answer.choices[0].message, {"role": "user", "content": "go on"}]
        await client.chat.completions.create(model="any", messages=more)
        made = session.trajectory()
        assert made is not None
        assert made.metrics["openai/segments"] == 2
        assert made.metrics["openai/mismatches"] == 0
        assert made.response_ids[:4] == at.engine.ids("one" + END)


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_at_the_same_time_have_seeds_of_their_own(stream: bool) -> None:
    """Best of several: an agent that asks one question many times at once wants different answers."""
    async with endpoint() as at:
        at.engine.given = 0
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        create = at.client(session).chat.completions.create
        asking = [asyncio.create_task(create(model="any", messages=[QUESTION], stream=stream)) for _ in range(8)]
        while len(at.engine.requests) < 8:
            await asyncio.sleep(0.001)
        at.engine.given = None
        await asyncio.gather(*asking)
        assert {request.seed for request in at.engine.requests} == {turn_seed(5, number) for number in range(8)}


async def test_equal_prompts_of_a_request_have_seeds_of_their_own() -> None:
    async with endpoint() as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        for _ in range(2):
            await at.client(session).completions.create(model="any", prompt=["x", "x"], n=2, max_tokens=1)
        assert len({request.seed for request in at.engine.requests}) == 8 and at.engine.requests[0].seed == 5


async def test_a_named_seed_repeats_an_answer_in_its_session_only() -> None:
    """Else the samples of a prompt would be copies of each other wherever an agent names a seed."""
    async with endpoint() as at:
        for number in (1, 2, 3):
            create = at.client(at.server.open_session(f"{number}", seed=number, limits=LIMITS)).chat.completions.create
            for _ in range(2):
                await create(model="any", messages=[QUESTION], seed=42, n=2)
        seeds = [request.seed for request in at.engine.requests]
        sessions = [seeds[place : place + 4] for place in (0, 4, 8)]
        assert all(one[:2] == one[2:] for one in sessions) and len(set(seeds)) == 6
        assert all(0 <= seed < 2**31 for seed in seeds)


async def test_a_stop_text_cuts_tokens_and_text() -> None:
    async with endpoint(["one. two. three" + END]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        answer = await at.client(session).chat.completions.create(model="any", messages=[QUESTION], stop=["two", "three"])
        assert answer.choices[0].message.content == "one. "
        assert answer.choices[0].finish_reason == "stop"
        made = session.trajectory()
        assert made is not None
        assert made.response_ids == at.engine.ids("one. two")


async def test_completions_by_text_and_by_token_ids() -> None:
    async with endpoint(["one" + END]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client = at.client(session)
        answer = await client.completions.create(model="any", prompt="count: ", logprobs=0)
        assert answer.choices[0].text == "one"
        assert answer.choices[0].logprobs.token_logprobs == [-0.01, -0.02, -0.03, -0.04]
        asked = at.engine.ids("count: ")
        extra = {"return_token_ids": True}
        answer = await client.completions.create(model="any", prompt=[*asked, 9], extra_body=extra)
        assert answer.choices[0].model_extra["token_ids"] == at.engine.ids("one" + END)
        assert answer.choices[0].model_extra["token_versions"] == [7] * 4
        assert answer.choices[0].model_extra["prompt_token_ids"] == [*asked, 9]
        go_on = [*asked, *at.engine.ids("one" + END), *at.engine.ids(", ")]
        await client.completions.create(model="any", prompt=go_on)
        made = session.trajectory()
        assert made is not None
        assert made.prompt_ids == asked
        assert sum(made.response_mask) == 8


async def test_sessions_are_isolated_and_keys_are_checked() -> None:
    async with endpoint() as at:
        one = at.server.open_session("one", seed=1, limits=LIMITS)
        two = at.server.open_session("two", seed=2, limits=LIMITS)
        with pytest.raises(ValueError, match="open already"):
            at.server.open_session("two", seed=2, limits=LIMITS)
        await at.client(one).chat.completions.create(model="any", messages=[QUESTION])
        assert (len(one.turns), len(two.turns)) == (1, 0)
        for base, key in (
            (at.server.base_url(two), one.token),
            (at.server.base_url(one), "master"),
            (f"{at.origin}/v1", one.token),
            (f"{at.origin}/s/none/v1", one.token),
        ):
            client = at.raw_client(base, key)
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="any", messages=[QUESTION])
        assert len(at.engine.requests) == 1
        open_client = at.raw_client(f"{at.origin}/v1", "master")
        assert [model.id async for model in open_client.models.list()] == ["policy"]
        at.server.close_session(one)
        with pytest.raises(openai.AuthenticationError):
            await at.client(one).chat.completions.create(model="any", messages=[QUESTION])


async def test_over_capacity_is_refused_with_a_time_to_come_back() -> None:
    async with endpoint(max_concurrent=1) as at:
        at.engine.given = 0
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client = at.client(session)
        first = asyncio.create_task(client.chat.completions.create(model="any", messages=[QUESTION]))
        while not at.engine.requests:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="any", messages=[QUESTION])
        assert float(caught.value.response.headers["Retry-After"]) > 0
        at.engine.given = None
        await first
        await client.chat.completions.create(model="any", messages=[QUESTION])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_generation(stream: bool) -> None:
    async with endpoint(delay_s=30.0) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client = at.client(session)
        task = asyncio.create_task(client.chat.completions.create(model="any", messages=[QUESTION], n=2, stream=stream))
        while len(at.engine.requests) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        async with asyncio.timeout(60):
            while at.engine.cancelled < 2:
                await asyncio.sleep(0.01)
        assert session.turns == []


async def test_no_more_tokens_than_the_session_has_room_for() -> None:
    async with endpoint(["one two" + END, "three" + END]) as at:
        session = at.server.open_session("a", seed=5, limits=SessionLimits(prompt=100, response=10))
        client = at.client(session)
        first = await client.chat.completions.create(model="any", messages=[QUESTION], max_tokens=9)
        more = [QUESTION, first.choices[0].message, {"role": "user", "content": "go on"}]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="any", messages=more)
        assert caught.value.code == "context_length_exceeded"
        assert session.full
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x" * 100}])


async def test_the_trained_distribution_is_sampled_whatever_a_client_wants() -> None:
    async with endpoint() as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        await at.client(session).chat.completions.create(model="any", messages=[QUESTION], temperature=0.1)
        assert at.engine.params[0].temperature == 1.0
        assert session.num_overruled == 1
        free = at.raw_client(f"{at.origin}/v1", "master")
        await free.chat.completions.create(model="any", messages=[QUESTION], temperature=0.1, seed=3)
        assert at.engine.params[1].temperature == 0.1
        assert at.engine.requests[1].seed == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_what_went_wrong_in_the_engine_has_the_status_that_fits(stream: bool) -> None:
    """Where the request was at fault it is told so, though another process found it."""
    foreign = RequestError("token id 9 at place 0", param="prompt")
    remote = WorkerError("agenerate raised RequestError", role="rollout-0", rank=0)
    remote.__cause__ = foreign
    lost = WorkerError("agenerate raised KeyError", role="rollout-0", rank=0)
    async with endpoint() as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client, at.engine.given = at.client(session), 0
        cases = [(foreign, 400, "messages"), (remote, 400, "messages"), (EngineError("it broke"), 500, None), (lost, 500, None)]
        for error, status, param in cases:
            at.engine.fails = error
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="any", messages=[QUESTION], stream=stream)
            assert (caught.value.status_code, caught.value.param) == (status, param)


async def test_an_answer_that_is_not_there_in_its_time_is_504_and_ends_the_generation() -> None:
    async with endpoint(delay_s=60.0, request_s=0.2) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        with pytest.raises(openai.InternalServerError, match="server.request_s") as caught:
            await at.client(session).chat.completions.create(model="any", messages=[QUESTION])
        assert caught.value.status_code == 504 and at.engine.cancelled == 1


async def test_more_answers_than_a_request_may_have_are_refused() -> None:
    async with endpoint(max_samples=6) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client = at.client(session)
        await client.completions.create(model="any", prompt=["a", "b", "c"], n=2)
        with pytest.raises(openai.BadRequestError, match=r"4 prompts x 2 = 8 answers.*at most 6"):
            await client.completions.create(model="any", prompt=["a", "b", "c", "d"], n=2)
        with pytest.raises(openai.BadRequestError, match="at most 6"):
            await client.chat.completions.create(model="any", messages=[QUESTION], n=7)
        assert len(at.engine.requests) == 6


async def test_a_client_that_does_not_read_its_answer_loses_its_connection() -> None:
    """An answer of more bytes than the system keeps for it; the parts of a stream are written likewise."""
    outcomes: list[BaseException | None] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await answers.send_whole(request, {"text": "x" * (32 << 20)}, 0.2)
        except BaseException as error:
            outcomes.append(error)
            raise

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0][:2], limit=1)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    async with asyncio.timeout(60):
        while not outcomes:
            await asyncio.sleep(0.01)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(32 << 20)
    assert isinstance(outcomes[0], ConnectionResetError)
    writer.transport.abort()
    await runner.cleanup()


async def test_metrics_count_requests_and_tokens_and_need_a_key() -> None:
    async with endpoint(["four" + END], admin_key="admin") as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client = at.client(session)
        await client.chat.completions.create(model="any", messages=[QUESTION])
        await client.responses.create(model="any", input="2+2?")
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="any", messages=[])
        shown = {}
        for key in ("master", "admin", session.token):
            answer = await at.http.get(f"{at.origin}/metrics", headers={"Authorization": f"Bearer {key}"})
            shown[key] = (answer.status_code, answer.text)
        assert [status for status, _ in shown.values()] == [200, 200, 401]
        lines = dict(line.rsplit(" ", 1) for line in shown["master"][1].splitlines() if not line.startswith("#"))
        assert lines['rlhub_requests_total{status="200",wire="chat/completions"}'] == "1.0"
        assert lines['rlhub_requests_total{status="400",wire="chat/completions"}'] == "1.0"
        assert lines['rlhub_request_seconds_count{wire="responses"}'] == "1.0"
        assert lines["rlhub_generated_tokens_total"] == "10.0" and lines["rlhub_sessions_open"] == "1.0"
        assert float(lines["rlhub_prompt_tokens_total"]) == sum(len(request.prompt_ids) for request in at.engine.requests)
