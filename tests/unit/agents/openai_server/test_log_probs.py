"""Log-probs of the likeliest tokens and of prompts, on every wire that has them, whole and streamed; the record never changes."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from rlhub.agents.openai_server.sessions import Session
from rlhub.engines.rollout.base import RequestError
from tests.unit.agents.openai_server.endpoint import END, LIMITS, Endpoint, endpoint, likeliest

ANSWER = "four é" + END
QUESTION: Any = [{"role": "user", "content": "2+2?"}]
TEXT = ["message.output_text.logprobs"]
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pairs(at: Endpoint, count: int) -> list[list[tuple[str, float]]]:
    """The likeliest tokens in the place of each token of the answer."""
    return [
        [(at.engine.tokenizer.decode([token]), value) for token, value in likeliest(token, count)]
        for token in at.engine.ids(ANSWER)
    ]


async def by_chat(at: Endpoint, session: Session, count: int, stream: bool) -> list[Any]:
    asked: Any = {"model": "any", "messages": QUESTION, "logprobs": True, "top_logprobs": count}
    create = at.client(session).chat.completions.create
    if not stream:
        return list((await create(**asked)).choices[0].logprobs.content)
    chunks = [chunk async for chunk in await create(**asked, stream=True)]
    return [place for chunk in chunks if chunk.choices[0].logprobs for place in chunk.choices[0].logprobs.content]


async def by_responses(at: Endpoint, session: Session, count: int, stream: bool) -> list[Any]:
    asked: Any = {"model": "any", "input": "2+2?", "top_logprobs": count, "include": TEXT}
    create = at.client(session).responses.create
    if not stream:
        return list((await create(**asked)).output[0].content[0].logprobs)
    events = [event async for event in await create(**asked, stream=True)]
    told = [place for event in events if event.type == "response.output_text.delta" for place in event.logprobs]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [place.token for place in told] == [place.token for place in done.logprobs][: len(told)] and len(told) >= 4
    return list(done.logprobs)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_likeliest_tokens_come_with_each_token_and_the_record_stays(stream: bool) -> None:
    records = []
    for talk, count in ((by_chat, 0), (by_chat, 3), (by_responses, 0), (by_responses, 3)):
        async with endpoint([ANSWER]) as at:
            session = at.server.open_session("a", seed=5, limits=LIMITS)
            found = await talk(at, session, count, stream)
            assert [place.logprob for place in found] == pytest.approx([-0.01 * (i + 1) for i in range(len(found))])
            assert [[(top.token, top.logprob) for top in place.top_logprobs] for place in found] == pairs(at, count)
            made = session.trajectory()
            assert made is not None and at.engine.params[0].top_log_probs == count
            records.append((made.response_ids, made.rollout_log_probs, made.versions))
    assert all(record == records[0] for record in records)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompt", ["ab", [97, 98]], ids=["text", "ids"])
async def test_an_echo_begins_with_its_prompt(prompt: Any, stream: bool) -> None:
    async with endpoint([ANSWER]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        prompt = prompt if isinstance(prompt, str) else at.engine.ids("ab")
        asked: Any = {"model": "any", "prompt": [prompt, prompt], "n": 2, "echo": True, "logprobs": 2}
        answers: dict[int, dict[str, Any]] = {}
        create = at.client(session).completions.create
        told = [chunk async for chunk in await create(**asked, stream=True)] if stream else [await create(**asked)]
        for choice in (choice for one in told for choice in one.choices):
            answer = answers.setdefault(choice.index, {"text": "", "tokens": [], "token_logprobs": [], "top_logprobs": []})
            answer["text"] += choice.text
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                answer[name] = answer.get(name, []) + (getattr(choice.logprobs, name) if choice.logprobs else [])
        assert sorted(answers) == [0, 1, 2, 3]
        tokens = ["a", "b", *(at.engine.tokenizer.decode([token]) for token in at.engine.ids(ANSWER))]
        for answer in answers.values():
            assert answer["text"] == "abfour é"
            assert answer["tokens"] == tokens
            assert answer["text_offset"] == [sum(map(len, tokens[:index])) for index in range(len(tokens))]
            assert answer["token_logprobs"][:2] == [None, -0.1] and answer["token_logprobs"][2] == -0.01
            assert answer["top_logprobs"][:2] == [None, {"c": -1.0, "d": -2.0, "b": -0.1}]
            assert answer["top_logprobs"][2] == {"g": -1.0, "h": -2.0, "f": -0.01}
        rows = session.episode().trajectories  # type: ignore[union-attr]
        assert all(row.rollout_log_probs[0] == -0.01 and row.response_mask[0] == 1 for row in rows), "the answer's own"


async def test_an_echo_without_log_probs_asks_the_engine_for_none() -> None:
    async with endpoint([ANSWER]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        answer = await at.client(session).completions.create(model="any", prompt="ab", echo=True)
        assert answer.choices[0].text == "abfour é" and answer.choices[0].logprobs is None
        assert not at.engine.params[0].prompt_log_probs


async def test_a_prompt_is_scored_without_an_answer_and_nothing_is_recorded() -> None:
    async with endpoint([ANSWER]) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        create = at.client(session).completions.create
        scored = await create(model="any", prompt="abc", echo=True, max_tokens=0, logprobs=1)
        assert scored.choices[0].text == "abc" and scored.usage.completion_tokens == 0
        assert scored.choices[0].logprobs.tokens == ["a", "b", "c"]
        assert scored.choices[0].logprobs.token_logprobs == pytest.approx([None, -0.1, -0.2])
        assert session.turns == [] and session.episode() is None


async def test_an_engine_without_them_refuses_them_by_the_wire_s_name() -> None:
    class Plain:
        async def agenerate(self, request: Any, params: Any, follow: Any = None) -> Any:
            name = "top_logprobs" if params.top_log_probs else "echo"
            raise RequestError(f"{name}: this engine has none", param=name)

    async with endpoint() as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS, engine=Plain())
        client = at.client(session)
        for field, asked in (
            ("top_logprobs", client.chat.completions.create(model="x", messages=QUESTION, logprobs=True, top_logprobs=1)),
            ("logprobs", client.completions.create(model="x", prompt="x", logprobs=1)),
            ("echo", client.completions.create(model="x", prompt="x", echo=True, logprobs=0)),
        ):
            with pytest.raises(openai.BadRequestError, match="this engine has none") as caught:
                await asked
            assert caught.value.param == field
