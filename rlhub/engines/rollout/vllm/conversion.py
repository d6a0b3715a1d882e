"""rlhub's requests in vLLM's terms, and vLLM's answers in rlhub's.  Imports vLLM: see `environment`."""

from __future__ import annotations

import math

from vllm import CompletionOutput
from vllm import SamplingParams as VLLMSamplingParams
from vllm.sampling_params import RequestOutputKind

from rlhub.engines.rollout.base import Completion, FinishReason, GenerationRequest, SamplingParams
from rlhub.errors import EngineError
from rlhub.utils.seeding import Purpose, random_bits

SEED_BITS = 1  # 64 - 63: a generator's seed is a signed integer
REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def vllm_params(request: GenerationRequest, params: SamplingParams, *, stream: bool = False) -> VLLMSamplingParams:
    """Returns vLLM's parameters of one request.  stream: an output a step, of what is new; False: one at the end."""
    return VLLMSamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=params.max_new_tokens - request.start,
        seed=_seed(request),
        stop_token_ids=[] if params.ignore_eos else list(params.stop_token_ids),
        ignore_eos=True,  # the request's stop tokens are the only ones
        logprobs=0,  # also where nobody asked: only they tell that logits were not finite
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # nobody else has it, and a deep copy costs more than all else of taking a request
    )


def _seed(request: GenerationRequest) -> int:
    """vLLM's noise has no position: what goes on after `start` tokens has noise of its own, and repeats no earlier one."""
    if request.start == 0:
        return request.seed
    return int(random_bits(request.seed, Purpose.CONTINUATION, request.start)[0]) >> SEED_BITS


def completion_of(output: CompletionOutput, params: SamplingParams, version: int) -> Completion:
    """Returns a whole completion, all of whose tokens the policy of this version has sampled."""
    log_probs = log_probs_of(output)
    return Completion(
        token_ids=list(output.token_ids),
        log_probs=log_probs if params.log_probs else [],
        finish_reason=finish_reason_of(output),
        versions=[version] * len(output.token_ids),
    )


def log_probs_of(output: CompletionOutput) -> list[float]:
    """Returns the log-probs of an output's tokens, asked for or not.  Raises EngineError where one is not finite."""
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
    """Returns why a finished request ended.  Raises EngineError for a reason that no request of ours has."""
    if output.finish_reason not in REASONS:
        raise EngineError(f"vLLM ended a request with {output.finish_reason}")
    return REASONS[output.finish_reason]
