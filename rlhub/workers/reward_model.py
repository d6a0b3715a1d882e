"""The reward model's worker: a frozen sequence classifier behind a training engine."""

from __future__ import annotations

from rlhub.config.sections.reward import RewardModelConfig
from rlhub.engines.training.process_group import ensure_process_group
from rlhub.engines.training.registry import build_reward_engine
from rlhub.protocol import DataProto
from rlhub.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from rlhub.workers.engine_worker import EngineWorker
from rlhub.workers.runtime import WorkerRuntime

REWARD_MODEL = make_nd_compute_dataproto_dispatch_fn(mesh_name="reward_model")


class RewardModelWorker(EngineWorker):
    """All methods run on every rank."""

    def __init__(self, config: RewardModelConfig, runtime: WorkerRuntime) -> None:
        self.config, self.runtime = config, runtime
        self.device = runtime.torch_device(self.local_rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the reward model's engine (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self.engine = build_reward_engine(self.config, device=self.device, seed=self.runtime.seed)
        self.engine.initialize()
        self.engine.offload()
        self._register_dispatch_collect_info("reward_model", self.engine.dp_rank, self.engine.is_collect)

    @register(dispatch_mode=REWARD_MODEL)
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """rm_scores (rows,), read at the last attended token of input_ids (rows, tokens)."""
        rows = {name: batch.batch[name] for name in ("input_ids", "attention_mask")}
        scores = self.engine.infer(rows, outputs=("scores",))["scores"]
        self.engine.offload()
        return DataProto.from_dict(tensors={"rm_scores": scores})
