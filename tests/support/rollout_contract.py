"""What every rollout engine must do, as functions of a ready engine; used for the fake, the hf and the vllm engine."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import Tensor

from rlhub.engines.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams, WeightBucket
from rlhub.errors import EngineError
from rlhub.utils.regions import take

PROMPTS = [[5, 6, 7, 13], [8, 9, 14, 5, 6], [20], [3] * 17, [5, 6, 7, 13]]


def requests(seed: int = 0) -> list[GenerationRequest]:
    return [GenerationRequest(prompt_ids=prompt, seed=seed + i) for i, prompt in enumerate(PROMPTS)]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def check_generation(engine: RolloutEngine) -> None:
    """Lengths, log-probs, versions, reasons; equal seeds repeat, other seeds differ, the batch does not matter."""
    params = SamplingParams(max_new_tokens=12, stop_token_ids=(2,))
    state = torch.get_rng_state()
    first = engine.generate(requests(), params)
    for completion in first:
        assert 1 <= len(completion.token_ids) <= 12
        assert len(completion.log_probs) == len(completion.versions) == len(completion.token_ids)
        assert set(completion.versions) == {engine.version}
        assert all(value <= 0 for value in completion.log_probs)
        stopped = completion.token_ids[-1] == 2
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.token_ids) == 12
        assert 2 not in completion.token_ids[:-1]
    assert tokens(engine.generate(requests(), params)) == tokens(first)
    assert tokens(engine.generate(requests(seed=100), params)) != tokens(first)
    alone = [engine.generate([request], params)[0] for request in requests()]
    assert tokens(alone) == tokens(first)
    assert torch.equal(torch.get_rng_state(), state)
    assert engine.generate([], params) == []
    assert engine.generate(requests(), SamplingParams(max_new_tokens=3, log_probs=False))[0].log_probs == []


def check_refusals(engine: RolloutEngine, max_model_len: int) -> None:
    """Requests that cannot be served are refused before anything is generated."""
    params = SamplingParams(max_new_tokens=4)
    for bad in ([], [3] * max_model_len):
        with pytest.raises(EngineError, match="request 0"):
            engine.generate([GenerationRequest(prompt_ids=bad, seed=0)], params)
    with pytest.raises(EngineError, match="max_new_tokens"):
        engine.generate(requests(), SamplingParams(max_new_tokens=0))
    with pytest.raises(EngineError, match="top_p"):
        engine.generate(requests(), SamplingParams(top_p=0.0))


def check_weight_stream(engine: RolloutEngine, weights: WeightBucket) -> None:
    """A broken, short or surplus stream leaves an engine that refuses to generate until a whole update."""
    params = SamplingParams(temperature=0.0, max_new_tokens=4)
    engine.update_weights([weights], 1)
    before = tokens(engine.generate(requests(), params))

    def broken() -> object:
        yield weights[:2]
        raise ConnectionError("lost")

    def unknown() -> list[WeightBucket]:
        return [weights, [("model.nothing.weight", torch.zeros(1))]]

    for stream, error in (
        (broken(), ConnectionError),
        ([weights[:-1]], EngineError),
        ([weights, weights[:1]], EngineError),
        (unknown(), EngineError),
    ):
        with pytest.raises(error):
            engine.update_weights(stream, 2)  # type: ignore[arg-type]
        assert engine.version == 1
        with pytest.raises(EngineError, match="update_weights"):
            engine.generate(requests(), params)
    engine.update_weights([[pair] for pair in weights], 2)
    assert engine.version == 2
    assert tokens(engine.generate(requests(), params)) == before
    engine.sleep()
    engine.sleep()
    engine.wake_up()
    with pytest.raises(EngineError, match="update_weights"):
        engine.generate(requests(), params)
    engine.update_weights([weights], 3)
    assert tokens(engine.generate(requests(), params)) == before


def check_live_weights(engine: RolloutEngine, weights: dict[str, Tensor]) -> None:
    """Every weight once, as a view of memory that generation reads, equal to its slice."""
    engine.update_weights([list(weights.items())], 1)
    live = {piece.name: piece for piece in engine.live_weights()}
    assert sorted(live) == sorted(weights)
    for name, piece in live.items():
        assert engine.weight_dtype(name) == piece.tensor.dtype
        assert piece.shape == tuple(weights[name].shape), name
        assert torch.equal(take(weights[name], piece.region).to(piece.tensor.dtype), piece.tensor), name
    again = {piece.name: piece.tensor.data_ptr() for piece in engine.live_weights()}
    assert again == {name: piece.tensor.data_ptr() for name, piece in live.items()}


def check_overwriting(engine: RolloutEngine, weights: dict[str, Tensor]) -> None:
    """Weights written in place serve after a clean end; inside, and after an exception, nothing is generated."""
    params = SamplingParams(temperature=0.0, max_new_tokens=4)
    engine.update_weights([list(weights.items())], 1)
    before = tokens(engine.generate(requests(), params))
    pieces = list(engine.live_weights())
    with pytest.raises(ConnectionError), engine.overwriting(2):
        pieces[0].tensor.zero_()
        with pytest.raises(EngineError, match="update_weights"):
            engine.generate(requests(), params)
        raise ConnectionError("lost")
    assert engine.version == 1
    with pytest.raises(EngineError, match="update_weights"):
        engine.generate(requests(), params)
    with engine.overwriting(3):
        for piece in pieces:
            piece.tensor.copy_(take(weights[piece.name], piece.region))
    assert engine.version == 3
    assert tokens(engine.generate(requests(), params)) == before


def check_agenerate(engine: RolloutEngine) -> None:
    """Concurrent single requests give what the batch gives, also under two kinds of parameters at once."""
    params, other = SamplingParams(max_new_tokens=6), SamplingParams(max_new_tokens=3)

    async def gather() -> list[Completion]:
        return await asyncio.gather(
            *(engine.agenerate(request, params) for request in requests()),
            *(engine.agenerate(request, other) for request in requests()),
        )

    both = asyncio.run(gather())
    assert tokens(both) == tokens(engine.generate(requests(), params)) + tokens(engine.generate(requests(), other))

    async def refused() -> None:
        await engine.agenerate(GenerationRequest(prompt_ids=[], seed=0), params)

    with pytest.raises(EngineError, match="empty prompt"):
        asyncio.run(refused())
