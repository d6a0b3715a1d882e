"""The correction and the measured mismatch in the training step: what travels for them, which passes they need, and the bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlhub.algorithms import estimation
from rlhub.algorithms.mismatch import staleness_of
from rlhub.algorithms.registry import POLICY_LOSSES
from rlhub.config.rules.derive import derive
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.rollout import RemoteConfig
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.errors import PolicyMismatchError, ProtocolError
from rlhub.protocol import DataProto
from rlhub.registry import Row
from rlhub.trainer.ppo.metrics import MismatchBound, mismatch_bound
from rlhub.trainer.ppo.requirements import requirements
from rlhub.trainer.ppo.scoring import Samples
from rlhub.trainer.ppo.step import policy_inputs
from rlhub.trainer.preflight import checks as preflight
from tests.unit.trainer.ppo.test_step import LENGTHS, FakeSource, Run, learn
from tests.unit.trainer.ppo.test_step import config_of as step_config

OLD = [[-1.0, -2.0, -3.0], [-1.0, -1.5, 0.0]]
MASK = [[1, 1, 1], [1, 1, 0]]


def batch_of(**columns: torch.Tensor) -> DataProto:
    old = torch.tensor(OLD)
    tensors = {
        "input_ids": torch.zeros(2, 5, dtype=torch.int64),
        "attention_mask": torch.ones(2, 5, dtype=torch.int64),
        "old_log_probs": old,
        "rollout_log_probs": old - 0.1,
        "response_mask": torch.tensor(MASK),
        "learn_mask": torch.tensor(MASK),
        "advantages": torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]]),
        "mini_batch": torch.zeros(2, dtype=torch.int64),
    }
    return DataProto.from_dict(tensors=tensors | columns)


def settings(**changes: object) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(**changes)  # type: ignore[arg-type]


def config_of(mini: int = 8, **changes: object) -> PPOConfig:
    config = PPOConfig(trainer=TrainerConfig(batches="driver"))  # the fake groups have no stores
    config.algorithm.adv_estimator = "grpo"
    config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size = 8, mini
    config.algorithm.rollout_correction = settings(**changes)
    return config


# What travels to the update


def test_in_bypass_mode_the_rollouts_log_probs_travel_in_place_of_the_old_ones() -> None:
    batch = batch_of()
    del batch.batch["old_log_probs"]
    needs = requirements(config_of(bypass_mode=True))
    assert not needs.correction, "the update corrects"
    sent = policy_inputs(batch, needs).batch
    assert torch.equal(sent["rollout_log_probs"], batch.batch["rollout_log_probs"]) and "old_log_probs" not in sent.keys()


@pytest.mark.parametrize("per_token", [False, True])
def test_versions_travel_where_the_update_reads_how_old_tokens_are(per_token: bool) -> None:
    versions = torch.tensor([[5, 6, 7], [7, 7, 9]]) if per_token else torch.tensor([5, 7])
    batch = batch_of(policy_version=versions)
    batch.meta_info["policy_version"] = 7
    expected = [[2, 1, 0], [0, 0, 0]] if per_token else [2, 0]
    sent = policy_inputs(batch, requirements(config_of(proximal="a3po")))
    assert staleness_of(sent.batch["policy_version"], sent.meta_info["policy_version"]).tolist() == expected
    assert "rollout_log_probs" in sent.batch.keys()
    assert "policy_version" not in policy_inputs(batch, requirements(config_of(4))).batch.keys()


# Passes


CORRECTIONS = [{"rollout_is": "token"}, {"rollout_rs": ["token_k2"], "rollout_rs_threshold": ["1"]}, {"m2po_threshold": 0.04}]


@pytest.mark.parametrize("changes", CORRECTIONS)
def test_a_correction_needs_old_log_probs_of_their_own(changes: dict[str, object]) -> None:
    assert not requirements(config_of()).old_log_probs
    needs = requirements(config_of(**changes))
    assert needs.old_log_probs and not needs.bypass and not needs.rollout_log_probs


@pytest.mark.parametrize("mini", [4, 8])
def test_bypass_and_a3po_save_the_pass_also_over_several_steps(mini: int) -> None:
    needs = requirements(config_of(mini, bypass_mode=True, rollout_rs=["token_k2"]))
    assert (needs.old_log_probs, needs.bypass, needs.rollout_log_probs) == (False, True, False)
    needs = requirements(config_of(mini, proximal="a3po", rollout_is="token"))
    assert (needs.old_log_probs, needs.bypass, needs.rollout_log_probs) == (False, False, True)
    assert requirements(config_of(mini)).old_log_probs == (mini == 4)


def test_with_a_kl_in_the_reward_a3po_has_the_pass_and_bypass_the_rollouts_log_probs() -> None:
    for changes, passes in (({"proximal": "a3po"}, True), ({"bypass_mode": True}, False)):
        config = config_of(**changes)
        config.algorithm.use_kl_in_reward = True
        assert requirements(config).old_log_probs is passes


# Warnings


def warned(config: PPOConfig) -> list[str]:
    return preflight.warnings(config, {"algorithm.rollout_correction.rollout_is"})


def test_a_weight_that_would_count_the_ratio_twice_is_said_to_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = warned(config_of(bypass_mode=True, rollout_is="token"))
    assert "has no effect" in warning and "count it twice" in warning
    assert warned(config_of(rollout_is="token")) == []
    row = Row(name="mine", target="nowhere:mine", requires=frozenset({"weights"}))
    monkeypatch.setitem(POLICY_LOSSES._rows, "mine", row)
    config = config_of(bypass_mode=True, rollout_is="token")
    config.actor_rollout_ref.actor.policy_loss.loss_mode = "mine"
    assert warned(config) == []


def test_the_rows_of_losses_without_a_ratio_say_so() -> None:
    """Found by what they do: doubling pi_old's log-probs leaves their gradient at pi alone."""
    from rlhub.algorithms.inputs import PolicyLossInputs

    for name in POLICY_LOSSES.names():
        row, knobs_class = POLICY_LOSSES.row(name), POLICY_LOSSES.knobs_class(name)
        gradients = []
        for gap in (0.0, 1e-5):  # inside every clip range, so that only a ratio can show
            new = torch.full((1, 1), -1.0, dtype=torch.float64, requires_grad=True)
            old = new.detach() - gap
            selected = torch.zeros(1, 1, dtype=torch.uint8) if "select" in row.companions else None
            anchor = old if "rollout_log_probs" in row.requires else None
            inputs = PolicyLossInputs(
                log_probs=new,
                old_log_probs=old,
                advantages=torch.ones(1, 1, dtype=torch.float64),
                response_mask=torch.ones(1, 1),
                rollout_log_probs=anchor,
                selected=selected,
            )
            POLICY_LOSSES.get(name)(inputs, knobs_class() if knobs_class else None).loss.sum().backward()
            assert new.grad is not None
            gradients.append(new.grad.item())
        moved = abs(gradients[1] / gradients[0] - 1)
        assert (moved > 5e-6) == ("weights" not in row.requires), (name, moved)


# In the training step


def test_rejected_rows_leave_the_policys_loss_alone_not_the_baseline_and_not_the_critic() -> None:
    """The rollout's log-probs are 0.05 below the trainer's on every token: sequences of more than 3 tokens leave the band."""
    config = step_config("gae")
    plain = learn(config)
    config.algorithm.rollout_correction = settings(rollout_is="token", rollout_rs=["seq_sum_k1"], rollout_rs_threshold=["1.18"])
    run = learn(config)
    assert torch.equal(run.batch.batch["advantages"], plain.batch.batch["advantages"])
    assert run.sent("critic.update_critic").columns["learn_mask"].sum(1).tolist() == LENGTHS
    sent = run.sent("actor.update_actor").columns
    assert sent["loss_mask"].sum(1).tolist() == [length if length <= 3 else 0 for length in LENGTHS]
    weights = sent["importance_weights"][sent["loss_mask"].bool()]
    torch.testing.assert_close(weights, torch.full_like(weights, math.exp(0.05)), rtol=1e-5, atol=0)
    assert "actor.compute_log_prob" in run.names() and "actor.compute_log_prob" not in plain.names()
    assert run.metrics["mismatch/masked_share"] == sum(n for n in LENGTHS if n > 3) / sum(LENGTHS)


@dataclass
class Writes:
    """Counts how often the step writes each column of its batch."""

    batch: TensorDict | None = None
    names: list[str] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        written, select, union = TensorDict.__setitem__, FakeSource.select, DataProto.union

        def note(columns: TensorDict, name: str, value: torch.Tensor) -> None:
            if columns is self.batch:
                self.names.append(name)
            written(columns, name, value)

        def chosen(source: FakeSource, samples: Samples) -> DataProto | None:
            batch = select(source, samples)
            self.batch = None if batch is None else batch.batch
            self.names += [] if self.batch is None else self.batch.keys()
            return batch

        def joined(batch: DataProto, other: DataProto) -> DataProto:
            self.names += other.batch.keys()
            return union(batch, other)

        monkeypatch.setattr(DataProto, "union", joined)
        monkeypatch.setattr(TensorDict, "__setitem__", note)
        monkeypatch.setattr(FakeSource, "select", chosen)


MASKS: list[dict[str, Any]] = [
    {},
    {"rollout_is": "token", "rollout_rs": ["seq_sum_k1"], "rollout_rs_threshold": ["1.18"]},
    {"bypass_mode": True},
    {"m2po_threshold": 0.04},
]


def check_masks(run: Run, writes: Writes, rejected: set[int]) -> None:
    """Row 3 has no valid score, rows 1 and 4 were truncated."""
    everything, untaught = dict(enumerate(LENGTHS)), {1, 3, 4}
    calls = {"actor.compute_log_prob": "response_mask", "critic.compute_values": "response_mask"}
    (policy,) = {"learn_mask", "loss_mask"} & set(run.sent("actor.update_actor").columns)
    assert policy == ("loss_mask" if run.train_step.needs.correction else "learn_mask")
    calls |= {"critic.update_critic": "learn_mask", "actor.update_actor": policy}
    without = {"response_mask": set[int](), "learn_mask": untaught, "loss_mask": untaught | rejected}
    for call in [call for call in run.calls if call.name in calls]:
        mask = calls[call.name]
        assert call.columns[mask].sum(1).tolist() == [0 if r in without[mask] else n for r, n in everything.items()], call.name
    assert run.batch.batch["response_mask"].sum(1).tolist() == LENGTHS
    assert len(writes.names) == len(set(writes.names)), sorted(name for name in writes.names if writes.names.count(name) > 1)
    assert {"learn_mask", "advantages"} <= set(writes.names)
    assert run.metrics["actor/masked_samples"] == len(untaught)


@pytest.mark.parametrize("correction", MASKS)
def test_every_reader_gets_its_own_mask_and_no_column_is_written_twice(
    correction: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, writes = step_config("gae"), Writes()
    config.actor_rollout_ref.actor.mask_truncated = True
    config.algorithm.whiten_rewards = True
    config.algorithm.rollout_correction = settings(**correction)
    writes.watch(monkeypatch)
    check_masks(learn(config, invalid={3}), writes, {5} if "rollout_rs" in correction else set())


@pytest.mark.parametrize("name", ["response_mask", "learn_mask"])
def test_a_correction_that_writes_the_mask_that_it_has_read_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = estimation.rollout_correction

    def rewriting(*args: Any) -> estimation.ColumnOutputs:
        outputs = correct(*args)
        outputs.columns[name] = outputs.columns["loss_mask"]
        return outputs

    monkeypatch.setattr(estimation, "rollout_correction", rewriting)
    with pytest.raises((AssertionError, ProtocolError)):
        test_every_reader_gets_its_own_mask_and_no_column_is_written_twice(MASKS[1], monkeypatch)


def test_in_bypass_mode_no_pass_is_made_and_the_update_gets_the_rollouts_log_probs() -> None:
    config = step_config(mini=2)
    config.algorithm.rollout_correction = settings(bypass_mode=True)
    run = learn(config)
    assert "actor.compute_log_prob" not in run.names()
    sent = run.sent("actor.update_actor").columns
    assert torch.equal(sent["rollout_log_probs"], run.batch.batch["rollout_log_probs"])
    assert not {"old_log_probs", "importance_weights"} & set(sent)


# The bound: sound engines of each precision pass, a corrupted one stops the run, staleness is allowed for.


def bound_of(device: str = "cpu", **rollout: object) -> MismatchBound:
    config = PPOConfig(trainer=TrainerConfig(batches="driver"))  # the fake groups have no stores
    config.trainer.device = device
    for name, value in rollout.items():
        setattr(config.actor_rollout_ref.rollout, name, value)
    derive(config)
    return mismatch_bound(config)


@pytest.mark.parametrize(
    ("bound", "usual"),
    [
        (bound_of(), 1e-5),
        (bound_of(dtype="bfloat16"), 0.02),
        (bound_of("cuda"), 0.02),
        (bound_of("cuda", dtype="float16"), 0.02),
        (bound_of(name="remote", remote=RemoteConfig(urls=["http://host:8000"])), 0.02),
    ],
)
def test_a_corrupted_engine_stops_the_run_and_a_sound_one_says_nothing(
    bound: MismatchBound, usual: float, caplog: pytest.LogCaptureFixture
) -> None:
    for kl in (usual, 0.0, -usual):
        bound.check({"mismatch/kl": kl})
    assert not caplog.text
    bound.check({"mismatch/kl": 20 * usual if usual > 1e-4 else 0.01})
    assert "does not sample from the policy that is trained" in caplog.text
    for kl in (6.14, math.inf, math.nan):
        with pytest.raises(PolicyMismatchError, match=r"mismatch/kl is .* algorithm\.rollout_correction\.mismatch_stop"):
            bound.check({"mismatch/kl": kl})


def test_the_newest_tokens_count_and_old_ones_may_be_farther_away() -> None:
    bound = bound_of()
    stale = {"mismatch/kl": 3.0, "mismatch/kl/staleness_4": 4.0}
    bound.check(stale | {"mismatch/kl/staleness_0": 1e-6})
    with pytest.raises(PolicyMismatchError, match="staleness_0"):
        bound.check(stale | {"mismatch/kl/staleness_0": 0.2})
    bound.check({"mismatch/kl": 0.3, "mismatch/kl/staleness_1": 0.3})  # one step ahead: there are no newer ones
    with pytest.raises(PolicyMismatchError, match="staleness_1"):
        bound.check({"mismatch/kl": 6.14, "mismatch/kl/staleness_1": 6.14})
    bound.check({})  # nothing was measured


def test_what_is_another_distribution_has_no_bound_but_the_one_that_is_set() -> None:
    for change in ({"top_p": 0.9}, {"top_k": 8}):
        bound_of(**change).check({"mismatch/kl": 2.0})
    config = PPOConfig(trainer=TrainerConfig(batches="driver"))  # the fake groups have no stores
    config.trainer.device, config.trainer.replay_from = "cpu", "somewhere"
    config.algorithm.rollout_correction.mismatch_stop = 0.5
    with pytest.raises(PolicyMismatchError, match="the bound is 0.5"):
        mismatch_bound(config).check({"mismatch/kl": 0.6})


def test_old_keys_and_values_are_allowed_for() -> None:
    assert bound_of(mode="async", recompute_kv_cache=False).oldest_keys == 1
    assert bound_of(mode="async").oldest_keys == 0
