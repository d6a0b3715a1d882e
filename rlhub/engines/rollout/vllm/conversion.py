"""Conversion of rlhub's requests to vLLM's, and of vLLM's outputs to rlhub's.  Imports vLLM: see `environment`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import CompletionOutput, RequestOutput
from vllm import SamplingParams as VLLMSamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from rlhub.engines.rollout.base import (
    Completion,
    FinishReason,
    GenerationRequest,
    Progress,
    SamplingParams,
    Shaping,
    TopLogProbs,
)
from rlhub.engines.rollout.vllm.internals import ADAPTER_ID
from rlhub.errors import EngineError
from rlhub.utils.seeding import Purpose, random_bits

SURPLUS_SEED_BITS = 1  # 64 - 63: a generator's seed is a signed integer
ADAPTER = LoRARequest(lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="in memory")
"""What every request names in an engine that gets LoRA adapters; vLLM reads no path, because the adapter is loaded before."""
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
        logprobs=params.top_log_probs,  # the sampled token's always: only log-probs show that logits were not finite
        prompt_logprobs=params.top_log_probs if params.prompt_log_probs else None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # nothing else uses the object, and a deep copy costs more than all other work on a new request
        **({} if params.shaping is None else _shaped(params.shaping)),
    )


def _shaped(shaping: Shaping) -> dict[str, Any]:
    """Returns vLLM's parameters for the settings of Shaping."""
    same = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens")
    return {
        **{name: getattr(shaping, name) for name in same},
        "logit_bias": dict(shaping.logit_bias) or None,
        "structured_outputs": StructuredOutputsParams(json=shaping.schema) if shaping.schema else None,
    }


def _seed(request: GenerationRequest) -> int:
    """Returns vLLM's seed of a request.  vLLM's noise does not depend on the position, so a completion that continues after
    `start` tokens gets another seed, whose noise repeats none of the earlier tokens'."""
    if request.start == 0:
        return request.seed
    return int(random_bits(request.seed, Purpose.CONTINUATION, request.start)[0]) >> SURPLUS_SEED_BITS


def completion_of(output: RequestOutput, params: SamplingParams, version: int, expert_layers: Sequence[int] = ()) -> Completion:
    """Returns a whole completion whose tokens were all sampled by the policy of this version.  expert_layers: the layers with
    experts."""
    made = Completion(token_ids=[], log_probs=[], finish_reason=finish_reason_of(output.outputs[0]))
    made.extend(progress_of(output, params))
    made.versions = [version] * len(made.token_ids)
    if params.routed_experts:
        made.routed_experts = experts_of(output.outputs[0], expert_layers)
    return made


def experts_of(output: CompletionOutput, expert_layers: Sequence[int]) -> Tensor:
    """Returns `Completion.routed_experts`.  vLLM's array is (tokens, all layers, top_k), of tokens from the prompt's first to the
    last that went through the model, those with cached keys and values included.  Raises EngineError where there is none."""
    found = output.routed_experts
    if found is None:
        raise EngineError("vLLM returned no experts of a completion's tokens, although its engine was built to record them")
    chosen = found[:, list(expert_layers)].reshape(len(found), -1)
    return torch.from_numpy(chosen if chosen.dtype == np.uint8 else chosen.astype(np.int16))


def progress_of(output: RequestOutput, params: SamplingParams | None = None) -> Progress:
    """Returns the tokens of an output, without versions.  Raises EngineError if a log-prob is missing or not finite.

    params: says whether log-probs were asked for; None keeps them.
    """
    part = output.outputs[0]
    # An output without tokens, which is how an aborted request ends, has the log-probs of the one before in vLLM 0.28 and older.
    places = _places(part.logprobs) if part.token_ids else []
    if not all(math.isfinite(log_prob) for log_prob, _ in places):
        raise EngineError(
            "vLLM gives log-probs that are not finite, so its tokens mean nothing: the model's weights are damaged, or "
            "rollout.dtype cannot hold what it computes (float16 ends at 65504)"
        )
    if len(places) != len(part.token_ids):
        raise EngineError(f"vLLM returned {len(part.token_ids)} tokens with {len(places)} log-probabilities")
    return Progress(
        token_ids=list(part.token_ids),
        log_probs=[] if params is not None and not params.log_probs else [log_prob for log_prob, _ in places],
        top_log_probs=[top for _, top in places if top],
        prompt_log_probs=_places(output.prompt_logprobs)[1:],
        finish_reason=finish_reason_of(part) if output.finished else None,
    )


def _places(found: FlatLogprobs | None) -> list[tuple[float, TopLogProbs]]:
    """Returns for each place the log-prob of its token, which vLLM lists first, and the likeliest tokens.  The first place of a
    prompt has none."""
    if not found:
        return []
    if len(found.logprobs) == len(found.start_indices):
        return [(value, []) for value in found.logprobs]
    return [
        (
            found.logprobs[first] if first < stop else 0.0,
            [
                pair
                for pair in zip(found.token_ids[first + 1 : stop], found.logprobs[first + 1 : stop], strict=True)
                if pair[1] > -math.inf
            ],
        )
        for first, stop in zip(found.start_indices, found.end_indices, strict=True)
    ]


def finish_reason_of(output: CompletionOutput) -> FinishReason:
    """Returns why a finished request ended.  Raises EngineError for a reason that none of rlhub's requests can have."""
    if output.finish_reason not in REASONS:
        raise EngineError(f"vLLM ended a request with {output.finish_reason}")
    return REASONS[output.finish_reason]
