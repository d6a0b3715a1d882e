"""RolloutEngine: generation with the policy's current weights, behind one interface.

Token in, token out: prompts and completions are token ids; no engine tokenizes.  Log-probs are those of the distribution
sampled from, after temperature.  Engines that run tensor-parallel over several ranks are SPMD: every rank of a
tensor-parallel group makes the same calls with the same arguments and gets the same results.

Two ways to generate.  `generate` takes a batch and blocks.  `agenerate` takes one request; requests join and leave a
continuous batch between two steps, and the weights may change under them: pause, write the weights, resume.  An engine does
one of the two at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from rlhub.errors import EngineError
from rlhub.protocol.weights.pieces import Piece

FinishReason = Literal["stop", "length", "abort"]
FINISH_CODES: dict[FinishReason, int] = {"stop": 0, "length": 1, "abort": 2}
"""The numbers of the finish reasons in the column `finish_reason` of a batch."""
WeightBucket = list[tuple[str, Tensor]]
EngineDtype = Literal["auto", "bfloat16", "float16", "float32"]
SHOWN_NAMES = 5  # how many names an error lists before it only counts


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """The settings of sampling.  temperature 0 is greedy.  top_k -1 and top_p 1.0 are off."""

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

    request_id: what `abort` knows it by; need not be unique.
    session: requests of one conversation, which a service sends to the same replica; "" for none.
    start: how many tokens at the end of `prompt_ids` are the completion's own, from an earlier attempt.  The completion goes
    on where that ended: its noise is that of token `start` on (vllm: other noise, but never that of tokens 0 to start - 1),
    and it may have `max_new_tokens - start` more.  Only those more are returned.
    """

    prompt_ids: Sequence[int]
    seed: int
    request_id: str = ""
    session: str = ""
    start: int = 0


@dataclass(slots=True, kw_only=True)
class Completion:
    """token_ids includes the stopping token; log_probs and versions have one entry a token (log_probs empty if not asked
    for); version v is the policy that sampled the token.  finish_reason "abort": ended by `abort`, with the tokens so far."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    versions: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Progress:
    """The next tokens of a completion that is being sampled; fields as in Completion.

    finish_reason: the completion's, with its last tokens; None while more may come.
    """

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: FinishReason | None = None


Follow = Callable[[Progress], None]
"""Takes the tokens of one request as they come: on the event loop of the caller, each token once and in order, and nothing after
the completion.  What it gets is always a beginning of the completion, but need not be all of it: an engine that cannot stream
gives nothing, and an abort comes without its last tokens.  It must return at once; what it raises ends the request."""


class RolloutEngine(ABC):
    """See the module docstring.  Blocking, except `agenerate`.  The engine owns its weights' memory."""

    version: int  # policy version of the live weights; -1 before the first update

    @abstractmethod
    def initialize(self) -> None:
        """Builds the engine.  On return the process's torch RNG state, default dtype, thread count and distributed
        environment variables are as they were."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Completion]:
        """Returns completions in the order of the requests.  An empty list of requests gives an empty list.

        Raises RequestError for what it cannot serve (see `check_requests`), and EngineError while requests of `agenerate` wait or
        run.
        """

    @abstractmethod
    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        """Generates one completion in the continuous batch, from any event loop; cancelling the task ends the request.  See
        Follow.

        Raises RequestError as `generate` does: what is wrong with one request ends that one.  While the engine is paused requests
        wait.  If a step fails, every waiting request gets the error, and so do later ones.
        """

    @property
    def vocab_size(self) -> int | None:
        """The number of rows of the model's embedding: the engine reads the token ids 0 to one less, and refuses others with
        RequestError.  None: the model is not here, and whoever has it checks them."""
        return None

    @property
    def failure(self) -> str:
        """Why the engine can never generate again and must be built again, as far as that is known while nobody asks it to; ""
        while it can.  Answers at once, from any thread."""
        return ""

    @property
    @abstractmethod
    def load(self) -> int:
        """The number of requests of `agenerate` that wait or run."""

    @abstractmethod
    def pause(self) -> None:
        """Stops between two steps; returns when none is computing.  The requests wait with their tokens.  Idempotent."""

    @abstractmethod
    def resume(self, *, recompute: bool = True) -> None:
        """Goes on after `pause`.  Idempotent.  Raises EngineError, and stays paused, without a whole set of weights.

        recompute: where the weights changed meanwhile, the keys and values of the running requests' tokens are computed again
        with the live ones, as if the whole sequence had been read by them.  False goes on with the old ones.
        """

    @abstractmethod
    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Ends the requests of `agenerate` with these ids (None: all of them); their completions say "abort".  Returns at once;
        unknown ids are passed over.  Works while paused."""

    @abstractmethod
    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Replaces all weights from a stream of full tensors with Hugging Face names (cast to the engine's dtype), lets no later
        request find cached prefixes of the old ones, then takes `version`.  If the stream breaks the engine refuses to generate
        until a whole update.

        While requests of `agenerate` wait or run the engine must be paused: EngineError otherwise.
        """

    @abstractmethod
    def overwriting(self, version: int) -> AbstractContextManager[None]:
        """Inside, the caller writes the whole of the live weights in place and the engine refuses to generate.

        After a clean end no request finds prefixes of the old weights, and `version` is taken; after an exception the engine
        refuses to generate until a whole update.  The weights' memory must be awake, and the engine paused if it has requests of
        `agenerate`.
        """

    @abstractmethod
    def live_weights(self) -> Iterator[Piece]:
        """Yields the engine's live parameters as VIEWS under Hugging Face names: fused parameters are taken apart, a
        tensor-parallel rank yields its own slices, a tied weight comes once."""

    @abstractmethod
    def weight_dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which the engine holds the weight of this Hugging Face name."""

    @abstractmethod
    def sleep(self) -> None:
        """Frees the KV cache (and weights) where the platform can.  On every platform, weights must be updated before the
        next generate.  Idempotent.  Raises EngineError while requests of `agenerate` wait or run."""

    @abstractmethod
    def wake_up(self, *, weights_only: bool = False) -> None:
        """Takes back the memory given up by `sleep`: the weights' only (enough for update_weights), or all.  Idempotent."""

    @abstractmethod
    def shutdown(self) -> None:
        """Releases processes, threads, memory and groups; waiting requests get an EngineError.  Idempotent."""


class ExternalWeights(ABC):
    """The side of a rollout engine whose weights live in worker processes of its own.

    Nobody in this process can write or read the weights; a class of the caller's does, in every worker.
    """

    @abstractmethod
    def call_workers(self, target: str, method: str, *arguments: Any) -> Sequence[Any]:
        """Calls, in every worker, a method of its one object of the class `target` ("module:Class", built from what WeightReader
        takes for an engine); returns the answers, by rank.

        It runs between two steps, which wait, so it must return soon.  Arguments and answers are pickled; an RlhubError of a
        worker is raised here.
        """

    @abstractmethod
    def overwriting(self, version: int) -> AbstractContextManager[None]:
        """As RolloutEngine's; the workers write the weights."""


def resolve_dtype(name: EngineDtype, device: torch.device) -> torch.dtype:
    """Returns the dtype that an engine holds the weights in.

    `auto` is bfloat16 on accelerators and float32 on CPU, where bfloat16 arithmetic is emulated on most machines.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def apply_buckets(buckets: Iterable[WeightBucket], expected: Collection[str], load: Callable[[WeightBucket], None]) -> None:
    """Calls `load` on every bucket of `update_weights`, so that a wrong or broken stream cannot pass for a whole update.

    Every expected name must come exactly once and no other.  Raises EngineError naming the surplus, repeated or missing weights.
    """
    applied: set[str] = set()
    for bucket in buckets:
        names = [name for name, _ in bucket]
        surplus = [name for name in names if name not in expected]
        if surplus:
            raise EngineError(f"the weight stream holds names the engine does not have: {abbreviate(surplus)}")
        repeated = [name for i, name in enumerate(names) if name in applied or name in names[:i]]
        if repeated:
            raise EngineError(f"the weight stream holds weights twice: {abbreviate(repeated)}")
        applied.update(names)
        load(bucket)
    missing = [name for name in expected if name not in applied]
    if missing:
        raise EngineError(f"the weight stream ended without {len(missing)} weights: {abbreviate(missing)}")


def abbreviate(names: list[str]) -> str:
    """Returns the first few names, and how many more there are."""
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
