"""RolloutServer: one replica of the rollout service, a rollout engine behind asyncio methods.

It is the worker of an asyncio actor, so its methods run concurrently on one event loop: requests stream into the engine's
continuous batch while new weights are read.  Blocking work (building, reading, pausing) runs in threads.  Generation pauses only
while new weights are exchanged with the live ones, or copied; getting and checking them happens before.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass

import psutil

from rlhub.agents.remote.streaming import TokenStreams
from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.engines.rollout.base import Completion, ExternalWeights, GenerationRequest, Progress, RolloutEngine, SamplingParams
from rlhub.engines.rollout.registry import build_rollout_engine
from rlhub.errors import EngineError, RequestError
from rlhub.models.tokenizer import Vocabulary
from rlhub.rollout_service.weights_folder import FolderReader, folder_reader
from rlhub.sharding_manager.route import SyncReport
from rlhub.single_controller import Worker
from rlhub.utils import faults
from rlhub.workers.generation import check_completions, load_vocabulary, rollout_setup, spoil_log_probs, spoil_weights
from rlhub.workers.memory_handover import GIB, WorkerRuntime


@dataclass(slots=True, kw_only=True, frozen=True)
class UpdateReport:
    """The report of one replica's weight update.

    paused_at: the time (time.time) at which generation paused.  pause_s: the duration of the pause.  read_s: the duration of the
    whole update, including waiting for the files and checking them.  fingerprint: of the loaded weights; replicas of one kind
    have equal ones.  fallbacks: the versions so far that the replica had to get in full, because a delta was of no use.
    """

    version: int
    paused_at: float
    pause_s: float
    read_s: float
    bytes: int
    fingerprint: str
    fallbacks: int = 0


@dataclass(slots=True, kw_only=True, frozen=True)
class ReplicaStatus:
    """The status of a replica.

    load: the number of requests in the engine, waiting or running.  num_requests, num_tokens: the completed requests since the
    start, and their tokens.  fingerprint: of the last weight update, "" before the first.  failure: why it can no longer
    generate, "" if it can.
    """

    version: int
    load: int
    paused: bool
    num_requests: int
    num_tokens: int
    fingerprint: str
    failure: str
    pid: int
    rss_gb: float


class RolloutServer(Worker):
    """Serves generation requests with one engine.  `start` must come first, then `update_weights`, then requests.

    replica: its number in the service.  load_checkpoint: load the weights of the model's files at the start, so that requests can
    come before any update.
    """

    def __init__(
        self, config: ActorRolloutRefConfig, runtime: WorkerRuntime, *, replica: int = 0, load_checkpoint: bool = False
    ) -> None:
        self.config, self.runtime = config, runtime
        device = runtime.torch_device(0)
        self._replica = replica
        self._setup = rollout_setup(config, runtime, device, dp_rank=replica, load_checkpoint=load_checkpoint)
        self._engine: RolloutEngine | None = None
        self._vocabulary: Vocabulary | None = None
        self._readers: dict[str, FolderReader] = {}
        self._turn = asyncio.Lock()  # updates and pauses come one after the other
        self._paused = False
        self._fingerprint = self._failure = ""
        self._num_requests = self._num_tokens = 0
        self._streams = TokenStreams()

    async def start(self) -> None:
        """Builds the engine, without weights."""
        await asyncio.to_thread(self._build)

    def _build(self) -> None:
        faults.at("replica.start", rank=self._replica)
        if self.config.model.path is not None:  # an engine without a model samples from no vocabulary
            self._vocabulary = load_vocabulary(self.config)
        engine = build_rollout_engine(self._setup)
        engine.initialize()
        self._engine = engine

    @property
    def engine(self) -> RolloutEngine:
        """Returns the engine.  Raises EngineError before `start`."""
        if self._engine is None:
            raise EngineError("the replica has no engine yet: start comes first")
        return self._engine

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: str = "") -> Completion:
        """Generates one completion and checks it: token ids inside the vocabulary and a finite log-prob for each token.  Raises
        RequestError if the request is invalid; the engine continues.

        follow: a unique name under which `progress` streams the tokens; "" for no streaming.
        """
        engine = self.engine
        faults.at("replica.generate", rank=self._replica)
        try:
            with self._streams.of(follow) if follow else nullcontext() as stream:
                completion = await engine.agenerate(request, params, stream.follow if stream is not None else None)
        except RequestError:
            raise
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"  # the request was fine, so the engine is not
            raise
        spoil_log_probs([completion], self._replica)
        if self._vocabulary is not None:
            check_completions([completion], self._vocabulary.size, params.log_probs)
        self._num_requests += 1
        self._num_tokens += len(completion.token_ids)
        return completion

    async def progress(self, follow: str, have: int) -> Progress | None:
        """Returns the tokens after the first `have` of the request with this name as soon as there are any, or None when no more
        will come.  These tokens are not checked yet."""
        return await self._streams.after(follow, have)

    async def update_weights(self, folder: str, version: int) -> UpdateReport:
        """Loads `version` from the folder, or from the training ranks at these addresses.  Running requests keep their tokens and
        continue under the new weights.

        Raises the errors of WeightReader.  An error before the pause changes nothing.  After an error during the pause the
        replica stays paused, because it must not serve partly loaded weights.
        """
        started = time.perf_counter()
        reader = self._reader(folder)
        async with self._turn:
            paused_at, pause_s, report = await asyncio.to_thread(self._take, reader, version)
        self._fingerprint, self._failure = report.fingerprint, ""
        return UpdateReport(
            version=version,
            paused_at=paused_at,
            pause_s=pause_s,
            read_s=time.perf_counter() - started,
            bytes=report.bytes,
            fingerprint=report.fingerprint,
            fallbacks=report.fallbacks,
        )

    def _reader(self, folder: str) -> FolderReader:
        if folder not in self._readers:
            bucket_bytes = self.config.rollout.update_weights_bucket_mb << 20
            self._close_readers()
            here = None if isinstance(self.engine, ExternalWeights) else self._setup.device  # else its workers' alone
            timeout_s = self.runtime.deadline_s
            reader = folder_reader(self.engine, folder, bucket_bytes=bucket_bytes, timeout_s=timeout_s, device=here)
            self._readers = {folder: reader}
        return self._readers[folder]

    def _close_readers(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers = {}

    def _take(self, reader: FolderReader, version: int) -> tuple[float, float, SyncReport]:
        """Prepares the version while generation continues; then pauses, places it and resumes.  Returns when the pause began, its
        seconds and the report."""
        faults.at("replica.update_weights", rank=self._replica)
        mapped = reader.prepare(version)
        paused_at = time.time()
        self.engine.pause()
        report = reader.place(mapped)
        spoil_weights(self.engine, self._replica)
        if not self._paused:
            self.engine.resume(recompute=self.config.rollout.recompute_kv_cache)
        return paused_at, time.time() - paused_at, report

    async def pause(self) -> None:
        """Stops sampling until `resume`, also over weight updates; requests keep their tokens and wait."""
        async with self._turn:
            self._paused = True
            await asyncio.to_thread(self.engine.pause)

    async def resume(self) -> None:
        """Continues sampling after `pause`."""
        async with self._turn:
            self._paused = False
            if self._setup.load_checkpoint or self.engine.version >= 0:  # else it goes on with its first weights
                await asyncio.to_thread(self.engine.resume, recompute=self.config.rollout.recompute_kv_cache)

    async def sleep(self, keep_weights: bool) -> None:
        """Frees the device's memory until the next weights, in an engine without requests.  keep_weights: see
        RolloutEngine.sleep."""
        async with self._turn:
            await asyncio.to_thread(self.engine.sleep, keep_weights=keep_weights)

    async def abort(self, request_ids: list[str] | None = None) -> None:
        """Ends these requests (None: all) with the tokens that they have."""
        self.engine.abort(request_ids)

    async def status(self) -> ReplicaStatus:
        """Returns the status at once, whatever the engine does."""
        engine = self._engine
        return ReplicaStatus(
            version=engine.version if engine else -1,
            load=engine.load if engine else 0,
            paused=self._paused,
            num_requests=self._num_requests,
            num_tokens=self._num_tokens,
            fingerprint=self._fingerprint,
            failure=self._failure or (engine.failure if engine else ""),
            pid=os.getpid(),
            rss_gb=psutil.Process().memory_info().rss / GIB,
        )

    async def shutdown(self) -> None:
        """Shuts the engine down; running requests fail.  Idempotent."""
        engine, self._engine = self._engine, None
        self._close_readers()
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)

    def close(self) -> None:
        """Shuts the engine down, without asyncio."""
        self._close_readers()
        if self._engine is not None:
            self._engine.shutdown()
