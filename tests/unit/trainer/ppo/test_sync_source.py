"""Whole batches in turns with training, dynamic sampling and the greedy baseline: generator and reward follow a script."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.samplers import SamplerData, UniformSampler
from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.rewards.base import RewardResult
from rlhub.trainer.ppo import dynamic_sampling as dynamic_sampling_module
from rlhub.trainer.ppo import sync_source as sync_source_module
from rlhub.trainer.ppo.dynamic_sampling import groups_with_signal, join
from rlhub.trainer.ppo.scoring import SIGNAL, Scorer, add_scores, build_scorer
from rlhub.trainer.ppo.sync_source import SyncSource
from rlhub.utils.timing import PhaseTimer

N, WANTED = 2, 3
PROMPT_WIDTHS, RESPONSE_WIDTHS = [2, 4, 3, 2, 5], [3, 2, 6, 4, 1]
MIXED, SAME = (1.0, 0.0), (1.0, 1.0)


def prompts_of(number: int) -> DataProto:
    """The `number`-th batch of prompts: ordinals go on, tokens say which prompt they are of."""
    ordinals = torch.arange(number * WANTED, (number + 1) * WANTED)
    return DataProto.from_dict(tensors={"ordinal": ordinals}, non_tensors={"raw_prompt": [f"p{i}" for i in ordinals.tolist()]})


class FakeLoader:
    sampler = UniformSampler(SamplerData(num_rows=1))
    consumed = 0

    def forget(self, first: int) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"consumed": 0}

    def load_state(self, state: dict[str, Any]) -> None: ...


class FakeGenerator:
    """Row tokens are 100 * ordinal + sample + 1 (greedy: + 50) in every place; odd samples are one token shorter."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int]]] = []

    def training(self, prompts: DataProto) -> DataProto:
        return self._rows("sampled", prompts, N)

    def greedy(self, prompts: DataProto) -> DataProto:
        return self._rows("greedy", prompts, 1)

    def metrics(self, batch: DataProto) -> dict[str, float]:
        return {}

    def load(self, folder: Path) -> None:
        """It has nothing to remember."""

    def _rows(self, kind: str, prompts: DataProto, n: int) -> DataProto:
        ordinals = prompts.batch["ordinal"]
        self.asked.append((kind, ordinals.tolist()))
        number = int(ordinals[0]) // WANTED
        batch = prompts.repeat(n)
        sample = torch.arange(n).repeat(len(prompts))
        value = (100 * batch.batch["ordinal"] + sample + 1)[:, None]
        left, right = PROMPT_WIDTHS[number], RESPONSE_WIDTHS[number]
        response_mask = (torch.arange(right)[None] < (right - sample % 2).clamp(min=1)[:, None]).long()
        prompt_mask = (torch.arange(left)[None] >= (batch.batch["ordinal"] % 2)[:, None]).long()
        columns = {
            "uid": torch.arange(len(prompts)).repeat_interleave(n),
            "responses": value * response_mask,
            "response_mask": response_mask,
            "input_ids": torch.cat([value * prompt_mask, value * response_mask], 1),
            "attention_mask": torch.cat([prompt_mask, response_mask], 1),
            "response_length": response_mask.sum(1),
            "sample": torch.full((len(batch),), 50) if kind == "greedy" else sample,
        }
        if kind == "sampled":
            columns["rollout_log_probs"] = -value.float() * response_mask
        return batch.union(DataProto.from_dict(columns))


class ScriptedReward:
    """scores: by ordinal, one for each sample; greedy: by ordinal; invalid: (ordinal, sample), sample 50 is the greedy one."""

    def __init__(self, scores: dict[int, tuple[float, ...]], greedy: dict[int, float] | None = None) -> None:
        self.scores, self.greedy = scores, greedy or {}
        self.invalid: set[tuple[int, int]] = set()
        self.extra: Any = lambda rows: {}

    def __call__(self, batch: DataProto) -> RewardResult:
        rows = list(zip(batch.batch["ordinal"].tolist(), batch.batch["sample"].tolist(), strict=True))
        valid = torch.tensor([row not in self.invalid for row in rows])
        found = [self.greedy[ordinal] if sample == 50 else self.scores[ordinal][sample] for ordinal, sample in rows]
        scores = torch.where(valid, torch.tensor(found), 0.0)
        tokens = torch.zeros(batch.batch["responses"].shape)
        tokens[torch.arange(len(rows)), batch.batch["response_length"] - 1] = scores
        metrics = {"reward/num_failed": float((~valid).sum()), "reward/failed_share": (~valid).float().mean().item()}
        return RewardResult(token_level_scores=tokens, scores=scores, valid=valid, extra=self.extra(rows), metrics=metrics)

    def close(self) -> None: ...


def config_of(*, enable: bool = True, metric: str = "seq_reward", bound: int = 5, estimator: str = "grpo") -> PPOConfig:
    config = PPOConfig()
    config.algorithm.adv_estimator = estimator
    groups = config.algorithm.filter_groups
    groups.enable, groups.metric, groups.max_num_gen_batches = enable, metric, bound
    config.data.train_batch_size = WANTED
    config.actor_rollout_ref.rollout.n = N
    return config


@dataclass
class FakeWeights:
    """The versions that the rollout engines got."""

    synced: list[int] = field(default_factory=list)

    def sync(self, version: int) -> None:
        self.synced.append(version)


@dataclass
class Sampler:
    """Sampling and scoring as the training step goes through them."""

    source: SyncSource
    score: Scorer
    metrics: dict[str, float] = field(default_factory=dict)

    def sample(self, prompts: Iterator[DataProto], step: int) -> DataProto:
        batch, scorings = None, []
        while batch is None:
            samples = self.source.sample(prompts, step)
            scorings.append(self.score.submit(samples))
            batch = self.source.select(samples)
        self.metrics = self.source.metrics | add_scores(batch, scorings)
        return batch

    @property
    def asked(self) -> list[tuple[str, list[int]]]:
        generator: Any = self.source.generator
        return generator.asked  # type: ignore[no-any-return]


def sampler_of(config: PPOConfig, reward: ScriptedReward) -> Sampler:
    source = SyncSource(config, FakeLoader(), FakeGenerator(), FakeWeights())  # type: ignore[arg-type]
    return Sampler(source, build_scorer(config, reward, PhaseTimer()))


def batches() -> Iterator[DataProto]:
    return (prompts_of(number) for number in range(len(PROMPT_WIDTHS)))


def scores(*groups: tuple[float, ...]) -> ScriptedReward:
    return ScriptedReward(dict(enumerate(groups)))


def ordinals(batch: DataProto) -> list[int]:
    """Of the groups, in order."""
    found = batch.batch["ordinal"].tolist()
    assert found == [ordinal for ordinal in found[::N] for _ in range(N)] and batch.batch["sample"].tolist() == [0, 1] * (
        len(found) // N
    )
    return found[::N]


# Which groups


def test_without_the_filter_a_batch_is_one_generation_scored() -> None:
    sampler = sampler_of(config_of(enable=False), scores(SAME, SAME, MIXED))
    batch = sampler.sample(batches(), 1)
    assert ordinals(batch) == [0, 1, 2]
    assert batch.batch["scores"].tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert sampler.metrics == {"reward/num_failed": 0.0, "reward/failed_share": 0.0}
    assert SIGNAL not in batch.batch.keys()


def check_collected(sampler: Sampler) -> None:
    """Three of the six prompts drawn have signal; order of drawing."""
    assert ordinals(sampler.sample(batches(), 1)) == [1, 3, 5]
    assert sampler.asked == [("sampled", [0, 1, 2]), ("sampled", [3, 4, 5])]


def six() -> ScriptedReward:
    return scores(SAME, MIXED, SAME, MIXED, SAME, MIXED)


def test_groups_without_signal_are_left_out_and_further_prompts_drawn() -> None:
    sampler = sampler_of(config_of(), six())
    check_collected(sampler)
    assert {name: value for name, value in sampler.metrics.items() if name.startswith("sampling/")} == {
        "sampling/num_gen_batches": 2.0,
        "sampling/num_prompts_generated": 6.0,
        "sampling/share_filtered": 0.5,
        "sampling/num_dropped": 0.0,
        "sampling/num_filled": 0.0,
        "sampling/reward_mean": pytest.approx(9 / 12),
    }


def test_keeping_every_group_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dynamic_sampling_module, "groups_with_signal", lambda batch, n: torch.ones(len(batch) // n, dtype=torch.bool)
    )
    with pytest.raises(AssertionError):
        check_collected(sampler_of(config_of(), six()))


def test_what_is_too_much_is_dropped_and_counted() -> None:
    sampler = sampler_of(config_of(), scores(SAME, MIXED, MIXED, SAME, MIXED, MIXED))
    assert ordinals(sampler.sample(batches(), 1)) == [1, 2, 4]
    assert sampler.metrics["sampling/num_dropped"] == 1.0 and sampler.metrics["sampling/share_filtered"] == pytest.approx(1 / 3)


def test_at_the_bound_the_batch_is_filled_up_in_order_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    sampler = sampler_of(config_of(bound=2), scores(SAME, SAME, SAME, SAME, MIXED, SAME))
    with caplog.at_level(logging.WARNING):
        batch = sampler.sample(batches(), 1)
    assert ordinals(batch) == [0, 1, 4]
    assert sampler.metrics["sampling/num_filled"] == 2.0 and sampler.metrics["sampling/num_gen_batches"] == 2.0
    assert "after 2 generations" in caplog.text and "1 of 3 prompts" in caplog.text and "2 without signal" in caplog.text


def test_a_batch_without_any_signal_keeps_its_size() -> None:
    sampler = sampler_of(config_of(bound=2), scores(*[SAME] * 6))
    assert ordinals(sampler.sample(batches(), 1)) == [0, 1, 2]
    assert sampler.metrics["sampling/num_filled"] == 3.0 and sampler.metrics["sampling/share_filtered"] == 1.0


def test_a_sample_without_a_score_is_not_compared() -> None:
    reward = scores(MIXED, MIXED, MIXED, MIXED, MIXED, MIXED)
    reward.invalid = {(0, 1), (2, 0), (2, 1)}
    sampler = sampler_of(config_of(), reward)
    assert ordinals(sampler.sample(batches(), 1)) == [1, 3, 4]
    assert sampler.metrics["reward/num_failed"] == 3.0 and sampler.metrics["reward/failed_share"] == pytest.approx(0.25)


def test_signal_is_exact() -> None:
    """No tolerance: an overlong penalty of a millionth is a difference; 0.1 seven times is none."""
    batch = DataProto.from_dict(
        {SIGNAL: torch.tensor([0.1, 0.1, 0.1, 0.1 + 1e-6]).double(), "valid": torch.ones(4, dtype=torch.bool)}
    )
    assert groups_with_signal(batch, 2).tolist() == [False, True]


def test_a_resumed_run_draws_what_comes_next() -> None:
    """Two steps from one stream of prompts equal the same two with the stream cut between them."""
    reward = scores(SAME, MIXED, SAME, MIXED, SAME, MIXED, MIXED, SAME, SAME, SAME, SAME, MIXED, MIXED, SAME, SAME)
    stream, sampler = batches(), sampler_of(config_of(), reward)
    whole = [ordinals(sampler.sample(stream, 1)) for _ in range(2)]
    drawn = sum(len(asked) for _, asked in sampler.asked) // WANTED
    assert whole == [[1, 3, 5], [6, 11, 12]] and drawn == 5
    rest = (prompts_of(number) for number in range(2, 5))
    assert ordinals(sampler_of(config_of(), reward).sample(rest, 1)) == whole[1]


# What is compared


def accuracy(rows: list[tuple[int, int]]) -> dict[str, np.ndarray]:
    """Differs between the samples of odd prompts."""
    values = np.array([float(ordinal % 2 and sample) for ordinal, sample in rows])
    return {"acc": values, "note": np.array(["x"] * len(rows), dtype=object)}


def test_the_metric_names_a_number_of_the_scorer() -> None:
    reward = scores(*[SAME] * 6)
    reward.extra = accuracy
    assert ordinals(sampler_of(config_of(metric="acc"), reward).sample(batches(), 1)) == [1, 3, 5]


def test_acc_falls_back_on_what_validation_counts_as_right() -> None:
    """0.9 and 0.6 are both right, 0.9 and 0.4 are not."""
    reward = scores((0.9, 0.6), (0.9, 0.4), (0.4, 0.9), (0.9, 0.2))
    reward.scores |= {4: SAME, 5: SAME}
    assert ordinals(sampler_of(config_of(metric="acc"), reward).sample(batches(), 1)) == [1, 2, 3]


@pytest.mark.parametrize("name", ["seq_reward", "seq_final_reward", "score", "reward"])
def test_the_reward_by_any_of_its_names(name: str) -> None:
    check_collected(sampler_of(config_of(metric=name), six()))


def test_an_unknown_metric_names_those_there_are() -> None:
    reward = scores(*[SAME] * 6)
    reward.extra = lambda rows: {"format": np.ones(len(rows))} | accuracy(rows)
    with pytest.raises(RewardError, match=r"metric=formt: .*did you mean 'format'.*known: seq_reward.*, acc, format") as caught:
        sampler_of(config_of(metric="formt"), reward).sample(batches(), 1)
    assert "note" not in str(caught.value)


# Publication


def test_the_engines_get_each_version_once_from_0_on() -> None:
    source = sampler_of(config_of(), scores()).source
    for step in (1, 2, 3):
        source.publish()
        source.publish()  # a validation before this step has asked for it
        source.trained(step)
    assert source.weights.synced == [0, 1, 2]  # type: ignore[attr-defined]


def test_while_the_critic_warms_up_nothing_is_published() -> None:
    config = config_of()
    config.trainer.critic_warmup = 2
    source = sampler_of(config, scores()).source
    for step in (1, 2, 3, 4):
        source.publish()
        source.trained(step)
    assert source.weights.synced == [0, 3] and source.policy_version == 4  # type: ignore[attr-defined]


def test_a_resumed_run_publishes_the_version_it_goes_on_from() -> None:
    config = config_of()
    before, after = (sampler_of(config, scores()).source for _ in range(2))
    before.trained(7)
    after.load_state(before.state(), Path())
    after.publish()
    assert after.weights.synced == [7]  # type: ignore[attr-defined]


# Joining generations of different widths


def check_joined(joined: DataProto, parts: list[DataProto]) -> None:
    """Row by row: the same tokens under the masks, prompts ending and responses beginning at one column; zeros elsewhere."""
    start = joined.batch["input_ids"].shape[1] - joined.batch["responses"].shape[1]
    rows = [(part, row) for part in parts for row in range(len(part))]
    assert len(joined) == len(rows)
    for number, (part, row) in enumerate(rows):
        own = part.batch["input_ids"].shape[1] - part.batch["responses"].shape[1]
        for name in ("input_ids", "attention_mask"):
            got, expected = joined.batch[name][number].tolist(), part.batch[name][row].tolist()
            left = start - own
            assert got[:left] == [0] * left and got[left : left + len(expected)] == expected
            assert not any(got[left + len(expected) :])
        for name in ("responses", "response_mask", "rollout_log_probs"):
            got, expected = joined.batch[name][number].tolist(), part.batch[name][row].tolist()
            assert got[: len(expected)] == expected and not any(got[len(expected) :])
        assert joined.batch["response_length"][number] == part.batch["response_length"][row]
        assert joined.non_tensor_batch["raw_prompt"][number] == part.non_tensor_batch["raw_prompt"][row]


def parts() -> list[DataProto]:
    generator = FakeGenerator()
    return [generator.training(prompts_of(number)) for number in range(4)]


def test_generations_of_different_widths_join() -> None:
    check_joined(join(parts()), parts())


def test_padding_prompts_on_the_right_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_sampling_module, "pad", lambda column, sides: torch.nn.functional.pad(column, (0, sum(sides))))
    with pytest.raises(AssertionError):
        check_joined(join(parts()), parts())


def test_groups_of_different_generations_have_ids_of_their_own() -> None:
    batch = sampler_of(config_of(), six()).sample(batches(), 1)
    assert batch.batch["uid"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.non_tensor_batch["raw_prompt"].tolist() == ["p1", "p1", "p3", "p3", "p5", "p5"]


# The greedy baseline


@pytest.fixture
def needs_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the estimator asked for it."""
    from rlhub.trainer.ppo.requirements import requirements

    def asked(config: PPOConfig) -> Any:
        found = requirements(config)
        found.baseline_rewards = True
        return found

    monkeypatch.setattr(sync_source_module, "requirements", asked)


@pytest.mark.usefixtures("needs_baseline")
def test_each_sample_stands_beside_its_prompts_greedy_reward() -> None:
    sampler = sampler_of(config_of(enable=False), ScriptedReward({0: MIXED, 1: SAME, 2: MIXED}, {0: 0.25, 1: 0.5, 2: 1.0}))
    batch = sampler.sample(batches(), 1)
    assert batch.batch["baseline_rewards"].tolist() == [0.25, 0.25, 0.5, 0.5, 1.0, 1.0]
    assert batch.batch["scores"].tolist() == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    assert sampler.metrics["reward/greedy_mean"] == pytest.approx(1.75 / 3)
    assert sampler.asked == [("sampled", [0, 1, 2]), ("greedy", [0, 1, 2])]


@pytest.mark.usefixtures("needs_baseline")
def test_without_a_greedy_score_a_prompt_does_not_train() -> None:
    reward = ScriptedReward({0: MIXED, 1: MIXED, 2: MIXED}, {0: 0.25, 1: 0.5, 2: 1.0})
    reward.invalid = {(1, 50), (2, 0)}
    sampler = sampler_of(config_of(enable=False), reward)
    batch = sampler.sample(batches(), 1)
    assert batch.batch["valid"].tolist() == [True, True, False, False, False, True]
    assert sampler.metrics["reward/greedy_mean"] == pytest.approx(1.25 / 2) and sampler.metrics["reward/num_failed"] == 2.0


@pytest.mark.usefixtures("needs_baseline")
def test_baselines_stay_with_their_prompts_when_groups_are_filtered() -> None:
    reward = six()
    reward.greedy = {ordinal: ordinal / 8 for ordinal in range(6)}
    batch = sampler_of(config_of(), reward).sample(batches(), 1)
    assert batch.batch["baseline_rewards"].tolist() == [1 / 8, 1 / 8, 3 / 8, 3 / 8, 5 / 8, 5 / 8]


def test_no_greedy_response_is_generated_for_nobody() -> None:
    sampler = sampler_of(config_of(enable=False), six())
    assert "baseline_rewards" not in sampler.sample(batches(), 1).batch.keys()
    assert [kind for kind, _ in sampler.asked] == ["sampled"]
