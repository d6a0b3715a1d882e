"""Generation of action tokens with a vision-language-action policy: whole batches, and the stepper of single requests.

All tokens of a response come from one forward pass, or one after the other with a key-value cache, as model.vla.decoding says.
The uniform of each token is that of text (see `decode`), so a response does not depend on its batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhub.config.sections.vla import VLAConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.engines.rollout.continuous_batching import TokenEvent
from rlhub.engines.rollout.hf.decode import NOT_FINITE, sample_tokens, token_uniforms
from rlhub.errors import EngineError, RequestError
from rlhub.models.vla import policy


def check_actions(requests: Sequence[GenerationRequest], params: SamplingParams, vla: VLAConfig) -> None:
    """Raises RequestError for a request without images, images of another form than those of the first request, or parameters
    that a response of vla.num_tokens tokens cannot have."""
    if params.max_new_tokens < vla.num_tokens:
        raise RequestError(
            f"max_new_tokens is {params.max_new_tokens}; a response has chunk x action_dim = {vla.num_tokens} tokens "
            "(data.max_response_length)",
            param="max_tokens",
        )
    for index, request in enumerate(requests):
        images = request.images
        if images is None or images.dtype != torch.uint8 or images.dim() != 4:
            found = "none" if images is None else f"{images.dtype} of shape {tuple(images.shape)}"
            raise RequestError(
                f"request {index}: images are {found}; the policy reads uint8 (images, colours, height, width)", param="images"
            )
        if request.start:
            raise RequestError(f"request {index} goes on after {request.start} tokens; actions are sampled whole", param="start")


@torch.inference_mode()
def decode_actions(
    model: PreTrainedModel, vla: VLAConfig, requests: Sequence[GenerationRequest], params: SamplingParams
) -> list[Completion]:
    """Generates the responses of one batch, in the order of the requests.  Leaves `versions` empty."""
    device, width = model.device, vla.num_tokens
    noise = torch.from_numpy(token_uniforms([r.seed for r in requests], [0] * len(requests), width)).to(device)
    images = torch.stack([image for r in requests if (image := r.images) is not None]).to(device)
    ids, attended = _left_padded([r.prompt_ids for r in requests])
    decode = _one_by_one if vla.decoding == "sequential" else _at_once
    tokens, log_probs = decode(model, vla, (ids.to(device), attended.to(device), images), noise, params)
    if not bool(log_probs.isfinite().all()):
        raise EngineError(NOT_FINITE)
    rows = zip((tokens + vla.first_bin_id).tolist(), log_probs.tolist(), strict=True)
    return [
        Completion(token_ids=ids, log_probs=values if params.log_probs else [], finish_reason="length") for ids, values in rows
    ]


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Returns ids and attention mask, (rows, longest) int64."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return ids, (torch.arange(longest) >= longest - lengths[:, None]).long()


Call = tuple[Tensor, Tensor, Tensor]
"""Prompts and attention mask (rows, prompt), and images."""


def _at_once(model: PreTrainedModel, vla: VLAConfig, call: Call, noise: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Returns bins and log-probs (rows, response) out of one pass."""
    prompts, attended, images = call
    rows, width = noise.shape
    unknown = prompts.new_zeros(rows, width)
    placed = policy.place_tokens(torch.cat([prompts, unknown], 1), torch.cat([attended, unknown], 1), width, vla)
    hidden = policy.hidden_states(model, vla, placed, images)[placed.sources.flatten()]
    tokens, log_probs = sample_tokens(torch.nn.functional.linear(hidden, *policy.bin_head(model, vla)), noise.flatten(), params)
    return tokens.view(rows, width), log_probs.view(rows, width)


def _one_by_one(
    model: PreTrainedModel, vla: VLAConfig, call: Call, noise: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Returns bins and log-probs (rows, response), each token out of a pass that reads the one before."""
    prompts, attended, images = call
    lengths, cache = attended.sum(1), DynamicCache(config=model.config)
    # The prompt's last token stands where a response of one token is read, so that token is the source.
    blank = prompts.new_zeros(len(prompts), 1)
    placed = policy.place_tokens(torch.cat([prompts, blank], 1), torch.cat([attended, blank], 1), 1, vla)
    longest = placed.input_ids.shape[1] - 1
    sources = placed.sources.flatten() - torch.arange(len(prompts), device=prompts.device)  # a column less in each row
    placed.input_ids, placed.position_ids = placed.input_ids[:, :longest], placed.position_ids[:, :longest]
    mask = placed.attention_mask = (placed.position_ids < lengths[:, None]).long()
    hidden = policy.hidden_states(model, vla, placed, images, past_key_values=cache, use_cache=True)[sources]
    found: list[tuple[Tensor, Tensor]] = []
    for number in range(noise.shape[1]):
        logits = torch.nn.functional.linear(hidden, *policy.bin_head(model, vla))
        found.append(sample_tokens(logits, noise[:, number], params))
        if number + 1 < noise.shape[1]:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            outputs = model.base_model(
                input_ids=found[-1][0][:, None] + vla.first_bin_id,
                attention_mask=mask,
                position_ids=(lengths + number)[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            hidden = outputs.last_hidden_state[:, -1]
    tokens, log_probs = zip(*found, strict=True)
    return torch.stack(tokens, 1), torch.stack(log_probs, 1)


class ActionBatch:
    """A Stepper of single requests: a step answers all that wait, up to max_rows, with the same parameters, whole."""

    def __init__(self, model: PreTrainedModel, vla: VLAConfig, max_rows: int) -> None:
        self._model, self._vla, self._max_rows = model, vla, max_rows
        self._waiting: deque[tuple[int, GenerationRequest, SamplingParams]] = deque()

    def add(self, key: int, request: GenerationRequest, params: SamplingParams) -> None:
        self._waiting.append((key, request, params))

    def remove(self, keys: Collection[int]) -> None:
        self._waiting = deque(one for one in self._waiting if one[0] not in keys)

    def recompute(self) -> None:
        """Does nothing, because no request runs between two steps."""

    def step(self) -> Sequence[TokenEvent]:
        first = self._waiting[0]
        alike = [one for one in self._waiting if one[2] == first[2] and _form(one[1]) == _form(first[1])][: self._max_rows]
        self.remove({key for key, _, _ in alike})
        answers = decode_actions(self._model, self._vla, [request for _, request, _ in alike], first[2])
        events = []
        for (key, _, _), answer in zip(alike, answers, strict=True):
            ends = [None] * (len(answer.token_ids) - 1) + [answer.finish_reason]
            log_probs = answer.log_probs or [0.0] * len(answer.token_ids)
            events += [TokenEvent(key, *one) for one in zip(answer.token_ids, log_probs, ends, strict=True)]
        return events


def _form(request: GenerationRequest) -> torch.Size | None:
    """Returns the shape of a request's images; one pass takes those of one shape."""
    return None if request.images is None else request.images.shape
