"""What generation is built from in every process that generates: the engine, and the vocabulary its tokens are checked with."""

from __future__ import annotations

import torch

from rlhub.config.ppo import ActorRolloutRefConfig
from rlhub.engines.rollout.base import RolloutEngine
from rlhub.engines.rollout.registry import RolloutSetup, engine_factory
from rlhub.models.tokenizer import load_tokenizer
from rlhub.models.vocabulary import Vocabulary, read_vocabulary
from rlhub.workers.runtime import WorkerRuntime


def load_vocabulary(config: ActorRolloutRefConfig) -> Vocabulary:
    """Of the model that generates."""
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    return read_vocabulary(config.model, tokenizer)


def rollout_setup(
    config: ActorRolloutRefConfig,
    runtime: WorkerRuntime,
    device: torch.device,
    *,
    dp_rank: int = 0,
    tp_rank: int = 0,
    load_checkpoint: bool = False,
) -> RolloutSetup:
    """For an engine that gets its weights from the trainer; load_checkpoint: it also starts with those of the model's files."""
    return RolloutSetup(
        config=config.rollout,
        model=config.model,
        device=device,
        seed=runtime.seed,
        max_prompt_length=runtime.max_prompt_length,
        max_response_length=runtime.max_response_length,
        dp_rank=dp_rank,
        tp_rank=tp_rank,
        load_checkpoint=load_checkpoint,
    )


def make_engine(setup: RolloutSetup) -> RolloutEngine:
    """The engine, not yet initialized."""
    return engine_factory(setup.config)(setup)
