"""Scenes of simulators, and the outcomes of their episodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhub.config.sections.env import EnvConfig, SRPOConfig
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.errors import ConfigError
from rlhub.protocol import DataProto
from rlhub.rewards.srpo import SelfReference
from rlhub.trainer.ppo.embodied import (
    EpisodeGenerator,
    EpisodeOutcomes,
    EpisodeValidator,
    scene_loader,
    validation_scenes,
    wilson_interval,
)


def config(num_scenes: int = 10, scenes: Any = "seeds", **data: Any) -> PPOConfig:
    config = PPOConfig()
    config.env = EnvConfig(name="reach_color", num_scenes=num_scenes, scenes=scenes)
    config.data.train_batch_size = 4
    for name, value in data.items():
        setattr(config.data, name, value)
    return config


def drawn(config: PPOConfig, count: int, state: Any = None) -> list[dict[str, list[int]]]:
    loader = scene_loader(config)
    if state is not None:
        loader.load_state(state)
    scenes = loader.endless()
    return [{name: column.tolist() for name, column in next(scenes).batch.items()} for _ in range(count)]


def test_scenes_are_numbered_and_each_comes_once_an_epoch() -> None:
    batches = drawn(config(num_scenes=8), 4)
    assert [batch["ordinal"] for batch in batches] == [[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(4)]
    seeds = [seed for batch in batches for seed in batch["seed"]]
    assert len(set(seeds[:8])) == 8 and set(seeds[:8]) == set(seeds[8:]) and seeds[:8] != seeds[8:]
    assert all(0 <= seed < 1 << 63 for seed in seeds) and {one for batch in batches for one in batch["initial"]} == {-1}
    assert drawn(config(num_scenes=8), 4) == batches != drawn(config(num_scenes=8, seed=5), 4)


def test_fixed_scenes_are_the_initial_states() -> None:
    (first, second) = drawn(config(num_scenes=8, scenes="fixed"), 2)
    assert sorted(first["initial"] + second["initial"]) == list(range(8))
    assert drawn(config(num_scenes=8, scenes="fixed", shuffle=False), 1)[0]["initial"] == [0, 1, 2, 3]


def test_a_resumed_run_draws_the_scenes_that_follow() -> None:
    whole, loader = drawn(config(), 7), scene_loader(config())
    scenes = loader.endless()
    for _ in range(3):
        next(scenes)
    assert drawn(config(), 4, loader.state()) == whole[3:]
    with pytest.raises(Exception, match="data"):
        drawn(config(num_scenes=11), 1, loader.state())


def test_validation_begins_with_the_fixed_initial_states() -> None:
    (batch,) = validation_scenes(EnvConfig(name="reach_color", val_scenes=5), 1 << 40)
    assert batch.batch["initial"].tolist() == [0, 1, 2, 3, 4]
    assert batch.batch["ordinal"].tolist() == [(1 << 40) + i for i in range(5)]
    assert validation_scenes(EnvConfig(name="reach_color"), 0) == []


# --- outcomes ----------------------------------------------------------------------------------------------------------------


def calls() -> DataProto:
    """Episode 3 succeeds in two calls, episode 7 fails in one, episode 9 is lost in its second call."""
    rows = [(7, 0.5, 0, 0), (3, 1.0, 0, 0), (9, 4.0, 0, 0), (3, 0.25, 1, 0), (9, 0.0, 0, 1)]
    episode, scores, success, lost = (torch.tensor(column) for column in zip(*rows, strict=True))
    return DataProto.from_dict({"episode": episode, "scores": scores, "success": success.bool(), "lost": lost.bool()})


def test_outcomes_are_those_of_episodes_and_the_lost_ones_do_not_count() -> None:
    found = EpisodeOutcomes.of(calls())
    assert found.returns.tolist() == [1.25, 0.5, 4.0] and found.calls.tolist() == [2, 1, 2]
    assert found.success.tolist() == [True, False, False] and found.lost.tolist() == [False, False, True]
    metrics = {"val/lost_episodes": 1.0, "val/success": 0.5, "val/return": 0.875, "val/calls": 1.5}
    assert found.metrics("val") == metrics
    order = torch.tensor([4, 0, 3, 2, 1])
    permuted = calls()
    permuted.reorder(order)
    assert EpisodeOutcomes.of(permuted).metrics("val") == metrics
    lost = calls().select_idxs([2, 4])
    assert EpisodeOutcomes.of(lost).metrics("val") == {"val/lost_episodes": 1.0}


def end_of_interval(successes: int, trials: int, z: float, far: float) -> float:
    """The rate between the observed share and `far` from which the share is z standard deviations away, by bisection."""
    share = near = successes / trials
    for _ in range(100):
        middle = (near + far) / 2
        outside = abs(share - middle) > z * math.sqrt(middle * (1 - middle) / trials)
        near, far = (near, middle) if outside else (middle, far)
    return near


@pytest.mark.parametrize(("successes", "trials"), [(1, 2), (3, 7), (381, 512), (37, 512), (7, 8)])
@pytest.mark.parametrize("z", [1.0, 1.959964])
def test_the_interval_of_a_rate_is_where_the_score_test_ends(successes: int, trials: int, z: float) -> None:
    low, high = wilson_interval(successes, trials, z)
    assert low == pytest.approx(end_of_interval(successes, trials, z, 0.0), abs=1e-9)
    assert high == pytest.approx(end_of_interval(successes, trials, z, 1.0), abs=1e-9)


def test_intervals_of_the_ends() -> None:
    assert wilson_interval(0, 10)[0] == pytest.approx(0.0) and wilson_interval(10, 10)[1] == pytest.approx(1.0)
    assert [round(end, 3) for end in wilson_interval(381, 512)] == [0.705, 0.780], "0.744 of 512 episodes"


# --- what the driver asks for ------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """The rollout's ranks; run_episodes answers with fixed calls."""

    asked: list[DataProto] = field(default_factory=list)
    answer: DataProto | None = None

    @property
    def run_episodes(self) -> Answer:
        return Answer(self)


@dataclass
class Answer:
    """The method, with and without waiting."""

    group: Group

    def __call__(self, scenes: DataProto) -> DataProto:
        self.group.asked.append(scenes)
        return calls() if self.group.answer is None else self.group.answer

    def submit(self, scenes: DataProto) -> Answer:
        self.found = self(scenes)
        return self

    def get(self) -> DataProto:
        return self.found


def test_training_samples_and_validation_is_greedy_unless_said_otherwise() -> None:
    group, rollout = Group(), RolloutConfig(n=3, temperature=0.7, top_p=0.9)
    generator = EpisodeGenerator(group, rollout)  # type: ignore[arg-type]
    (scenes,) = validation_scenes(EnvConfig(name="reach_color", val_scenes=5), 10)
    found = generator.training(scenes)
    generator.validation(scenes)
    training, validation = group.asked
    assert training.meta_info == {"n": 3, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "log_probs": True}
    assert (validation.meta_info["temperature"], validation.meta_info["n"], validation.meta_info["log_probs"]) == (0.0, 1, False)
    assert set(training.batch.keys()) == {"seed", "initial", "ordinal", "uid"} and training.batch["uid"].tolist() == list(
        range(5)
    )
    assert generator.metrics(found)["rollout/success"] == 0.5
    with pytest.raises(ConfigError, match="greedy"):
        generator.greedy(scenes)


def test_failures_are_rewarded_in_training_and_the_bank_is_saved(tmp_path: Path) -> None:
    group = Group()
    plain = EpisodeGenerator(group, RolloutConfig())  # type: ignore[arg-type]
    (scenes,) = validation_scenes(EnvConfig(name="reach_color", val_scenes=5), 10)
    plain.training(scenes)
    assert plain.save(tmp_path) == [] and "embed" not in group.asked[-1].meta_info
    reference = SelfReference(SRPOConfig())
    generator = EpisodeGenerator(group, RolloutConfig(), reference=reference)  # type: ignore[arg-type]
    group.answer = embedded_calls()
    found = generator.training(scenes)
    assert group.asked[-1].meta_info["embed"] and "embedding" not in found.batch.keys() and len(reference.bank.task) == 1
    generator.validation(scenes)
    assert "embed" not in group.asked[-1].meta_info and len(reference.bank.task) == 1
    (entry,) = generator.save(tmp_path)
    resumed = EpisodeGenerator(group, RolloutConfig(), reference=SelfReference(SRPOConfig()))  # type: ignore[arg-type]
    resumed.load(tmp_path)
    assert resumed.reference is not None and Path(entry.path).parent == tmp_path
    assert torch.equal(resumed.reference.bank.embeddings, reference.bank.embeddings)
    assert torch.equal(resumed.reference.bank.task, reference.bank.task)


def embedded_calls() -> DataProto:
    rows = calls()
    rows.batch["call"] = torch.tensor([0, 0, 0, 1, 1])
    rows.batch["task"] = torch.zeros(5, dtype=torch.int64)
    rows.batch["embedding"] = torch.arange(10, dtype=torch.float64).view(5, 2)
    return rows


def test_a_validation_reports_the_rate_with_its_interval() -> None:
    generator: Any = EpisodeGenerator(Group(), RolloutConfig())  # type: ignore[arg-type]
    scenes = validation_scenes(EnvConfig(name="reach_color", val_scenes=5), 10)
    report = EpisodeValidator(scenes=scenes, generator=generator, tokenizer=None)()
    low, high = wilson_interval(1, 2)
    wanted = EpisodeOutcomes.of(calls()).metrics("val")
    wanted |= {"val/success_low": low, "val/success_high": high, "val/num_episodes": 2.0}
    assert report.metrics == wanted and 0 < low < 0.5 < high < 1 and report.samples == []
