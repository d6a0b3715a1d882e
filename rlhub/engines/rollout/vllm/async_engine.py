"""RolloutEngine over vLLM's AsyncLLMEngine: single requests, tensor-parallel if configured, in processes that vLLM starts.

The engine core and its workers are children of this process and hold the weights, which `call_workers` reaches.  The client
runs on an event loop of its own, so callers may use any loop, and blocking methods delay nobody's requests.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from rlhub.engines.rollout.base import (
    Completion,
    ExternalWeights,
    Follow,
    GenerationRequest,
    Progress,
    RolloutEngine,
    SamplingParams,
    WeightBucket,
    check_requests,
    resolve_dtype,
)
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.streaming import ProgressRelay
from rlhub.engines.rollout.vllm.environment import child_variables, guarded_process, start_resource_tracker
from rlhub.errors import EngineError, RequestError, RlhubError
from rlhub.models.hf import check_weights
from rlhub.protocol.weights.pieces import Piece
from rlhub.utils.aio.loop_thread import LoopThread

if TYPE_CHECKING:
    from rlhub.engines.rollout.vllm.entrypoints import AsyncClient

LOADED_WEIGHTS = "rlhub.engines.rollout.vllm.worker:LoadedWeights"


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    """A request that waits or runs.

    go: an event that is set when the request may be sent, or was aborted before.
    sent: True once vLLM has the request.
    """

    key: str
    request: GenerationRequest
    go: asyncio.Event = field(default_factory=asyncio.Event)
    sent: bool = False
    aborted: bool = False


class AsyncVLLMEngine(RolloutEngine, ExternalWeights):
    """A RolloutEngine for single requests.  Requests that arrive during a pause are sent when the engine resumes."""

    def __init__(self, setup: RolloutSetup) -> None:
        if setup.config.mode != "async":
            raise EngineError(
                f"this engine serves single requests, but rollout.mode={setup.config.mode}: set rollout.mode=async, or "
                "rollout.name=vllm for an engine in this process"
            )
        self.version = -1
        self._setup = setup
        self._dtype = resolve_dtype(setup.config.dtype, setup.device)
        self._ready = self._paused = self._stale = self._closed = False
        self._keys = itertools.count()
        self._updates = itertools.count()
        self._salt = ""
        self._live: dict[str, _Pending] = {}
        self._thread: LoopThread | None = None
        self._client: AsyncClient | None = None
        self._vocab_size: int | None = None

    def initialize(self) -> None:
        model = self._setup.model
        if self._setup.reads_files:
            check_weights(model, "policy")
        self._thread = LoopThread("vllm-client")
        start_resource_tracker()  # vLLM's processes talk to each other through shared memory
        try:
            with guarded_process(child_variables()):
                self._client = self._thread.run(self._build())
            self._vocab_size = self._client.vocab_size
            self._new_weights(self.version)
            if self._setup.reads_files:
                self.call_workers(LOADED_WEIGHTS, "check", str(model.path))
            if self._setup.adapters:
                self.call_workers(LOADED_WEIGHTS, "add_adapter", model.lora_rank, model.target_modules)
        except BaseException as error:
            self.shutdown()
            if isinstance(error, RuntimeError) and not isinstance(error, RlhubError):
                raise EngineError(f"vLLM's processes did not start: {error}; what they said is in this process's log") from error
            raise
        self._ready = self._setup.load_checkpoint

    async def _build(self) -> AsyncClient:
        # Imported only now: vLLM reads the environment while it is imported.
        from rlhub.engines.rollout.vllm.entrypoints import AsyncClient

        return AsyncClient(self._setup, self._dtype)

    # -- generation --------------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Completion]:
        self._refuse_unready("generate")
        self._check(requests, params)
        self._refuse_busy("generate")

        async def gather() -> list[Completion]:
            return list(await asyncio.gather(*(self._answer(self._enter(request), params, None) for request in requests)))

        found: list[Completion] = self._loop().run(gather())
        return found

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        if not self._paused:
            self._refuse_unready("generate")
        self._check([request], params, ranks=True)
        relay = None if follow is None else ProgressRelay(follow)
        work = self._answer(self._enter(request), params, relay)
        answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop().loop))
        return await (answer if relay is None else relay.until(answer))

    def _check(self, requests: Sequence[GenerationRequest], params: SamplingParams, *, ranks: bool = False) -> None:
        most, vocabulary = self._setup.max_model_len, self.vocab_size
        check_requests(requests, params, max_model_len=most, vocab_size=vocabulary, shapes=True, ranks=ranks)

    @property
    def vocab_size(self) -> int | None:
        return self._vocab_size

    def _enter(self, request: GenerationRequest) -> _Pending:
        live = _Pending(key=str(next(self._keys)), request=request)
        self._live[live.key] = live
        return live

    async def _answer(self, live: _Pending, params: SamplingParams, relay: ProgressRelay | None) -> Completion:
        """Serves one request on the client's loop, from its arrival to its end."""

        def stream(progress: Progress) -> None:
            assert relay is not None
            relay.send(replace(progress, versions=[self.version] * len(progress.token_ids)))

        try:
            if self._paused and not live.aborted:
                await live.go.wait()
            if live.aborted:
                return Completion(token_ids=[], log_probs=[], finish_reason="abort")
            live.sent = True
            on_tokens = None if relay is None else stream
            return await self._running().generate(live.key, live.request, params, self._salt, on_tokens)
        except asyncio.CancelledError:
            if self._closed:
                self._refuse_closed()
            raise
        except EngineError:
            raise
        except (ValueError, TypeError) as error:  # raised before the request reaches the core
            if self.failure:
                raise EngineError(f"{self.failure}; the engine must be built again: {error}") from error
            raise RequestError(f"vLLM refuses the request: {error}") from error
        except Exception as error:
            raise EngineError(f"vLLM failed: {type(error).__name__}: {error}; the engine must be built again") from error
        finally:
            self._live.pop(live.key, None)

    @property
    def load(self) -> int:
        return len(self._live)

    @property
    def failure(self) -> str:
        """Returns an error once vLLM's own watcher thread has noticed the end of one of its processes."""
        client = self._client
        return "vLLM's engine core, or a worker of it, has ended" if client is not None and client.dead else ""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._loop().call(self._abort, request_ids)

    def _abort(self, request_ids: Sequence[str] | None) -> None:
        requests = list(self._live.values())
        chosen = [live for live in requests if request_ids is None or live.request.request_id in request_ids]
        for live in chosen:
            live.aborted = True
            live.go.set()
        sent = [live.key for live in chosen if live.sent]
        if sent:
            self._aborting = asyncio.create_task(self._running().abort(sent))

    # -- pausing and weights -----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        self._paused = True
        self._loop().run(self._running().pause())

    def resume(self, *, recompute: bool = True) -> None:
        if self._paused:
            self._refuse_unready("resume")
            self._loop().run(self._resume(recompute))

    async def _resume(self, recompute: bool) -> None:
        await self._running().resume(recompute=recompute and self._stale)
        self._stale = self._stale and not recompute
        self._paused = False
        for live in list(self._live.values()):  # a copy, because other threads add requests meanwhile
            live.go.set()

    @contextmanager
    def overwriting(self, version: int) -> Iterator[None]:
        if not self._paused:
            self._refuse_busy("the weight update", remedy="pause()")
        self._ready = False
        yield
        self._new_weights(version)
        self._ready = True

    def _new_weights(self, version: int) -> None:
        self._loop().run(self._running().set_version(version))
        self.version, self._salt = version, f"weights-{next(self._updates)}"
        self._stale = True

    def call_workers(self, target: str, method: str, *arguments: Any) -> Sequence[Any]:
        replies = self._loop().run(self._running().call_workers(target, method, pickle.dumps(arguments)))
        answers = [pickle.loads(reply) for reply in replies]
        for _, error in answers:
            if error is not None:
                raise error
        return [value for value, _ in answers]

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        self._refuse_here()

    def live_weights(self) -> Iterator[Piece]:
        self._refuse_here()

    def weight_dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def _refuse_here(self) -> NoReturn:
        raise EngineError(
            "this engine's weights are in processes of vLLM's: publish them through a folder (rollout.mode=async does), or hold "
            "the engine in this process with rollout.name=vllm"
        )

    # -- the rest ----------------------------------------------------------------------------------------------------------

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Frees no memory; it only refuses requests until the next update."""
        self._refuse_busy("sleep")
        self._ready = False

    def wake_up(self, *, weights_only: bool = False) -> None:
        """Does nothing, because `sleep` frees no memory."""

    def shutdown(self) -> None:
        self._closed, self._ready = True, False
        thread, client = self._thread, self._client
        self._thread = self._client = None
        if thread is not None:
            if client is not None:
                thread.run(_close(client))
            thread.stop()

    def _refuse_unready(self, action: str) -> None:
        self._running()
        if not self._ready:
            raise EngineError(f"the engine has no whole set of weights: initialize and an update of them come before {action}")

    def _refuse_busy(self, purpose: str, remedy: str = "await or abort() them") -> None:
        if self._live:
            raise EngineError(f"{purpose} while {len(self._live)} single requests wait or run: {remedy} first")

    def _refuse_closed(self) -> NoReturn:
        raise EngineError("the vLLM engine is not initialized, or was shut down")

    def _loop(self) -> LoopThread:
        if self._thread is None:
            self._refuse_closed()
        return self._thread

    def _running(self) -> AsyncClient:
        if self._client is None:
            self._refuse_closed()
        return self._client


async def _close(client: AsyncClient) -> None:
    client.close()
