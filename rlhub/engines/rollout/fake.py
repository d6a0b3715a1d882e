"""A rollout engine without a model, for tests of the code that uses an engine: completions follow from prompt and seed alone.

Its continuous batch is real: each step gives every request one token, and takes as long as it is set to.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from rlhub.engines.rollout.base import Completion, FinishReason, GenerationRequest, SamplingParams, WeightBucket, apply_buckets
from rlhub.engines.rollout.continuous_batching import SteppedEngine, Stepper, TokenEvent
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.protocol.weights.pieces import Piece, whole_piece

Script = Callable[[GenerationRequest, SamplingParams], list[int]]

FAKE_LOG_PROB = -0.5
FAKE_VOCABULARY = 16
FIRST_TOKEN = 3  # 0 to 2 are commonly padding, beginning and end of sequence


def hashed_script(request: GenerationRequest, params: SamplingParams) -> list[int]:
    """Returns tokens from a checksum of (prompt, seed), as many as allowed, or fewer and ended by the first stop token."""
    key = zlib.crc32(repr((list(request.prompt_ids), request.seed)).encode())
    stops = bool(params.stop_token_ids) and not params.ignore_eos
    length = 1 + key % params.max_new_tokens if stops else params.max_new_tokens
    tokens = [FIRST_TOKEN + zlib.crc32(f"{key}:{i}".encode()) % FAKE_VOCABULARY for i in range(length)]
    if length < params.max_new_tokens:
        tokens[-1] = params.stop_token_ids[0]
    return tokens


class FakeEngine(SteppedEngine):
    """A RolloutEngine that accepts any weights; the first update defines which names the model has."""

    def __init__(
        self, setup: RolloutSetup, *, script: Script = hashed_script, step_s: float = 0.0, vocab_size: int | None = None
    ) -> None:
        """Builds the engine.

        script: returns the tokens of a request's completion.
        step_s: the duration of a step of the continuous batch in seconds.
        vocab_size: the vocabulary of the model that the engine stands for; None accepts any token ids.
        """
        super().__init__(setup)
        self._script = script
        self._weights: dict[str, Tensor] = {}
        self._standby: dict[str, Tensor] = {}
        self._ready = setup.load_checkpoint
        self._step_s = step_s
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int | None:
        return self._vocab_size

    def _make_stepper(self) -> Stepper:
        return FakeStepper(self._whole, self._step_s)

    def initialize(self) -> None:
        return

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Completion]:
        self._refuse_unready("generate")
        self._check(requests, params)
        with self._generating():
            return [self._complete(request, params) for request in requests]

    def _complete(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        tokens = self._whole(request, params)
        return Completion(
            token_ids=tokens,
            log_probs=[FAKE_LOG_PROB] * len(tokens) if params.log_probs else [],
            finish_reason=_reason(tokens, params),
            versions=[self.version] * len(tokens),
        )

    def _whole(self, request: GenerationRequest, params: SamplingParams) -> list[int]:
        """Returns the tokens of a request.  One that continues after `start` tokens gets the rest of the completion that it
        began."""
        prompt = list(request.prompt_ids)
        beginning = replace(request, prompt_ids=prompt[: len(prompt) - request.start], start=0)
        num_free = self._setup.max_model_len - len(prompt)
        return self._script(beginning, params)[request.start : params.max_new_tokens][:num_free]

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        with self.overwriting(version):
            if self._weights:
                apply_buckets(buckets, self._weights, self._copy)
            else:
                for bucket in buckets:
                    self._weights.update({name: tensor.detach().clone() for name, tensor in bucket})

    def _copy(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            self._weights[name].copy_(tensor)

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
        self._standby = self._standby or {name: torch.empty_like(tensor) for name, tensor in self._weights.items()}
        return (whole_piece(name, tensor) for name, tensor in self._standby.items())

    def exchange(self) -> None:
        self._weights, self._standby = self._standby, self._weights

    def weight_dtype(self, name: str) -> torch.dtype:
        return self._weights[name].dtype

    def sleep(self, *, keep_weights: bool = False) -> None:
        with self._loop.exclusive("sleep"):
            self._ready = False

    def wake_up(self, *, weights_only: bool = False) -> None:
        return

    def shutdown(self) -> None:
        self._loop.close()
        self._ready = False


class FakeStepper:
    """A Stepper that gives every request the next token of its script in each step."""

    def __init__(self, whole: Script, step_s: float) -> None:
        self._whole = whole
        self._step_s = step_s
        self._arrived: dict[int, tuple[GenerationRequest, SamplingParams]] = {}
        self._rest: dict[int, tuple[list[int], SamplingParams]] = {}  # the tokens that follow, the next one last

    def add(self, key: int, request: GenerationRequest, params: SamplingParams) -> None:
        self._arrived[key] = (request, params)

    def step(self) -> Sequence[TokenEvent]:
        if self._step_s:
            time.sleep(self._step_s)
        self._rest |= {key: (self._whole(*asked)[::-1], asked[1]) for key, asked in self._arrived.items()}
        self._arrived = {}
        events = []
        for key, (rest, params) in list(self._rest.items()):
            token = rest.pop()
            events.append(TokenEvent(key, token, FAKE_LOG_PROB, None if rest else _reason([token], params)))
            if not rest:
                del self._rest[key]
        return events

    def remove(self, keys: Collection[int]) -> None:
        for key in keys:
            self._arrived.pop(key, None)
            self._rest.pop(key, None)

    def recompute(self) -> None:
        """Does nothing, because there are no keys and values."""


def _reason(tokens: Sequence[int], params: SamplingParams) -> FinishReason:
    stopped = not params.ignore_eos and bool(tokens) and tokens[-1] in params.stop_token_ids
    return "stop" if stopped else "length"
