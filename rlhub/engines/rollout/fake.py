"""A rollout engine without a model: completions follow from prompt and seed alone.  For tests of what uses an engine."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlhub.engines.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams, WeightBucket
from rlhub.engines.rollout.batcher import RequestBatcher
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.requests import check_requests
from rlhub.engines.rollout.weight_stream import apply_buckets
from rlhub.errors import EngineError
from rlhub.utils.pieces import Piece, whole_piece

Script = Callable[[GenerationRequest, SamplingParams], list[int]]

FAKE_LOG_PROB = -0.5
FAKE_VOCABULARY = 16
FIRST_TOKEN = 3  # 0 to 2 are commonly padding, beginning and end of sequence


def hashed_script(request: GenerationRequest, params: SamplingParams) -> list[int]:
    """Tokens from a checksum of (prompt, seed); as long as allowed, or shorter and ended by the first stop token."""
    key = zlib.crc32(repr((list(request.prompt_ids), request.seed)).encode())
    stops = bool(params.stop_token_ids) and not params.ignore_eos
    length = 1 + key % params.max_new_tokens if stops else params.max_new_tokens
    tokens = [FIRST_TOKEN + zlib.crc32(f"{key}:{i}".encode()) % FAKE_VOCABULARY for i in range(length)]
    if length < params.max_new_tokens:
        tokens[-1] = params.stop_token_ids[0]
    return tokens


class FakeEngine(RolloutEngine):
    """Keeps whatever weights it is given: the first update says which names belong to the model."""

    def __init__(self, setup: RolloutSetup, *, script: Script = hashed_script) -> None:
        self.version = -1
        self._setup = setup
        self._script = script
        self._weights: dict[str, Tensor] = {}
        self._ready = setup.load_checkpoint
        self._batcher = RequestBatcher(self.generate)

    def initialize(self) -> None:
        return

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Completion]:
        if not self._ready:
            raise EngineError("the engine has no whole set of weights: update_weights comes before generate")
        check_requests(requests, params, max_model_len=self._setup.max_model_len)
        return [self._complete(request, params) for request in requests]

    def _complete(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        tokens = self._script(request, params)[: params.max_new_tokens]
        stopped = not params.ignore_eos and bool(tokens) and tokens[-1] in params.stop_token_ids
        return Completion(
            token_ids=tokens,
            log_probs=[FAKE_LOG_PROB] * len(tokens) if params.log_probs else [],
            finish_reason="stop" if stopped else "length",
            versions=[self.version] * len(tokens),
        )

    async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        return await self._batcher.submit(request, params)

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        self._ready = False
        if self._weights:
            apply_buckets(buckets, self._weights, self._copy)
        else:
            for bucket in buckets:
                self._weights.update({name: tensor.detach().clone() for name, tensor in bucket})
        self._ready, self.version = True, version

    def _copy(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            self._weights[name].copy_(tensor)

    @contextmanager
    def overwriting(self, version: int) -> Iterator[None]:
        self._ready = False
        yield
        self._ready, self.version = True, version

    def live_weights(self) -> Iterator[Piece]:
        for name, tensor in self._weights.items():
            yield whole_piece(name, tensor)

    def weight_dtype(self, name: str) -> torch.dtype:
        return self._weights[name].dtype

    def sleep(self) -> None:
        self._ready = False

    def wake_up(self, *, weights_only: bool = False) -> None:
        return

    def shutdown(self) -> None:
        self._ready = False
