"""main_serve in a process of its own, the remote engine here, and what an engine in this process says of the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from rlhub.engines.rollout.base import Completion, GenerationRequest, Progress, RolloutEngine, SamplingParams
from rlhub.errors import ConfigError, EngineError
from tests.support.serving import Server, build, difference, expected, serving, started, weights
from tests.support.wire import wire

CLOSE = 2e-4  # between cached and whole forward passes in float32
PROMPTS = [[5, 6, 7, 13], [8, 9, 14, 5, 6], [20]]
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve"), "rollout.name=hf", "rollout.max_model_len=400") as found:
        yield found


def requests(seed: int = 0) -> list[GenerationRequest]:
    return [GenerationRequest(prompt_ids=prompt, seed=seed + index) for index, prompt in enumerate(PROMPTS)]


def test_a_server_samples_what_the_engine_itself_samples_and_a_tokenizer_would_not(server: Server) -> None:
    remote, local = build(server, "remote"), build(server, "hf")
    found, right = remote.generate(requests(), PARAMS), local.generate(requests(), PARAMS)
    assert [one.token_ids for one in found] == [one.token_ids for one in right]
    assert max(difference(a.log_probs, b.log_probs) for a, b in zip(found, right, strict=True)) < CLOSE
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    texts = [tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in right]
    again = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert again != [one.token_ids for one in right]  # the control: what a server that tokenizes text again would give
    later = [
        GenerationRequest(prompt_ids=[*request.prompt_ids, *whole.token_ids[:9]], seed=request.seed, start=9)
        for request, whole in zip(requests(), right, strict=True)
    ]
    assert [one.token_ids for one in remote.generate(later, PARAMS)] == [one.token_ids[9:] for one in right]
    with pytest.raises(ConfigError, match="weights_folder"):
        remote.update_weights([], 1)
    remote.shutdown()
    local.shutdown()


def test_new_weights_through_the_folder_are_those_that_generate(server: Server, tmp_path: Path) -> None:
    remote = build(server, "remote", tmp_path)
    before = remote.generate(requests(), PARAMS)
    for version in (1, 2):
        moved = weights(server, seed=version)
        remote.update_weights([[pair] for pair in moved.items()], version)
        found = remote.generate(requests(), PARAMS)
        for prompt, one in zip(PROMPTS, found, strict=True):
            assert one.versions == [version] * len(one.token_ids)
            assert difference(one.log_probs, expected(server, moved, prompt, one.token_ids)) < CLOSE
        old = expected(server, weights(server, seed=9), PROMPTS[0], found[0].token_ids)
        assert difference(found[0].log_probs, old) > 10 * CLOSE  # the control: other weights say other things
    assert [one.token_ids for one in before] != [one.token_ids for one in found]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".policy-0", "policy-0-1", "policy-0-2"]
    remote.shutdown()


def test_a_server_that_an_ended_job_left_paused_is_woken_by_the_next(server: Server, tmp_path: Path) -> None:
    ended = build(server, "remote", tmp_path)
    ended._ask(ended._dialect.pause())
    ended.shutdown()
    job = build(server, "remote", tmp_path)
    job.update_weights([[pair] for pair in weights(server, seed=1).items()], 1)
    assert [one.versions[0] for one in job.generate(requests(), PARAMS)] == [1, 1, 1]
    job.shutdown()


def test_weights_that_the_server_refuses_leave_it_to_others(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other = build(server, "remote", tmp_path), build(server, "remote")
    monkeypatch.setattr(job._staging, "write", lambda version: tmp_path / "missing")
    with pytest.raises(EngineError, match="no weights in"):
        job.update_weights([[pair] for pair in weights(server, seed=1).items()], 1)
    assert len(other.generate(requests(), PARAMS)) == len(PROMPTS)
    job.shutdown()
    other.shutdown()


class Heard:
    """Follows a request."""

    def __init__(self) -> None:
        self.parts: list[Progress] = []
        self.changed = asyncio.Event()

    def __call__(self, progress: Progress) -> None:
        self.parts.append(progress)
        self.changed.set()

    def all(self, name: str) -> list[Any]:
        return [value for part in self.parts for value in getattr(part, name)]

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 240)


@pytest.mark.parametrize("followed", [False, True])
def test_requests_go_on_under_weights_that_change(server: Server, tmp_path: Path, followed: bool) -> None:
    remote, params = build(server, "remote", tmp_path), SamplingParams(max_new_tokens=290, ignore_eos=True)
    moved = [weights(server, seed=11), weights(server, seed=12)]
    remote.update_weights([list(moved[0].items())], 11)
    heard = [Heard() for _ in PROMPTS]

    async def run() -> list[Completion]:
        def ask() -> list[asyncio.Task[Completion]]:
            asked = zip(requests(), heard, strict=True)
            return [asyncio.create_task(remote.agenerate(one, params, ear if followed else None)) for one, ear in asked]

        tasks = await started(server, ask, 20)
        for ear in heard if followed else ():
            await ear.until(lambda ear=ear: bool(ear.parts))
        assert remote.load == len(tasks)
        with pytest.raises(EngineError, match="pause before"):
            remote.update_weights([list(moved[1].items())], 12)
        await asyncio.to_thread(remote.pause)
        await asyncio.to_thread(remote.update_weights, [list(moved[1].items())], 12)
        server.limit.lift()
        await asyncio.to_thread(remote.resume)
        return list(await asyncio.gather(*tasks))

    for prompt, one, ear in zip(PROMPTS, asyncio.run(run()), heard, strict=True):
        assert len(one.token_ids) == len(one.log_probs) == len(one.versions) == 290
        assert set(one.versions) == {11, 12}
        assert one.versions == sorted(one.versions)
        cut = one.versions.index(12)
        for values, part in zip(moved, (slice(0, cut), slice(cut, None)), strict=True):
            right = expected(server, values, prompt, one.token_ids)
            assert difference(one.log_probs[part], right[part]) < CLOSE
        if followed:
            for name in ("token_ids", "log_probs", "versions"):
                assert ear.all(name) == getattr(one, name)
            assert [part.finish_reason for part in ear.parts][-2:] == [None, "length"]
    remote.shutdown()


def test_a_stream_that_breaks_off_goes_on_where_it_broke(server: Server) -> None:
    """Through a wire that is cut again and again; what comes is what comes through a whole one, each token told once."""
    params, request = SamplingParams(max_new_tokens=120, ignore_eos=True), requests(seed=3)[0]
    whole = build(server, "remote")
    right = whole.generate([request], params)[0]
    whole.shutdown()

    async def ask(remote: RolloutEngine, heard: Heard) -> Completion:
        """A server that is late would send most tokens at once, and none of them before the cut: the first come by themselves."""
        server.limit.set(5)
        asked = asyncio.create_task(remote.agenerate(request, params, heard))
        await heard.until(lambda: bool(heard.parts))
        server.limit.lift()
        return await asked

    async def run() -> None:
        async with wire(server.address) as cut:
            remote = await asyncio.to_thread(build, server, "remote", None, cut.address)
            cut.after = [4000, 300, 9000]  # bytes: the second brings no token
            heard = Heard()
            with pytest.raises(EngineError, match="does the server still run"):
                await ask(remote, heard)
            assert 0 < len(heard.all("token_ids")) < params.max_new_tokens and cut.after == [9000]
            heard = Heard()
            cut.after = [4000, 9000]
            found = await ask(remote, heard)
            assert found.token_ids == right.token_ids and difference(found.log_probs, right.log_probs) < CLOSE
            assert heard.all("token_ids") == right.token_ids and cut.after == []
            assert heard.all("versions") == right.versions and heard.parts[-1].finish_reason == "length"
            cut.after = [4000]
            with pytest.raises(EngineError, match="does the server still run"):  # the control: whole answers do not go on
                await remote.agenerate(request, params)
            await asyncio.to_thread(remote.shutdown)

    asyncio.run(run())


def test_cancelled_and_aborted_requests_end_on_the_server(server: Server) -> None:
    """While the engine is held because of them: another one goes on when they are gone."""
    remote, params = build(server, "remote"), SamplingParams(max_new_tokens=290, ignore_eos=True)

    async def run() -> None:
        heard = [Heard() for _ in PROMPTS]

        def ask() -> list[asyncio.Task[Completion]]:
            asked = zip(requests(), heard, strict=True)
            return [asyncio.create_task(remote.agenerate(one, params, ear)) for one, ear in asked]

        tasks = await started(server, ask, 20)
        for ear in heard:
            await ear.until(lambda ear=ear: bool(ear.parts))
        tasks[0].cancel()
        remote.abort()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(ended[0], asyncio.CancelledError)
        for one, ear in zip(ended[1:], heard[1:], strict=True):
            assert isinstance(one, Completion) and one.finish_reason == "abort"
            assert 0 < len(one.token_ids) < 290 and ear.all("token_ids") == one.token_ids
            assert len(one.token_ids) == len(one.log_probs) == len(one.versions)

    asyncio.run(run())
    assert remote.load == 0
    assert [len(one.token_ids) for one in remote.generate(requests(), SamplingParams(max_new_tokens=9, ignore_eos=True))] == [
        9
    ] * 3
    server.limit.lift()
    remote.shutdown()


def test_openais_client_and_the_server_s_own_key(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=server.key)
    answer = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hello"}], max_tokens=5, logprobs=True
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 5
    chunks = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hello"}], max_tokens=5, stream=True
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] in ("stop", "length")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="wrong").models.list()
    nowhere: dict[str, object] = {"folder": "/nowhere", "version": 1000}
    with pytest.raises(openai.AuthenticationError, match="administration"):
        client.post(f"{server.address}/admin/weights", body=nowhere, cast_to=object)
    with pytest.raises(openai.BadRequestError, match="no weights in"):
        client.with_options(api_key=server.admin_key).post(f"{server.address}/admin/weights", body=nowhere, cast_to=object)
    assert client.models.list().data[0].id == "policy"
