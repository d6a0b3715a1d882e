"""recipes/pipelines: of two policies with roles of their own each changes in its own turns only."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from recipes.pipelines.signalling import ROLES, SETTINGS, play, signalling
from rlhub.config import cli
from rlhub.config.sections.ppo import PPOConfig
from rlhub.pipeline.graph import Pipeline

STEPS = 5


def changes(folder: Path, *settings: str, by_turns: bool = True) -> dict[str, list[bool]]:
    """Whether each step from the second on has changed a role's weights, as its engine gets them in the next step.

    The first time weights move in another way than later, and their fingerprint is another one.
    """
    here = (f"trainer.default_local_dir={folder}", "trainer.device=cpu", f"trainer.total_training_steps={STEPS}")
    config = cli.prepare(PPOConfig, "ppo", [*SETTINGS, *here, *settings], required=())
    pipeline = signalling(config)
    results = list(play(config, pipeline if by_turns else at_once(pipeline)))
    metrics = [result.metrics["speak"] | result.metrics["listen"] for result in results]
    prints = {role: [row[f"{role}/weights"] for row in metrics[1:]] for role in ROLES}
    return {role: [one != other for one, other in zip(of, of[1:], strict=False)] for role, of in prints.items()}


def at_once(pipeline: Pipeline) -> Pipeline:
    """The same with both policies trained in every step."""
    pipeline.nodes = [dataclasses.replace(node, when=True) for node in pipeline.nodes]
    return pipeline


def test_each_policy_changes_in_its_turns_only(ray_cluster: None, tmp_path: Path) -> None:
    found = changes(tmp_path)
    assert found == {"speaker": [False, True, False], "listener": [True, False, True]}


def test_without_turns_both_change(tmp_path: Path) -> None:
    """Control of the test above."""
    found = changes(tmp_path, "trainer.backend=local", "trainer.n_gpus_per_node=1", by_turns=False)
    assert found == {role: [True] * (STEPS - 2) for role in ROLES}


@pytest.mark.parametrize("above", ["train_speaker", "train_listener"])
def test_a_policy_cannot_speak_after_its_update(above: str) -> None:
    role = above.removeprefix("train_")
    problems = signalling(None).add("again", run="speak", on=role, reads="step", writes="echo:int64(rows)").problems()
    assert any(f"uses the weights of {role} and stands below {above!r}" in problem for problem in problems)
