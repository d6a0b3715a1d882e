"""RolloutEngine over a server that another job runs: requests go over HTTP, weights through a shared folder.

The server's weights cannot be read back.  The live weights of this engine are the copy that is written for the server: an
update changes the copy, writes it and makes the server load it.  The server's log-probs show that it did, because training
compares them with its own in every step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from rlhub.engines.rollout.base import (
    Completion,
    FinishReason,
    Follow,
    GenerationRequest,
    Progress,
    RolloutEngine,
    SamplingParams,
    WeightBucket,
    check_requests,
)
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.remote.dialects import DIALECTS, NO_IDS, Call, Dialect, NoTokenIdsError
from rlhub.engines.rollout.remote.server import BrokenConnectionError, Http, Staging, WeightsLock, read_key
from rlhub.engines.rollout.streaming import ProgressRelay
from rlhub.errors import ConfigError, DeadlineError, EngineError, RlhubError
from rlhub.protocol.weights.pieces import Piece
from rlhub.utils.aio.loop_thread import LoopThread

PROBE = (1, 2, 3)  # without 0, which is often padding: its embedding is zero, so that all logits after it are equal
CERTAIN = 1e-3
"""The largest distance from 0 of the log-prob of the only possible token."""
LOCK_FACTOR = 4.0  # times the deadline of a request: the holder of the lock makes at most four
logger = logging.getLogger(__name__)


class RemoteEngine(RolloutEngine):
    """A RolloutEngine over one of the configured servers (see RemoteConfig).  All requests run on the event loop of one
    thread."""

    def __init__(self, setup: RolloutSetup) -> None:
        remote = setup.config.remote
        if not remote.urls:
            raise ConfigError("rollout.name=remote needs rollout.remote.urls: name the servers, for example [http://host:8000]")
        self.version = -1
        self._setup, self._remote = setup, remote
        urls = list(dict.fromkeys(remote.urls))
        self._url = urls[setup.dp_rank % len(urls)]
        self._key = read_key("api_key_file", remote.api_key_file)
        self._admin_key = read_key("admin_key_file", remote.admin_key_file)
        self._dialect: Dialect = DIALECTS[remote.server](setup)
        self._folder = Path(remote.weights_folder).expanduser().absolute() if remote.weights_folder else None
        name = f"policy-{urls.index(self._url)}"
        self._staging = Staging(self._folder or Path(), name, setup.model.path)
        self._lock = WeightsLock(self._folder or Path(), name, timeout_s=LOCK_FACTOR * remote.request_s)
        self._ready = setup.load_checkpoint
        self._loop: LoopThread | None = None
        self._http: Http | None = None
        self._streams = self._dialect.trains  # until a stream turns out to contain no token ids
        self._going = asyncio.Event()  # used on the loop's thread only
        self._pauses = 0  # counts them, so that a request can tell whether a pause ended it
        self._changing = threading.Lock()
        self._paused = False
        self._live: dict[asyncio.Task[Completion], str] = {}

    # --- start and end -------------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        self._loop = LoopThread("remote rollout")
        self._http = Http(self._url, self._key, request_s=self._remote.request_s, admin_key=self._admin_key)
        self._loop.call(self._going.set)
        try:
            self._loop.run(self._http.wait_ready(self._dialect.health, self._remote.start_s))
            if not self._dialect.trains:
                logger.warning("%s: %s", self._url, NO_IDS)
            elif self._generates_already() and self._dialect.processed:
                self._loop.run(self._probe())
            if self._folder is not None:
                self._lock.arrive()
        except BaseException:
            self.shutdown()
            raise

    def _generates_already(self) -> bool:
        """Returns whether the server generates before it has this job's weights.

        A job that ended during a weight update has left the server paused, so it is resumed first.
        """
        if self._folder is None:
            return True
        try:
            with self._lock.taken():
                self._ask(self._dialect.resume(recompute=True))
        except BrokenConnectionError:
            raise
        except EngineError as error:
            logger.warning("%s waits for new weights, so its log-probs are not tried first: %s", self._url, error)
            return False
        return True

    async def _probe(self) -> None:
        """Raises EngineError unless the server's log-probs are those of the distribution that it samples from."""
        params = SamplingParams(top_k=1, max_new_tokens=1, ignore_eos=True)
        try:
            async with asyncio.timeout(self._remote.start_s):
                found = await self._ask_whole(GenerationRequest(prompt_ids=PROBE, seed=0), params)
        except TimeoutError as error:
            hint = "it answers, but samples nothing: is it paused, or without weights?"
            raise DeadlineError(f"a token of the rollout server {self._url}", self._remote.start_s, hint) from error
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
            return list(
                await asyncio.gather(*(self._complete(_PartialCompletion(request, params, None), params) for request in requests))
            )

        found: list[Completion] = self._running().run(gather())
        return found

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        """Streams the tokens of a request with `follow`.  If the stream breaks off, a further request continues after its
        tokens."""
        if not self._paused:
            self._refuse_unready("generate")
        check_requests([request], params, max_model_len=self._setup.max_model_len)
        relay = None if follow is None else ProgressRelay(follow)
        future = asyncio.run_coroutine_threadsafe(self._tracked(request, params, relay), self._running().loop)
        answer = asyncio.wrap_future(future)
        return await (answer if relay is None else relay.until(answer))

    async def _tracked(self, request: GenerationRequest, params: SamplingParams, relay: ProgressRelay | None) -> Completion:
        partial = _PartialCompletion(request, params, relay)
        task = asyncio.create_task(self._complete(partial, params))
        self._live[task] = request.request_id
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():  # the caller cancelled
                raise
            return partial.completion  # `abort` cancelled
        finally:
            del self._live[task]

    async def _complete(self, partial: _PartialCompletion, params: SamplingParams) -> Completion:
        """Generates one completion.  An attempt that a pause has ended, or whose stream broke off after some tokens, is
        followed by another."""
        ended: FinishReason | None = None
        while ended is None:
            await self._going.wait()
            had, pauses = len(partial), self._pauses
            try:
                found = await self._once(partial, params)
            except BrokenConnectionError as error:
                if len(partial) == had and pauses == self._pauses:
                    raise
                logger.warning("%s; going on after %d tokens", error, len(partial))
                if (ended := partial.ended(self._setup.max_model_len)) is not None:
                    partial.add(Progress(token_ids=[], log_probs=[], versions=[], finish_reason=ended))
            else:
                ended = found if found != "abort" or pauses == self._pauses else None
        partial.completion.finish_reason = ended
        if not params.log_probs:  # servers return them all the same, because they come with the token ids
            partial.completion.log_probs = []
        return partial.completion

    async def _once(self, partial: _PartialCompletion, params: SamplingParams) -> FinishReason:
        had = len(partial)
        if partial.relay is not None and self._streams:
            try:
                return await self._streamed(partial, params)
            except NoTokenIdsError:
                if len(partial) > had:
                    raise
                self._streams = False
                logger.warning("%s streams no token ids or no log-probs: its answers come when they are whole", self._url)
        before = self.version
        found = await self._ask_whole(partial.rest, params)
        found.versions = self._versions(found.versions, found.finish_reason, before)
        partial.add(found)
        return found.finish_reason

    async def _ask_whole(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        assert self._http is not None
        path, body = self._dialect.generate(request, params, self._remote.model_name)
        before = self.version
        return self._dialect.completion(await self._http.call(path, body), before)

    def _versions(self, versions: list[int], ended: FinishReason, before: int) -> list[int]:
        """Returns the versions of an answer's tokens, which the server does not name itself.

        An answer that no pause has ended was either complete before the pause or started after it, and then with the new
        weights.  before: the version when the request was sent.
        """
        if ended != "abort" and self.version != before and not self._dialect.keeps_requests:
            return [self.version] * len(versions)
        return versions

    async def _streamed(self, partial: _PartialCompletion, params: SamplingParams) -> FinishReason:
        assert self._http is not None
        path, body = self._dialect.generate(partial.rest, params, self._remote.model_name)
        before, pauses, have = self.version, self._pauses, 0
        waiting: list[Progress] = []
        sure: bool | None = None  # whether the tokens' versions are known when they arrive
        ended: FinishReason | None = None
        async with aclosing(self._http.stream(path, {**body, "stream": True})) as events:
            async for event in events:
                part = self._dialect.part(event, before, have)
                if part is None:
                    continue
                have += len(part.token_ids)
                ended = part.finish_reason or ended
                if sure is None:  # a pause ends a stream that began before it
                    sure = self._dialect.keeps_requests or pauses == self._pauses
                if sure:
                    partial.add(part)
                else:
                    waiting.append(part)
        if ended is None:
            raise BrokenConnectionError(f"{self._url}{path} ended its answer without a reason")
        for part in waiting:
            part.versions = self._versions(part.versions, ended, before)
            partial.add(part)
        return ended

    @property
    def load(self) -> int:
        return len(self._live)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Ends requests with the tokens that were streamed.  The tokens of a request that is not streamed are lost."""

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
            self._ask(self._dialect.pause())

    def _stop(self) -> None:
        self._pauses += 1
        if not self._dialect.keeps_requests:
            self._going.clear()

    def resume(self, *, recompute: bool = True) -> None:
        with self._changing:
            if not self._paused:
                return
            self._refuse_unready("resume")
            self._ask(self._dialect.resume(recompute=recompute))
            self._paused = False
            self._running().call(self._going.set)

    def _ask(self, calls: Sequence[Call]) -> None:
        assert self._http is not None
        for path, body in calls:
            self._running().run(self._http.call(path, body, admin=True))

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
        """Makes the server load the copy, unless another engine of this job has just loaded the same weights there."""
        fingerprint = self._staging.fingerprint()
        with self._lock.taken() as record:
            if record.loaded is not None and record.loaded[:2] == (version, fingerprint):
                return
            record.begin()
            self._reload(version)
            record.end(version, fingerprint)

    def _reload(self, version: int) -> None:
        """Changes the server's weights during a pause, the caller's or one of its own."""
        folder = self._staging.write(version)
        pauses_here = not self._paused
        reload = self._dialect.reload(str(folder), version, reset_version=self.version < 0)
        try:
            self._ask([*(self._dialect.pause() if pauses_here else ()), *reload])
        except RlhubError:
            with suppress(RlhubError):  # other jobs may use the server, which refuses by itself while its weights are not whole
                self._ask(self._dialect.resume(recompute=True) if pauses_here else ())
            raise
        if pauses_here:
            self._ask(self._dialect.resume(recompute=True))

    def live_weights(self) -> Iterator[Piece]:
        return self._staging.pieces()

    def weight_dtype(self, name: str) -> torch.dtype:
        return self._staging.weights[name].dtype

    def sleep(self, *, keep_weights: bool = False) -> None:
        if self.load:
            raise EngineError(f"{self.load} requests are under way: the engine cannot sleep")
        self._ready = False

    def wake_up(self, *, weights_only: bool = False) -> None:
        return


class _PartialCompletion:
    """A request's completion so far, over all the attempts at it.

    completion: the tokens so far; its reason is "abort" until the end is known.
    relay: passes the tokens on to the caller; None if nobody follows the request.
    """

    def __init__(self, request: GenerationRequest, params: SamplingParams, relay: ProgressRelay | None) -> None:
        self._request, self._params = request, params
        self.relay = relay
        self.completion = Completion(token_ids=[], log_probs=[], finish_reason="abort", versions=[])

    def __len__(self) -> int:
        return len(self.completion.token_ids)

    @property
    def rest(self) -> GenerationRequest:
        """Returns the request for the tokens that are still missing."""
        start = self._request.start + len(self)
        return replace(self._request, prompt_ids=[*self._request.prompt_ids, *self.completion.token_ids], start=start)

    def add(self, part: Progress | Completion) -> None:
        """Appends tokens and streams them, with the finish reason if they are the last."""
        self.completion.token_ids += part.token_ids
        self.completion.log_probs += part.log_probs
        self.completion.versions += part.versions
        if self.relay is not None:
            # A completion that a pause has ended will be continued.
            ended = part.finish_reason if part.finish_reason != "abort" else None
            tokens, log_probs, versions = part.token_ids, part.log_probs, part.versions
            self.relay.send(Progress(token_ids=tokens, log_probs=log_probs, versions=versions, finish_reason=ended))

    def ended(self, max_model_len: int) -> FinishReason | None:
        """Returns the reason if the tokens alone show that the completion is whole, or None."""
        tokens, params = self.completion.token_ids, self._params
        if tokens and tokens[-1] in params.stop_token_ids and not params.ignore_eos:
            return "stop"
        full = self._request.start + len(self) >= params.max_new_tokens or len(self.rest.prompt_ids) >= max_model_len
        return "length" if full else None
