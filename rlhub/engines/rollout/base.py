"""RolloutEngine: generation with the policy's current weights, behind one interface.

Token in, token out: prompts and completions are token ids; no engine tokenizes.  Log-probs are those of the distribution
sampled from, after temperature.  Engines that run tensor-parallel over several ranks are SPMD: every rank of a
tensor-parallel group makes the same calls with the same arguments and gets the same results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rlhub.utils.pieces import Piece

FinishReason = Literal["stop", "length", "abort"]
WeightBucket = list[tuple[str, Tensor]]


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to sample.  temperature 0 is greedy.  top_k -1 and top_p 1.0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()  # the end-of-sequence ids; the stopping token is part of the completion
    ignore_eos: bool = False
    log_probs: bool = True  # False: completions carry none (validation does not read them)


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and the seed of its noise; equal (prompt, params, seed, weights) give equal completions on one engine.

    session: requests of one conversation, which a service sends to the same replica; "" for none.
    """

    prompt_ids: Sequence[int]
    seed: int
    request_id: str = ""
    session: str = ""


@dataclass(slots=True, kw_only=True)
class Completion:
    """token_ids includes the stopping token; log_probs and versions have one entry a token (log_probs empty if not asked
    for); version v is the policy that sampled the token."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    versions: list[int] = field(default_factory=list)


class RolloutEngine(ABC):
    """See the module docstring.  Blocking, except `agenerate`.  The engine owns its weights' memory."""

    version: int  # policy version of the live weights; -1 before the first update

    @abstractmethod
    def initialize(self) -> None:
        """Build the engine.  On return the process's torch RNG state, default dtype, thread count and distributed
        environment variables are as they were."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Completion]:
        """Completions in the order of the requests.  An empty list of requests gives an empty list."""

    @abstractmethod
    async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        """One request on the event loop; concurrent requests are batched where the engine can."""

    @abstractmethod
    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Replace all weights from a stream of full tensors with Hugging Face names (cast to the engine's dtype), reset the
        prefix cache, then take `version`.  If the stream breaks the engine refuses to generate until a whole update."""

    @abstractmethod
    def overwriting(self, version: int) -> AbstractContextManager[None]:
        """Inside, the caller writes the whole of the live weights in place and the engine refuses to generate.

        A clean end resets the prefix cache and takes `version`; after an exception the engine refuses to generate until a
        whole update.  The weights' memory must be awake.
        """

    @abstractmethod
    def live_weights(self) -> Iterator[Piece]:
        """The engine's live parameters as VIEWS under Hugging Face names: fused parameters are taken apart, a
        tensor-parallel rank yields its own slices, a tied weight comes once."""

    @abstractmethod
    def weight_dtype(self, name: str) -> torch.dtype:
        """In which dtype the engine holds the weight of this Hugging Face name."""

    @abstractmethod
    def sleep(self) -> None:
        """Free the KV cache (and weights) where the platform can.  On every platform, weights must be updated before the
        next generate.  Idempotent."""

    @abstractmethod
    def wake_up(self, *, weights_only: bool = False) -> None:
        """Take back the memory given up by `sleep`: the weights' only (enough for update_weights), or all.  Idempotent."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release processes, memory and groups.  Idempotent."""
