"""For rollout_scenarios: whole batches of the vllm engine with a core that runs ahead, and after errors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.engines.rollout.vllm import conversion
from rlhub.engines.rollout.vllm.conversion import vllm_params
from rlhub.engines.rollout.vllm.engine import VLLMEngine
from rlhub.errors import EngineError
from tests.support import rollout_contract as contract

SETTINGS = {
    "plain": SamplingParams(max_new_tokens=12),
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=12),
    "filtered": SamplingParams(temperature=0.7, top_p=0.8, top_k=9, max_new_tokens=12),
    "stops": SamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(2, 9))),
    "ignored stops": SamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(2, 9)), ignore_eos=True),
    "no log-probs": SamplingParams(max_new_tokens=12, log_probs=False),
    "to the model's length": SamplingParams(max_new_tokens=30, stop_token_ids=(2,)),
}
Row = tuple[list[int], list[float], str]


def requests() -> list[GenerationRequest]:
    """More than run at once; of many lengths, some over several cache blocks and with a common beginning; some that go on."""
    lengths = [1, 40, 7, 70, 3, 33, 70, 12] * 2
    rows = [GenerationRequest(prompt_ids=[3 + j % 60 for j in range(length)], seed=i) for i, length in enumerate(lengths)]
    return [*contract.requests(), *rows, *(replace(row, start=3) for row in rows[1:4])]


def seen(completions: list[Completion]) -> list[Row]:
    return [(one.token_ids, one.log_probs, one.finish_reason) for one in completions]


def by_llm(engine: VLLMEngine, wanted: list[GenerationRequest], params: SamplingParams) -> list[Row]:
    """The same from vLLM's own interface."""
    prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in wanted]
    with torch.random.fork_rng(devices=[]):
        answers = engine._running().llm.generate(prompts, [vllm_params(request, params) for request in wanted], use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    return [
        (list(output.token_ids), list(output.logprobs.logprobs) if params.log_probs else [], output.finish_reason)
        for output in outputs
    ]


def compare(engine: VLLMEngine) -> dict[str, Any]:
    """By setting: whether both give the same, and why requests ended."""
    out: dict[str, Any] = {"same": {}, "reasons": {}}
    for name, params in SETTINGS.items():
        ours = engine.generate(requests(), params)
        out["same"][name] = seen(ours) == by_llm(engine, requests(), params)
        out["reasons"][name] = sorted({one.finish_reason for one in ours})
        assert all(one.versions == [engine.version] * len(one.token_ids) for one in ours)
    others = [replace(request, seed=request.seed + 1) for request in requests()]
    params = SETTINGS["plain"]
    out["other seeds"] = seen(engine.generate(requests(), params)) == by_llm(engine, others, params)
    return out


def engine_core(engine: VLLMEngine) -> Any:
    return engine._running().llm.llm_engine.engine_core.engine_core


@contextmanager
def running_ahead(engine: VLLMEngine) -> Iterator[Any]:
    """The engine with a queue of two steps, as on GPUs."""
    inner, config = engine_core(engine), engine._running().llm.llm_engine.vllm_config
    ahead = {"batch_queue": deque(maxlen=2), "batch_queue_size": 2, "step_fn": inner.step_with_batch_queue}
    with mock.patch.multiple(inner, **ahead), mock.patch.object(type(config), "max_concurrent_batches", 2):
        yield inner


def observe_ahead(engine: VLLMEngine) -> dict[str, Any]:
    """Whether whole batches are the same, and what is left of them; single requests are refused."""
    params = SETTINGS["stops"]
    expected = seen(engine.generate(requests(), params))
    with running_ahead(engine) as inner:
        same = seen(engine.generate(requests(), params)) == expected
        left = inner.scheduler.has_requests() or len(inner.batch_queue) > 0
        by_llm(engine, requests(), params)
        left_by_llm = inner.scheduler.has_requests() or len(inner.batch_queue) > 0
        engine.generate(contract.requests(), params)
        try:
            engine._make_stepper()
            refusal = "none"
        except EngineError as error:
            refusal = str(error)
    return {"same": same, "left": left, "left by LLM": left_by_llm, "refusal": refusal}


class _Broken(Exception):
    """What the tests let happen inside."""


def _failing_at(call: int, function: Any) -> Any:
    calls = iter(range(call))

    def fail_late(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise _Broken
        return function(*args, **kwargs)

    return fail_late


def _breaks(target: Any, name: str, call: int, action: Callable[[], object]) -> None:
    """`action` ends with the error that call number `call` of target.name raises."""
    with mock.patch.object(target, name, _failing_at(call, getattr(target, name))), pytest.raises(_Broken):
        action()


def observe_errors(engine: VLLMEngine) -> dict[str, bool]:
    """Whether errors outside the steps leave the engine as it was: while requests are made, taken by vLLM, and read."""
    params, out = SETTINGS["plain"], {}
    expected = seen(engine.generate(requests(), params))
    vllm = engine._running().llm.llm_engine
    for target, name, call in ((conversion, "vllm_params", 9), (vllm, "add_request", 9), (conversion, "progress_of", 9)):
        _breaks(target, name, call, lambda: engine.generate(requests(), params))
        left = engine_core(engine).scheduler.has_requests()
        out[name] = not left and seen(engine.generate(requests(), params)) == expected
    return out


def observe_failure(engine: VLLMEngine) -> dict[str, Any]:
    """What the engine says after an error inside a step."""
    params, executor = SETTINGS["plain"], engine._running().llm.llm_engine.model_executor
    _breaks(executor, "execute_model", 3, lambda: engine.generate(requests(), params))
    try:
        engine.generate(contract.requests(), params)
        answer = "none"
    except EngineError as error:
        answer = str(error)
    return {"failure": engine.failure, "answer": answer}
