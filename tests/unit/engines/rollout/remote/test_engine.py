"""What a server of each kind streams to who follows, read from a server that says what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from aiohttp import web

from rlhub.config.sections.rollout import RemoteConfig, RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.base import GenerationRequest, Progress, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.engines.rollout.remote.engine import RemoteEngine
from rlhub.errors import EngineError, RequestError

REQUEST = GenerationRequest(prompt_ids=[1, 2], seed=5)
PARAMS = SamplingParams(max_new_tokens=6, stop_token_ids=(9,))
Kind = Literal["rlhub", "vllm", "sglang"]
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def said(kind: str, ids: list[int], ended: str | None = None, **more: Any) -> dict[str, Any]:
    """An answer or an event: tokens with log-probs that count them."""
    if kind == "sglang":
        told = [[-0.1 * token, token, None] for token in ids]
        reason = {"type": ended} if ended else None
        return {"meta_info": {"output_token_logprobs": told, "finish_reason": reason, "completion_tokens": len(ids), **more}}
    choice = {"text": "x", "token_ids": ids, "logprobs": {"token_logprobs": [-0.1 * token for token in ids]}}
    return {"choices": [{**choice, "finish_reason": ended, **more}]}


@dataclass
class Scripted:
    """answers: of the next requests: what is not streamed, or events; a function among them is awaited, an Exception cuts the
    connection.  bodies: of the requests.  keys: of all that was asked.  published: bodies of new weights."""

    kind: Kind
    answers: list[Any] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    published: list[dict[str, Any]] = field(default_factory=list)
    engine: RemoteEngine | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        self.keys.append(request.headers.get("Authorization", ""))
        if request.path == "/admin/weights":
            self.published.append(await request.json())
        if request.path not in ("/v1/completions", "/generate"):
            return web.json_response({})
        body = await request.json()
        if not self.answers:  # the engine's first question
            return web.json_response(said(self.kind, [0], "length"))
        self.bodies.append(body)
        answer = self.answers.pop(0)
        if isinstance(answer, web.Response):
            return answer
        if not isinstance(answer, list):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in answer:
            if isinstance(event, Exception):
                assert request.transport is not None
                request.transport.abort()
                return response
            if callable(event):
                await event()
                continue
            await response.write(f"data: {json.dumps(event)}\n\n: a comment\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    @property
    def remote(self) -> RemoteEngine:
        assert self.engine is not None
        return self.engine


@asynccontextmanager
async def server(kind: Kind, folder: Path | None = None, **more: Any) -> AsyncIterator[Scripted]:
    """more: of RemoteConfig."""
    scripted, app = Scripted(kind), web.Application()
    app.router.add_route("*", "/{path:.*}", scripted.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    remote = RemoteConfig(
        urls=[f"http://127.0.0.1:{runner.addresses[0][1]}"], server=kind, weights_folder=str(folder) if folder else None, **more
    )
    engine = build_rollout_engine(
        RolloutSetup(
            config=RolloutConfig(name="remote", remote=remote),
            model=ModelConfig(),
            device=torch.device("cpu"),
            seed=0,
            max_prompt_length=10,
            max_response_length=10,
            load_checkpoint=True,
        )
    )
    assert isinstance(engine, RemoteEngine)
    await asyncio.to_thread(engine.initialize)
    scripted.engine, engine.version = engine, 3
    try:
        yield scripted
    finally:
        await asyncio.to_thread(engine.shutdown)
        await runner.cleanup()


async def follow(at: Scripted, request: GenerationRequest = REQUEST) -> tuple[list[int], list[int], str, list[list[int]]]:
    """Tokens, versions and reason of the completion, and the tokens as they were told."""
    told: list[Progress] = []
    one = await at.remote.agenerate(request, PARAMS, told.append)
    assert [token for part in told for token in part.token_ids] == one.token_ids
    assert [value for part in told for value in part.log_probs] == one.log_probs == [-0.1 * token for token in one.token_ids]
    assert [version for part in told for version in part.versions] == one.versions
    assert [part.finish_reason for part in told] == [None] * (len(told) - 1) + [one.finish_reason]
    return one.token_ids, one.versions, one.finish_reason, [part.token_ids for part in told if part.token_ids]


async def test_tokens_are_told_as_each_kind_of_server_streams_them() -> None:
    scripts: list[tuple[Kind, list[Any]]] = [
        (
            "rlhub",
            [said("rlhub", [4], token_versions=[7]), said("rlhub", [5, 6], token_versions=[7, 8]), said("rlhub", [], "length")],
        ),
        ("vllm", [{"choices": []}, said("vllm", [4]), said("vllm", [5, 6], "length"), {"choices": [], "usage": {}}]),
        ("sglang", [said("sglang", [4]), said("sglang", [4, 5, 6], "length")]),
        ("sglang", [said("sglang", [4]), said("sglang", [5, 6], "length", completion_tokens=3)]),
    ]
    for kind, events in scripts:
        async with server(kind) as at:
            at.answers = [events]
            tokens, versions, reason, told = await follow(at)
            assert (tokens, reason, told) == ([4, 5, 6], "length", [[4], [5, 6]])
            assert versions == ([7, 7, 8] if kind == "rlhub" else [3, 3, 3])
            assert at.bodies[0]["stream"] is True
            at.answers = [said(kind, [4, 5], "stop")]
            await at.remote.agenerate(REQUEST, PARAMS)
            assert "stream" not in at.bodies[1], "nobody follows"


@pytest.mark.parametrize("kind", ["rlhub", "vllm", "sglang"])
async def test_a_stream_that_breaks_off_goes_on_after_what_came(kind: Kind) -> None:
    async with server(kind) as at:
        gone = ConnectionError()
        at.answers = [[said(kind, [4, 5]), gone], [said(kind, [6]), gone], [said(kind, [7], "stop")]]
        tokens, _, reason, _ = await follow(at)
        assert (tokens, reason) == ([4, 5, 6, 7], "stop")
        prompts = [body["input_ids" if kind == "sglang" else "prompt"] for body in at.bodies]
        assert prompts == [[1, 2], [1, 2, 4, 5], [1, 2, 4, 5, 6]]
        at.answers = [[said(kind, [4, 9]), gone]]
        assert (await follow(at))[2] == "stop", "the stop token was there"
        at.answers = [[said(kind, [4, 5, 6, 7, 8, 4]), gone]]
        assert (await follow(at))[2] == "length", "all tokens were there"
        for ends in ([gone], [{"error": {"message": "the device is gone"}}]):
            at.answers = [[said(kind, [4])] + ends, [gone]]
            with pytest.raises(EngineError, match="still run|device is gone"):
                await follow(at)


async def test_a_server_that_streams_no_token_ids_is_asked_for_whole_answers() -> None:
    async with server("vllm") as at:
        at.answers = [[{"choices": [{"text": "x", "finish_reason": None}]}], said("vllm", [4, 5], "stop")]
        assert (await follow(at))[0] == [4, 5]
        at.answers = [said("vllm", [4, 5], "stop")]
        assert (await follow(at))[3] == [[4, 5]]
        assert ["stream" in body for body in at.bodies] == [True, False, False]
    async with server("vllm") as at:  # one that does not know of streams
        at.answers = [said("vllm", [4, 5], "stop")]
        assert (await follow(at))[0] == [4, 5]


async def test_versions_of_a_stream_that_new_weights_end(tmp_path: Path) -> None:
    """The pause ends the stream; its tokens are of the old weights even where they are read after the update."""
    async with server("vllm", tmp_path) as at:
        begun, update = asyncio.Event(), asyncio.Event()

        async def reached() -> None:
            begun.set()
            await update.wait()

        at.answers = [[said("vllm", [4]), reached, said("vllm", [5], "abort")], [said("vllm", [6], "stop")]]
        following = asyncio.create_task(follow(at))
        await begun.wait()
        await asyncio.to_thread(at.remote.pause)
        await asyncio.to_thread(at.remote.update_weights, [[("w", torch.ones(2))]], 4)
        update.set()
        await asyncio.to_thread(at.remote.resume)
        assert (await following)[:3] == ([4, 5, 6], [3, 3, 4], "stop")
        assert at.bodies[1]["prompt"] == [1, 2, 4, 5] and at.bodies[1]["max_tokens"] == 4


async def test_versions_of_a_stream_that_begins_after_the_update(tmp_path: Path) -> None:
    """Sent before the pause, but begun after it: the server took it up with the new weights."""
    async with server("vllm", tmp_path) as at:
        begun, update = asyncio.Event(), asyncio.Event()

        async def reached() -> None:
            begun.set()
            await update.wait()

        at.answers = [[reached, said("vllm", [4]), said("vllm", [5], "stop")]]
        following = asyncio.create_task(follow(at))
        await begun.wait()
        await asyncio.to_thread(at.remote.pause)
        await asyncio.to_thread(at.remote.update_weights, [[("w", torch.ones(2))]], 4)
        await asyncio.to_thread(at.remote.resume)
        update.set()
        assert (await following)[:3] == ([4, 5], [4, 4], "stop")


async def test_a_server_that_mends_itself_is_waited_for_and_a_wrong_request_is_not_sent_again(tmp_path: Path) -> None:
    async with server("rlhub") as at:
        back = {"Retry-After": "0.01"}
        at.answers = [web.json_response({}, status=503, headers=back), web.json_response({}, status=429, headers=back)]
        at.answers.append(said("rlhub", [4], "length", token_versions=[7]))
        assert (await at.remote.agenerate(REQUEST, PARAMS)).token_ids == [4] and len(at.bodies) == 3
        for status, error in ((400, RequestError), (500, EngineError), (503, EngineError)):
            at.answers = [web.json_response({"error": "why"}, status=status)]
            with pytest.raises(error, match=f"answered {status}"):
                await at.remote.agenerate(REQUEST, PARAMS)


async def test_administration_has_its_key_and_a_job_s_first_weights_begin_its_versions(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("clients")
    (tmp_path / "admin-key").write_text("administration")
    keys = {"api_key_file": str(tmp_path / "key"), "admin_key_file": str(tmp_path / "admin-key")}
    async with server("rlhub", tmp_path, **keys) as at:
        at.remote.version = -1
        for version in (5, 6):
            await asyncio.to_thread(at.remote.update_weights, [[("w", torch.zeros(1))]], version)
        at.answers = [said("rlhub", [4], "length", token_versions=[6])]
        await at.remote.agenerate(REQUEST, PARAMS)
    by_path = list(zip(at.asked, at.keys, strict=True))
    assert {key for path, key in by_path if path.startswith("/admin")} == {"Bearer administration"}
    assert {key for path, key in by_path if path.startswith("/v1")} == {"Bearer clients"}
    assert [(body["version"], body["reset_version"]) for body in at.published] == [(5, True), (6, False)]
