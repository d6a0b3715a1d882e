"""The workers of supervised training: fine-tuning on responses, DPO on a policy with a frozen reference, and a reward model by
Bradley-Terry.

Thin shells.  With preference pairs a batch has a row a pair, so dispatch over ranks never separates one; an engine is given two
rows for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhub.algorithms.masked import masked_sum
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.engines.training.base import TrainEngine
from rlhub.engines.training.collectives import check_finite, ensure_process_group
from rlhub.engines.training.preference import (
    DPOLoss,
    PairLoss,
    RewardLoss,
    evaluate_pairs,
    interleave,
    sequence_log_probs,
    take_pair_step,
)
from rlhub.engines.training.registry import build_dpo_engine, build_dpo_reference_engine, build_rm_engine, build_sft_engine
from rlhub.engines.training.updates import sft_loss, take_steps
from rlhub.errors import DataError
from rlhub.models.hf import ModelKind
from rlhub.protocol import DataProto
from rlhub.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from rlhub.workers.base import EngineWorker
from rlhub.workers.memory_handover import WorkerRuntime, memory_metrics

MODEL = make_nd_compute_dataproto_dispatch_fn(mesh_name="model")


class PreferenceWorker(EngineWorker):
    """What both have in common; a subclass builds `engine` and `loss`.  All methods run on every rank."""

    loss: PairLoss

    def __init__(self, config: DPOConfig | RMConfig, runtime: WorkerRuntime) -> None:
        self.runtime = runtime
        self.device = runtime.torch_device(self.local_rank)
        self.hf_model = config.model

    def _start(self, engine: TrainEngine) -> None:
        """Initialize the engine that is trained (collective)."""
        self.engine = engine
        self.engine.initialize()
        self._register_dispatch_collect_info("model", self.engine.dp_rank, self.engine.is_collect)

    def _rows(self, batch: DataProto) -> dict[str, Tensor]:
        """What engine and loss read, two rows a pair."""
        return interleave(dict(batch.batch.items()))

    @register(dispatch_mode=MODEL, deadline="update")
    def train_step(self, batch: DataProto) -> DataProto:
        """One optimizer step over the pairs; meta_info["metrics"] are global: means over the pairs."""
        step = take_pair_step(self.engine, self._rows(batch), self.loss)
        check_finite(self.engine, "after the update")
        metrics = {
            "train/loss": step.sums.pop("loss"),
            "train/grad_norm": step.report.grad_norm,
            "train/lr": step.report.lr,
            "train/skipped_steps": float(step.report.skipped),
            "train/pairs": step.num_pairs,
            **{name: total / step.num_pairs for name, total in step.sums.items()},
        }
        return DataProto(meta_info={"metrics": metrics | memory_metrics("model", self.device)})

    @register(dispatch_mode=MODEL, deadline="infer")
    def evaluate(self, batch: DataProto) -> DataProto:
        """meta_info["metrics"]: sums over all ranks' pairs, and their `count`."""
        sums = evaluate_pairs(self.engine, self._rows(batch), self.loss)
        names = {"count": "count", "loss": "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margin"}
        return DataProto(meta_info={"metrics": {name: sums[key] for key, name in names.items()}})


class DPOWorker(PreferenceWorker):
    """The policy, and the reference: a frozen copy, or the policy itself with its adapters off."""

    def __init__(self, config: DPOConfig, runtime: WorkerRuntime) -> None:
        super().__init__(config, runtime)
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Build the engines (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self.loss = DPOLoss(self.config.dpo)
        self._start(build_dpo_engine(self.config, device=self.device, seed=self.runtime.seed))
        self.reference: TrainEngine | None = None
        if self.config.model.lora_rank == 0:
            self.reference = build_dpo_reference_engine(self.config, device=self.device, seed=self.runtime.seed)
            self.reference.initialize()

    def _rows(self, batch: DataProto) -> dict[str, Tensor]:
        rows = super()._rows(batch)
        engine = self.reference or self.engine
        log_probs = engine.infer(rows, outputs=("log_probs",), adapters=False)["log_probs"]
        if self.reference is not None:
            self.reference.offload()
        return rows | {"ref_log_prob": sequence_log_probs(log_probs, rows["response_mask"])}


class RewardTrainingWorker(PreferenceWorker):
    """A sequence classifier with one label."""

    hf_kind: ModelKind = "reward"

    def __init__(self, config: RMConfig, runtime: WorkerRuntime) -> None:
        super().__init__(config, runtime)
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Build the engine (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self.loss = RewardLoss()
        self._start(build_rm_engine(self.config, device=self.device, seed=self.runtime.seed))


class SFTWorker(EngineWorker):
    """All methods run on every rank."""

    def __init__(self, config: SFTConfig, runtime: WorkerRuntime) -> None:
        self.config, self.runtime = config, runtime
        self.device = runtime.torch_device(self.local_rank)
        self.hf_model = config.model

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Build the engine (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self.engine = build_sft_engine(self.config, device=self.device, seed=self.runtime.seed)
        self.engine.initialize()
        self._register_dispatch_collect_info("model", self.engine.dp_rank, self.engine.is_collect)

    @register(dispatch_mode=MODEL, deadline="update")
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

    @register(dispatch_mode=MODEL, deadline="infer")
    def evaluate(self, batch: DataProto) -> DataProto:
        """meta_info["metrics"]: the summed negative log-likelihood and the `count` of tokens, over all ranks."""
        mask = batch.batch["response_mask"]
        log_probs = self.engine.infer(dict(batch.batch.items()), outputs=("log_probs",))["log_probs"]
        local = torch.stack([-masked_sum(log_probs.double(), mask), mask.sum().double()])
        loss, tokens = self.engine.reduce(local).tolist()
        return DataProto(meta_info={"metrics": {"loss": loss, "count": tokens}})
