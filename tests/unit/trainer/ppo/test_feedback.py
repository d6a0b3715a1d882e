"""What samples score reaches the sampler once, in the order of prompts, whatever order they end in; and survives a checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.order import ResumableLoader
from rlhub.data.samplers import (
    CurriculumKnobs,
    CurriculumSampler,
    MixtureSampler,
    Observation,
    Sampler,
    SamplerData,
    UniformSampler,
)
from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rollout_service.executor.episode_groups import Group
from rlhub.trainer.ppo.dynamic_sampling import DynamicSampling
from rlhub.trainer.ppo.feedback import SamplerFeedback
from rlhub.trainer.ppo.group_filter import load_group_filter, scored_groups
from rlhub.trainer.ppo.metrics import source_metrics
from rlhub.trainer.ppo.scoring import SIGNAL, Scoring
from rlhub.trainer.ppo.step import number_estimators
from rlhub.trainer.ppo.stream_source import StreamSource
from tests.unit.trainer.ppo.test_stream_source import BATCH, streaming
from tests.unit.trainer.ppo.test_stream_source_prompts import Numbers


class Recording(CurriculumSampler):
    """Remembers what it was told."""

    def __init__(self, data: SamplerData, knobs: CurriculumKnobs | None = None) -> None:
        super().__init__(data, knobs)
        self.told: list[tuple[int, list[int], list[float]]] = []

    def observe(self, seen: Observation) -> None:
        self.told.append((seen.step, seen.indices.tolist(), seen.pass_rates.tolist()))
        super().observe(seen)


def loader_of(batch_size: int = BATCH, sampler: type[Sampler] | None = None) -> ResumableLoader:
    data = SamplerData(num_rows=len(Numbers()), sources=["a", "b"] * (len(Numbers()) // 2), seed=3, batch_size=batch_size)
    if sampler is not None:
        return ResumableLoader(Numbers(), batch_size, sampler=sampler(data))
    knobs = CurriculumKnobs(low=0.2, high=0.8, revisit=0.2, retire_after=0)
    return ResumableLoader(Numbers(), batch_size, sampler=Recording(data, knobs))


def columns(scores: list[float], valid: list[bool] | None = None) -> dict[str, torch.Tensor]:
    found = torch.tensor(scores)
    valid = valid or [True] * len(scores)
    return {"scores": found, "valid": torch.tensor(valid), "correct": found > 0.5}


def told(feedback: SamplerFeedback) -> list[Any]:
    return feedback.loader.sampler.told  # type: ignore[attr-defined]


def test_prompts_enter_in_the_order_of_ordinals_whatever_order_they_were_noted_in() -> None:
    noted = [(0, [1.0, 0.0]), (1, [1.0, 1.0]), (2, [0.0, 0.0]), (3, [0.0, 1.0])]
    found = []
    for seed in range(5):
        loader = loader_of()
        feedback = SamplerFeedback(loader)
        (rows,) = [next(loader.endless()).non_tensor_batch["name"].astype(int).tolist()]
        for ordinal, scores in random.Random(seed).sample(noted, len(noted)):
            feedback.note(columns(scores), torch.tensor([ordinal] * 2))
        feedback.trained(1)
        feedback.enter(0)
        assert told(feedback) == []
        feedback.enter(1)
        feedback.enter(1)
        assert told(feedback) == [(1, rows, [0.5, 1.0, 0.0, 0.5])]
        found.append(loader.state())
    assert all(state == found[0] for state in found)


def test_samples_without_a_score_and_rows_of_one_episode_count_as_they_should() -> None:
    loader = loader_of()
    feedback = SamplerFeedback(loader)
    next(loader.endless())
    feedback.note(columns([1.0, 0.0, 0.0], [True, False, False]), torch.tensor([0, 0, 1]))
    feedback.note(columns([1.0, 0.0, 0.0, 0.0]), torch.tensor([2] * 4), torch.tensor([7, 8, 8, 8]))
    feedback.trained(1)
    feedback.enter(1)
    assert told(feedback)[0][2] == [1.0, 0.5]


def test_what_has_not_entered_survives_a_checkpoint() -> None:
    loader = loader_of()
    feedback = SamplerFeedback(loader)
    next(loader.endless())
    feedback.note(columns([1.0, 0.0]), torch.tensor([0, 0]))
    feedback.trained(1)
    feedback.note(columns([1.0, 1.0]), torch.tensor([1, 1]))
    again = SamplerFeedback(loader_of())
    again.load_state(json.loads(json.dumps(feedback.state())))
    for one in (feedback, again):
        one.enter(1)
        one.trained(2)
        one.enter(2)
    assert told(again) == told(feedback) and [step for step, *_ in told(again)] == [1, 2]


@pytest.mark.parametrize("sampler", [None, MixtureSampler, UniformSampler])
def test_a_loader_draws_prompts_in_work_again_whatever_its_sampler_has_learned_since(sampler: type[Sampler] | None) -> None:
    loader = loader_of(sampler=sampler)
    loader.remembers = True
    feedback = SamplerFeedback(loader)
    batches = loader.endless()
    drawn = [next(batches).non_tensor_batch["name"].tolist() for _ in range(3)]
    feedback.note(columns([0.0] * 4), torch.arange(4))
    feedback.trained(1)
    feedback.enter(1)
    loader.forget(5)
    state = json.loads(json.dumps(loader.state(5)))
    assert state["consumed"] == 4 and len(state["drawn"]) == 2
    again = loader_of(sampler=sampler)
    again.load_state(state)
    assert again.state() == state
    fresh = again.endless()
    found = [next(fresh) for _ in range(5)]
    assert [batch.non_tensor_batch["name"].tolist() for batch in found[:2]] == drawn[1:]
    assert found[0].batch["ordinal"].tolist() == [4, 5, 6, 7]
    assert [batch.non_tensor_batch["name"].tolist() for batch in found[2:]] == [
        next(batches).non_tensor_batch["name"].tolist() for _ in range(3)
    ]


@contextmanager
def curriculum(folder: Path, max_staleness: int = 0, keep: Any = None) -> Iterator[StreamSource]:
    with streaming(folder, max_staleness, keep) as source:
        loader = loader_of()
        source.loader = source.positions.loader = source.feedback.loader = loader
        loader.remembers = True
        yield source


def score_of(row: str, sample: int) -> float:
    """Rows below 3 never pass, those above 6 always do."""
    return float(int(row) > 6 or (int(row) >= 3 and sample % 2 == 0))


def take_step(source: StreamSource, step: int, prompts: Any) -> list[int]:
    """Goes through a step with scores; returns the rows of its batch."""
    source.publish()
    samples = source.sample(prompts, step)
    names = samples.batch.non_tensor_batch["name"].tolist()
    samples.scoring = Scoring(lambda: (columns([score_of(name, step) for name in names]), {}))
    source.select(samples)
    source.trained(step)
    return [int(name) for name in names]


@pytest.mark.parametrize("turned_down", [False, True])
def test_an_asynchronous_curriculum_resumes_exactly(tmp_path: Path, turned_down: bool) -> None:
    """Also where a filter turns groups down, whose scores count too."""

    def keep_in(source_of: list[StreamSource]) -> Any:
        def keep(group: Group) -> bool:
            kept = not turned_down or group.ordinal % 3 != 1
            if not kept:
                ordinals = torch.tensor([group.ordinal])
                source_of[0].feedback.note(columns([0.0]), ordinals)
            return kept

        return keep

    def run(name: str, steps: range, state: Any = None) -> tuple[list[list[int]], Any]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        holder: list[StreamSource] = []
        with curriculum(folder, keep=keep_in(holder)) as source:
            holder.append(source)
            if state is not None:
                source.load_state(state, tmp_path / "stopped")
            prompts = source.loader.endless()
            rows = [take_step(source, step, prompts) for step in steps]
            source.save(folder)
            return rows, json.loads(json.dumps(source.state()))

    whole, end = run("whole", range(1, 8))
    first, state = run("stopped", range(1, 4))
    then, again = run("resumed", range(4, 8), state)
    assert first + then == whole and again == end
    lost = {**state["loader"]["sampler_state"], "units": [], "draws": [], "batches": 0}
    forgotten = {**state, "loader": {**state["loader"], "sampler_state": lost}}
    assert run("forgotten", range(4, 8), forgotten)[0] != whole[3:]  # the control


def scored(scores: list[list[float]]) -> DataProto:
    rows = [one for group in scores for one in group]
    n, count = len(scores[0]), len(scores)
    tensors = {
        **columns(rows),
        SIGNAL: torch.tensor(rows).double(),
        "ordinal": torch.arange(count).repeat_interleave(n),
        "uid": torch.arange(count).repeat_interleave(n),
        "response_length": torch.arange(len(rows)) + 1,
    }
    objects = {"data_source": object_array([f"s{row // n % 2}" for row in range(len(rows))])}
    objects |= {name: object_array([{"row": row} for row in range(len(rows))]) for name in ("ground_truth", "extra_info")}
    return DataProto.from_dict(tensors, objects)


def test_a_filter_of_ones_own_sees_groups_and_decides(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def low(group): return sum(group.rewards) / len(group.rewards) < 0.6\n"
        "def fails(group): return 1 / group.ordinal > 0\n"
        "def number(group): return 1\n"
        "value = 3\n"
    )
    config = PPOConfig()
    config.data.train_batch_size, config.actor_rollout_ref.rollout.n = 2, 2
    batch = scored([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    one = next(scored_groups(batch, 2))
    assert (one.data_source, one.rewards, one.correct, one.lengths, one.num_failed) == ("s0", (1.0, 1.0), (True, True), (1, 2), 0)
    config.algorithm.group_filter = f"{own}:low"
    found = DynamicSampling(config, load_group_filter(config))._kept(batch, 2)
    assert found.tolist() == [False, True, True]
    config.algorithm.filter_groups.enable = True
    assert DynamicSampling(config, load_group_filter(config))._kept(batch, 2).tolist() == [False, True, False]
    for name, message in {"fails": "failed on prompt 0: ZeroDivisionError", "number": "returned 1 for prompt 0"}.items():
        config.algorithm.group_filter = f"{own}:{name}"
        filter_ = load_group_filter(config)
        assert filter_ is not None
        with pytest.raises(RewardError, match=message):
            filter_(one)


def test_metrics_of_each_source() -> None:
    batch = scored([[1.0, 0.0], [0.2, 0.2], [1.0, 1.0]])
    batch.batch["valid"][4] = False
    found = source_metrics(batch, ["s0", "s1", "s2"])
    assert found == pytest.approx(
        {
            "source/s0/share": 4 / 6,
            "source/s0/reward_mean": 2 / 3,
            "source/s0/pass_rate": 2 / 3,
            "source/s1/share": 2 / 6,
            "source/s1/reward_mean": 0.2,
            "source/s1/pass_rate": 0.0,
            "source/s2/share": 0.0,
        }
    )


def test_rows_have_the_number_of_their_estimator_and_recorded_ones_no_source() -> None:
    batch = scored([[1.0, 0.0]] * 4)
    number_estimators(batch, [])
    assert "estimator" not in batch.batch.keys()
    number_estimators(batch, ["other", "s1"])
    assert batch.batch["estimator"].tolist() == [0, 0, 2, 2, 0, 0, 2, 2]
    recorded = batch.select(non_tensor_batch_keys=[])
    assert source_metrics(recorded, ["s0", "s1"]) == {}
