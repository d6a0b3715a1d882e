"""Decoding with a key-value cache over any causal Hugging Face model: whole batches, the sampling of a token from its logits, and
the responses of a vision-language-action policy, whose tokens come from one pass or one after the other.

Equal prompts are read once.  Finished rows leave the batch when they are a quarter of it, so that a few long completions do
not pay for the many short ones.

A token is sampled by temperature, top-k, top-p and then inverse-CDF sampling.  The uniform of token `index` of a completion is
a pure function of (seed, index), so a completion does not depend on the batch it is generated in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from rlhub.config.sections.vla import VLAConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams, TopLogProbs
from rlhub.engines.rollout.continuous_batching import TokenEvent
from rlhub.engines.rollout.hf.cache import (
    Prompt,
    ReadPrompts,
    allocate,
    experts_of_rows,
    fill_rows,
    keep_rows,
    key_mask,
    prefill_chunks,
    read_prompts,
)
from rlhub.errors import EngineError, RequestError
from rlhub.models.vision import ImageReader
from rlhub.models.vla import policy
from rlhub.utils.seeding import Purpose, random_bits

KEEP_FRACTION = 0.75  # a batch with a smaller share of live rows is compacted; copying costs a small part of the work it saves
FIRST_CAPACITY = 128  # new tokens that fit into the cache before it grows
NOISE_BLOCK = 64  # noise is drawn for this many tokens at once
SURPLUS_FLOAT32_BITS = np.uint64(40)  # 64 - 24: the remaining bits fit a float32 exactly, so the result stays below 1
SCORED_TOKENS = 256  # tokens of a prompt whose logits are computed at once
NOT_FINITE = (
    "the model gives log-probs that are not finite, so its tokens mean nothing: its weights are damaged, or rollout.dtype cannot "
    "hold what it computes (float16 ends at 65504)"
)


@dataclass(slots=True, kw_only=True)
class DecodeLimits:
    """The limits of a batch, in tokens.

    max_model_len: the longest prompt plus completion.
    max_prefill_tokens: the most padded prompt tokens in one forward pass.
    """

    max_model_len: int
    max_prefill_tokens: int


Routed = Callable[[], Tensor]


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    requests: Sequence[GenerationRequest],
    params: SamplingParams,
    limits: DecodeLimits,
    reader: ImageReader | None = None,
    routed: Routed | None = None,
) -> list[Completion]:
    """Generates the completions of one batch, in the order of the requests.  Leaves `versions` empty.

    reader: of the pictures of requests, if the model reads some.  routed: returns the experts of the tokens of the last forward
    pass, (tokens, routers * top_k), which completions then have.
    """
    device = model.device
    batch, logits, experts = _prefill(model, requests, params, limits, reader, routed)
    noise = _Noise(requests, device)
    stop_ids = torch.tensor([] if params.ignore_eos else params.stop_token_ids, dtype=torch.long, device=device)
    output = _Output(
        tokens=torch.zeros(len(requests), int(batch.limits.max()), dtype=torch.long, device=device),
        log_probs=torch.zeros(len(requests), int(batch.limits.max()), device=device),
        lengths=torch.zeros(len(requests), dtype=torch.long, device=device),
        stopped=torch.zeros(len(requests), dtype=torch.bool, device=device),
        prompt_experts=experts,
    )
    for step in range(output.tokens.shape[1]):
        tokens, log_probs = sample_tokens(logits, noise.at(step, batch.ids), params)
        _record(output, batch, step, tokens, log_probs, stop_ids)
        num_alive = int(batch.alive.sum())
        if num_alive == 0:
            break
        if num_alive < KEEP_FRACTION * len(tokens):
            tokens = _compact(batch, tokens)
        logits = _step(model, batch, tokens)
        if routed is not None:
            output.fed.append((batch.ids, routed()))
    return _completions(output, params)


@dataclass(slots=True, kw_only=True)
class _Batch:
    """The rows that are still in the batch.

    length: the number of filled columns of the cache.
    ids: (rows,) their indices in the list of requests.
    pads: (rows,) the padding columns before each row.
    mask: (rows, 1, 1, capacity) additive, 0 where a key is visible; None if every key is.
    positions: (rows,) the position of the next token.
    limits: (rows,) the tokens that the completion may have.
    alive: (rows,) whether the row has not ended.
    """

    cache: Cache
    length: int
    ids: Tensor
    pads: Tensor
    mask: Tensor | None
    positions: Tensor
    limits: Tensor
    alive: Tensor


@dataclass(slots=True, kw_only=True)
class _Output:
    """The sampled tokens of all requests: tokens and log_probs (requests, columns), lengths and stopped (requests,).

    prompt_experts: of each request, (tokens, routers * top_k); fed: the requests whose tokens went through the model after a
    step, and their experts.  Both are empty where no experts are recorded.
    """

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor
    stopped: Tensor
    prompt_experts: list[Tensor]
    fed: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class _Noise:
    """The uniforms of all requests, drawn in blocks of tokens."""

    def __init__(self, requests: Sequence[GenerationRequest], device: torch.device) -> None:
        self._requests = requests
        self._device = device
        self._block = torch.empty(0)

    def at(self, step: int, ids: Tensor) -> Tensor:
        """Returns the (rows,) uniforms of token number `step` of the requests `ids`."""
        if step % NOISE_BLOCK == 0:
            seeds, firsts = ([one.seed for one in self._requests], [one.start + step for one in self._requests])
            self._block = torch.from_numpy(token_uniforms(seeds, firsts, NOISE_BLOCK)).to(self._device)
        return self._block[ids, step % NOISE_BLOCK]


def _prefill(
    model: PreTrainedModel,
    requests: Sequence[GenerationRequest],
    params: SamplingParams,
    limits: DecodeLimits,
    reader: ImageReader | None,
    routed: Routed | None,
) -> tuple[_Batch, Tensor, list[Tensor]]:
    """Reads the distinct prompts and copies them to the rows; returns the batch, the logits (rows, vocabulary), and the experts
    of each request's prompt."""
    asked = [Prompt(tuple(request.prompt_ids), request.pictures) for request in requests]
    prompts = sorted(set(asked), key=len)
    place = {prompt: i for i, prompt in enumerate(prompts)}
    source = torch.tensor([place[prompt] for prompt in asked])
    lengths = torch.tensor([len(request.prompt_ids) for request in requests])
    width = int(lengths.max())
    wanted = torch.tensor([params.max_new_tokens - request.start for request in requests])
    allowed = torch.minimum(limits.max_model_len - lengths, wanted)
    capacity = width + min(int(allowed.max()), FIRST_CAPACITY)
    cache: Cache | None = None
    parts: list[ReadPrompts] = []
    experts: list[Tensor] = []
    for first, stop in prefill_chunks([len(prompt) for prompt in prompts], limits.max_prefill_tokens):
        read = read_prompts(model, prompts[first:stop], reader)
        parts.append(read)
        if routed is not None:
            padded = routed().view(stop - first, len(prompts[stop - 1]), -1)
            experts += [row[len(row) - len(prompt) :] for row, prompt in zip(padded, prompts[first:stop], strict=True)]
        cache = allocate(read.cache, len(requests), width, capacity) if cache is None else cache
        rows = ((source >= first) & (source < stop)).nonzero()[:, 0]
        fill_rows(cache, read.cache, rows.to(model.device), (source[rows] - first).to(model.device))
    assert cache is not None
    device = model.device
    pads = (width - lengths).to(device)
    batch = _Batch(
        cache=cache,
        length=width,
        ids=torch.arange(len(requests), device=device),
        pads=pads,
        mask=key_mask(pads, width + int(allowed.max()), model.dtype),
        positions=torch.cat([read.positions for read in parts])[source.to(device)],
        limits=allowed.to(device),
        alive=torch.ones(len(requests), dtype=torch.bool, device=device),
    )
    of_requests = [experts[place[prompt]] for prompt in asked] if experts else []
    return batch, torch.cat([read.logits for read in parts])[source.to(device)], of_requests


def _record(output: _Output, batch: _Batch, step: int, tokens: Tensor, log_probs: Tensor, stop_ids: Tensor) -> None:
    """Stores the step's tokens of the live rows, and marks the rows that end with them."""
    output.tokens[batch.ids, step] = tokens
    output.log_probs[batch.ids, step] = log_probs
    output.lengths[batch.ids] += batch.alive
    stops = torch.isin(tokens, stop_ids) & batch.alive
    output.stopped[batch.ids] |= stops
    batch.alive &= ~stops & (batch.limits > step + 1)


def _compact(batch: _Batch, tokens: Tensor) -> Tensor:
    """Keeps only the live rows, and drops columns that are padding for all of them; returns their tokens."""
    rows = batch.alive.nonzero()[:, 0]
    first_column = int(batch.pads[rows].min())
    keep_rows(batch.cache, rows, first_column)
    batch.length -= first_column
    batch.ids, batch.positions, batch.limits = batch.ids[rows], batch.positions[rows], batch.limits[rows]
    batch.alive = batch.alive[rows]
    batch.pads = batch.pads[rows] - first_column
    if batch.mask is not None:
        batch.mask = key_mask(batch.pads, batch.mask.shape[-1] - first_column, batch.mask.dtype)
    return tokens[rows]


def _step(model: PreTrainedModel, batch: _Batch, tokens: Tensor) -> Tensor:
    """Feeds one token per row; returns the logits (rows, vocabulary)."""
    batch.length += 1
    mask = None if batch.mask is None else batch.mask[..., : batch.length]
    logits = decode_step(model, tokens, batch.positions, batch.cache, mask)
    batch.positions = batch.positions + batch.alive  # rows that ended stay, because there are no positions beyond max_model_len
    return logits


def decode_step(model: PreTrainedModel, tokens: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None) -> Tensor:
    """Feeds one token per row and appends it to the cache; returns the logits (rows, vocabulary).

    tokens, positions: (rows,) int64.
    mask: (rows, 1, 1, keys) additive, the new key included; None if every key is visible.
    """
    out = model(
        input_ids=tokens[:, None],
        attention_mask=mask,
        position_ids=positions[:, None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = out.logits
    return logits[:, -1]


def _completions(output: _Output, params: SamplingParams) -> list[Completion]:
    filled = torch.arange(output.log_probs.shape[1], device=output.lengths.device) < output.lengths[:, None]
    if not bool(output.log_probs[filled].isfinite().all()):
        raise EngineError(NOT_FINITE)
    tokens, log_probs = output.tokens.tolist(), output.log_probs.tolist() if params.log_probs else None
    experts = experts_of_rows(output.prompt_experts, output.fed, output.lengths) if output.prompt_experts else None
    return [
        Completion(
            token_ids=tokens[row][:length],
            log_probs=[] if log_probs is None else log_probs[row][:length],
            finish_reason="stop" if stopped else "length",
            routed_experts=None if experts is None else experts[row],
        )
        for row, (length, stopped) in enumerate(zip(output.lengths.tolist(), output.stopped.tolist(), strict=True))
    ]


def token_uniforms(seeds: Iterable[int], firsts: Iterable[int], count: int) -> NDArray[np.float32]:
    """Returns the uniforms in [0, 1) of tokens first .. first + count - 1 of each seed, (rows, count) float32."""
    pairs = zip(seeds, firsts, strict=True)
    bits = np.array([random_bits(seed, Purpose.TOKEN, first=first, count=count) for seed, first in pairs], dtype=np.uint64)
    return (bits >> SURPLUS_FLOAT32_BITS).astype(np.float32) * np.float32(2.0**-24)


def sample_tokens(logits: Tensor, noise: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Samples one token per row; returns tokens (rows,) int64 and their log-probs (rows,) float32 under the distribution they
    were drawn from.  Temperature 0 takes the most likely token and gives its log-prob at temperature 1.

    logits: (rows, vocabulary), any floating dtype.
    noise: (rows,) float32 uniforms in [0, 1).
    """
    if params.temperature == 0.0:
        return _greedy(logits.float())
    probabilities = _probabilities(logits, params)
    # A GPU sums in parallel, so float32 sums would also rise at tokens of probability zero, and these could be drawn.
    cumulative = (probabilities.double() if probabilities.is_cuda else probabilities).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # The product may round up to the total, beyond which there is no token; the float below it selects the last one.
    target = torch.minimum(noise[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True)
    return tokens[:, 0], probabilities.gather(1, tokens).log()[:, 0]


def top_log_probs(logits: Tensor, params: SamplingParams) -> list[TopLogProbs]:
    """Returns for each row the `params.top_log_probs` likeliest tokens of the distribution that `sample_tokens` draws from.

    logits: (rows, vocabulary), any floating dtype.
    """
    if params.temperature == 0.0:
        log_probs = logits.float() - logits.float().logsumexp(dim=-1, keepdim=True)
    else:
        log_probs = _probabilities(logits, params).log()
    best = log_probs.topk(min(params.top_log_probs, log_probs.shape[-1]), dim=-1)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[(token, value) for token, value in zip(*row, strict=True) if value > -math.inf] for row in rows]


@torch.inference_mode()
def prompt_log_probs(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[tuple[float, TopLogProbs]]:
    """Returns the log-prob of each token of a prompt after the first, by the plain model at temperature 1, and the `count`
    likeliest tokens in its place.  Reads the prompt in parts, so that the logits of a long one fit."""
    ids, found = torch.tensor([list(prompt)], device=model.device), list[tuple[float, TopLogProbs]]()
    plain, cache = SamplingParams(top_log_probs=count), DynamicCache()
    for first in range(0, len(prompt) - 1, SCORED_TOKENS):
        part = ids[:, first : min(first + SCORED_TOKENS, len(prompt) - 1)]
        logits = model(input_ids=part, past_key_values=cache, use_cache=True).logits[0]
        following = ids[0, first + 1 : first + 1 + len(logits)]
        values = logits.float().log_softmax(dim=-1).gather(1, following[:, None])[:, 0].tolist()
        found += zip(values, top_log_probs(logits, plain) if count else [[] for _ in values], strict=True)
    return found


def _probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    scaled = logits.float()
    if params.temperature != 1.0:
        scaled = scaled / params.temperature
    return _truncate(scaled, params).softmax(dim=-1)


def _greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    best, tokens = logits.max(dim=-1)
    return tokens, best - logits.logsumexp(dim=-1)


def _truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    """Returns the logits with minus infinity outside top-k, and then outside the nucleus of top-p."""
    if params.top_k > 0 and params.top_k < logits.shape[-1]:
        floor = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        # The nucleus is the shortest prefix whose mass reaches top_p: a token is out if the mass BEFORE it suffices.
        outside = probabilities.cumsum(dim=-1) - probabilities >= params.top_p
        logits = logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)
    return logits


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
    tokens, log_probs, first = decode(model, vla, (ids.to(device), attended.to(device), images), noise, params)
    if not bool(log_probs.isfinite().all()):
        raise EngineError(NOT_FINITE)
    values = policy.values_of(model, vla, first).tolist() if vla.value_head else [None] * len(requests)
    rows = zip((tokens + vla.first_bin_id).tolist(), log_probs.tolist(), values, strict=True)
    return [
        Completion(token_ids=ids, log_probs=row if params.log_probs else [], finish_reason="length", value=value)
        for ids, row, value in rows
    ]


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Returns ids and attention mask, (rows, longest) int64."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return ids, (torch.arange(longest) >= longest - lengths[:, None]).long()


Call = tuple[Tensor, Tensor, Tensor]
"""Prompts and attention mask (rows, prompt), and images."""


Decoded = tuple[Tensor, Tensor, Tensor]
"""Bins and log-probs (rows, response), and the hidden state (rows, hidden) at which the first bin was read."""


def _at_once(model: PreTrainedModel, vla: VLAConfig, call: Call, noise: Tensor, params: SamplingParams) -> Decoded:
    """Decodes in one pass."""
    prompts, attended, images = call
    rows, width = noise.shape
    unknown = prompts.new_zeros(rows, width)
    placed = policy.place_tokens(torch.cat([prompts, unknown], 1), torch.cat([attended, unknown], 1), width, vla)
    hidden = policy.hidden_states(model, vla, placed, images)[placed.sources.flatten()]
    tokens, log_probs = sample_tokens(torch.nn.functional.linear(hidden, *policy.bin_head(model, vla)), noise.flatten(), params)
    return tokens.view(rows, width), log_probs.view(rows, width), hidden.view(rows, width, -1)[:, 0]


def _one_by_one(model: PreTrainedModel, vla: VLAConfig, call: Call, noise: Tensor, params: SamplingParams) -> Decoded:
    """Decodes each token in a pass that reads the one before."""
    prompts, attended, images = call
    lengths, cache = attended.sum(1), DynamicCache(config=model.config)
    # The prompt's last token stands where a response of one token is read, so that token is the source.
    blank = prompts.new_zeros(len(prompts), 1)
    placed = policy.place_tokens(torch.cat([prompts, blank], 1), torch.cat([attended, blank], 1), 1, vla)
    longest = placed.input_ids.shape[1] - 1
    sources = placed.sources.flatten() - torch.arange(len(prompts), device=prompts.device)  # a column less in each row
    placed.input_ids, placed.position_ids = placed.input_ids[:, :longest], placed.position_ids[:, :longest]
    mask = placed.attention_mask = (placed.position_ids < lengths[:, None]).long()
    first = hidden = policy.hidden_states(model, vla, placed, images, past_key_values=cache, use_cache=True)[sources]
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
    return torch.stack(tokens, 1), torch.stack(log_probs, 1), first


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
