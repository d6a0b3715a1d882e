"""What generation is built from in every process that generates: the engine, and the vocabulary its tokens are checked with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.engines.rollout.base import Completion, RolloutEngine
from rlhub.engines.rollout.registry import RolloutSetup, engine_factory
from rlhub.models.tokenizer import load_tokenizer
from rlhub.models.vocabulary import Vocabulary, read_vocabulary
from rlhub.utils import faults
from rlhub.workers.runtime import WorkerRuntime

WRONG_BY, WRONG_TIMES = 3.0, 100.0  # nats of a log-prob, and of a weight: what no rounding explains


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


def spoil_weights(engine: RolloutEngine, rank: int) -> None:
    """Where the fault plan says so, an engine's first weight is no longer the trainer's, after the two were compared."""
    if (kind := faults.at("engine.weights", rank=rank)) is not None:
        first = next(engine.live_weights()).tensor
        with torch.no_grad():
            first.mul_(torch.nan if kind == "nonfinite" else WRONG_TIMES)


def spoil_log_probs(completions: Sequence[Completion], rank: int) -> None:
    """Where the fault plan says so, the first completion's log-probs are not those of its tokens."""
    if completions and (kind := faults.at("engine.log_probs", rank=rank)) is not None:
        wrong = torch.nan if kind == "nonfinite" else WRONG_BY
        completions[0].log_probs = [value - wrong for value in completions[0].log_probs]


def make_engine(setup: RolloutSetup) -> RolloutEngine:
    """The engine, not yet initialized."""
    return engine_factory(setup.config)(setup)
