"""RolloutEngine over a server that another job runs: requests go by HTTP, weights through a shared folder.

The server's weights cannot be seen from here.  What this engine calls its live weights is the copy that is written for the
server: an update changes the copy, writes it and has the server load it.  That the server does is shown by its log-probs, which
training compares with its own each step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, RolloutEngine, SamplingParams, WeightBucket
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.remote.dialect import NO_IDS, Call, Dialect
from rlhub.engines.rollout.remote.http import Http, read_key
from rlhub.engines.rollout.remote.staging import Staging
from rlhub.engines.rollout.requests import check_requests
from rlhub.errors import ConfigError, EngineError
from rlhub.registry import load_object
from rlhub.utils.loop_thread import LoopThread
from rlhub.utils.pieces import Piece

logger = logging.getLogger(__name__)

PROBE = (1, 2, 3)  # not 0, which is often padding: its embedding is zero, and all logits are the same after it
CERTAIN = 1e-3
"""How far from 0 the log-prob of the only possible token may be."""


class RemoteEngine(RolloutEngine):
    """See the module docstring and RemoteConfig.  Requests run on a thread's event loop, whoever asks for them."""

    def __init__(self, setup: RolloutSetup) -> None:
        remote = setup.config.remote
        if not remote.urls:
            raise ConfigError("rollout.name=remote needs rollout.remote.urls: name the servers, for example [http://host:8000]")
        self.version = -1
        self._setup, self._remote = setup, remote
        self._url = remote.urls[setup.dp_rank % len(remote.urls)]
        self._key = read_key(remote.api_key_file)
        self._server: Dialect = load_object(f"{__package__}.{remote.server}:Server")(setup)
        self._folder = Path(remote.weights_folder).expanduser().absolute() if remote.weights_folder else None
        self._staging = Staging(self._folder or Path(), f"policy-{setup.dp_rank}", setup.model.path)
        self._ready = setup.load_checkpoint
        self._loop: LoopThread | None = None
        self._http: Http | None = None
        self._going = asyncio.Event()  # used on the loop's thread only
        self._pauses = 0  # how many there were: tells a request whether its end was one of them
        self._changing = threading.Lock()
        self._paused = False
        self._live: dict[asyncio.Task[Completion], str] = {}

    # --- life ----------------------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        self._loop = LoopThread("remote rollout")
        self._http = Http(self._url, self._key, request_s=self._remote.request_s)
        self._loop.call(self._going.set)
        try:
            self._loop.run(self._http.wait_ready(self._server.health, self._remote.start_s))
            if not self._server.trains:
                logger.warning("%s: %s", self._url, NO_IDS)
            elif self._server.processed:
                self._loop.run(self._probe())
        except BaseException:
            self.shutdown()
            raise

    async def _probe(self) -> None:
        """Whether log-probs are those of the distribution that is sampled.  EngineError if not, or if there are none."""
        params = SamplingParams(top_k=1, max_new_tokens=1, ignore_eos=True)
        found = await self._once(GenerationRequest(prompt_ids=PROBE, seed=0), params)
        if abs(found.log_probs[0]) > CERTAIN:
            raise EngineError(
                f"{self._url} gives log-probs of another distribution than it samples from: the only possible token has "
                f"{found.log_probs[0]:.3f}, not 0. Start vLLM with --logprobs-mode processed_logprobs"
            )

    def shutdown(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            if self._http is not None:
                loop.run(self._http.close())
            loop.stop()
        self._ready = False

    def _running(self) -> LoopThread:
        if self._loop is None:
            raise EngineError("the engine has no connection: initialize comes first")
        return self._loop

    # --- generation ----------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Completion]:
        self._refuse_unready("generate")
        if self.load:
            raise EngineError(f"{self.load} single requests are under way: generate takes the engine for itself")
        check_requests(requests, params, max_model_len=self._setup.max_model_len)

        async def gather() -> list[Completion]:
            return list(await asyncio.gather(*(self._complete(request, params) for request in requests)))

        found: list[Completion] = self._running().run(gather())
        return found

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        """Servers answer whole: `follow` is told nothing."""
        if not self._paused:
            self._refuse_unready("generate")
        check_requests([request], params, max_model_len=self._setup.max_model_len)
        future = asyncio.run_coroutine_threadsafe(self._tracked(request, params), self._running().loop)
        return await asyncio.wrap_future(future)

    async def _tracked(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        task = asyncio.create_task(self._complete(request, params))
        self._live[task] = request.request_id
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():  # the caller went away
                raise
            return Completion(token_ids=[], log_probs=[], finish_reason="abort", versions=[])  # by `abort`
        finally:
            del self._live[task]

    async def _complete(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        """One completion, in as many attempts as pauses end it."""
        first = request.start
        made = Completion(token_ids=[], log_probs=[], finish_reason="abort", versions=[])
        while True:
            await self._going.wait()
            pauses = self._pauses
            found = await self._once(request, params)
            made = Completion(
                token_ids=made.token_ids + found.token_ids,
                log_probs=made.log_probs + found.log_probs,
                finish_reason=found.finish_reason,
                versions=made.versions + found.versions,
            )
            if found.finish_reason != "abort" or pauses == self._pauses:
                return made
            start = first + len(made.token_ids)
            request = replace(request, prompt_ids=[*request.prompt_ids, *found.token_ids], start=start)

    async def _once(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        assert self._http is not None
        path, body = self._server.generate(request, params, self._remote.model_name)
        before = self.version
        answer = await self._http.call(path, body)
        # What a pause did not end was either over before it or begun after it; of the latter the weights are the new ones.
        found = self._server.completion(answer, before)
        if found.finish_reason != "abort" and self.version != before and not self._server.keeps_requests:
            found.versions = [self.version] * len(found.token_ids)
        return found

    @property
    def load(self) -> int:
        return len(self._live)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Their tokens are lost: a server answers whole."""

        def cancel() -> None:
            for task, name in self._live.items():
                if request_ids is None or name in request_ids:
                    task.cancel()

        self._running().call(cancel)

    def pause(self) -> None:
        with self._changing:
            if self._paused:
                return
            self._paused = True
            self._running().call(self._stop)
            self._ask(self._server.pause())

    def _stop(self) -> None:
        self._pauses += 1
        if not self._server.keeps_requests:
            self._going.clear()

    def resume(self, *, recompute: bool = True) -> None:
        with self._changing:
            if not self._paused:
                return
            self._refuse_unready("resume")
            self._ask(self._server.resume(recompute=recompute))
            self._paused = False
            self._running().call(self._going.set)

    def _ask(self, calls: Sequence[Call]) -> None:
        assert self._http is not None
        for path, body in calls:
            self._running().run(self._http.call(path, body))

    def _refuse_unready(self, action: str) -> None:
        if not self._ready:
            raise EngineError(f"the server has no whole set of weights of this job: update_weights comes before {action}")

    # --- weights -------------------------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        with self.overwriting(version):
            self._staging.take(buckets)

    @contextmanager
    def overwriting(self, version: int) -> Iterator[None]:
        if self._folder is None:
            raise ConfigError(
                "training with rollout.name=remote needs rollout.remote.weights_folder: a folder that this job and the servers "
                "both reach"
            )
        if self.load and not self._paused:
            raise EngineError(f"{self.load} requests are under way: pause before the weight update")
        self._ready = False
        yield
        self._send(version)
        self._ready, self.version = True, version

    def _send(self, version: int) -> None:
        """Have the server run the copy; between two requests' tokens, whether or not the caller has paused."""
        folder = self._staging.write(version)
        own = not self._paused
        self._ask([*(self._server.pause() if own else ()), *self._server.reload(str(folder), version)])
        if own:
            self._ask(self._server.resume(recompute=True))

    def live_weights(self) -> Iterator[Piece]:
        return self._staging.pieces()

    def weight_dtype(self, name: str) -> torch.dtype:
        return self._staging.weights[name].dtype

    def sleep(self) -> None:
        if self.load:
            raise EngineError(f"{self.load} requests are under way: the engine cannot sleep")
        self._ready = False

    def wake_up(self, *, weights_only: bool = False) -> None:
        return
