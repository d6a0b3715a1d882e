"""RolloutEngine: generation with the policy's current weights, behind one interface.

Prompts and completions are token ids, and no engine tokenizes.  Log-probs are those of the distribution sampled from, after
temperature.  `check_requests` is what every engine asks before it generates: a request that passes cannot end the engine.
Engines that run tensor-parallel over several ranks are SPMD: every rank of a tensor-parallel group makes the
same calls with the same arguments and gets the same results.

There are two ways to generate.  `generate` takes a batch and blocks.  `agenerate` takes one request; requests join and leave a
continuous batch between two steps, and the weights may change under them: pause, write the weights, resume.  An engine does
one of the two at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from rlhub.errors import EngineError, RequestError
from rlhub.protocol.weights.pieces import Piece

FinishReason = Literal["stop", "length", "abort"]
FINISH_CODES: dict[FinishReason, int] = {"stop": 0, "length": 1, "abort": 2}
"""Maps each finish reason to its number in the column `finish_reason` of a batch."""
WeightBucket = list[tuple[str, Tensor]]
EngineDtype = Literal["auto", "bfloat16", "float16", "float32"]
MIN_TEMPERATURE = 1e-6
"""The smallest temperature above 0: logits of up to 1e32 divided by it are still finite in float32."""
MAX_TOP_LOG_PROBS = 20  # OpenAI's own bound, and vLLM's
TopLogProbs = list[tuple[int, float]]
"""The likeliest tokens in one place, in descending order: (token id, log-prob) each.  A token that could not be sampled is left
out."""
SEEDS = 1 << 63
"""The bound of seeds, which engines store as signed integers of 64 bits."""
SHOWN_NAMES = 5  # an error lists this many names, and counts the others


@dataclass(slots=True, kw_only=True, frozen=True)
class Shaping:
    """Settings that change the distribution beyond temperature, top_p and top_k, so that log-probs are not the plain policy's.

    Only vLLM has them.  min_tokens: no stop token is sampled before so many tokens.  logit_bias: (token id, what is added to its
    logit).  schema: the completion is JSON of this JSON schema, which is JSON itself; "" for any text.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    schema: str = ""


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """The settings of sampling.  Temperature 0 is greedy; top_k -1 and top_p 1.0 are off.

    routed_experts: the completion comes with the experts that its tokens were sent to; for whole batches (`generate`), of engines
    and models whose choices can be recorded.
    top_log_probs: with each token come so many of the likeliest in its place.  prompt_log_probs: the prompt's tokens have
    log-probs too, with as many of the likeliest.  Neither changes what is sampled; both are for single requests (`agenerate`).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids; the stopping token is part of the completion
    ignore_eos: bool = False
    log_probs: bool = True  # False leaves them out, as validation does, which does not read them
    shaping: Shaping | None = None
    top_log_probs: int = 0
    prompt_log_probs: bool = False
    routed_experts: bool = False


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and the seed of its noise; equal (prompt, params, seed, weights) give equal completions on one engine.

    request_id: the id by which `abort` finds the request; it need not be unique.
    session: a name shared by the requests of one conversation, which a service sends to the same replica; "" for none.
    start: the number of tokens at the end of `prompt_ids` that belong to the completion, from an earlier attempt.  The completion
        continues there: it uses the noise of token `start` on (vllm: other noise, but never that of tokens 0 to start - 1), may
        have `max_new_tokens - start` more tokens, and returns only those.
    images: (images, colours, height, width) uint8, for a vision-language-action policy; None for a language model.
    pictures: the image files that a language model reads at the image tokens of the prompt, by `pack_files`.
    """

    prompt_ids: Sequence[int]
    seed: int
    request_id: str = ""
    session: str = ""
    start: int = 0
    images: Tensor | None = None
    pictures: bytes = b""


@dataclass(slots=True, kw_only=True)
class SampledTokens:
    """Tokens that were sampled one after the other.

    token_ids: including the stopping token.  log_probs: one per token; empty if SamplingParams.log_probs is False.
    versions: for each token, the version of the policy that sampled it.  top_log_probs: the likeliest in each token's place, by
    the distribution that it was sampled from; empty if SamplingParams.top_log_probs is 0.

    prompt_log_probs: for each token of the prompt but the first, its log-prob and the likeliest in its place, by the plain model
    at temperature 1; empty unless SamplingParams.prompt_log_probs is set.  They come with the first token.
    """

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: list[tuple[float, TopLogProbs]] = field(default_factory=list)

    def between(self, first: int, stop: int | None = None) -> Self:
        """Returns the tokens from number `first` to before number `stop`; the prompt belongs to the first token."""
        part = slice(first, stop)
        return replace(
            self,
            token_ids=self.token_ids[part],
            log_probs=self.log_probs[part],
            versions=self.versions[part],
            top_log_probs=self.top_log_probs[part],
            prompt_log_probs=[] if first else self.prompt_log_probs,
        )

    def extend(self, more: SampledTokens) -> None:
        """Appends the tokens that follow."""
        self.token_ids += more.token_ids
        self.log_probs += more.log_probs
        self.versions += more.versions
        self.top_log_probs += more.top_log_probs
        self.prompt_log_probs = self.prompt_log_probs or more.prompt_log_probs


@dataclass(slots=True, kw_only=True)
class Completion(SampledTokens):
    """The result of a request.

    finish_reason: "abort" means that `abort` ended the request, with the tokens so far.
    value: the return that the policy itself predicts before the first token; None without a value head.
    routed_experts: (tokens, routers * top_k) uint8 or int16, the experts of each token of prompt and completion but the last,
        which went through no layer; None unless SamplingParams.routed_experts is set.
    """

    finish_reason: FinishReason
    value: float | None = None
    routed_experts: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class Progress(SampledTokens):
    """The next tokens of a completion that is being sampled.

    finish_reason: the completion's reason, with its last tokens; None while more may come.
    """

    finish_reason: FinishReason | None = None


Follow = Callable[[Progress], None]
"""A callback that receives the tokens of one request while they are sampled.  It runs on the event loop of the caller, gets
each token once and in order, and is not called after the completion is returned.  The tokens it gets are a prefix of the
completion, but need not be all of it: an engine that cannot stream passes none, and an aborted request lacks its last ones.
The callback must return at once; an error that it raises ends the request."""


class RolloutEngine(ABC):
    """A rollout engine; see the module docstring.  All methods but `agenerate` block.  The engine owns its weights' memory."""

    version: int  # the policy version of the live weights; -1 before the first update

    @abstractmethod
    def initialize(self) -> None:
        """Builds the engine.  On return the process's torch RNG state, default dtype, thread count and distributed environment
        variables are unchanged."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Completion]:
        """Returns completions in the order of the requests; an empty list of requests gives an empty list.

        Raises RequestError for requests that the engine cannot serve (see `check_requests`), and EngineError while requests of
        `agenerate` wait or run.
        """

    @abstractmethod
    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        """Generates one completion in the continuous batch, from any event loop; cancelling the task ends the request.

        follow: receives the tokens while they are sampled; see Follow.

        Raises RequestError as `generate` does; a fault of one request ends that request alone.  Requests wait while the engine
        is paused.  If a step fails, every waiting request gets the error, and so do all later ones.
        """

    @property
    def vocab_size(self) -> int | None:
        """Returns the number of rows of the model's embedding, or None if the model lives in another job, which checks the ids
        itself.

        The engine reads token ids from 0 to one less than this number, and refuses others with RequestError.
        """
        return None

    @property
    def failure(self) -> str:
        """Returns the reason why the engine can never generate again and must be rebuilt, as far as it is known without a
        request; "" while the engine works.  Returns at once, from any thread."""
        return ""

    @property
    @abstractmethod
    def load(self) -> int:
        """Returns the number of requests of `agenerate` that wait or run."""

    @abstractmethod
    def pause(self) -> None:
        """Stops between two steps; returns when no step is computing.  Requests wait with their tokens.  Idempotent."""

    @abstractmethod
    def resume(self, *, recompute: bool = True) -> None:
        """Continues after `pause`.  Idempotent.  Raises EngineError, and stays paused, without a whole set of weights.

        recompute: if the weights have changed, True computes the keys and values of the running requests' tokens again with
        the live weights, as if these had read the whole sequence; False continues with the old keys and values.
        """

    @abstractmethod
    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Ends the requests of `agenerate` with these ids, or all for None; their completions have the reason "abort".

        Returns at once and ignores unknown ids.  Works while the engine is paused.
        """

    @abstractmethod
    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Replaces all weights from a stream of full tensors with Hugging Face names, cast to the engine's dtype, and then
        takes `version`.  A weight that the engine stores quantized comes so, beside its scales (see protocol.weights.pieces).

        No later request finds cached prefixes of the old weights.  If the stream breaks, the engine refuses to generate until
        a whole update.  Raises EngineError if requests of `agenerate` wait or run and the engine is not paused.
        """

    @abstractmethod
    def overwriting(self, version: int) -> AbstractContextManager[None]:
        """Returns a context in which the caller overwrites all live weights in place, while the engine refuses to generate.

        After a clean exit no request finds prefixes of the old weights, and the engine takes `version`; after an exception it
        refuses to generate until a whole update.  The weights' memory must be awake, and the engine paused if it has requests
        of `agenerate`.
        """

    @abstractmethod
    def live_weights(self) -> Iterator[Piece]:
        """Yields the engine's live parameters as VIEWS under Hugging Face names: fused parameters are taken apart, a
        tensor-parallel rank yields its own slices, and a tied weight is yielded once."""

    def standby_weights(self) -> Iterator[Piece] | None:
        """Returns views of a second set of weights, laid out as `live_weights`, which the caller may write while the engine
        generates; None from an engine that has none, or no memory for it.

        Allocated on the first call, and kept.
        """
        return None

    def exchange(self) -> None:
        """Makes the standby weights the live ones: in exchange for the live memory, or, in an engine that must keep that, by a
        copy.  The caller is inside `overwriting`."""
        raise EngineError("the weights of this engine cannot be exchanged")

    @abstractmethod
    def weight_dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which the engine stores the weight of this Hugging Face name."""

    @abstractmethod
    def sleep(self, *, keep_weights: bool = False) -> None:
        """Frees the KV cache, and the weights, where the platform can.  Idempotent.

        On every platform, the weights must be updated before the next generate.  keep_weights: in host memory, for an update that
        brings only what has changed.  Raises EngineError while requests of `agenerate` wait or run.
        """

    @abstractmethod
    def wake_up(self, *, weights_only: bool = False) -> None:
        """Allocates the memory again that `sleep` has freed: the weights' only, which is enough for update_weights, or all.
        Idempotent."""

    @abstractmethod
    def shutdown(self) -> None:
        """Releases processes, threads, memory and groups; waiting requests get an EngineError.  Idempotent."""


class ExternalWeights(ABC):
    """The side of a rollout engine whose weights live in worker processes of its own.

    Code in this process can neither write nor read the weights; an object of a class of the caller's does, in every worker.
    """

    @abstractmethod
    def call_workers(self, target: str, method: str, *arguments: Any) -> Sequence[Any]:
        """Calls a method of each worker's one object of the class `target` ("module:Class"); returns the results in the order
        of the ranks.

        The object is built in the worker from the part of an engine that WeightReader takes.  The call runs between two steps,
        which wait for it, so it must return soon.  Arguments and results are pickled; an RlhubError of a worker is raised
        here.
        """

    @abstractmethod
    def overwriting(self, version: int) -> AbstractContextManager[None]:
        """Returns a context as RolloutEngine.overwriting does, in which the workers write the weights."""


def resolve_dtype(name: EngineDtype, device: torch.device) -> torch.dtype:
    """Returns the dtype of an engine's weights.

    `auto` is bfloat16 on accelerators and float32 on CPU, where bfloat16 arithmetic is emulated on most machines.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def apply_buckets(buckets: Iterable[WeightBucket], expected: Collection[str], load: Callable[[WeightBucket], None]) -> None:
    """Calls `load` on every bucket of `update_weights`, so that a wrong or broken stream cannot pass for a whole update.

    Every expected name must occur exactly once, and no other.  Raises EngineError naming the surplus, repeated or missing
    weights.
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
    """Returns the first few names, and the number of the others."""
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def check_requests(
    requests: Sequence[GenerationRequest],
    params: SamplingParams,
    *,
    max_model_len: int,
    vocab_size: int | None = None,
    reads: Collection[str] = (),
    shapes: bool = False,
    ranks: bool = False,
    routes: bool = False,
) -> None:
    """Raises RequestError for an empty prompt, one that leaves no space for a token, ids outside the vocabulary, a seed that
    is no integer of 64 bits, or impossible sampling parameters.

    vocab_size: the number of rows of the model's embedding; None if a server of another job checks the ids.
    reads: "images" for a policy of actions, "pictures" for a language model that reads some; every other engine refuses them.
    shapes: True for an engine that has the settings of Shaping.
    ranks: True where the engine returns `top_log_probs` and `prompt_log_probs`.
    routes: True where it returns `routed_experts`.
    """
    _check_sampling(params)
    if params.routed_experts and not routes:
        told = "this call returns no experts of tokens: whole batches of rollout.name=hf or vllm do, with a mixture of experts"
        raise RequestError(f"routed_experts: {told}", param="routed_experts")
    _check_ranks(params, ranks=ranks)
    _check_shaping(params.shaping, vocab_size, shapes=shapes)
    check_ids(params.stop_token_ids, "stop_token_ids", "a stop token", vocab_size)
    for index, request in enumerate(requests):
        _check_length(index, request, params, max_model_len)
        _check_read(index, request, reads)
        check_ids(request.prompt_ids, "prompt", f"the prompt of request {index}", vocab_size)
        if not -SEEDS <= request.seed < SEEDS:
            raise RequestError(f"request {index} has seed {request.seed}; it must be an integer of 64 bits", param="seed")


def _check_read(index: int, request: GenerationRequest, reads: Collection[str]) -> None:
    if request.images is not None and "images" not in reads:
        raise RequestError(
            f"request {index} has images, which this engine's model does not read; only rollout.name=hf with model.vla does",
            param="images",
        )
    if request.pictures and "pictures" not in reads:
        raise RequestError(
            f"request {index} has pictures, which this engine's model does not read; rollout.name=hf with such a model does",
            param="pictures",
        )


def _check_sampling(params: SamplingParams) -> None:
    if params.max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {params.max_new_tokens}; at least 1 token must be asked for", param="max_tokens")
    temperature = params.temperature
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf):
        raise RequestError(
            f"temperature is {temperature}; it must be 0 (greedy) or a finite number of at least {MIN_TEMPERATURE:g}",
            param="temperature",
        )
    if not 0 < params.top_p <= 1 or params.top_k == 0 or not -1 <= params.top_k < SEEDS:
        raise RequestError(
            f"sampling parameters out of range: top_p {params.top_p} (0 < top_p <= 1), top_k {params.top_k} "
            "(-1 is off, else >= 1)",
            param="top_p" if not 0 < params.top_p <= 1 else "top_k",
        )


def _check_ranks(params: SamplingParams, *, ranks: bool) -> None:
    if not 0 <= params.top_log_probs <= MAX_TOP_LOG_PROBS:
        told = f"top_logprobs is {params.top_log_probs}; it must be from 0 to {MAX_TOP_LOG_PROBS}"
        raise RequestError(told, param="top_logprobs")
    if (params.top_log_probs or params.prompt_log_probs) and not ranks:
        name = "top_logprobs" if params.top_log_probs else "echo"
        told = "this engine returns log-probs of the sampled tokens alone; single requests to rollout.name=vllm or hf have others"
        raise RequestError(f"{name}: {told}", param=name)


def _check_shaping(shaping: Shaping | None, vocab_size: int | None, *, shapes: bool) -> None:
    if shaping is None:
        return
    if not shapes:
        name = next(field.name for field in fields(Shaping) if getattr(shaping, field.name) != field.default)
        raise RequestError(
            f"{name}: this engine samples by temperature, top_p and top_k alone; rollout.name=vllm has it", param=name
        )
    check_ids([token for token, _ in shaping.logit_bias], "logit_bias", "logit_bias", vocab_size)


def _check_length(index: int, request: GenerationRequest, params: SamplingParams, max_model_len: int) -> None:
    length = len(request.prompt_ids)
    if length == 0:
        raise RequestError(f"request {index} has an empty prompt; a prompt needs at least one token", param="prompt")
    if length >= max_model_len:
        raise RequestError(
            f"request {index} has a prompt of {length} tokens, which leaves no room in max_model_len {max_model_len}; "
            "raise rollout.max_model_len or filter over-long prompts",
            param="prompt",
        )
    if not 0 <= request.start < min(length + 1, params.max_new_tokens):
        raise RequestError(
            f"request {index} goes on after {request.start} tokens of its completion; that must be at most its "
            f"{length} prompt tokens and less than max_new_tokens {params.max_new_tokens}",
            param="start",
        )


def check_ids(ids: Sequence[int], param: str, where: str, vocab_size: int | None) -> None:
    """Raises RequestError for an id that the model does not have.  param, where: the parameter and the words that name the ids
    in the error."""
    if vocab_size is None or not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    place, token = next((place, token) for place, token in enumerate(ids) if not 0 <= token < vocab_size)
    raise RequestError(
        f"{where} has token id {token} at place {place}, outside the model's vocabulary of {vocab_size}: ids are 0 to "
        f"{vocab_size - 1}; use the tokenizer of the model that is served",
        param=param,
    )
