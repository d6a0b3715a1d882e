"""What every rollout engine must do, as functions of a ready engine; used for the fake, the hf and the vllm engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlhub.engines.rollout.base import Completion, GenerationRequest, Progress, RolloutEngine, SamplingParams, WeightBucket
from rlhub.engines.rollout.continuous_batching import SteppedEngine
from rlhub.errors import EngineError, RequestError
from rlhub.protocol.weights.pieces import take
from tests.support.stopping import LIMIT_S, StopAt, halt, run_to

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
    if engine.vocab_size is not None:
        check_foreign_ids(engine, engine.vocab_size)


def check_foreign_ids(engine: RolloutEngine, vocab_size: int) -> None:
    """What is in no vocabulary is refused by its name, and so is sampling that would give no numbers; the next batch is fine."""
    params = SamplingParams(max_new_tokens=4)
    right = tokens(engine.generate(requests(), params))
    for token, asked, sampling in foreign(params, vocab_size):
        with pytest.raises(RequestError, match=f"token id {token} at place"):
            engine.generate([requests()[1], asked], sampling)
    for wrong in (replace(params, temperature=float("nan")), replace(params, temperature=1e-42), replace(params, top_k=2**70)):
        with pytest.raises(RequestError, match="temperature|top_k"):
            engine.generate(requests(), wrong)
    with pytest.raises(RequestError, match="seed"):
        engine.generate([GenerationRequest(prompt_ids=[5], seed=2**63)], params)
    assert tokens(engine.generate(requests(), params)) == right


def foreign(params: SamplingParams, vocab_size: int) -> list[tuple[int, GenerationRequest, SamplingParams]]:
    """Requests with a token id, in the prompt or among the stop tokens, that the engine has not."""
    ids = (-1, vocab_size, 2**70)
    prompts = [(token, GenerationRequest(prompt_ids=[5, token], seed=0), params) for token in ids]
    return [*prompts, *((token, requests()[0], replace(params, stop_token_ids=(token,))) for token in ids)]


async def _check_foreign_among_others(engine: RolloutEngine, vocab_size: int) -> None:
    params = SamplingParams(max_new_tokens=4)
    right = [await engine.agenerate(request, params) for request in requests()]
    for token, asked, sampling in foreign(params, vocab_size):
        good = (engine.agenerate(request, params) for request in requests())
        refused, *answers = await asyncio.gather(engine.agenerate(asked, sampling), *good, return_exceptions=True)
        assert isinstance(refused, RequestError) and str(token) in str(refused)
        assert [one.token_ids for one in answers if isinstance(one, Completion)] == tokens(right) and engine.failure == ""


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


def check_standby(engine: RolloutEngine, weights: dict[str, Tensor]) -> None:
    """Weights written aside disturb nobody, and once exchanged generate as loaded ones; twice, for the memory comes back.
    Control: a flipped weight does not."""
    params = SamplingParams(temperature=0.0, max_new_tokens=4)

    def generated() -> list[tuple[list[int], list[float]]]:
        return [(one.token_ids, one.log_probs) for one in engine.generate(requests(), params)]

    changed = {name: tensor * (1 + 0.2 * torch.rand_like(tensor)) for name, tensor in weights.items()}
    engine.update_weights([list(changed.items())], 1)
    loaded = generated()
    engine.update_weights([list(weights.items())], 2)
    before = generated()
    assert before != loaded
    for version, (values, expected) in enumerate([(changed, loaded), (weights, before)], start=3):
        for piece in engine.standby_weights() or ():
            piece.tensor.copy_(take(values[piece.name], piece.region))
        assert generated() == (before if values is changed else loaded)
        with engine.overwriting(version):
            engine.exchange()
        assert generated() == expected and engine.version == version
    flipped = next(piece.tensor for piece in engine.standby_weights() or () if piece.name == "model.norm.weight")
    flipped[0].neg_()
    with engine.overwriting(5):
        engine.exchange()
    assert generated() not in (before, loaded)
    engine.update_weights([list(weights.items())], 6)
    assert generated() == before


def check_nonfinite_weights(engine: RolloutEngine) -> None:
    """Log-probs that are not finite are an error also where nobody asked for them; with the weights back it generates on."""
    params = SamplingParams(temperature=0.0, max_new_tokens=4, log_probs=False)
    before = tokens(engine.generate(requests(), params))
    norms = [piece.tensor for piece in engine.live_weights() if piece.name == "model.norm.weight"]
    kept = [norm.clone() for norm in norms]
    for values, finite in (([torch.full_like(norm, float("nan")) for norm in norms], False), (kept, True)):
        with engine.overwriting(engine.version), torch.no_grad():
            for norm, value in zip(norms, values, strict=True):
                norm.copy_(value)
        if finite:
            assert tokens(engine.generate(requests(), params)) == before
        else:
            with pytest.raises(EngineError, match="log-probs that are not finite"):
                engine.generate(requests(), params)


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

    asyncio.run(_check_follow(engine, params))
    if engine.vocab_size is not None:
        asyncio.run(_check_foreign_among_others(engine, engine.vocab_size))

    async def refused() -> None:
        await engine.agenerate(GenerationRequest(prompt_ids=[], seed=0), params)

    with pytest.raises(EngineError, match="empty prompt"):
        asyncio.run(refused())


async def _check_follow(engine: RolloutEngine, params: SamplingParams) -> None:
    """Who follows a request is told its tokens one after the other, among others that nobody follows."""
    told: list[Progress] = []
    others = [asyncio.create_task(engine.agenerate(request, params)) for request in requests()[1:]]
    completion = await engine.agenerate(requests()[0], params, told.append)
    await asyncio.gather(*others)
    assert [token for progress in told for token in progress.token_ids] == completion.token_ids
    assert [value for progress in told for value in progress.log_probs] == completion.log_probs
    assert [value for progress in told for value in progress.versions] == completion.versions
    assert [progress.finish_reason for progress in told] == [None] * (len(told) - 1) + [completion.finish_reason]
    assert len(told) > 1


def check_interruptions(engine: SteppedEngine, weights: dict[str, Tensor], *, num_tokens: int = 40) -> None:
    """Pause, resume, abort, cancel and weights that change under running requests; `num_tokens` must fit the engine."""
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    engine.update_weights([list(weights.items())], 1)
    whole = engine.generate(requests(), params)
    for scenario in (_check_pause, _check_update_in_flight, _check_abort, _check_cancel):
        asyncio.run(scenario(engine, weights, params, whole))
        assert engine.load == 0
    assert tokens(engine.generate(requests(), params)) == tokens(whole), "the batch of before"


def _start(engine: RolloutEngine, params: SamplingParams) -> list[asyncio.Task[Completion]]:
    named = [replace(request, request_id=f"r{i}") for i, request in enumerate(requests())]
    return [asyncio.create_task(engine.agenerate(request, params)) for request in named]


STEP = 3
"""In which requests are met: they have some tokens by then, and are far from their end."""


async def _running(engine: SteppedEngine, params: SamplingParams) -> tuple[list[asyncio.Task[Completion]], StopAt]:
    """Requests, and the step of theirs that is under way."""
    engine.pause()
    tasks = _start(engine, params)
    await asyncio.sleep(0)
    return tasks, await run_to(engine, STEP)


async def _paused_midway(engine: SteppedEngine, params: SamplingParams) -> list[asyncio.Task[Completion]]:
    """Requests that are running, held up by a pause."""
    tasks, stop = await _running(engine, params)
    await halt(engine, stop)
    assert engine.load == len(tasks)
    return tasks


async def _check_pause(engine: SteppedEngine, _: dict[str, Tensor], params: SamplingParams, whole: list[Completion]) -> None:
    """A pause holds requests up and changes nothing; the batch path is refused meanwhile; new requests wait."""
    tasks = await _paused_midway(engine, params)
    engine.pause()
    late = asyncio.create_task(engine.agenerate(requests()[0], params))
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in (*tasks, late))
    with pytest.raises(EngineError, match="single requests"):
        engine.generate(requests(), params)
    engine.resume()
    engine.resume()
    assert tokens(await asyncio.gather(*tasks)) == tokens(whole)
    assert (await late).token_ids == whole[0].token_ids


async def _check_update_in_flight(
    engine: SteppedEngine, weights: dict[str, Tensor], params: SamplingParams, whole: list[Completion]
) -> None:
    """Refused while steps go on; after a pause the same weights under another version give the same tokens."""
    tasks, stop = await _running(engine, params)
    with pytest.raises(EngineError, match="pause"):
        engine.update_weights([list(weights.items())], 2)
    await halt(engine, stop)
    with pytest.raises(ConnectionError), engine.overwriting(2):
        raise ConnectionError("lost")
    with pytest.raises(EngineError, match="update_weights"):
        engine.resume()
    engine.update_weights([list(weights.items())], 2)
    with engine.overwriting(3):
        pass
    engine.resume()
    for completion, expected in zip(await asyncio.gather(*tasks), whole, strict=True):
        assert completion.token_ids == expected.token_ids
        assert len(completion.versions) == len(completion.log_probs) == len(completion.token_ids)
        assert completion.versions == sorted(completion.versions)
        assert set(completion.versions) <= {1, 3} and completion.versions[-1] == 3
    engine.update_weights([list(weights.items())], 1)


async def _check_abort(engine: SteppedEngine, _: dict[str, Tensor], params: SamplingParams, whole: list[Completion]) -> None:
    """By name, also while paused; the others go on; the tokens so far continue under `start`."""
    tasks = await _paused_midway(engine, params)
    engine.abort(["r1", "nobody"])
    part = await asyncio.wait_for(tasks[1], LIMIT_S)
    assert part.finish_reason == "abort"
    assert part.token_ids == whole[1].token_ids[: len(part.token_ids)]
    assert len(part.log_probs) == len(part.versions) == len(part.token_ids)
    engine.resume()
    rest = await asyncio.gather(tasks[0], *tasks[2:])
    assert tokens(rest) == tokens([whole[0], *whole[2:]])
    first = requests()[1]
    resumed = replace(first, prompt_ids=[*first.prompt_ids, *part.token_ids], start=len(part.token_ids))
    continued = await engine.agenerate(resumed, params)
    assert len(part.token_ids) + len(continued.token_ids) == params.max_new_tokens
    tasks, stop = await _running(engine, params)
    engine.abort()
    await halt(engine, stop)
    engine.resume()
    assert {completion.finish_reason for completion in await asyncio.gather(*tasks)} == {"abort"}


async def _check_cancel(engine: SteppedEngine, _: dict[str, Tensor], params: SamplingParams, whole: list[Completion]) -> None:
    """A cancelled task's request leaves, running or still waiting; the others do not notice."""
    tasks = await _paused_midway(engine, params)
    late = asyncio.create_task(engine.agenerate(requests()[0], params))
    await asyncio.sleep(0)
    late.cancel()
    engine.resume()
    tasks[0].cancel()
    rest = await asyncio.gather(*tasks[1:])
    assert tokens(rest) == tokens(whole[1:])
    assert tasks[0].cancelled() or tasks[0].cancelling()
    while engine.load:
        await asyncio.sleep(0.001)
