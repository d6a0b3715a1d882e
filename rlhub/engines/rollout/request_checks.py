"""The checks that every engine makes on requests before it generates.  A request that passes them cannot end the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhub.engines.rollout.base import GenerationRequest, SamplingParams
from rlhub.errors import RequestError

MIN_TEMPERATURE = 1e-6
"""The smallest temperature above 0: logits of up to 1e32 divided by it are still finite in float32."""
SEEDS = 1 << 63
"""The bound of seeds, which engines store as signed integers of 64 bits."""


def check_requests(
    requests: Sequence[GenerationRequest],
    params: SamplingParams,
    *,
    max_model_len: int,
    vocab_size: int | None = None,
    reads_images: bool = False,
) -> None:
    """Raises RequestError for an empty prompt, one that leaves no space for a token, ids outside the vocabulary, a seed that
    is no integer of 64 bits, or impossible sampling parameters.

    vocab_size: the number of rows of the model's embedding; None if a server of another job checks the ids.
    reads_images: True for a vision-language-action policy; every other engine refuses images.
    """
    _check_sampling(params)
    check_ids(params.stop_token_ids, "stop_token_ids", "a stop token", vocab_size)
    for index, request in enumerate(requests):
        _check_length(index, request, params, max_model_len)
        if request.images is not None and not reads_images:
            raise RequestError(
                f"request {index} has images, which this engine's model does not read; only rollout.name=hf with model.vla does",
                param="images",
            )
        check_ids(request.prompt_ids, "prompt", f"the prompt of request {index}", vocab_size)
        if not -SEEDS <= request.seed < SEEDS:
            raise RequestError(f"request {index} has seed {request.seed}; it must be an integer of 64 bits", param="seed")


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
