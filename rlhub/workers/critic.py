"""The critic's worker: a value model behind a training engine."""

from __future__ import annotations

import time

from rlhub.config.sections.ppo import CriticConfig
from rlhub.engines.training.collectives import check_finite, ensure_process_group
from rlhub.engines.training.registry import build_value_engine
from rlhub.engines.training.updates import ValueUpdater
from rlhub.models.hf import ModelKind
from rlhub.models.throughput import ThroughputMeter
from rlhub.protocol import DataProto
from rlhub.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from rlhub.workers.base import EngineWorker
from rlhub.workers.memory_handover import WorkerRuntime, memory_metrics, release_idle_memory

CRITIC = make_nd_compute_dataproto_dispatch_fn(mesh_name="critic")


class CriticWorker(EngineWorker):
    """All methods run on every rank."""

    hf_kind: ModelKind = "value"

    def __init__(self, config: CriticConfig, runtime: WorkerRuntime, *, loss_agg_mode: str) -> None:
        self.config, self.runtime, self.loss_agg_mode = config, runtime, loss_agg_mode
        self.device = runtime.torch_device(self.local_rank)
        self.hf_model = config.model

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Build the value model's engine (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self.engine = build_value_engine(self.config, device=self.device, seed=self.runtime.seed)
        self.engine.initialize()
        self.engine.offload()
        self.updater = ValueUpdater(
            self.engine, self.config, loss_agg_mode=self.loss_agg_mode, scale=self.runtime.max_response_length
        )
        ranks_per_copy = self.world_size // self.engine.dp_size
        assert self.config.model is not None, "derived before the start"
        self.throughput = ThroughputMeter(self.config.model, self.device, ranks_per_copy, head=False)
        self._register_dispatch_collect_info("critic", self.engine.dp_rank, self.engine.is_collect)

    @register(dispatch_mode=CRITIC, deadline="infer")
    def compute_values(self, batch: DataProto) -> DataProto:
        """values (rows, response), of the state before each response token."""
        release_idle_memory()
        outputs = self.engine.infer(dict(batch.batch.items()), outputs=("values",))
        return DataProto.from_dict(tensors={"values": outputs["values"]})

    @register(dispatch_mode=CRITIC, deadline="update")
    def update_critic(self, batch: DataProto) -> DataProto:
        """All optimizer steps of the batch; meta_info["metrics"] are global."""
        release_idle_memory()
        started = time.perf_counter()
        metrics = self.updater.update(dict(batch.batch.items()), batch.meta_info["num_mini_batches"])
        check_finite(self.engine, "after the update")
        seconds = time.perf_counter() - started
        metrics |= self.throughput.training("critic", batch.batch["attention_mask"], self.config.ppo_epochs or 1, seconds)
        self.engine.offload()
        return DataProto(meta_info={"metrics": metrics | memory_metrics("critic", self.device)})
