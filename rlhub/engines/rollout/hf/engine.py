"""RolloutEngine over a Hugging Face model in this process: HFEngine, and the continuous batch of its single requests.

Rows of the continuous batch join and leave between two steps, and share one left-padded cache.  A row that ends leaves its
place in the cache to the next row that joins.  The cache is copied only when places run out, when too many are empty, or when
its first columns are padding for every row.  A row joins by reading all its tokens, which are its prompt or, after a change of
weights, everything so far.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.initialization import no_init_weights

from rlhub.config.sections.vla import vla_of
from rlhub.engines.rollout.base import (
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TopLogProbs,
    WeightBucket,
    apply_buckets,
    resolve_dtype,
)
from rlhub.engines.rollout.continuous_batching import SteppedEngine, Stepper, TokenEvent
from rlhub.engines.rollout.hf.cache import (
    Places,
    Prompt,
    allocate,
    fill_rows,
    prefill_chunks,
    read_prompts,
    widen,
)
from rlhub.engines.rollout.hf.decode import (
    FIRST_CAPACITY,
    KEEP_FRACTION,
    NOT_FINITE,
    ActionBatch,
    DecodeLimits,
    check_actions,
    decode,
    decode_actions,
    decode_step,
    prompt_log_probs,
    sample_tokens,
    token_uniforms,
    top_log_probs,
)
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.errors import EngineError
from rlhub.models.experts import recording, routers_of, unfused_tensors
from rlhub.models.hf import policy_loader, quantize_projections
from rlhub.models.lora import add_lora, saved_names
from rlhub.models.required_weights import load_checked
from rlhub.models.vision import ImageReader, image_reader
from rlhub.models.vla.policy import complete
from rlhub.protocol.weights.pieces import FP8, Piece, whole_piece

SPARE_DIVISOR = 8  # a cache that is copied for more rows gets 1/8 more places, for rows that will join soon
PADDING_INTERVAL = 64  # steps between two searches for columns that are padding in every row
NOISE_BLOCK = 64  # noise of a row is drawn for this many tokens at once


class HFEngine(SteppedEngine):
    """A RolloutEngine with a whole copy of the model on each rank, without tensor parallelism.  `sleep` frees nothing, because
    the cache exists only while requests run."""

    def __init__(self, setup: RolloutSetup) -> None:
        if setup.config.tensor_model_parallel_size != 1:
            raise EngineError(
                f"the hf rollout engine has no tensor parallelism, but rollout.tensor_model_parallel_size is "
                f"{setup.config.tensor_model_parallel_size}; set it to 1 or use rollout.name=vllm"
            )
        super().__init__(setup)
        self._dtype = resolve_dtype(setup.config.dtype, setup.device)
        self._vla = vla_of(setup.model)
        self._reader = image_reader(setup.model)
        self._model: PreTrainedModel | None = None
        self._weights: dict[str, Tensor] = {}
        self._standby: dict[str, Tensor] = {}  # by the names of the parameters

    def initialize(self) -> None:
        with torch.random.fork_rng(devices=[self._setup.device] if self._setup.device.type == "cuda" else []):
            self._model = self._build()
        self._weights = self._named_weights()
        self._ready = self._setup.load_checkpoint

    def _build(self) -> PreTrainedModel:
        setup = self._setup
        trust = setup.model.trust_remote_code
        config = AutoConfig.from_pretrained(setup.model.path, trust_remote_code=trust, **setup.model.override_config)
        _refuse_short_windows(config, setup.max_model_len)
        options = {"dtype": self._dtype, "trust_remote_code": trust}
        loader, kind = policy_loader(setup.model, config), setup.model.policy_kind
        if setup.reads_files:
            model = load_checked(loader, str(setup.model.path), config, kind, **options)
        else:
            with no_init_weights():  # the first update overwrites every weight
                model = loader.from_config(config, **options)
            model.tie_weights()
        if setup.config.quantization == "fp8":
            quantize_projections(model, quantized=setup.reads_files)
        if self._vla is not None:
            complete(model, self._vla, setup.model.path)
        if setup.adapters:  # with scale 1, because B comes with the scale
            unscaled = replace(setup.model, lora_alpha=float(setup.model.lora_rank))
            add_lora(model, unscaled, head=model.get_output_embeddings(), seed=setup.seed)
        return model.to(setup.device).requires_grad_(False).eval()

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Completion]:
        self._refuse_unready("generate")
        self._check(requests, params, routes=self._model is not None and bool(routers_of(self._model)))
        with self._generating():
            return self._generate(requests, params)

    def _generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Completion]:
        """Generates in batches of requests of similar length, with equal prompts together."""
        assert self._model is not None
        limits, max_rows, vla = self._limits(), self._setup.config.most_sequences, self._vla
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), list(requests[i].prompt_ids)))
        completions: dict[int, Completion] = {}
        for first in range(0, len(order), max_rows):
            indices = order[first : first + max_rows]
            chosen = [requests[i] for i in indices]
            if vla is not None:
                batch = decode_actions(self._model, vla, chosen, params)
            else:
                with recording(self._model) if params.routed_experts else nullcontext() as routed:
                    batch = decode(self._model, chosen, params, limits, self._reader, routed)
            for index, completion in zip(indices, batch, strict=True):
                completion.versions = [self.version] * len(completion.token_ids)
                completions[index] = completion
        return [completions[i] for i in range(len(requests))]

    @property
    def vocab_size(self) -> int | None:
        return None if self._model is None else int(self._model.get_input_embeddings().weight.shape[0])

    @property
    def _reads(self) -> frozenset[str]:
        return frozenset({"images"} if self._vla is not None else {"pictures"} if self._reader is not None else ())

    @property
    def _ranks(self) -> bool:
        return self._vla is None

    def _check(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, *, ranks: bool = False, routes: bool = False
    ) -> None:
        super()._check(requests, params, ranks=ranks, routes=routes)
        if self._vla is not None:
            check_actions(requests, params, self._vla)

    def _make_stepper(self) -> Stepper:
        assert self._model is not None, "single requests are refused before"
        if self._vla is not None:
            return ActionBatch(self._model, self._vla, self._setup.config.most_sequences)
        return ContinuousBatch(self._model, self._limits(), self._setup.config.most_sequences, self._reader)

    def _limits(self) -> DecodeLimits:
        config = self._setup.config
        return DecodeLimits(max_model_len=self._setup.max_model_len, max_prefill_tokens=config.most_tokens)

    @torch.no_grad()
    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        with self.overwriting(version):
            apply_buckets(buckets, self._weights, self._copy)

    def _copy(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            target = self._weights[name]
            if target.shape != tensor.shape:
                raise EngineError(f"weight {name} has shape {tuple(tensor.shape)}, the engine's has {tuple(target.shape)}")
            if target.dtype == FP8 != tensor.dtype:
                raise EngineError(f"weight {name} came as {tensor.dtype}: this engine stores it quantized, and takes it so only")
            target.copy_(tensor)

    @contextmanager
    def overwriting(self, version: int) -> Iterator[None]:
        with self._updating():
            self._ready = False
            yield
            self._loop.weights_changed()
            self._ready, self.version = True, version

    def live_weights(self) -> Iterator[Piece]:
        for name, tensor in self._weights.items():
            yield whole_piece(name, tensor)

    def standby_weights(self) -> Iterator[Piece]:
        assert self._model is not None, "initialize first"
        if not self._standby:
            self._standby = {name: torch.empty_like(param) for name, param in self._updated()}
        return (whole_piece(name, tensor) for name, tensor in unfused_tensors(self._standby.items()))

    def exchange(self) -> None:
        assert self._model is not None, "initialize first"
        for name, param in self._updated():
            param.data, self._standby[name] = self._standby[name], param.data
        self._weights = self._named_weights()

    def _updated(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that updates bring: all, a tied one at the input embedding; or the adapters, in peft's names."""
        assert self._model is not None, "initialize first"
        names = saved_names(self._model, self._setup.model.policy_kind)
        for name, param in self._model.named_parameters():
            if not names or name in names:
                yield names.get(name, name), param

    def _named_weights(self) -> dict[str, Tensor]:
        return dict(unfused_tensors((name, param.detach()) for name, param in self._updated()))

    def weight_dtype(self, name: str) -> torch.dtype:
        return self._weights[name].dtype

    def sleep(self, *, keep_weights: bool = False) -> None:
        with self._loop.exclusive("sleep"):
            self._ready = False

    def wake_up(self, *, weights_only: bool = False) -> None:
        return

    def shutdown(self) -> None:
        self._loop.close()
        self._model, self._weights, self._standby, self._ready = None, {}, {}, False


def _refuse_short_windows(config: PreTrainedConfig, max_model_len: int) -> None:
    """Raises EngineError for a sliding window shorter than the context, which this engine would silently ignore: it masks
    padding only."""
    text = config.get_text_config()
    values = text.to_dict()
    kinds = set(values.get("layer_types") or ["full_attention"])
    window = values.get("sliding_window")
    if kinds == {"full_attention"} or (kinds <= {"full_attention", "sliding_attention"} and (window or 0) >= max_model_len):
        return
    raise EngineError(
        f"the hf rollout engine does full attention only; {text.model_type} has layers of kinds {sorted(kinds)} with a window "
        f"of {window} tokens and max_model_len is {max_model_len}; use rollout.name=vllm"
    )


class ContinuousBatch:
    """A Stepper over a Hugging Face model.

    max_rows: the most requests that run at once; the others wait.  reader: of the pictures of requests, if the model reads some.
    """

    def __init__(self, model: PreTrainedModel, limits: DecodeLimits, max_rows: int, reader: ImageReader | None = None) -> None:
        self._model = model
        self._reader = reader
        self._limits = limits
        self._max_rows = max_rows
        self._waiting: deque[_Row] = deque()
        self._places: Places[_Row] | None = None

    def add(self, key: int, request: GenerationRequest, params: SamplingParams) -> None:
        length = len(request.prompt_ids)
        limit = min(params.max_new_tokens, request.start + self._limits.max_model_len - length)
        stops = frozenset(() if params.ignore_eos else params.stop_token_ids)
        self._waiting.append(
            _Row(
                key=key,
                ids=list(request.prompt_ids),
                pictures=request.pictures,
                seed=request.seed,
                params=params,
                stops=stops,
                count=request.start,
                limit=limit,
            )
        )

    @torch.inference_mode()
    def remove(self, keys: Collection[int]) -> None:
        self._waiting = deque(row for row in self._waiting if row.key not in keys)
        if self._places is not None:
            for place, row in enumerate(self._places.rows):
                if row is not None and row.key in keys:
                    self._places.leave(place)

    def recompute(self) -> None:
        """Makes all running rows join again, with all their tokens."""
        if self._places is not None:
            self._waiting.extendleft(row for row in reversed(self._places.rows) if row is not None)
            self._places = None

    @torch.inference_mode()
    def step(self) -> Sequence[TokenEvent]:
        num_running = len(self._places.taken()) if self._places is not None else 0
        joining = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_rows - num_running))]
        logits = None
        if self._places is not None and num_running:
            self._shrink(self._places, num_running, len(joining))
            logits = self._forward(self._places)
        if joining:
            logits = self._join(joining, logits)
        assert self._places is not None and logits is not None
        tokens, log_probs, tops = self._sample(logits, self._places)
        self._places.tokens = tokens
        return self._record(self._places, tokens.tolist(), log_probs.tolist(), tops)

    def _forward(self, places: Places[_Row]) -> Tensor:
        """Feeds every place's last token; returns the logits (places, vocabulary)."""
        columns = places.length + 1
        if places.mask is not None and places.mask.shape[-1] < columns:
            places.remask()
        mask = None if places.mask is None else places.mask[..., :columns]
        logits = decode_step(self._model, places.tokens, places.positions, places.cache, mask)
        places.positions = places.positions + places.advance
        return logits

    def _shrink(self, places: Places[_Row], num_running: int, num_joining: int) -> None:
        """Drops empty places, or columns that no row needs, once they make up a quarter of the cache."""
        taken = places.taken()
        look = places.length % PADDING_INTERVAL == 0  # reading `pads` waits for the device
        padding = int(places.pads[taken].min()) if look else 0
        if num_running + num_joining < KEEP_FRACTION * len(places.rows) or padding > (1 - KEEP_FRACTION) * places.length:
            places.arrange(taken, [places.rows[place] for place in taken])

    def _join(self, joining: list[_Row], logits: Tensor | None) -> Tensor:
        """Reads the joining rows and gives them places.

        logits: those of the places before, (places, vocabulary), or None without any.  Returns the logits of all places.
        """
        prompts = sorted({row.prompt for row in joining}, key=len)
        chunks = prefill_chunks([len(prompt) for prompt in prompts], self._limits.max_prefill_tokens)
        read = [read_prompts(self._model, prompts[first:stop], self._reader) for first, stop in chunks]
        if logits is None:
            self._places = self._new_places(len(joining), len(prompts[-1]), read[0].cache)
            logits = read[0].logits.new_empty(len(joining), read[0].logits.shape[1])
        assert self._places is not None
        places = self._places
        logits = self._make_places(places, len(joining), len(prompts[-1]), logits)
        number = {prompt: i for i, prompt in enumerate(prompts)}
        free = places.free()[: len(joining)]
        source = torch.tensor([number[row.prompt] for row in joining])
        index = torch.tensor(free)
        for (first, stop), one in zip(chunks, read, strict=True):
            inside = (source >= first) & (source < stop)
            fill_rows(places.cache, one.cache, index[inside].to(logits.device), (source[inside] - first).to(logits.device))
        self._fill(places, free, joining)
        for row in joining:
            if row.params.prompt_log_probs and not row.sampled:
                row.prompt_log_probs = prompt_log_probs(self._model, row.ids, row.params.top_log_probs)
        index, source = index.to(logits.device), source.to(logits.device)
        places.positions[index] = torch.cat([one.positions for one in read])[source]
        logits[index] = torch.cat([one.logits for one in read])[source]
        return logits

    def _new_places(self, count: int, width: int, prefilled: Cache) -> Places[_Row]:
        zeros = torch.zeros(count, dtype=torch.long, device=self._model.device)
        return Places(
            cache=allocate(prefilled, count, width, width + FIRST_CAPACITY),
            rows=[None] * count,
            pads=zeros,
            positions=zeros.clone(),
            advance=zeros.clone(),
            tokens=zeros.clone(),
            mask=None,
        )

    def _make_places(self, places: Places[_Row], count: int, width: int, logits: Tensor) -> Tensor:
        """Provides at least `count` empty places of at least `width` columns; returns the logits of all places."""
        if len(places.free()) < count:
            taken = places.taken()
            spare = min(max(count, len(taken) // SPARE_DIVISOR), self._max_rows - len(taken))
            sources = taken + [taken[0]] * spare  # the content of an empty place does not matter
            logits = logits[places.arrange(sources, [*(places.rows[place] for place in taken), *[None] * spare])]
        if width > places.length:
            more = width - places.length
            widen(places.cache, more)
            places.pads = places.pads + more
        return logits

    def _fill(self, places: Places[_Row], free: list[int], joining: list[_Row]) -> None:
        index = torch.tensor(free, device=places.pads.device)
        lengths = torch.tensor([len(row.ids) for row in joining], device=places.pads.device)
        places.pads[index] = places.length - lengths
        places.advance[index] = 1
        for place, row in zip(free, joining, strict=True):
            places.rows[place] = row
        places.remask()

    def _sample(self, logits: Tensor, places: Places[_Row]) -> tuple[Tensor, Tensor, dict[int, TopLogProbs]]:
        """Samples one token per place with its log-prob, both (places,), by each row's own parameters.  The values of empty
        places are meaningless.  Also returns the likeliest tokens of the places that ask for them."""
        noise = torch.tensor([0.0 if row is None else row.next_uniform() for row in places.rows], device=logits.device)
        kinds: list[SamplingParams] = []
        for row in places.rows:
            if row is not None and row.params not in kinds:
                kinds.append(row.params)
        tops: dict[int, TopLogProbs] = {}
        if len(kinds) == 1:
            if kinds[0].top_log_probs:
                tops = dict(enumerate(top_log_probs(logits, kinds[0])))
            return *sample_tokens(logits, noise, kinds[0]), tops
        tokens, log_probs = torch.zeros_like(places.tokens), torch.zeros_like(noise)
        for kind in kinds:
            chosen = [place for place, row in enumerate(places.rows) if row is not None and row.params == kind]
            index = torch.tensor(chosen, device=logits.device)
            tokens[index], log_probs[index] = sample_tokens(logits[index], noise[index], kind)
            if kind.top_log_probs:
                tops |= zip(chosen, top_log_probs(logits[index], kind), strict=True)
        return tokens, log_probs, tops

    def _record(
        self, places: Places[_Row], tokens: list[int], log_probs: list[float], tops: Mapping[int, TopLogProbs]
    ) -> list[TokenEvent]:
        """Appends the step's tokens to their rows, and removes the rows that end with them."""
        events = []
        for place, row in enumerate(places.rows):
            if row is None:
                continue
            token = tokens[place]
            if not math.isfinite(log_probs[place]):
                raise EngineError(NOT_FINITE)
            row.ids.append(token)
            row.count += 1
            row.sampled = True
            reason: FinishReason | None = None
            if token in row.stops or row.count >= row.limit:
                reason = "stop" if token in row.stops else "length"
                places.leave(place)
            events.append(TokenEvent(row.key, token, log_probs[place], reason, tops.get(place), row.prompt_log_probs))
            row.prompt_log_probs = None
        if not any(places.rows):
            self._places = None
        return events


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    """One request of the batch.

    pictures: of the prompt.
    ids: the tokens of the prompt and of the completion; the last one is not in the cache yet.
    count: the completion's tokens so far, including those of an earlier attempt.
    limit: the largest number of tokens that the completion may have.
    sampled: whether a token was sampled for this request.
    """

    key: int
    ids: list[int]
    seed: int
    params: SamplingParams
    stops: frozenset[int]
    count: int
    limit: int
    pictures: bytes = b""
    sampled: bool = False
    noise: list[float] = field(default_factory=list)  # uniforms of the tokens that follow, the next one last
    prompt_log_probs: list[tuple[float, TopLogProbs]] | None = None  # until its next token

    @property
    def prompt(self) -> Prompt:
        """Returns what the row reads when it joins."""
        return Prompt(tuple(self.ids), self.pictures)

    def next_uniform(self) -> float:
        """Returns the uniform of the token that is sampled next."""
        if not self.noise:
            self.noise = token_uniforms([self.seed], [self.count], NOISE_BLOCK)[0, ::-1].tolist()
        return self.noise.pop()
