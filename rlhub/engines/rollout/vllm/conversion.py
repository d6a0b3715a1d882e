"""Conversion of rlhub's requests to vLLM's, and of vLLM's outputs to rlhub's.  Imports vLLM: see `environment`."""

from __future__ import annotations

import math

from vllm import CompletionOutput
from vllm import SamplingParams as VLLMSamplingParams
from vllm.sampling_params import RequestOutputKind

from rlhub.engines.rollout.base import Completion, FinishReason, GenerationRequest, SamplingParams
from rlhub.errors import EngineError
from rlhub.utils.seeding import Purpose, random_bits

SURPLUS_SEED_BITS = 1  # 64 - 63: a generator's seed is a signed integer
REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def vllm_params(request: GenerationRequest, params: SamplingParams, *, stream: bool = False) -> VLLMSamplingParams:
    """Returns vLLM's sampling parameters of one request.

    stream: True asks for one output per step, with the new tokens; False for a single output at the end.
    """
    return VLLMSamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=params.max_new_tokens - request.start,
        seed=_seed(request),
        stop_token_ids=[] if params.ignore_eos else list(params.stop_token_ids),
        ignore_eos=True,  # the request's stop tokens are the only ones
        logprobs=0,  # always: only log-probs show that logits were not finite
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # nothing else uses the object, and a deep copy costs more than all other work on a new request
    )


def _seed(request: GenerationRequest) -> int:
    """Returns vLLM's seed of a request.  vLLM's noise does not depend on the position, so a completion that continues after
    `start` tokens gets another seed, whose noise repeats none of the earlier tokens'."""
    if request.start == 0:
        return request.seed
    return int(random_bits(request.seed, Purpose.CONTINUATION, request.start)[0]) >> SURPLUS_SEED_BITS


def completion_of(output: CompletionOutput, params: SamplingParams, version: int) -> Completion:
    """Returns a whole completion whose tokens were all sampled by the policy of this version."""
    log_probs = log_probs_of(output)
    return Completion(
        token_ids=list(output.token_ids),
        log_probs=log_probs if params.log_probs else [],
        finish_reason=finish_reason_of(output),
        versions=[version] * len(output.token_ids),
    )


def log_probs_of(output: CompletionOutput) -> list[float]:
    """Returns the log-probs of an output's tokens, whether requested or not.  Raises EngineError if one is missing or not
    finite."""
    values: list[float] = list(output.logprobs.logprobs) if output.logprobs else []
    if not all(map(math.isfinite, values)):
        raise EngineError(
            "vLLM gives log-probs that are not finite, so its tokens mean nothing: the model's weights are damaged, or "
            "rollout.dtype cannot hold what it computes (float16 ends at 65504)"
        )
    if len(values) != len(output.token_ids):
        raise EngineError(f"vLLM returned {len(output.token_ids)} tokens with {len(values)} log-probabilities")
    return values


def finish_reason_of(output: CompletionOutput) -> FinishReason:
    """Returns why a finished request ended.  Raises EngineError for a reason that none of rlhub's requests can have."""
    if output.finish_reason not in REASONS:
        raise EngineError(f"vLLM ended a request with {output.finish_reason}")
    return REASONS[output.finish_reason]
