"""RolloutServer: one replica of the rollout service, a rollout engine behind asyncio methods.

It is the worker of an asyncio actor, so its methods run at the same time on one event loop: requests stream into the engine's
continuous batch while weights are read beside them.  What blocks (building, reading, pausing) runs in threads.  Generation stops
for the copying of new weights alone; waiting for the files and checking them comes before.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlhub.agents.remote.streaming import TokenStreams
from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, Progress, RolloutEngine, SamplingParams
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
    """One replica's update.  paused_at: by the clock (time.time); pause_s: for how long no token was sampled; read_s: all of
    it, with waiting for the files and checking them; fingerprint: of the weights as they now are, equal on replicas of one
    kind."""

    version: int
    paused_at: float
    pause_s: float
    read_s: float
    bytes: int
    fingerprint: str


@dataclass(slots=True, kw_only=True, frozen=True)
class ReplicaStatus:
    """load: requests in the engine, waiting or running; num_requests, num_tokens: finished since the start, and what they got.
    fingerprint: of the last weight update, "" before the first.  failure: why it cannot generate any more, "" while it can."""

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
    """See the module docstring.  `start` comes first, then `update_weights`, then requests.

    replica: its number among the service's.  load_checkpoint: start with the weights of the model's files, so that requests can
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
        """Build the engine; it has no weights yet."""
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
        if self._engine is None:
            raise EngineError("the replica has no engine yet: start comes first")
        return self._engine

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: str = "") -> Completion:
        """One completion, checked: token ids inside the vocabulary, finite log-probs, one for each token.  RequestError, and the
        engine goes on, where the request is at fault.

        follow: a name by which `progress` knows it, no other request's; "": nobody follows it.
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
        """The tokens after the first `have` of the request that is followed by this name, as soon as there are any; None when no
        more will be told.  They are not checked yet."""
        return await self._streams.after(follow, have)

    async def update_weights(self, folder: str, version: int) -> UpdateReport:
        """Take `version` from the folder.  Requests under way keep their tokens and go on under the new weights.

        Raises what WeightReader raises.  An error before the pause changes nothing; after one in the pause the replica stays
        paused, for it must not serve weights that are not whole.
        """
        started = time.perf_counter()
        reader = self._reader(folder)
        async with self._turn:
            paused_at, report = await asyncio.to_thread(self._take, reader, version)
        self._fingerprint, self._failure = report.fingerprint, ""
        return UpdateReport(
            version=version,
            paused_at=paused_at,
            pause_s=time.time() - paused_at,
            read_s=time.perf_counter() - started,
            bytes=report.bytes,
            fingerprint=report.fingerprint,
        )

    def _reader(self, folder: str) -> FolderReader:
        if folder not in self._readers:
            bucket_bytes = self.config.rollout.update_weights_bucket_mb << 20
            self._readers = {
                folder: folder_reader(self.engine, Path(folder), bucket_bytes=bucket_bytes, timeout_s=self.runtime.deadline_s)
            }
        return self._readers[folder]

    def _take(self, reader: FolderReader, version: int) -> tuple[float, SyncReport]:
        """Map the version beside generation; then pause, copy, go on.  Also the time at which the pause began."""
        faults.at("replica.update_weights", rank=self._replica)
        mapped = reader.prepare(version)
        paused_at = time.time()
        self.engine.pause()
        report = reader.place(mapped)
        spoil_weights(self.engine, self._replica)
        if not self._paused:
            self.engine.resume(recompute=self.config.rollout.recompute_kv_cache)
        return paused_at, report

    async def pause(self) -> None:
        """Sample nothing until `resume`, also when weights are updated meanwhile; requests wait with their tokens."""
        async with self._turn:
            self._paused = True
            await asyncio.to_thread(self.engine.pause)

    async def resume(self) -> None:
        """Go on after `pause`."""
        async with self._turn:
            self._paused = False
            if self._setup.load_checkpoint or self.engine.version >= 0:  # else it goes on with its first weights
                await asyncio.to_thread(self.engine.resume, recompute=self.config.rollout.recompute_kv_cache)

    async def abort(self, request_ids: list[str] | None = None) -> None:
        """End these requests (None: all) with the tokens that they have."""
        self.engine.abort(request_ids)

    async def status(self) -> ReplicaStatus:
        """How it is doing; answers at once, whatever the engine does."""
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
        """Release the engine; requests under way fail.  Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
