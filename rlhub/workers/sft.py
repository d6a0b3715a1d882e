"""The worker of supervised fine-tuning: one policy engine, the negative log-likelihood of response tokens."""

from __future__ import annotations

import torch

from rlhub.algorithms.masked import masked_sum
from rlhub.config.sections.sft import SFTConfig
from rlhub.engines.training.finite import check_finite
from rlhub.engines.training.process_group import ensure_process_group
from rlhub.engines.training.registry import build_sft_engine
from rlhub.engines.training.updates import sft_loss, take_steps
from rlhub.errors import DataError
from rlhub.protocol import DataProto
from rlhub.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from rlhub.workers.engine_worker import EngineWorker
from rlhub.workers.runtime import WorkerRuntime, memory_metrics

MODEL = make_nd_compute_dataproto_dispatch_fn(mesh_name="model")


class SFTWorker(EngineWorker):
    """All methods run on every rank."""

    def __init__(self, config: SFTConfig, runtime: WorkerRuntime) -> None:
        self.config, self.runtime = config, runtime
        self.device = runtime.torch_device(self.local_rank)
        self.hf_model = config.model

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the engine (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self.engine = build_sft_engine(self.config, device=self.device, seed=self.runtime.seed)
        self.engine.initialize()
        self._register_dispatch_collect_info("model", self.engine.dp_rank, self.engine.is_collect)

    @register(dispatch_mode=MODEL)
    def train_step(self, batch: DataProto) -> DataProto:
        """One optimizer step over the batch; meta_info["metrics"] are global."""
        rows = dict(batch.batch.items())
        steps = take_steps(self.engine, rows, sft_loss, num_mini_batches=1, epochs=1, scale=1.0, outputs=("log_probs",))
        check_finite(self.engine, "after the update")
        if not steps:
            raise DataError("no row of this batch has a token to learn from; check data.response_key and the truncation")
        (step,) = steps
        metrics = {
            "train/loss": step.sums["loss"],
            "train/grad_norm": step.report.grad_norm,
            "train/lr": step.report.lr,
            "train/skipped_steps": float(step.report.skipped),
            "train/tokens": step.denominators.tokens,
        }
        return DataProto(meta_info={"metrics": metrics | memory_metrics("model", self.device)})

    @register(dispatch_mode=MODEL)
    def evaluate(self, batch: DataProto) -> DataProto:
        """meta_info["metrics"]: the summed negative log-likelihood and the `count` of tokens, over all ranks."""
        mask = batch.batch["response_mask"]
        log_probs = self.engine.infer(dict(batch.batch.items()), outputs=("log_probs",))["log_probs"]
        local = torch.stack([-masked_sum(log_probs.double(), mask), mask.sum().double()])
        loss, tokens = self.engine.reduce(local).tolist()
        return DataProto(meta_info={"metrics": {"loss": loss, "count": tokens}})
