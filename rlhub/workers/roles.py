"""The workers of every role beside actor, reference and rollout alone: thin shells, whose methods hand rows to an engine and wrap
what it returns.

- `ActorRolloutRefWorker`: actor, rollout engine and reference in one process per rank, with the resharding of the policy's
  weights inside it.
- `CriticWorker`: a value model behind a training engine.
- `RewardModelWorker`, `JudgeWorker`: models that score and whose weights never change, a sequence classifier behind a training
  engine, and a rollout engine with a model of its own.
- `SFTWorker`, `DPOWorker`, `RewardTrainingWorker`: supervised training on responses, on preference pairs with a frozen reference,
  and of a reward model by Bradley-Terry.  A batch of pairs has one row a pair, so dispatch over ranks never separates one; an
  engine is given two rows for each.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhub.algorithms.masked import masked_sum
from rlhub.config.sections.env import EnvConfig
from rlhub.config.sections.ppo import ActorRolloutRefConfig, CriticConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.reward import JudgeConfig, RewardModelConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.vla import FLOW, vla_of
from rlhub.data.episodes import FRAME, EpisodeReader
from rlhub.engines.rollout.base import GenerationRequest, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.engines.training.base import TrainEngine
from rlhub.engines.training.collectives import check_finite, ensure_process_group
from rlhub.engines.training.registry import (
    build_dpo_engine,
    build_dpo_reference_engine,
    build_reward_engine,
    build_rm_engine,
    build_sft_engine,
    build_value_engine,
)
from rlhub.engines.training.updates import (
    DPOLoss,
    PairLoss,
    RewardLoss,
    ValueUpdater,
    evaluate_pairs,
    flow_loss,
    interleave,
    sequence_log_probs,
    sft_loss,
    take_pair_step,
    take_steps,
)
from rlhub.errors import DataError
from rlhub.models.hf import ModelKind, load_config
from rlhub.models.shape import local_shape
from rlhub.models.throughput import ThroughputMeter
from rlhub.models.tokenizer import load_tokenizer, read_vocabulary
from rlhub.models.vla.flow import flow_columns
from rlhub.models.vla.policy import PIXEL_VALUES
from rlhub.protocol import DataProto
from rlhub.rewards.combine import Judge, Judgements
from rlhub.rewards.pool import RewardFunction
from rlhub.rewards.rendering import Rendering
from rlhub.sharding_manager.manager import ShardingManager
from rlhub.sharding_manager.route import SyncReport
from rlhub.single_controller import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from rlhub.single_controller.dispatch import collect_list
from rlhub.utils.seeding import sample_seeds
from rlhub.workers.actor import ActorPart
from rlhub.workers.base import EngineWorker
from rlhub.workers.generation import check_completions, spoil_weights
from rlhub.workers.memory_handover import MemoryHolder, WorkerRuntime, memory_metrics, register_memory_holder, release_idle_memory
from rlhub.workers.rollout import RolloutPart


class ActorRolloutRefWorker(ActorPart, RolloutPart, MemoryHolder):
    """Trains and generates in turns on the same devices.  All methods run on every rank."""

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        runtime: WorkerRuntime,
        *,
        reward: RewardFunction | None = None,
        env: EnvConfig | None = None,
        **actor: Any,
    ) -> None:
        """actor: the further settings of ActorPart."""
        super().__init__(config, runtime, **actor)
        self.reward, self.env = reward, env

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Builds all engines (collective)."""
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
        """Publishes the policy's weights to the rollout engine as `version`, checked weight by weight."""
        check_finite(self.engine, "before the sync")
        self.rollout_asleep = False
        report = self.sharding.sync(version)
        spoil_weights(self.rollout, self.rank)
        return report

    def release_memory(self) -> None:
        """Gives the GPU memory of the rollout engine to training; it wakes with the next weights."""
        if self.device.type == "cuda" and self.config.rollout.free_cache_engine and not self.rollout_asleep:
            self.rollout.sleep()
            self.rollout_asleep = True

    def _wake_rollout(self) -> None:
        if self.rollout_asleep:
            self.sync_weights(self.rollout.version)


CRITIC = make_nd_compute_dataproto_dispatch_fn(mesh_name="critic")


class CriticWorker(EngineWorker):
    """Trains the value model.  All methods run on every rank."""

    hf_kind: ModelKind = "value"

    def __init__(self, config: CriticConfig, runtime: WorkerRuntime, *, loss_agg_mode: str) -> None:
        self.config, self.runtime, self.loss_agg_mode = config, runtime, loss_agg_mode
        self.device = runtime.torch_device(self.local_rank)
        self.hf_model = config.model

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Builds the value model's engine (collective)."""
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

    @register(dispatch_mode=CRITIC, deadline="infer", adds_columns=True)
    def compute_values(self, batch: DataProto) -> DataProto:
        """Returns values (rows, response), of the state before each response token."""
        release_idle_memory()
        outputs = self.engine.infer(dict(batch.batch.items()), outputs=("values",))
        return DataProto.from_dict(tensors={"values": outputs["values"]})

    @register(dispatch_mode=CRITIC, deadline="update")
    def update_critic(self, batch: DataProto) -> DataProto:
        """Takes all optimizer steps of the batch; meta_info["metrics"] are global."""
        release_idle_memory()
        started = time.perf_counter()
        metrics = self.updater.update(dict(batch.batch.items()), batch.meta_info["num_mini_batches"])
        check_finite(self.engine, "after the update")
        seconds = time.perf_counter() - started
        metrics |= self.throughput.training("critic", batch.batch["attention_mask"], self.config.ppo_epochs or 1, seconds)
        self.engine.offload()
        return DataProto(meta_info={"metrics": metrics | memory_metrics("critic", self.device)})


REWARD_MODEL = make_nd_compute_dataproto_dispatch_fn(mesh_name="reward_model")


class RewardModelWorker(EngineWorker):
    """Scores texts with a frozen sequence classifier.  All methods run on every rank."""

    def __init__(self, config: RewardModelConfig, runtime: WorkerRuntime) -> None:
        self.config, self.runtime = config, runtime
        self.device = runtime.torch_device(self.local_rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Builds the reward model's engine (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self.rendering = self._load_rendering()
        self.engine = build_reward_engine(self.config, device=self.device, seed=self.runtime.seed)
        self.engine.initialize()
        self.engine.offload()
        self._register_dispatch_collect_info("reward_model", self.engine.dp_rank, self.engine.is_collect)

    @register(dispatch_mode=REWARD_MODEL, deadline="infer")
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Returns rm_scores (rows,), read at the last attended token of input_ids (rows, tokens).

        With model.input_tokenizer these are the rows' texts (raw_chat, responses, response_length) in the model's own tokens.
        """
        read = batch if self.rendering is None else self.rendering(batch)
        rows = {name: read.batch[name] for name in ("input_ids", "attention_mask")}
        scores = self.engine.infer(rows, outputs=("scores",))["scores"]
        self.engine.offload()
        return DataProto.from_dict(tensors={"rm_scores": scores})

    def _load_rendering(self) -> Rendering | None:
        model = self.config.model
        if model.input_tokenizer is None:
            return None
        own = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        shape = local_shape(model.path, model.override_config)
        longest = self.config.max_length or (shape.max_positions if shape is not None else 0)
        return Rendering(load_tokenizer(model.input_tokenizer), own, longest or None)


JUDGE = dataclasses.replace(make_nd_compute_dataproto_dispatch_fn(mesh_name="judge"), collect_fn=collect_list, proto=False)


class JudgeWorker(Worker):
    """Judges responses with a model of its own.  All methods run on every rank.  policy: the policy's settings, whose tokenizer
    decodes responses, and whose rollout has the settings that the judge has none of its own for."""

    def __init__(self, config: JudgeConfig, policy: ActorRolloutRefConfig, runtime: WorkerRuntime) -> None:
        self.config, self.policy, self.runtime = config, policy.model, runtime
        self.device = runtime.torch_device(self.local_rank)
        self.rollout_config = dataclasses.replace(
            policy.rollout,
            name=config.name or policy.rollout.name,
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            gpu_memory_utilization=config.gpu_memory_utilization,
            max_model_len=config.max_prompt_length + config.max_tokens,
            ignore_eos=False,
            free_cache_engine=False,  # it never sleeps, and vLLM can let one engine of a process sleep, not two
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Builds the engine with the checkpoint's weights (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        model = self.config.model.as_model()
        tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self.vocabulary = read_vocabulary(model, tokenizer)
        policy = load_tokenizer(self.policy.path, trust_remote_code=self.policy.trust_remote_code)
        self.judge = Judge(config=self.config, policy=policy, tokenizer=tokenizer, generate=self._generate)
        dp_rank, tp_rank = divmod(self.rank, self.config.tensor_model_parallel_size)
        self.engine = build_rollout_engine(
            RolloutSetup(
                config=self.rollout_config,
                model=model,
                device=self.device,
                seed=self.runtime.seed,
                max_prompt_length=self.config.max_prompt_length,
                max_response_length=self.config.max_tokens,
                dp_rank=dp_rank,
                tp_rank=tp_rank,
                load_checkpoint=True,
            )
        )
        self.closing.callback(self.engine.shutdown)
        self.engine.initialize()
        self._register_dispatch_collect_info("judge", dp_rank, tp_rank == 0)

    @register(dispatch_mode=JUDGE, deadline="generate")
    def generate_judgements(self, batch: DataProto) -> Judgements:
        """Returns the judgements of the rank's rows: judge.n of each, read and averaged."""
        return self.judge(batch)

    def _generate(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[list[list[int]]]:
        """Is `rewards.combine.Generate`."""
        n = self.config.n
        requests = [
            GenerationRequest(prompt_ids=list(ids), seed=seed)
            for ids, number in zip(prompts, numbers, strict=True)
            for seed in sample_seeds(self.runtime.seed, number, n)
        ]
        completions = self.engine.generate(requests, self._sampling())
        check_completions(completions, self.vocabulary.size, False)
        answers = [list(completion.token_ids) for completion in completions]
        return [answers[first : first + n] for first in range(0, len(answers), n)]

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.config.temperature,
            max_new_tokens=self.config.max_tokens,
            stop_token_ids=self.vocabulary.stop_token_ids,
            log_probs=False,
        )


MODEL = make_nd_compute_dataproto_dispatch_fn(mesh_name="model")


class PreferenceWorker(EngineWorker):
    """Trains on preference pairs; a subclass builds `engine` and `loss`.  All methods run on every rank."""

    loss: PairLoss

    def __init__(self, config: DPOConfig | RMConfig, runtime: WorkerRuntime) -> None:
        self.runtime = runtime
        self.device = runtime.torch_device(self.local_rank)
        self.hf_model = config.model

    def _start(self, engine: TrainEngine) -> None:
        """Initializes the engine that is trained (collective)."""
        self.engine = engine
        self.engine.initialize()
        self._register_dispatch_collect_info("model", self.engine.dp_rank, self.engine.is_collect)

    def _rows(self, batch: DataProto) -> dict[str, Tensor]:
        """Returns what engine and loss read, two rows a pair."""
        return interleave(dict(batch.batch.items()))

    @register(dispatch_mode=MODEL, deadline="update")
    def train_step(self, batch: DataProto) -> DataProto:
        """Takes one optimizer step over the pairs; meta_info["metrics"] are global: means over the pairs."""
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
        """Returns meta_info["metrics"]: sums over all ranks' pairs, and their `count`."""
        sums = evaluate_pairs(self.engine, self._rows(batch), self.loss)
        names = {"count": "count", "loss": "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margin"}
        return DataProto(meta_info={"metrics": {name: sums[key] for key, name in names.items()}})


class DPOWorker(PreferenceWorker):
    """Trains the policy against the reference: a frozen copy, or the policy itself with its adapters off."""

    def __init__(self, config: DPOConfig, runtime: WorkerRuntime) -> None:
        super().__init__(config, runtime)
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Builds the engines (collective)."""
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
    """Trains a sequence classifier with one label."""

    hf_kind: ModelKind = "reward"

    def __init__(self, config: RMConfig, runtime: WorkerRuntime) -> None:
        super().__init__(config, runtime)
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Builds the engine (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self.loss = RewardLoss()
        self._start(build_rm_engine(self.config, device=self.device, seed=self.runtime.seed))


class SFTWorker(EngineWorker):
    """Trains on the responses of a data set.  All methods run on every rank."""

    def __init__(self, config: SFTConfig, runtime: WorkerRuntime) -> None:
        self.config, self.runtime = config, runtime
        self.device = runtime.torch_device(self.local_rank)
        self.hf_model = config.model
        vla = vla_of(config.model)
        self.flow = vla if vla is not None and vla.decoding == FLOW else None
        self._episodes: dict[str, EpisodeReader] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Builds the engine (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self.engine = build_sft_engine(self.config, device=self.device, seed=self.runtime.seed)
        self.engine.initialize()
        self._register_dispatch_collect_info("model", self.engine.dp_rank, self.engine.is_collect)

    @property
    def _output(self) -> str:
        """Returns the output of the engine that the loss reads."""
        return "log_probs" if self.flow is None else "flow_errors"

    def _rows(self, batch: DataProto, files: str | list[str] | None, step: int) -> dict[str, Tensor]:
        """Returns the columns of a batch, with the pictures of its frames out of the files that it was read from, and for a flow
        the actions, with noise and time by `step` and frame."""
        rows = dict(batch.batch.items())
        if FRAME in rows:
            assert files is not None, "a batch comes from files"
            key = json.dumps(files)
            if key not in self._episodes:
                self._episodes[key] = EpisodeReader(files)
            reader, frames = self._episodes[key], rows.pop(FRAME).numpy()
            rows[PIXEL_VALUES] = reader.images(frames.tolist())
            if self.flow is not None:
                actions, seeds = reader.chunks(frames, self.flow.chunk), [[self.runtime.seed, step, frame] for frame in frames]
                state = None if reader.states is None else reader.states[frames]
                rows |= flow_columns(load_config(self.config.model), self.flow, actions, state, seeds)
        return rows

    @register(dispatch_mode=MODEL, deadline="update")
    def train_step(self, batch: DataProto) -> DataProto:
        """Takes one optimizer step over the batch; meta_info["metrics"] are global."""
        rows = self._rows(batch, self.config.data.train_files, 1 + int(self.engine.scalar_state()["optimizer_steps"]))
        loss = sft_loss if self.flow is None else flow_loss
        steps = list(take_steps(self.engine, rows, loss, num_mini_batches=1, epochs=1, scale=1.0, outputs=(self._output,)))
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
        """Returns meta_info["metrics"] over all ranks: the summed negative log-likelihood, or squared error of a flow, and the
        `count` of tokens."""
        mask = batch.batch["response_mask"]
        rows = self._rows(batch, self.config.data.val_files, 0)
        found = self.engine.infer(rows, outputs=(self._output,))[self._output].double()
        local = torch.stack([masked_sum(-found if self.flow is None else found, mask), mask.sum().double()])
        loss, tokens = self.engine.reduce(local).tolist()
        return DataProto(meta_info={"metrics": {"loss": loss, "count": tokens}})
