"""The policy's worker: training engine, frozen reference and rollout engine in one process, with the resharding between.

Thin shells: each method hands its rows to an engine and wraps what comes back.
"""

from __future__ import annotations

import time

import torch

from rlhub.config.ppo import ActorRolloutRefConfig
from rlhub.config.rollout_correction import RolloutCorrectionConfig
from rlhub.engines.rollout.base import SamplingParams
from rlhub.engines.rollout.registry import build_rollout_engine
from rlhub.engines.training.base import TrainEngine
from rlhub.engines.training.process_group import ensure_process_group
from rlhub.engines.training.registry import build_policy_engine, build_reference_engine
from rlhub.engines.training.updates import PolicyUpdater
from rlhub.models.throughput import ThroughputMeter
from rlhub.models.tokenizer import load_tokenizer
from rlhub.models.vocabulary import read_vocabulary
from rlhub.protocol import DataProto
from rlhub.sharding_manager.manager import ShardingManager, SyncReport
from rlhub.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from rlhub.workers.engine_worker import EngineWorker
from rlhub.workers.rollout_batch import check_completions, generation_requests, pad_completions, training_columns
from rlhub.workers.runtime import WorkerRuntime, memory_metrics

ACTOR = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")
ROLLOUT = make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout")


class ActorRolloutRefWorker(EngineWorker):
    """Roles by need: always actor and rollout, the reference where `needs_reference`.  All methods run on every rank."""

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        runtime: WorkerRuntime,
        *,
        train: bool = True,
        needs_reference: bool = False,
        correction: RolloutCorrectionConfig | None = None,
    ) -> None:
        self.config, self.runtime, self.correction = config, runtime, correction
        self.train, self.needs_reference = train, needs_reference
        self.device = runtime.torch_device(self.local_rank)
        self.hf_model = config.model

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build all engines (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        tokenizer = load_tokenizer(self.config.model.path, trust_remote_code=self.config.model.trust_remote_code)
        self.vocabulary = read_vocabulary(self.config.model, tokenizer)
        self.engine = build_policy_engine(self.config, device=self.device, seed=self.runtime.seed, train=self.train)
        self.engine.initialize()
        self.reference = self._build_reference()
        self._init_rollout()
        if self.train:
            self.throughput = ThroughputMeter(self.config.model, self.device)
            self.updater = PolicyUpdater(
                self.engine,
                self.config.actor,
                scale=self.config.actor.loss_scale_factor or self.runtime.max_response_length,
                correction=self.correction,
            )

    def _build_reference(self) -> TrainEngine | None:
        """The policy itself where it carries adapters (they are switched off), else a frozen copy."""
        if not self.needs_reference or self.config.model.lora_rank > 0:
            return None
        reference = build_reference_engine(self.config, device=self.device, seed=self.runtime.seed)
        reference.initialize()
        return reference

    def _init_rollout(self) -> None:
        tensor_parallel = self.config.rollout.tensor_model_parallel_size
        dp_rank, tp_rank = divmod(self.rank, tensor_parallel)
        self.rollout = build_rollout_engine(
            self.config.rollout,
            self.config.model,
            device=self.device,
            seed=self.runtime.seed,
            max_prompt_length=self.runtime.max_prompt_length,
            max_response_length=self.runtime.max_response_length,
            dp_rank=dp_rank,
            tp_rank=tp_rank,
        )
        self.rollout.initialize()
        self.rollout_asleep = False
        bucket_bytes = self.config.rollout.update_weights_bucket_mb << 20
        self.sharding = ShardingManager(self.engine, self.rollout, bucket_bytes=bucket_bytes)
        self._register_dispatch_collect_info("actor", self.engine.dp_rank, self.engine.is_collect)
        self._register_dispatch_collect_info("rollout", dp_rank, tp_rank == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_weights(self, version: int) -> SyncReport:
        """Publish the policy's weights to the rollout engine as `version`, checked weight by weight."""
        self.rollout_asleep = False
        return self.sharding.sync(version)

    def _let_rollout_sleep(self) -> None:
        """Give the GPU memory of the rollout engine to training; it wakes with the next weights."""
        if self.device.type == "cuda" and self.config.rollout.free_cache_engine and not self.rollout_asleep:
            self.rollout.sleep()
            self.rollout_asleep = True

    @register(dispatch_mode=ROLLOUT)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """meta_info["n"] samples per prompt, neighbours in prompt order, as training columns."""
        if self.rollout_asleep:
            self.sync_weights(self.rollout.version)
        meta, columns = prompts.meta_info, prompts.batch
        requests = generation_requests(
            columns["prompts"],
            columns["attention_mask"],
            columns["ordinal"],
            num_samples=meta["n"],
            run_seed=self.runtime.seed,
        )
        completions = self.rollout.generate(requests, self._sampling(meta))
        check_completions(completions, self.vocabulary.size, meta["log_probs"])
        padded = pad_completions(
            completions, pad_id=self.vocabulary.pad_id, with_log_probs=meta["log_probs"], widest=self._widest
        )
        rows = training_columns(columns["prompts"], columns["attention_mask"], padded, meta["n"])
        return DataProto.from_dict(tensors=rows)

    def _sampling(self, meta: dict[str, object]) -> SamplingParams:
        return SamplingParams(
            temperature=float(meta["temperature"]),
            top_p=float(meta["top_p"]),
            top_k=int(meta["top_k"]),
            max_new_tokens=self.runtime.max_response_length,
            stop_token_ids=self.vocabulary.stop_token_ids,
            ignore_eos=self.config.rollout.ignore_eos,
            log_probs=bool(meta["log_probs"]),
        )

    def _widest(self, width: int) -> int:
        """The longest response over all ranks, so that their parts join without padding again."""
        return int(self.engine.reduce(torch.tensor([width]), op="max", every_rank=True).item())

    @register(dispatch_mode=ACTOR)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """old_log_probs (rows, response) of the current policy, and sum_pi_squared where meta_info asks for it."""
        self._let_rollout_sleep()
        extra = ("sum_pi_squared",) if batch.meta_info.get("sum_pi_squared") else ()
        outputs = self.engine.infer(dict(batch.batch.items()), outputs=("log_probs", *extra))
        columns = {"old_log_probs": outputs["log_probs"]} | {name: outputs[name] for name in extra}
        return DataProto.from_dict(tensors=columns)

    @register(dispatch_mode=ACTOR)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """ref_log_prob (rows, response) of the frozen starting policy."""
        self._let_rollout_sleep()
        engine = self.reference or self.engine
        outputs = engine.infer(dict(batch.batch.items()), outputs=("log_probs",), adapters=False)
        return DataProto.from_dict(tensors={"ref_log_prob": outputs["log_probs"]})

    @register(dispatch_mode=ACTOR)
    def update_actor(self, batch: DataProto) -> DataProto:
        """All optimizer steps of the batch; meta_info["metrics"] are global."""
        self._let_rollout_sleep()
        started = time.perf_counter()
        metrics = self.updater.update(dict(batch.batch.items()), batch.meta_info["num_mini_batches"])
        seconds = time.perf_counter() - started
        metrics |= self.throughput.metrics(batch.batch["attention_mask"], self.config.actor.ppo_epochs, seconds)
        return DataProto(meta_info={"metrics": metrics | memory_metrics("actor", self.device)})

    def close(self) -> None:
        self.rollout.shutdown()
