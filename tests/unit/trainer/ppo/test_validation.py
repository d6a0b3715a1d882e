"""The validator: samples that fail, and what the reward function returns, in a report of its own or of workflows' rewards."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.reward import RewardModelConfig
from rlhub.config.sections.rollout import ValSamplingConfig
from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rewards import RewardFailure, RewardOutcome
from rlhub.rewards.base import OUTCOMES
from rlhub.rewards.managers import NaiveManager
from rlhub.trainer.ppo.episodes import TRAINING, VALIDATION, Workflows, samplings
from rlhub.trainer.ppo.sync_source import VALIDATION_ORDINALS, validation_sampling
from rlhub.trainer.ppo.trainer import validation_batches
from rlhub.trainer.ppo.validation import Validator
from rlhub.utils.timing import PhaseTimer
from tests.unit.rewards.test_managers import Letters, make_batch, parts


class Given:
    """Validation samples that are there already."""

    def __init__(self, samples: int) -> None:
        self.config: Any = SimpleNamespace(val_kwargs=ValSamplingConfig(n=samples))

    def validation(self, prompts: DataProto) -> DataProto:
        return prompts


def given(texts: list[str]) -> DataProto:
    batch = make_batch(texts)
    batch.batch["response_length"] = batch.batch["response_mask"].sum(1)
    batch.batch["finish_reason"] = torch.zeros(len(texts), dtype=torch.int64)
    batch.non_tensor_batch["raw_prompt"] = object_array(["?"] * len(texts))
    return batch


def validated(batches: list[DataProto], table: dict[str, Any], **settings: Any) -> Any:
    scoring = RewardModelConfig(**({"on_error": "mask", "max_error_rate": 1.0} | settings))
    reward = NaiveManager(replace(parts(table), on_error=scoring.on_error, max_error_rate=scoring.max_error_rate))
    return Validator(batches, Given(2), reward, Letters(), PhaseTimer(), 8, scoring)()


def test_failed_rewards_are_excluded_and_counted_over_all_batches() -> None:
    report = validated([given(["a", "a", "x", "b"]), given(["b", "b", "x", "x"])], {"a": 1.0, "b": 0.0})
    assert report.metrics["val/pass@1"] == pytest.approx((1 + 0 + 0) / 3)
    assert report.metrics["val/pass@2"] == pytest.approx((1 + 0) / 2)
    assert report.metrics["val/reward/mean"] == pytest.approx(2 / 5)
    counted = {"val/reward/num_failed": 3.0, "val/reward/num_failed/raised": 3.0, "val/reward/failed_share": 3 / 8}
    assert {name: report.metrics[name] for name in counted} == counted
    assert [row.score for row in report.samples] == [1.0, 1.0, None, 0.0, 0.0, 0.0, None, None]


def test_the_policy_for_failures_is_that_of_training() -> None:
    zero = validated([given(["a", "x"])], {"a": 1.0}, on_error="zero").metrics
    assert (zero["val/pass@1"], zero["val/reward/mean"], zero["val/reward/num_failed"]) == (0.5, 0.5, 1.0)
    with pytest.raises(RewardError, match="on_error=fail"):
        validated([given(["a", "x"])], {"a": 1.0}, on_error="fail")
    with pytest.raises(RewardError, match="max_error_rate=0.4"):
        validated([given(["a", "x"])], {"a": 1.0}, max_error_rate=0.4)


def scored_by_workflows() -> DataProto:
    """Rewards of the workflows' own; the reward that one of them asked for failed."""
    batch = given(["a", "a", "a", "a"])
    batch.batch["scores"] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    failure = RewardOutcome(error=RewardFailure(kind="raised", message="asked in vain"))
    batch.non_tensor_batch[OUTCOMES] = object_array([None, None, None, failure])
    return batch


def test_a_reward_that_failed_inside_an_episode_follows_the_same_policy() -> None:
    masked = validated([scored_by_workflows()], {}).metrics
    assert (masked["val/pass@1"], masked["val/reward/num_failed"]) == (0.5, 1.0)
    assert masked["val/reward/mean"] == pytest.approx(2 / 3)
    zero = validated([scored_by_workflows()], {}, on_error="zero").metrics
    assert (zero["val/pass@1"], zero["val/pass@2"], zero["val/reward/num_failed"]) == (0.5, 0.5, 1.0)
    assert zero["val/reward/mean"] == 0.5
    with pytest.raises(RewardError, match=r"(?s)asked in vain.*on_error=fail"):
        validated([scored_by_workflows()], {}, on_error="fail")


def test_what_the_reward_function_returns_is_reported_by_data_source() -> None:
    """n = 2 of each prompt; the prediction of one in five is missing."""
    table = {
        "a": {"score": 1.0, "acc": True, "pred": "7", "note": "x"},
        "b": {"score": -1.0, "acc": False, "pred": "8", "note": "y"},
    }
    metrics = validated([given(["a", "a", "b", "b"]), given(["a", "b"])], table).metrics
    assert metrics["val-core/source/acc/mean@2"] == pytest.approx(0.5)
    assert metrics["val-aux/source/reward/mean@2"] == pytest.approx(0.0)
    assert metrics["val-core/source/acc/best@2/mean"] == pytest.approx((1 + 0 + 0.75) / 3, abs=0.02)
    assert {name for name in metrics if name.startswith("val-core/")} == {
        f"val-core/source/acc/{name}" for name in ("mean@2", "best@2/mean", "best@2/std", "maj@2/mean", "maj@2/std")
    }
    assert not any("note" in name or "pred" in name for name in metrics)


def test_workflows_own_rewards_have_no_further_numbers() -> None:
    metrics = validated([scored_by_workflows()], {}).metrics
    assert metrics["val-core/source/reward/mean@2"] == pytest.approx((1.0 + 0.0) / 2)
    assert not any("/acc/" in name or "maj@" in name for name in metrics)


class FourRows:
    """A data set of two sources."""

    sources = ("few", "many", "few", "many")

    def __len__(self) -> int:
        return len(self.sources)

    def batch(self, rows: np.ndarray) -> DataProto:
        return DataProto.from_dict(
            {"prompts": torch.from_numpy(rows)[:, None], "attention_mask": torch.ones(len(rows), 1).long()},
            {"data_source": object_array([self.sources[row] for row in rows])},
        )


@pytest.mark.parametrize("size", [None, 1])
def test_prompts_of_a_source_with_its_own_sampling_are_batches_of_their_own(size: int | None) -> None:
    config = PPOConfig()
    config.data.val_batch_size, config.data.sources = size, {"many": {"val_kwargs": {"n": 8}}, "few": {"weight": 2.0}}
    general = config.actor_rollout_ref.rollout
    general.val_kwargs.n = 2
    batches = validation_batches(config, FourRows())  # type: ignore[arg-type]
    found = [(one.batch["ordinal"] - VALIDATION_ORDINALS, validation_sampling(one, general).n) for one in batches]
    assert sorted((int(row), n) for rows, n in found for row in rows) == [(0, 2), (1, 8), (2, 2), (3, 8)]
    assert len(batches) == (2 if size is None else 4)
    assert all((one.batch["prompts"][:, 0] + VALIDATION_ORDINALS).equal(one.batch["ordinal"]) for one in batches)


def test_episodes_of_a_source_run_with_its_own_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PPOConfig()
    config.data.sources = {"many": {"val_kwargs": {"do_sample": True, "temperature": 0.5}}, "few": {"weight": 2.0}}
    found = samplings(config, SimpleNamespace(stop_token_ids=[0]))  # type: ignore[arg-type]
    monkeypatch.setattr(Workflows, "_build", lambda self, key: SimpleNamespace(sampling=self.samplings[key.purpose]))

    def temperature(purpose: str, source: str) -> float:
        workflows = Workflows(config, None, found, None, purpose=purpose)  # type: ignore[arg-type]
        return workflows.of({"data_source": source}).sampling.temperature  # type: ignore[attr-defined, no-any-return]

    assert (temperature(VALIDATION, "many"), temperature(VALIDATION, "few"), temperature(TRAINING, "many")) == (0.5, 0.0, 1.0)
