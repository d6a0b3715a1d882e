"""recipes/pipelines: of two policies with roles of their own each changes in its own turns only."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from recipes.pipelines.signalling import ROLES, SETTINGS, play, signalling
from rlhub.config import cli
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import ConfigError
from rlhub.pipeline.graph import Pipeline

STEPS = 5


def steps(folder: Path, *settings: str, by_turns: bool = True) -> list[dict[str, Any]]:
    """The metrics of each step: fingerprints of the weights, accuracy, norms of the gradients."""
    here = (f"trainer.default_local_dir={folder}", "trainer.device=cpu", f"trainer.total_training_steps={STEPS}")
    config = cli.prepare(PPOConfig, "ppo", [*SETTINGS, *here, *settings], required=())
    pipeline = signalling(config)
    results = list(play(config, pipeline if by_turns else at_once(pipeline)))
    return [{name: value for found in result.metrics.values() for name, value in found.items()} for result in results]


def changes(metrics: list[dict[str, Any]]) -> dict[str, list[bool]]:
    """Whether each step from the second on has changed a role's weights, as its engine gets them in the next step.

    The first time weights move in another way than later, and their fingerprint is another one.
    """
    prints = {role: [row[f"{role}/weights"] for row in metrics[1:]] for role in ROLES}
    return {role: [one != other for one, other in zip(of, of[1:], strict=False)] for role, of in prints.items()}


def at_once(pipeline: Pipeline) -> Pipeline:
    """The same with both policies trained in every step."""
    pipeline.nodes = [dataclasses.replace(node, when=True) for node in pipeline.nodes]
    return pipeline


def test_each_policy_changes_in_its_turns_only(ray_cluster: None, tmp_path: Path) -> None:
    """Whether both share their processes or the listener has a pool of its own, with the same bits."""
    apart = ("trainer.pools.other.n_gpus_per_node=2", "trainer.placement.listener=other")
    found = steps(tmp_path / "together")
    assert changes(found) == {"speaker": [False, True, False], "listener": [True, False, True]}
    assert steps(tmp_path / "apart", *apart) == found


def test_without_turns_both_change(tmp_path: Path) -> None:
    """Control of the test above."""
    found = steps(tmp_path, "trainer.backend=local", "trainer.n_gpus_per_node=1", by_turns=False)
    assert changes(found) == {role: [True] * (STEPS - 2) for role in ROLES}


def test_a_role_that_there_is_not_cannot_be_placed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.placement.lisener: no such role; did you mean 'listener'\? known: speaker"):
        steps(tmp_path, "trainer.pools.other.n_gpus_per_node=2", "trainer.placement.lisener=other")


@pytest.mark.parametrize("above", ["train_speaker", "train_listener"])
def test_a_policy_cannot_speak_after_its_update(above: str) -> None:
    role = above.removeprefix("train_")
    problems = signalling(None).add("again", run="speak", on=role, reads="step", writes="echo:int64(rows)").problems()
    assert any(f"uses the weights of {role} and stands below {above!r}" in problem for problem in problems)
