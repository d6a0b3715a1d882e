"""Environments of the recipe in the real library, where a Python with it exists.

bash recipes/verifiers/setup_env.sh && pytest -m verifiers tests/integration/test_verifiers.py

RLHUB_VERIFIERS_PYTHON names another Python than .venv-verifiers/bin/python.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from recipes.verifiers import run
from rlhub.agents.trajectory import Trajectory
from rlhub.agents.verifiers.export import rows_of
from rlhub.agents.verifiers.process import list_tasks
from rlhub.agents.workflows.base import EpisodeData, WorkflowParts, build_workflow
from rlhub.engines.rollout.base import SamplingParams
from rlhub.errors import ConfigError
from scripts.checks import verifiers_kills
from tests.unit.agents.openai_server.endpoint import END, Told, tokenizer

PYTHON = Path(os.environ.get("RLHUB_VERIFIERS_PYTHON", run.ROOT / ".venv-verifiers/bin/python"))
pytestmark = [
    pytest.mark.verifiers,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}: bash recipes/verifiers/setup_env.sh"),
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def described(name: str) -> dict[str, Any]:
    return {"id": name, "settings": {}, "path": [str(run.ENVIRONMENTS)]}


async def no_score(row: Any, text: str) -> tuple[float, dict[str, float]]:
    raise AssertionError("the environment gives the reward")


async def episode(name: str, answers: list[str], row: dict[str, Any], response: int = 500) -> tuple[Trajectory, str]:
    """Returns the episode of a policy that gives these answers, and its text."""
    words = tokenizer()
    parts = WorkflowParts(
        tokenizer=words,
        sampling=SamplingParams(stop_token_ids=(words.eos_token_id,)),
        max_prompt_length=1000,
        max_response_length=response,
        score=no_score,
        kwargs={"verifiers_python": str(PYTHON), "verifiers_path": [str(run.ENVIRONMENTS)]},
    )
    workflow = build_workflow(f"verifiers:{name}", parts)
    data = EpisodeData(prompt_ids=(1,), ordinal=0, sample=0, seed=1, row=row)
    try:
        made = await workflow.arun_episode(Told(words, [answer + END for answer in answers]), data)
    finally:
        await workflow.aclose()
    assert isinstance(made, Trajectory) and made.metrics["openai/untrained_tokens"] == 0
    assert made.metrics["openai/turns"] == made.metrics["verifiers/answers"]
    return made, words.decode(made.response_ids)


@pytest.mark.parametrize(
    ("name", "answers", "reward", "metrics", "spoken"),
    [
        ("vowels", ["aebc"], 0.5, {"different": 2.0, "reward/vowels": 0.5}, "aebc"),
        ("guess", ["0", "10", "none"], 0.0, {"openai/turns": 3.0}, "higher"),
        ("adder", [CALL, "it is {total}"], 1.0, {"calls": 1.0, "openai/turns": 2.0}, "5"),
    ],
)
def test_environments_of_one_turn_of_several_and_with_tools(
    name: str, answers: list[str], reward: float, metrics: dict[str, float], spoken: str
) -> None:
    row = rows_of(name, list_tasks(str(PYTHON), described(name), 3))[0]
    question = row["prompt"][-1]["content"]
    total = str(sum(int(word) for word in question.strip("?").split() if word.isdigit()))
    made, text = asyncio.run(episode(name, [answer.replace("{total}", total) for answer in answers], row))
    assert sum(made.rewards or ()) == reward
    assert {key: made.metrics[key] for key in metrics} == metrics
    assert spoken in text


def test_an_answer_that_reaches_the_limit_of_its_conversation_is_scored() -> None:
    row = rows_of("guess", list_tasks(str(PYTHON), described("guess"), 1))[0]
    made, _ = asyncio.run(episode("guess", ["0" * 60], row, response=70))
    assert made.finish_reason == "length" and sum(made.rewards or ()) == 0.0


def test_an_unknown_environment_is_told_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no environment 'vowel' in .*found: .*adder.*vowels"):
        list_tasks(str(PYTHON), described("vowel"), 0)


def test_a_run_survives_kills_with_every_prompt_trained_once(tmp_path: Path) -> None:
    arguments = ["--python", str(PYTHON), "--steps", "9", "--rise", "-1", "--folder", str(tmp_path)]
    assert verifiers_kills.main(arguments) == 0
