"""From a batch of prompts to training columns: what every process that generates has around its engine.

The engine's setup and the vocabulary that its tokens are checked with; requests from prompts, each sample with its seed; checks
and padding of what comes back; and the places where a fault plan spoils weights or log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.engines.rollout.base import FINISH_CODES, Completion, GenerationRequest, RolloutEngine
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.errors import EngineError
from rlhub.models.tokenizer import Vocabulary, load_tokenizer, read_vocabulary
from rlhub.protocol.columns import jagged
from rlhub.protocol.sequences import images_of
from rlhub.utils import faults
from rlhub.utils.seeding import sample_seeds
from rlhub.workers.memory_handover import WorkerRuntime

WRONG_BY, WRONG_TIMES = 3.0, 100.0  # nats of a log-prob, and of a weight: what no rounding explains


def load_vocabulary(config: ActorRolloutRefConfig) -> Vocabulary:
    """Returns the vocabulary of the model that generates."""
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
    """Returns the setup of an engine that gets its weights from the trainer; load_checkpoint: it also starts with those of the
    model's files."""
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
        structured=config.rollout.agent.has_frozen_roles,
        routed_experts=config.actor.router_replay == "rollout",
    )


def generation_requests(
    prompts: Tensor,
    attention_mask: Tensor,
    ordinals: Tensor,
    *,
    num_samples: int,
    run_seed: int,
    images: Tensor | None = None,
    pictures: Tensor | None = None,
) -> list[GenerationRequest]:
    """Returns num_samples requests per prompt, samples of a prompt side by side.

    prompts and attention_mask: (rows, prompt), left padded; ordinals: (rows,) the prompts' running numbers in the run; images:
    (rows, images, colours, height, width) uint8 of a policy that reads them; pictures: the column `images` of a language model
    that reads them (see `images_column`).
    """
    files = [b""] * len(prompts) if pictures is None else images_of(pictures)
    lengths = attention_mask.sum(1).tolist()
    requests: list[GenerationRequest] = []
    for row, (ids, length, ordinal) in enumerate(zip(prompts.tolist(), lengths, ordinals.tolist(), strict=True)):
        if length == 0:
            raise EngineError(f"prompt in row {row} (ordinal {ordinal}) is empty: there is nothing to condition generation on")
        own = ids[len(ids) - length :]
        seeds = sample_seeds(run_seed, ordinal, num_samples)
        pixels = None if images is None else images[row]
        requests += [GenerationRequest(prompt_ids=own, seed=seed, images=pixels, pictures=files[row]) for seed in seeds]
    return requests


def check_completions(completions: Sequence[Completion], vocab_size: int, with_log_probs: bool) -> None:
    """Raises EngineError on what would corrupt training silently: foreign token ids, missing or non-finite log-probs."""
    for row, completion in enumerate(completions):
        if with_log_probs and len(completion.log_probs) != len(completion.token_ids):
            raise EngineError(
                f"completion {row} has {len(completion.token_ids)} tokens but {len(completion.log_probs)} log-probs; "
                "the rollout engine must return one for each token"
            )
    tokens = np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(c.token_ids, dtype=np.int64) for c in completions)])
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
        bad = tokens.max() if tokens.max() >= vocab_size else tokens.min()
        raise EngineError(f"the rollout engine returned token id {int(bad)}, outside the vocabulary of {vocab_size}")
    if with_log_probs and not all(np.isfinite(np.asarray(c.log_probs)).all() for c in completions):
        raise EngineError("the rollout engine returned a log-prob that is not finite; check dtype and sampling settings")


def experts_column(requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> Tensor:
    """Returns the column ROUTED_EXPERTS of completions.  Raises EngineError where it would lack more than a row's last token."""
    found = []
    for row, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        experts, count = completion.routed_experts, len(request.prompt_ids) + len(completion.token_ids) - 1
        if experts is None or len(experts) != count:
            raise EngineError(
                f"completion {row} has the experts of {0 if experts is None else len(experts)} tokens where {count} went through "
                "the model; the rollout engine must return those of each (actor.router_replay=rollout)"
            )
        found.append(experts)
    return jagged(torch.cat(found), torch.tensor([len(experts) for experts in found]))


@dataclass(slots=True, kw_only=True)
class PaddedCompletions:
    """responses (rows, T) int64 right padded, response_length (rows,), log_probs (rows, T) float32 or None, finish_reason
    (rows,) by FINISH_CODES."""

    responses: Tensor
    response_length: Tensor
    log_probs: Tensor | None
    finish_reason: Tensor


def pad_completions(
    completions: Sequence[Completion], *, pad_id: int, with_log_probs: bool, widest: Callable[[int], int]
) -> PaddedCompletions:
    """Pads completions on the right to one width; `widest` turns this rank's longest length into that of all ranks."""
    lengths = np.fromiter((len(c.token_ids) for c in completions), dtype=np.int64, count=len(completions))
    width = max(widest(int(lengths.max(initial=0))), 1)
    filled = np.arange(width)[None, :] < lengths[:, None]
    responses = np.full((len(completions), width), pad_id, dtype=np.int64)
    responses[filled] = [token for c in completions for token in c.token_ids]
    log_probs = None
    if with_log_probs:
        log_probs = np.zeros((len(completions), width), dtype=np.float32)
        log_probs[filled] = [value for c in completions for value in c.log_probs]
    return PaddedCompletions(
        responses=torch.from_numpy(responses),
        response_length=torch.from_numpy(lengths),
        log_probs=None if log_probs is None else torch.from_numpy(log_probs),
        finish_reason=torch.tensor([FINISH_CODES[c.finish_reason] for c in completions], dtype=torch.int64),
    )


def training_columns(prompts: Tensor, prompt_mask: Tensor, padded: PaddedCompletions, num_samples: int) -> dict[str, Tensor]:
    """Returns the columns that training reads: input_ids, attention_mask (rows, prompt + response), responses, response_mask,
    prompt_length, response_length, finish_reason and, when asked for, rollout_log_probs."""
    width = padded.responses.shape[1]
    response_mask = (torch.arange(width)[None, :] < padded.response_length[:, None]).long()
    columns = {
        "input_ids": torch.cat([prompts.repeat_interleave(num_samples, 0), padded.responses], 1),
        "attention_mask": torch.cat([prompt_mask.repeat_interleave(num_samples, 0), response_mask], 1),
        "responses": padded.responses,
        "response_mask": response_mask,
        "prompt_length": prompt_mask.sum(1).repeat_interleave(num_samples),
        "response_length": padded.response_length,
        "finish_reason": padded.finish_reason,
    }
    if padded.log_probs is not None:
        columns["rollout_log_probs"] = padded.log_probs
    return columns


def spoil_weights(engine: RolloutEngine, rank: int) -> None:
    """Changes, where the fault plan says so, an engine's first weight after it was compared with the trainer's."""
    if (kind := faults.at("engine.weights", rank=rank)) is not None:
        first = next(engine.live_weights()).tensor
        with torch.no_grad():
            first.mul_(torch.nan if kind == "nonfinite" else WRONG_TIMES)


def spoil_log_probs(completions: Sequence[Completion], rank: int) -> None:
    """Changes, where the fault plan says so, the first completion's log-probs, which are then not those of its tokens."""
    if completions and (kind := faults.at("engine.log_probs", rank=rank)) is not None:
        wrong = torch.nan if kind == "nonfinite" else WRONG_BY
        completions[0].log_probs = [value - wrong for value in completions[0].log_probs]
