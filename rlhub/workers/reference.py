"""The frozen reference policy in processes of its own."""

from __future__ import annotations

import dataclasses

from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.engines.training.process_group import ensure_process_group
from rlhub.engines.training.registry import build_reference_engine
from rlhub.protocol import DataProto
from rlhub.single_controller import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from rlhub.workers.runtime import WorkerRuntime

REFERENCE = make_nd_compute_dataproto_dispatch_fn(mesh_name="reference")


class ReferenceWorker(Worker):
    """All methods run on every rank.  Of a policy with adapters it is the model under them."""

    def __init__(self, config: ActorRolloutRefConfig, runtime: WorkerRuntime) -> None:
        self.config = dataclasses.replace(config, model=dataclasses.replace(config.model, lora_rank=0))
        self.runtime = runtime
        self.device = runtime.torch_device(self.local_rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the reference's engine (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self.engine = build_reference_engine(self.config, device=self.device, seed=self.runtime.seed)
        self.engine.initialize()
        self.engine.offload()
        self._register_dispatch_collect_info("reference", self.engine.dp_rank, self.engine.is_collect)

    @register(dispatch_mode=REFERENCE)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """ref_log_prob (rows, response) of the frozen starting policy."""
        outputs = self.engine.infer(dict(batch.batch.items()), outputs=("log_probs",))
        self.engine.offload()
        return DataProto.from_dict(tensors={"ref_log_prob": outputs["log_probs"]})
