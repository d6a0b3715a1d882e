import asyncio
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.engines.rollout.continuous_batching import Stepper
from rlhub.engines.rollout.hf import cache, decode
from rlhub.engines.rollout.hf import engine as module
from rlhub.engines.rollout.hf.engine import ContinuousBatch, HFEngine
from rlhub.errors import RequestError
from tests.integration.test_hf_engine import hf_engine, many_requests
from tests.support import interruptions
from tests.support.tiny_models import END_OF_SEQUENCE, save_tiny_model, tiny_model

NUM_TOKENS = 10
STOPPING = SamplingParams(max_new_tokens=40, stop_token_ids=(END_OF_SEQUENCE, 5, 9))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return save_tiny_model(tmp_path_factory.getbasetemp() / "stepper")


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> HFEngine:
    engine = engine_of(tmp_path_factory.getbasetemp() / "stepper")
    engine.update_weights([list(model.named_parameters())], 0)
    return engine


def engine_of(folder: Path) -> HFEngine:
    engine = hf_engine(folder, RolloutConfig(name="hf", max_num_seqs=24, max_num_batched_tokens=60), max_prompt_length=60)
    assert isinstance(engine, HFEngine)
    return engine


def drive(stepper: Stepper, kinds: list[SamplingParams], draw: random.Random) -> dict[int, Completion]:
    """Requests that join at random steps; some leave early, and now and then everything is read anew."""
    waiting = list(enumerate(many_requests()))
    done = {key: Completion(token_ids=[], log_probs=[], finish_reason="abort") for key, _ in waiting}
    running: set[int] = set()
    while waiting or running:
        for _ in range(min(len(waiting), draw.choice([0, 0, 0, 1, 2, 9]))):
            key, request = waiting.pop(0)
            stepper.add(key, request, kinds[key])
            running.add(key)
        if draw.random() < 0.05:
            stepper.recompute()
        if running and draw.random() < 0.05:
            gone = draw.choice(sorted(running))
            stepper.remove([gone, 12345])
            running.discard(gone)
        for key, token, log_prob, reason, *_ in stepper.step() if running else ():
            done[key].token_ids.append(token)
            done[key].log_probs.append(log_prob)
            if reason is not None:
                done[key].finish_reason = reason
                running.discard(key)
    return done


@pytest.mark.parametrize("small", [False, True])
def test_company_joins_and_leaves_without_changing_a_completion(
    engine: HFEngine, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:
        monkeypatch.setattr(module, "FIRST_CAPACITY", 2)
        monkeypatch.setattr(cache, "SPARE_MASK_COLUMNS", 3)
        monkeypatch.setattr(module, "PADDING_INTERVAL", 1)
        monkeypatch.setattr(module, "NOISE_BLOCK", 5)
    kinds = [STOPPING if i % 3 else replace(STOPPING, temperature=0.7, max_new_tokens=15) for i in range(40)]
    done = drive(engine._make_stepper(), kinds, random.Random(1))
    assert sum(completion.finish_reason == "abort" for completion in done.values()) in range(1, 20)
    for kind in (STOPPING, kinds[0]):
        keys = [key for key in done if kinds[key] == kind]
        whole = engine.generate([many_requests()[key] for key in keys], kind)
        for key, expected in zip(keys, whole, strict=True):
            count = len(done[key].token_ids)
            assert done[key].token_ids == expected.token_ids[:count]
            assert done[key].log_probs == pytest.approx(expected.log_probs[:count], abs=1e-5)
            assert done[key].finish_reason in ("abort", expected.finish_reason)
            assert done[key].finish_reason == "abort" or count == len(expected.token_ids)


def test_the_test_above_notices_rows_that_get_mixed_up(engine: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = module.fill_rows
    monkeypatch.setattr(module, "fill_rows", lambda cache, read, rows, source: fill(cache, read, rows.flip(0), source))
    with pytest.raises(AssertionError):
        test_company_joins_and_leaves_without_changing_a_completion(engine, False, monkeypatch)


def test_interrupted_at_every_token_it_goes_on_under_the_new_weights(engine: HFEngine, model: PreTrainedModel) -> None:
    models = (model, tiny_model(seed=5))
    positions = range(1, NUM_TOKENS)
    interruptions.check(
        interruptions.observe(engine, models, positions, num_tokens=NUM_TOKENS, recompute=True), num_tokens=NUM_TOKENS
    )
    ends = (positions[0], positions[-1])
    kept = interruptions.observe(engine, models, ends, num_tokens=NUM_TOKENS, recompute=False)
    for at in ends:
        assert max(one.error_after for one in kept if one.at == at) > 1e-3, "old keys and values must be noticed"
    engine.update_weights([list(model.named_parameters())], 0)


def test_a_completion_goes_on_with_the_noise_of_where_it_stopped(engine: HFEngine) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    requests = many_requests()[:12]
    whole = engine.generate(requests, params)
    rest = [
        replace(request, prompt_ids=[*request.prompt_ids, *completion.token_ids[:start]], start=start)
        for start, (request, completion) in enumerate(zip(requests, whole, strict=True))
    ]

    async def gather() -> list[Completion]:
        return list(await asyncio.gather(*(engine.agenerate(request, params) for request in rest)))

    for completions in (engine.generate(rest, params), asyncio.run(gather())):
        for start, (completion, expected) in enumerate(zip(completions, whole, strict=True)):
            assert completion.token_ids == expected.token_ids[start:]
            assert completion.finish_reason == "length"


def test_rows_that_ended_at_max_model_len_do_not_disturb_the_others(engine: HFEngine) -> None:
    limit = engine._setup.max_model_len
    prompts = [[5] * (limit - 3), [7] * 4, [8] * 4, [9] * 5]
    requests = [GenerationRequest(prompt_ids=prompt, seed=1) for prompt in prompts]
    params = SamplingParams(max_new_tokens=10)

    async def gather() -> list[Completion]:
        return list(await asyncio.gather(*(engine.agenerate(request, params) for request in requests)))

    for completions in (engine.generate(requests, params), asyncio.run(gather())):
        assert [len(completion.token_ids) for completion in completions] == [3, 10, 10, 10]


def test_a_steady_stream_keeps_the_cache_small(engine: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that are padding for all are given up, though there is never a moment without a row."""
    monkeypatch.setattr(module, "PADDING_INTERVAL", 16)
    stepper = engine._make_stepper()
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    longest = 0
    with torch.inference_mode():
        for step in range(120):
            if step % 5 == 0:
                stepper.add(step, GenerationRequest(prompt_ids=[3, 4, 5], seed=step), params)
            stepper.step()
            assert isinstance(stepper, ContinuousBatch) and stepper._places is not None
            longest = max(longest, stepper._places.length)
    assert longest < 60


def test_likeliest_tokens_and_prompts_come_without_changing_a_completion(
    engine: HFEngine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "SCORED_TOKENS", 3)
    truncated = replace(STOPPING, temperature=0.7, top_k=5, top_p=0.9)

    async def both(params: SamplingParams) -> list[tuple[Completion, Completion]]:
        more = replace(params, top_log_probs=7, prompt_log_probs=True)
        alone = await asyncio.gather(*(engine.agenerate(request, params) for request in many_requests()[:8]))
        mixed = await asyncio.gather(
            *(engine.agenerate(request, (params, more)[index % 2]) for index, request in enumerate(many_requests()[:8]))
        )
        return list(zip(alone, mixed, strict=True))[1::2]

    for params in (STOPPING, truncated, replace(STOPPING, temperature=0.0)):
        for index, (alone, ranked) in enumerate(asyncio.run(both(params))):
            request = many_requests()[2 * index + 1]
            assert ranked.token_ids == alone.token_ids and ranked.log_probs == pytest.approx(alone.log_probs, abs=1e-5)
            assert alone.top_log_probs == alone.prompt_log_probs == []
            plain = full_log_probs(model, [*request.prompt_ids, *ranked.token_ids], 1.0)
            first = len(request.prompt_ids) - 1
            for place, (log_prob, top) in enumerate(ranked.prompt_log_probs):
                assert log_prob == pytest.approx(float(plain[place, request.prompt_ids[place + 1]]), abs=1e-4)
                assert [value for _, value in top] == pytest.approx(plain[place].topk(7).values.tolist(), abs=1e-4)
            assert len(ranked.prompt_log_probs) == first
            for place, (token, log_prob, top) in enumerate(
                zip(ranked.token_ids, ranked.log_probs, ranked.top_log_probs, strict=True)
            ):
                if token in dict(top):
                    assert dict(top)[token] == pytest.approx(log_prob, abs=1e-6), "the sampled token's own"
                if params is truncated:
                    assert len(top) <= 5 and token in dict(top) and sum(math.exp(value) for _, value in top) == pytest.approx(1)
                else:
                    expected = plain[first + place].topk(7).values.tolist()
                    assert [value for _, value in top] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(RequestError, match="single requests"):
        engine.generate(many_requests()[:1], replace(STOPPING, top_log_probs=1))


def full_log_probs(model: PreTrainedModel, ids: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        return (model(input_ids=torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
