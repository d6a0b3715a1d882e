"""The conformance suite passes right environments, and names what is wrong with each faulty one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhub.envs.base import EnvError
from rlhub.envs.vector.base import StepOutcome, VectorSpec
from rlhub.envs.vector.check import CHECKS, check_vector_env
from rlhub.envs.vector.lockstep import LockStep, make_vector_env
from tests.support import vector_simulators

SIMULATORS = f"{vector_simulators.__name__}:"


@pytest.mark.parametrize("name", ["Drift", "Replayed", "Stateless", "Batched"])
def test_a_right_environment_passes(name: str) -> None:
    env = make_vector_env(SIMULATORS + name, {}, 4)
    assert check_vector_env(env, chunks=100) == [check.__name__ for check in CHECKS]
    env.close()


@pytest.mark.parametrize(
    ("name", "check", "sentence"),
    [
        ("PositionsOnly", "states_continue_exactly", "differ"),
        ("WithoutRandomNumbers", "states_continue_exactly", "differ"),
        ("Blind", "pictures_show_something", "constant"),
        ("Frozen", "pictures_show_something", "do not change"),
        ("Leaky", "equal_seeds_give_equal_episodes", "differ"),
        ("Endless", "shapes_and_types", "instruction is empty"),
        ("RunsOn", "chunks_stop_at_the_end", "valid must be"),
        ("RendersAll", "renders_only_what_is_read", "observations rendered for a chunk of 8"),
        ("Reuses", "shapes_and_types", "changed the arrays"),
    ],
)
def test_a_fault_is_found_by_its_check(name: str, check: str, sentence: str) -> None:
    with pytest.raises(EnvError, match=f"{check}: .*{sentence}"):
        check_vector_env(make_vector_env(SIMULATORS + name, {}, 4), chunks=20)


def test_one_environment_is_not_enough() -> None:
    with pytest.raises(EnvError, match="at least 2"):
        check_vector_env(make_vector_env(SIMULATORS + "Drift", {}, 1))


def test_the_example_of_the_readme_passes() -> None:
    text = (Path(__file__).resolve().parents[4] / "rlhub/envs/README.md").read_text()
    (code,) = re.findall(r"```python\n(class .*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"np": np, "json": json, "VectorSpec": VectorSpec, "StepOutcome": StepOutcome}
    exec(code, names)
    code_lines = [line for line in code.splitlines() if line.strip()]
    assert len(code_lines) <= 30
    check_vector_env(LockStep(names["Balance"], 4), chunks=100)
