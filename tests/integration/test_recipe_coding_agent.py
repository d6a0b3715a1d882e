"""The tests of the recipe coding_agent: right functions pass, wrong and hostile ones do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from recipes.coding_agent.build_model import build_tokenizer
from recipes.coding_agent.generate import INPUTS, body_of, split_problems, to_row
from recipes.coding_agent.workflow import CodingAgent
from rlhub.agents.workflows.base import EpisodeData, WorkflowParts
from rlhub.engines.rollout.base import Completion, SamplingParams
from rlhub.errors import ConfigError
from rlhub.sandboxes.bwrap import usable_mode

try:
    usable_mode()
except ConfigError as error:
    pytest.skip(f"no sandbox can be made here: {error}", allow_module_level=True)

TESTS = json.dumps({"inputs": [3, 4], "wants": ["7", "9"]})


async def score(row: Any, text: str) -> tuple[float, dict[str, float]]:
    raise AssertionError("not the workflow's business")


def agent(**kwargs: Any) -> CodingAgent:
    parts = WorkflowParts(
        tokenizer=build_tokenizer(),
        sampling=SamplingParams(),
        max_prompt_length=16,
        max_response_length=80,
        score=score,
        kwargs={"sandbox": {"name": "bwrap", "timeout_s": 120}, **kwargs},
    )
    return CodingAgent(parts)


def test_functions_are_tested_in_a_sandbox() -> None:
    bodies = {
        "x*=2;x+=1": None,
        "x+=4": "f(4) is 8, not 9",
        "x=float(x*2+1)": "f(3) is 7.0, not 7",
        "x=": "f(3) is SyntaxErr, not 7",
        "x=1/0": "f(3) is ZeroDivis, not 7",
        'print(\'["7", "9"]\')': "f(3) is no result, not 7",
        'import os; print(\'["7", "9"]\'); os._exit(0)': "f(3) is no result, not 7",
        "open('/etc/passwd')": "f(3) is FileNotFo, not 7",
    }
    endless = "while 1: pass"

    async def once() -> list[str | None]:
        tester, hasty = agent(), agent(sandbox={"name": "bwrap", "timeout_s": 3})
        return [await hasty.failure(endless, TESTS), *await asyncio.gather(*(tester.failure(body, TESTS) for body in bodies))]

    timed, *found = asyncio.run(once())
    assert timed == "f(3) is time, not 7" and dict(zip(bodies, found, strict=True)) == bodies


class Told:
    """An engine that writes what it was told."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._answers = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
        self.requests: list[Any] = []

    async def agenerate(self, request: Any, params: SamplingParams, follow: Any = None) -> Completion:
        self.requests.append(request)
        ids = self._answers[len(self.requests) - 1]
        return Completion(token_ids=ids, log_probs=[-1.0] * len(ids), versions=[0] * len(ids), finish_reason="stop")


@pytest.mark.parametrize(
    ("split", "tries", "kwargs", "reward"),
    [
        ("train", ["right"], {}, 1.0),
        ("train", ["wrong", "right"], {}, 0.8),
        ("val", ["wrong", "right"], {}, 1.0),
        ("train", ["wrong", "wrong"], {}, 0.0),
        ("train", ["wrong"], {"tests": "always"}, 1.0),
        ("val", ["wrong", "wrong"], {"tests": "always"}, 0.0),
        ("val", ["wrong", "wrong"], {"tests": "coin"}, 0.0),
    ],
)
def test_an_episode_has_the_reward_of_its_tests(split: str, tries: list[str], kwargs: dict[str, Any], reward: float) -> None:
    """The controls change rewards in training only."""
    problem = split_problems(1).training[0]
    row = to_row(problem, split, 0)
    data = {"extra_info": row["extra_info"], "ground_truth": row["reward_model"]["ground_truth"]}
    made = agent(**kwargs)
    engine = Told(made.parts.tokenizer, [body_of(problem) if tried == "right" else "x=x" for tried in tries])

    async def once() -> Any:
        return await made.arun_episode(engine, EpisodeData(prompt_ids=(1,), ordinal=0, sample=0, seed=1, row=data))

    found = asyncio.run(once())
    assert len(engine.requests) == len(tries) and sum(found.rewards) == reward
    if len(tries) > 1:
        said = made.parts.tokenizer.decode(list(engine.requests[1].prompt_ids))
        assert f"f({INPUTS[split][0]}) is {INPUTS[split][0]}, not" in said
