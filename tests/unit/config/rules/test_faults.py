"""The rules of trainer.faults."""

from __future__ import annotations

import pytest

from rlhub.config.load import load
from rlhub.config.rules.faults import planned_faults, problems
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.errors import ConfigError
from rlhub.utils.faults import Fault

ROW = "{kind: kill, place: actor.update_actor, rank: 1, step: 2}"


def test_a_plan_is_written_on_the_command_line() -> None:
    config = load(PPOConfig, "ppo", [f"trainer.faults=[{ROW}]", "trainer.n_gpus_per_node=2"])
    assert planned_faults(config.trainer) == (Fault(kind="kill", place="actor.update_actor", rank=1, step=2),)
    assert list(problems(config.trainer)) == []


def test_a_plan_that_is_no_list_of_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.faults: got .*expected list of mapping"):
        load(PPOConfig, "ppo", ["trainer.faults=kill"])


def test_all_that_is_wrong_with_all_rows_is_listed() -> None:
    rows = [
        {"kind": "kil", "place": "actor.update_actor"},
        {"kind": "kill", "place": "actor.updat_actor", "rnk": 1},
        {"kind": "full", "place": "driver.step"},
        {"place": "driver.step"},
        {"kind": "kill", "place": "actor.update_actor", "rank": 2, "step": 9, "seconds": 2},
        {"kind": "delay", "place": "driver.step", "seconds": 2},
        {"kind": "delay", "place": "driver.step", "seconds": 2},
    ]
    found = list(problems(TrainerConfig(n_gpus_per_node=2, total_training_steps=4, faults=rows)))
    expected = [
        "trainer.faults[0].kind: got 'kil'",
        "trainer.faults[1].rnk: no such key; did you mean 'rank'?",
        "trainer.faults[1].place=actor.updat_actor: no such place; did you mean 'actor.update_actor'?; known: driver.step",
        "trainer.faults[2]: full cannot happen at driver.step (the driver begins a step); there can be kill, stop, raise, delay",
        "trainer.faults[3]: kind must be given, for example {kind: kill",
        "trainer.faults[4].rank=2, but the actor has",
        "trainer.faults[4].step=9 never comes: trainer.total_training_steps=4",
        "trainer.faults[4].seconds=2 has no meaning for kill",
        "trainer.faults[6]: the same fault stands in row 5",
    ]
    assert len(found) == len(expected)
    for message, beginning in zip(found, expected, strict=True):
        assert message.startswith(beginning)
