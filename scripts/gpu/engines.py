"""rlhub's engines as the sections build them: by the project's own builders, from a configuration."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rlhub.config.sections.actor import ActorConfig
from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine, resolve_engine_name
from rlhub.engines.training.base import TrainEngine
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.registry import build_policy_engine
from rlhub.workers.generation import pad_completions, training_columns
from scripts.gpu.measure import GIB, free_bytes
from scripts.gpu.rows import NotThere, Skip

MOST_OF_GPU, SHARE_OF_FREE = 0.5, 0.85
"""What a rollout engine takes: half of the GPU, the default, and less where less is free."""
MIN_SHARE = 0.05
BUCKET_BYTES = RolloutConfig().update_weights_bucket_mb << 20


def train_engine(
    folder: Path,
    device: torch.device,
    *,
    max_tokens: int,
    train: bool = True,
    section: FSDPConfig | None = None,
    actor: ActorConfig | None = None,
) -> TrainEngine:
    """Builds and initializes the actor's engine.

    max_tokens: the token budget of a pass.  section: fsdp_config of the actor; None: the default.
    """
    actor = actor or ActorConfig()
    actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu = True, max_tokens
    actor.fsdp_config = section or FSDPConfig()
    config = ActorRolloutRefConfig(model=ModelConfig(path=str(folder)), actor=actor, rollout=RolloutConfig())
    ensure_process_group(device)
    engine = build_policy_engine(config, device=device, seed=1, train=train)
    engine.initialize()
    return engine


def need_vllm() -> None:
    """Raises NotThere without vLLM."""
    if resolve_engine_name("auto") != "vllm":
        raise NotThere("vLLM is not installed")


def rollout_setup(folder: Path, device: torch.device, *, prompt: int, response: int, **settings: object) -> RolloutSetup:
    """Returns the setup of a rollout engine, vLLM unless another is named.  settings: of RolloutConfig, beside the share of the
    memory that is free now."""
    given = {"name": "vllm", "gpu_memory_utilization": memory_share(device), **settings}
    config = RolloutConfig(**given)  # type: ignore[arg-type]
    return RolloutSetup(
        config=config,
        model=ModelConfig(path=str(folder)),
        device=device,
        seed=1,
        max_prompt_length=prompt,
        max_response_length=response,
    )


def rollout_engine(setup: RolloutSetup) -> RolloutEngine:
    """Builds and initializes an engine."""
    engine = build_rollout_engine(setup)
    engine.initialize()
    return engine


def memory_share(device: torch.device) -> float:
    """Returns the share of a GPU's whole memory that an engine can take now.  Raises Skip if that is too little."""
    if device.type != "cuda":
        return MOST_OF_GPU
    total = torch.cuda.get_device_properties(device).total_memory
    share = min(MOST_OF_GPU, SHARE_OF_FREE * free_bytes(device) / total)
    if share < MIN_SHARE:
        raise Skip(f"only {free_bytes(device) / GIB:.1f} GiB of {total / GIB:.1f} GiB are free")
    return round(share, 3)


def generation_requests(prompts: list[list[int]]) -> list[GenerationRequest]:
    """Returns a request for each prompt, each with a seed of its own."""
    return [GenerationRequest(prompt_ids=prompt, seed=seed) for seed, prompt in enumerate(prompts)]


def full_length(num_tokens: int) -> SamplingParams:
    """Returns the sampling of responses of exactly so many tokens."""
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)


def columns_of(prompts: list[list[int]], completions: list[Completion]) -> dict[str, Tensor]:
    """Returns the columns that training reads, from prompts of one length and their completions."""
    ids = torch.tensor(prompts)
    padded = pad_completions(completions, pad_id=0, with_log_probs=True, widest=int)
    return training_columns(ids, torch.ones_like(ids), padded, 1)
