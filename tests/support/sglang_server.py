"""A server that answers as the record of SGLang's interface says (sglang_record.json): its keys, types, states and refusals.

It computes no model: a token follows from the weights, the tokens before it and the seed, so a request that goes on with its
tokens can be told from one that begins anew.  A field that SGLang's classes do not have is refused, where SGLang itself would
ignore it.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from aiohttp import web
from safetensors.torch import load_file

from rlhub.protocol.weights.fingerprint import combine, fingerprint
from rlhub.utils.aio.loop_thread import LoopThread

RECORD: dict[str, Any] = json.loads(Path(__file__).with_name("sglang_record.json").read_text())
VOCABULARY = 64
FIRST = 2  # the first token that is sampled, at which some requests end
NO_SEED = 0  # greedy sampling has none


@dataclass
class Generating:
    """A request that runs or waits.  running: it has a place, so that an abort returns its tokens."""

    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    running: bool = False
    aborted: bool = False


class SGLang:
    """hold: requests stop before they have so many tokens, until `lift`.  incremental: --incremental-streaming-output.
    bodies: of all requests to /generate.  calls: the paths of the others."""

    def __init__(self, *, incremental: bool = False) -> None:
        self.incremental = incremental
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.paused = False
        self.weights, self.weight_version = "first", "default"
        self.hold: int | None = None
        self.waits = False
        self.url = ""
        self.thread: LoopThread | None = None
        self._live: list[Generating] = []
        self._changed = asyncio.Condition()

    def running(self, tokens: int) -> int:
        """The number of requests that have so many tokens and go no further."""
        return sum(one.running and len(one.tokens) == tokens for one in self._live)

    @property
    def waiting(self) -> int:
        return sum(not one.running for one in self._live)

    async def lift(self) -> None:
        """Lets all requests go on."""
        async with self._changed:
            self.hold, self.waits = None, False
            self._changed.notify_all()

    # --- the interface ---------------------------------------------------------------------------------------------------

    async def handle(self, request: web.Request) -> web.StreamResponse:
        call = RECORD["calls"].get(request.path)
        if call is None or call["method"] != request.method:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.path == "/model_info":
            return answer(request.path, "ready", {"weight_version": self.weight_version})
        if request.path == "/health":  # it samples a token, which waits while the server is paused
            return answer(request.path, "paused" if self.paused else "ready")
        body = await request.json()
        allowed = call["fields"]
        for values, name in ((body, next(iter(allowed))), (body.get("sampling_params", {}), "SamplingParams")):
            if unknown := set(values) - set(allowed.get(name, ())):
                return web.json_response({"error": f"{request.path}: {name} has no {sorted(unknown)}"}, status=400)
        if request.path == "/generate":
            return await self._generate(request, body)
        self.calls.append(request.path)
        return await {
            "/pause_generation": self._pause,
            "/continue_generation": self._go_on,
            "/update_weights_from_disk": self._load,
        }[request.path](body)

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.bodies.append(body)
        if not 0 < body["sampling_params"]["top_p"] <= 1:
            return answer("/generate", "refused")
        one, stream, sent = Generating(body), None, 0
        async with self._changed:
            await self._changed.wait_for(lambda: not self.paused)
            self._live.append(one)
        if body.get("stream"):
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
        try:
            while True:
                final = await self._step(one)
                if stream is not None:
                    await stream.write(b"data: " + json.dumps(self._said(one, final, sent)).encode() + b"\n\n")
                    sent = len(one.tokens) if self.incremental else 0
                if final:
                    break
        finally:
            async with self._changed:
                self._live.remove(one)
                self._changed.notify_all()
        if stream is None:
            return web.json_response(self._said(one, final, 0))
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _step(self, one: Generating) -> str:
        """Samples a token; returns the name of the answer if it is the last."""
        async with self._changed:
            await self._changed.wait_for(lambda: one.aborted or not self._held(one))
        if one.aborted:
            return "aborted" if one.running else "aborted while it waited"
        sampling = one.body["sampling_params"]
        one.running = True
        one.tokens.append(self._token(one))
        if one.tokens[-1] in sampling["stop_token_ids"] and not sampling["ignore_eos"]:
            return "stop"
        return "length" if len(one.tokens) == sampling["max_new_tokens"] else ""

    def _held(self, one: Generating) -> bool:
        return self.waits or (self.hold is not None and len(one.tokens) >= self.hold)

    def _token(self, one: Generating) -> int:
        sampling = one.body["sampling_params"]
        greedy = sampling["temperature"] == 0 or sampling["top_k"] == 1
        seed = NO_SEED if greedy else sampling["sampling_seed"]
        read = f"{self.weights} {one.body['input_ids']} {one.tokens} {seed}"
        return FIRST + xxhash.xxh3_64_intdigest(read.encode()) % (VOCABULARY - FIRST)

    def _said(self, one: Generating, final: str, first: int) -> dict[str, Any]:
        """The body of an answer or an event, with the tokens from number `first`."""
        said: dict[str, Any] = copy.deepcopy(RECORD["calls"]["/generate"]["answers"][final or "event"]["body"])
        tokens, meta = one.tokens[first:], said["meta_info"]
        said["output_ids"], said["text"] = tokens, " ".join(map(str, tokens))
        meta["output_token_logprobs"] = [[log_prob(token), token, None] for token in tokens]
        meta["completion_tokens"], meta["weight_version"] = len(one.tokens), self.weight_version
        meta["output_token_logprobs_length"] = len(tokens)
        return said

    async def _pause(self, body: Mapping[str, Any]) -> web.Response:
        assert body["mode"] == "abort"
        async with self._changed:
            self.paused = True
            for one in self._live:
                one.aborted = True
            self._changed.notify_all()
            await self._changed.wait_for(lambda: not self._live)
        return answer("/pause_generation", "done")

    async def _go_on(self, _: Mapping[str, Any]) -> web.Response:
        async with self._changed:
            self.paused = False
            self._changed.notify_all()
        return answer("/continue_generation", "done")

    async def _load(self, body: Mapping[str, Any]) -> web.Response:
        if not Path(body["model_path"]).is_dir():
            return answer("/update_weights_from_disk", "failed")
        tensors = load_file(Path(body["model_path"]) / "model.safetensors")
        self.weights = combine((name, fingerprint(tensor)) for name, tensor in tensors.items())
        self.weight_version = body["weight_version"]
        return answer("/update_weights_from_disk", "done")


def log_prob(token: int) -> float:
    return -token / 8


def answer(path: str, name: str, changes: Mapping[str, Any] | None = None) -> web.Response:
    """A recorded answer."""
    recorded = RECORD["calls"][path]["answers"][name]
    body = recorded["body"]
    if body is None:
        return web.Response(status=recorded["status"])
    return web.json_response({**body, **(changes or {})}, status=recorded["status"])


@contextmanager
def serving(*, incremental: bool = False) -> Iterator[SGLang]:
    """A server on a thread of its own."""
    thread = LoopThread("recorded sglang")

    async def start() -> tuple[SGLang, web.AppRunner]:
        at, app = SGLang(incremental=incremental), web.Application()
        app.router.add_route("*", "/{path:.*}", at.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        at.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return at, runner

    at, runner = thread.run(start())
    at.thread = thread
    try:
        yield at
    finally:
        thread.run(runner.cleanup())
        thread.stop()
