"""Samplers: what they draw, what they learn, and that they go on exactly where they were."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhub.config.sections.ppo import DataConfig
from rlhub.data.samplers import (
    SAMPLERS,
    CurriculumKnobs,
    CurriculumSampler,
    MixtureSampler,
    Observation,
    Sampler,
    SamplerData,
    UniformSampler,
    build_sampler,
    sampler_problems,
)
from rlhub.errors import ConfigError, DataError
from rlhub.utils.seeding import permutation

ROWS, BATCH = 40, 4
DATA = SamplerData(
    num_rows=ROWS,
    sources=["many"] * 30 + ["few"] * 10,
    extra_info=[{"level": row % 4} for row in range(ROWS)],
    seed=5,
    batch_size=BATCH,
)
KNOBS: Mapping[str, Any] = {"curriculum": CurriculumKnobs(rate=0.7), "curriculum by level": CurriculumKnobs(by="level")}


def built(name: str, data: SamplerData = DATA) -> Sampler:
    return SAMPLERS.get(name.split()[0])(data, KNOBS.get(name))


def seen(indices: np.ndarray, rate: Callable[[int], float], step: int = 1) -> Observation:
    rates = np.array([rate(int(row)) for row in indices])
    return Observation(indices=indices, pass_rates=rates, rewards=rates, step=step)


def by_level(row: int) -> float:
    """The rows of level 0 never pass, those of 1 and 2 sometimes, and those of 3 always."""
    return (0.0, 0.4, 0.6, 1.0)[row % 4]


def draws(sampler: Sampler, steps: int, rate: Callable[[int], float] = by_level) -> list[list[int]]:
    found = []
    for step in range(1, steps + 1):
        indices = sampler.next(BATCH)
        sampler.observe(seen(indices, rate, step))
        found.append(indices.tolist())
    return found


def test_uniform_is_the_permutation_of_each_epoch() -> None:
    sampler = UniformSampler(replace(DATA, num_rows=10))
    drawn = [row for batch in draws(sampler, 4) for row in batch]
    assert drawn == [*permutation(5, 0, 10)[:8], *permutation(5, 1, 10)[:8]]
    assert sampler.epoch == 2
    plain = UniformSampler(replace(DATA, num_rows=10, shuffle=False))
    assert draws(plain, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize("name", [*SAMPLERS.names(), "curriculum by level"])
@pytest.mark.parametrize("stop", [1, 7, 23])
def test_a_resumed_sampler_draws_what_the_other_goes_on_to_draw(name: str, stop: int) -> None:
    sampler = built(name)
    draws(sampler, stop)
    state = json.loads(json.dumps(sampler.state_dict()))
    again = built(name)
    again.load_state_dict(state)
    assert again.epoch == sampler.epoch
    assert draws(again, 12) == draws(sampler, 12)
    assert again.state_dict() == sampler.state_dict()
    assert draws(built(name), 12) != draws(again, 12)  # the control: without the state it begins anew


@pytest.mark.parametrize("name", SAMPLERS.names())
def test_another_seed_is_another_order_and_is_refused_after_a_resume(name: str) -> None:
    other = built(name, replace(DATA, seed=6))
    assert draws(other, 3) != draws(built(name), 3)
    with pytest.raises(DataError, match="data.seed was 5 when the run was started and is 6 now"):
        other.load_state_dict(built(name).state_dict())


def test_a_mixture_has_its_ratios_in_every_batch_and_each_source_its_own_epochs() -> None:
    sampler = MixtureSampler(replace(DATA, weights={"few": 3.0}))
    batches = draws(sampler, 40)
    assert all(sum(row >= 30 for row in batch) == 3 for batch in batches)
    times = Counter(row for batch in batches for row in batch)
    assert {times[row] for row in range(30, 40)} == {12} and {times[row] for row in range(30)} <= {1, 2}
    uneven = MixtureSampler(replace(DATA, weights={"few": 1.0, "many": 2.0}))
    total = Counter(DATA.sources[row] for batch in draws(uneven, 30) for row in batch)
    assert total == {"many": 80, "few": 40}


def test_a_source_of_weight_0_does_not_train() -> None:
    sampler = MixtureSampler(replace(DATA, weights={"few": 0.0}))
    assert all(row < 30 for batch in draws(sampler, 30) for row in batch)
    with pytest.raises(DataError, match="have the weight 0"):
        MixtureSampler(replace(DATA, weights={"few": 0.0, "many": 0.0}))


def test_a_curriculum_leaves_out_what_always_passes_or_never_does() -> None:
    """After every row was seen once, the band of half of the rows gets nine draws in ten; hard rows come now and then, and easy
    ones until they have retired."""
    sampler = CurriculumSampler(DATA, CurriculumKnobs(retire_after=2))
    first = [row for batch in draws(sampler, 12) for row in batch]
    assert set(first) == set(range(ROWS))
    later = Counter(row % 4 for batch in draws(sampler, 100) for row in batch)
    assert later[1] + later[2] >= 350 and later[0] > 5
    assert sampler.metrics() == {
        "sampler/learning": 20.0,
        "sampler/hard": 10.0,
        "sampler/easy": 0.0,
        "sampler/retired": 10.0,
        "sampler/unseen": 0.0,
    }


def test_the_control_that_learns_nothing_draws_evenly() -> None:
    sampler = CurriculumSampler(DATA)
    later = Counter(row for _ in range(100) for row in sampler.next(BATCH).tolist())
    assert set(later.values()) == {10}


def test_a_row_that_has_become_learnable_comes_back() -> None:
    sampler = CurriculumSampler(DATA)
    draws(sampler, 60)
    hard = sampler.pass_rates[::4]
    assert (hard == 0).all()
    draws(sampler, 120, lambda row: 0.5)
    assert sampler.metrics()["sampler/hard"] == 0 and (sampler.pass_rates[::4] > 0.3).all()


def test_rows_of_one_level_share_a_pass_rate() -> None:
    sampler = CurriculumSampler(DATA, CurriculumKnobs(by="level", retire_after=0))
    draws(sampler, 4)
    assert dict(zip(sampler.names, sampler.pass_rates.tolist(), strict=True)) == pytest.approx(
        {"0": 0, "1": 0.4, "2": 0.6, "3": 1}
    )
    later = Counter(row % 4 for batch in draws(sampler, 50) for row in batch)
    assert later[1] + later[2] >= 175
    with pytest.raises(DataError, match="by=levle.*did you mean 'level'"):
        CurriculumSampler(DATA, CurriculumKnobs(by="levle"))
    assert CurriculumSampler(DATA, CurriculumKnobs(by="data_source")).names == ["few", "many"]


LEVELS = CurriculumKnobs(by="level", revisit=0.0, retire_after=0)
MANY = replace(DATA, num_rows=400, extra_info=[{"level": row % 4} for row in range(400)])


def told(rates: tuple[float, ...], knobs: CurriculumKnobs = LEVELS) -> CurriculumSampler:
    """Returns a curriculum that has seen these pass rates of the four levels."""
    sampler = CurriculumSampler(MANY, knobs)
    sampler.observe(seen(np.arange(4), lambda row: rates[row]))
    return sampler


def shares(sampler: CurriculumSampler, batches: int) -> list[float]:
    """Returns the share of each level in the next rows, of which the sampler learns nothing."""
    found = Counter(int(row) % 4 for _ in range(batches) for row in sampler.next(BATCH))
    return [found[level] / batches / BATCH for level in range(4)]


def test_levels_of_the_band_come_in_proportion_to_their_learnability() -> None:
    assert shares(told((0.0, 0.5, 0.146447, 1.0)), 75) == pytest.approx([0, 2 / 3, 1 / 3, 0], abs=0.02)  # 4 p (1 - p): 1 and 0.5
    rows = CurriculumSampler(DATA, CurriculumKnobs(revisit=0.0))  # the same of rows that each have a pass rate
    rows.observe(seen(np.arange(ROWS), lambda row: (0.5, 0.146447)[row % 2]))
    found = Counter(int(row) % 2 for _ in range(200) for row in rows.next(BATCH))
    assert found[0] / found[1] == pytest.approx(2, abs=0.15)


def test_a_level_that_enters_the_band_late_does_not_push_the_others_out() -> None:
    """Its rows were drawn less than those of the other levels, by far."""
    sampler = told((0.0, 0.5, 1.0, 1.0))
    assert shares(sampler, 200) == [0, 1, 0, 0]
    sampler.observe(seen(np.array([0] * 20), lambda row: 0.5))
    assert shares(sampler, 10) == pytest.approx([0.5, 0.5, 0, 0], abs=0.05)


def test_where_nothing_is_in_the_band_the_most_learnable_levels_fill_the_batch() -> None:
    found = shares(told((0.0, 0.1, 0.9, 1.0)), 50)
    assert found[1] == pytest.approx(0.45, abs=0.05) and found[2] == pytest.approx(0.45, abs=0.05)
    assert all(share > 0 for share in found)


@pytest.mark.parametrize("prompts", [1, 3])
def test_each_scored_prompt_of_a_level_moves_its_pass_rate(prompts: int) -> None:
    sampler = told((0.2, 0.2, 0.2, 0.2), CurriculumKnobs(by="level", rate=0.1))
    sampler.observe(seen(np.array([1, 5, 9][:prompts]), lambda row: 0.7))
    assert sampler.pass_rates.tolist() == pytest.approx([0.2, 0.7 - 0.5 * 0.9**prompts, 0.2, 0.2])


def test_the_pass_rate_of_a_level_follows_the_policy() -> None:
    """It drifts from never to always over 200 batches, and the level comes most in between."""
    sampler = told((0.0, 0.5, 0.5, 1.0), replace(LEVELS, revisit=0.1))
    counts = []
    for step in range(200):
        batch = sampler.next(BATCH)
        sampler.observe(seen(batch, lambda row, p=step / 200: (p, 0.5, 0.5, 1.0)[row % 4]))
        counts.append(sum(row % 4 == 0 for row in batch.tolist()))
        assert abs(sampler.pass_rates[0] - step / 200) < 0.1 or step / 200 < 0.15
    assert sum(counts[80:120]) > 3 * max(sum(counts[:20]), 1) and sum(counts[80:120]) > 3 * sum(counts[-15:])


def batches_to_learn(sampler: Sampler, shown: Callable[[np.ndarray, int], np.ndarray | None]) -> int:
    """Returns the batches until the mean pass rate of three levels is 0.8, where each group of eight that neither passes nor
    fails as a whole raises the log-odds of its level.  shown: the pass rates that the sampler sees, of those of a batch."""
    odds, rng = np.array([4.0, -0.2, -1.4]), np.random.default_rng(1)
    for step in range(1, 500):
        rates = 1 / (1 + np.exp(-odds))
        if rates.mean() >= 0.8:
            return step - 1
        indices = sampler.next(32)
        levels = np.array([sampler.data.extra_info[row]["level"] for row in indices])
        found = rng.binomial(8, rates[levels]) / 8
        np.add.at(odds, levels[(found > 0) & (found < 1)], 0.02)
        if (pass_rates := shown(found, step)) is not None:
            sampler.observe(Observation(indices=indices, pass_rates=pass_rates, rewards=pass_rates, step=step))
    return 500


def test_a_curriculum_saves_samples_and_its_controls_do_not() -> None:
    """Four rows in five are of a level that the policy has solved (scripts/bench/curriculum.py trains one)."""
    levels = [{"level": max(row % 10 - 7, 0)} for row in range(2000)]
    data = SamplerData(num_rows=2000, extra_info=levels, batch_size=32)

    def curriculum(shown: Callable[[np.ndarray, int], np.ndarray | None]) -> int:
        return batches_to_learn(CurriculumSampler(data, CurriculumKnobs(by="level", retire_after=0)), shown)

    uniform = batches_to_learn(UniformSampler(data), lambda found, step: None)
    assert curriculum(lambda found, step: found) < 0.4 * uniform
    assert curriculum(lambda found, step: None) == pytest.approx(uniform, rel=0.1)
    assert curriculum(lambda found, step: np.random.default_rng(step).permutation(found)) > 0.75 * uniform


def test_the_band_is_filled_up_where_it_has_too_few_rows() -> None:
    sampler = CurriculumSampler(replace(DATA, num_rows=8, sources=DATA.sources[:8]), CurriculumKnobs(retire_after=1))
    draws(sampler, 6, lambda row: 1.0)
    assert sampler.metrics()["sampler/retired"] == 8
    assert all(len(set(batch)) == BATCH for batch in draws(sampler, 5, lambda row: 1.0))


def test_one_s_own_sampler_and_what_is_wrong_with_a_choice(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import numpy as np\nfrom rlhub.data.samplers import Sampler\n"
        "class First(Sampler):\n"
        "    def next(self, count): return np.arange(count)\n"
        "    def state_dict(self): return {}\n"
        "    def load_state_dict(self, state): pass\n"
        "number = 3\n"
    )
    config = DataConfig(sampler=f"{own}:First")
    assert sampler_problems(config) == []
    assert build_sampler(config, DATA).next(3).tolist() == [0, 1, 2]
    config.sampler = f"{own}:Frist"
    assert "has: First; did you mean 'First'?" in sampler_problems(config)[0]
    config.sampler = f"{own}:number"
    with pytest.raises(ConfigError, match="expected a subclass of rlhub.data.samplers.Sampler, got 3"):
        build_sampler(config, DATA)
    config.sampler = "curiculum"
    assert "did you mean 'curriculum'?" in sampler_problems(config)[0]
    config.sampler, config.sampler_kwargs = "curriculum", {"lwo": 0.2}
    assert "data.sampler_kwargs.lwo: no such knob; did you mean 'low'?" in sampler_problems(config)[0]
    config.sampler_kwargs = {"low": 0.9, "high": 0.1}
    assert "expected 0 <= low < high <= 1" in sampler_problems(config)[0]


def test_data_of_one_batch_leave_a_curriculum_nothing_to_choose() -> None:
    few = replace(DATA, num_rows=BATCH, sources=DATA.sources[:BATCH], batch_size=BATCH)
    with pytest.raises(DataError, match=f"{BATCH} usable rows and data.train_batch_size={BATCH}.*set data.sampler=uniform"):
        build_sampler(DataConfig(sampler="curriculum"), few)
    assert len(build_sampler(DataConfig(sampler="uniform"), few).next(BATCH)) == BATCH
    assert len(build_sampler(DataConfig(sampler="curriculum"), replace(DATA, batch_size=BATCH)).next(BATCH)) == BATCH
