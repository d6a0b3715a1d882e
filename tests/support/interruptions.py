"""Running requests that are interrupted for new weights after a chosen number of steps, and what must hold for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from transformers import PreTrainedModel

from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.engines.rollout.continuous_batching import SteppedEngine
from tests.support.rollout_contract import PROMPTS, requests
from tests.support.stopping import LIMIT_S, halt, run_to
from tests.support.tiny_models import sequence_log_probs

LONG_PROMPT = [3 + i % 60 for i in range(70)]  # several blocks of a paged cache


async def interrupted(
    engine: SteppedEngine,
    wanted: Sequence[GenerationRequest],
    params: SamplingParams,
    at: int,
    update: Callable[[], None],
    *,
    recompute: bool,
    late: Sequence[GenerationRequest] = (),
) -> list[Completion]:
    """The requests, all in one batch, with `update` after `at` steps, and `late`, which come just after it."""
    engine.pause()
    tasks = [asyncio.create_task(engine.agenerate(request, params)) for request in wanted]
    await asyncio.sleep(0)
    await halt(engine, await run_to(engine, at))
    assert engine.load == len(tasks)
    update()
    tasks += [asyncio.create_task(engine.agenerate(request, params)) for request in late]
    await asyncio.sleep(0)
    engine.resume(recompute=recompute)
    return list(await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S))


@dataclass(slots=True, kw_only=True)
class Seen:
    """One completion interrupted after `at` tokens: the versions it says, and the largest differences of its log-probs to full
    forwards of the old weights (before) and of the new ones (after)."""

    at: int
    lengths: tuple[int, int, int]
    versions: list[int]
    error_before: float
    error_after: float


def observe(
    engine: SteppedEngine,
    models: tuple[PreTrainedModel, PreTrainedModel],
    positions: Sequence[int],
    *,
    num_tokens: int,
    recompute: bool,
) -> list[Seen]:
    """Interrupt the contract's requests and a long one after every number of tokens in `positions`; old weights are version
    1, new ones 2."""
    old, new = ([[(name, weight.detach()) for name, weight in model.named_parameters()]] for model in models)
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    wanted = [*requests(), GenerationRequest(prompt_ids=LONG_PROMPT, seed=77)]
    seen = []
    for at in positions:
        engine.update_weights(old, 1)
        update = lambda: engine.update_weights(new, 2)  # noqa: E731
        completions = asyncio.run(interrupted(engine, wanted, params, at, update, recompute=recompute))
        for prompt, completion in zip([*PROMPTS, LONG_PROMPT], completions, strict=True):
            seen.append(_compare(models, prompt, completion, at))
    return seen


def _compare(models: tuple[PreTrainedModel, PreTrainedModel], prompt: list[int], completion: Completion, at: int) -> Seen:
    before, after = (sequence_log_probs(model, prompt, completion.token_ids, 1.0) for model in models)
    return Seen(
        at=at,
        lengths=(len(completion.token_ids), len(completion.log_probs), len(completion.versions)),
        versions=completion.versions,
        error_before=max(abs(a - b) for a, b in zip(before[:at], completion.log_probs[:at], strict=True)),
        error_after=max(abs(a - b) for a, b in zip(after[at:], completion.log_probs[at:], strict=True)),
    )


def late_error(
    engine: SteppedEngine,
    models: tuple[PreTrainedModel, PreTrainedModel],
    around: AbstractContextManager[object],
    *,
    num_tokens: int = 8,
) -> float:
    """Largest difference of log-probs to the new weights' full forward, for a request with the prompt of an interrupted one
    that goes on with its old keys and values; `around` the update in flight."""
    old, new = ([[(name, weight.detach()) for name, weight in model.named_parameters()]] for model in models)
    engine.update_weights(old, 1)
    first, late = (GenerationRequest(prompt_ids=LONG_PROMPT, seed=seed) for seed in (1, 2))
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)

    def update() -> None:
        with around:
            engine.update_weights(new, 2)

    _, completion = asyncio.run(interrupted(engine, [first], params, 3, update, recompute=False, late=[late]))
    expected = sequence_log_probs(models[1], LONG_PROMPT, completion.token_ids, 1.0)
    return max(abs(a - b) for a, b in zip(expected, completion.log_probs, strict=True))


def check(seen: Sequence[Seen], *, num_tokens: int, tolerance: float = 2e-5) -> None:
    """Every completion of an `observe` with recomputation."""
    for one in seen:
        assert one.lengths == (num_tokens, num_tokens, num_tokens)
        assert one.versions == [1] * one.at + [2] * (num_tokens - one.at)
        assert one.error_before < tolerance
        assert one.error_after < tolerance, f"interrupted after {one.at} tokens"
