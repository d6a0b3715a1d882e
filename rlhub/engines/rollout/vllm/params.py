"""rlhub's sampling parameters as vLLM's.  Imports vLLM: see `environment`."""

from __future__ import annotations

import numpy as np
from vllm import SamplingParams as VLLMSamplingParams

from rlhub.engines.rollout.base import GenerationRequest, SamplingParams
from rlhub.utils.counter_noise import streams

SEED_BITS = np.uint64(1)  # 64 - 63: a generator's seed is a signed integer


def vllm_params(request: GenerationRequest, params: SamplingParams) -> VLLMSamplingParams:
    """For one request."""
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
        skip_clone=True,  # nobody else has it, and a deep copy costs more than all else of taking a request
    )


def _seed(request: GenerationRequest) -> int:
    """vLLM's noise has no position: what goes on after `start` tokens has noise of its own, and repeats no earlier one."""
    if request.start == 0:
        return request.seed
    return int(streams(np.array([request.seed], dtype=np.int64), request.start)[0] >> SEED_BITS)
