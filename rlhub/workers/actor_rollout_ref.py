"""Actor, rollout engine and reference in one process per rank, with the resharding of the policy's weights inside it."""

from __future__ import annotations

from rlhub.engines.training.collectives import check_finite
from rlhub.sharding_manager.manager import ShardingManager
from rlhub.sharding_manager.route import SyncReport
from rlhub.single_controller import Dispatch, register
from rlhub.workers.actor import ActorPart
from rlhub.workers.generation import spoil_weights
from rlhub.workers.memory_handover import MemoryHolder, register_memory_holder
from rlhub.workers.rollout import RolloutPart


class ActorRolloutRefWorker(ActorPart, RolloutPart, MemoryHolder):
    """Training and generation take turns on the same devices.  All methods run on every rank."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Build all engines (collective)."""
        self._init_actor()
        self._init_rollout()
        self.rollout_asleep = False
        register_memory_holder(self)
        self.release_memory()  # for the roles that are built next, and for the trainer until the first weights
        self.sharding = ShardingManager(
            self.engine,
            self.rollout,
            bucket_bytes=self.bucket_bytes,
            timeout_s=self.runtime.deadline_s,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="sync")
    def sync_weights(self, version: int) -> SyncReport:
        """Publish the policy's weights to the rollout engine as `version`, checked weight by weight."""
        check_finite(self.engine, "before the sync")
        self.rollout_asleep = False
        report = self.sharding.sync(version)
        spoil_weights(self.rollout, self.rank)
        return report

    def release_memory(self) -> None:
        """Give the GPU memory of the rollout engine to training; it wakes with the next weights."""
        if self.device.type == "cuda" and self.config.rollout.free_cache_engine and not self.rollout_asleep:
            self.rollout.sleep()
            self.rollout_asleep = True

    def _wake_rollout(self) -> None:
        if self.rollout_asleep:
            self.sync_weights(self.rollout.version)
