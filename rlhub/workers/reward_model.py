"""The workers of models that score: a frozen sequence classifier behind a training engine, and a judge, a rollout engine with a
model of its own, whose weights never change.
"""

from __future__ import annotations

import dataclasses

from rlhub.config.sections.reward import JudgeConfig, RewardModelConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.engines.rollout.base import SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.registry import build_reward_engine
from rlhub.models.tokenizer import load_tokenizer, read_vocabulary
from rlhub.protocol import DataProto
from rlhub.single_controller import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from rlhub.workers.base import EngineWorker
from rlhub.workers.generation import check_completions, generation_requests, pad_completions
from rlhub.workers.memory_handover import WorkerRuntime

REWARD_MODEL = make_nd_compute_dataproto_dispatch_fn(mesh_name="reward_model")


class RewardModelWorker(EngineWorker):
    """All methods run on every rank."""

    def __init__(self, config: RewardModelConfig, runtime: WorkerRuntime) -> None:
        self.config, self.runtime = config, runtime
        self.device = runtime.torch_device(self.local_rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Build the reward model's engine (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self.engine = build_reward_engine(self.config, device=self.device, seed=self.runtime.seed)
        self.engine.initialize()
        self.engine.offload()
        self._register_dispatch_collect_info("reward_model", self.engine.dp_rank, self.engine.is_collect)

    @register(dispatch_mode=REWARD_MODEL, deadline="infer")
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """rm_scores (rows,), read at the last attended token of input_ids (rows, tokens)."""
        rows = {name: batch.batch[name] for name in ("input_ids", "attention_mask")}
        scores = self.engine.infer(rows, outputs=("scores",))["scores"]
        self.engine.offload()
        return DataProto.from_dict(tensors={"rm_scores": scores})


JUDGE = make_nd_compute_dataproto_dispatch_fn(mesh_name="judge")


class JudgeWorker(Worker):
    """All methods run on every rank.  rollout: the policy's settings, for what the judge has none of its own."""

    def __init__(self, config: JudgeConfig, rollout: RolloutConfig, runtime: WorkerRuntime) -> None:
        self.config, self.runtime = config, runtime
        self.device = runtime.torch_device(self.local_rank)
        self.rollout_config = dataclasses.replace(
            rollout,
            name=config.name or rollout.name,
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            gpu_memory_utilization=config.gpu_memory_utilization,
            max_model_len=config.max_prompt_length + config.max_tokens,
            ignore_eos=False,
            free_cache_engine=False,  # it never sleeps, and vLLM can let one engine of a process sleep, not two
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Build the engine with the checkpoint's weights (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        model = self.config.model.as_model()
        self.vocabulary = read_vocabulary(model, load_tokenizer(model.path, trust_remote_code=model.trust_remote_code))
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
    def generate_judgements(self, prompts: DataProto) -> DataProto:
        """judge.n completions per prompt, neighbours in prompt order: responses (rows * n, max_tokens) and response_length."""
        columns, config = prompts.batch, self.config
        requests = generation_requests(
            columns["prompts"],
            columns["attention_mask"],
            columns["ordinal"],
            num_samples=config.n,
            run_seed=self.runtime.seed,
        )
        completions = self.engine.generate(requests, self._sampling())
        check_completions(completions, self.vocabulary.size, False)
        padded = pad_completions(  # one width on all ranks, so that their parts join
            completions, pad_id=self.vocabulary.pad_id, with_log_probs=False, widest=lambda _: config.max_tokens
        )
        return DataProto.from_dict(
            tensors={"responses": padded.responses, "response_length": padded.response_length},
        )

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.config.temperature,
            max_new_tokens=self.config.max_tokens,
            stop_token_ids=self.vocabulary.stop_token_ids,
            log_probs=False,
        )
