"""An estimator that reads the sum of squared probabilities gets it from the pass before the update, others do not ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhub.protocol import DataProto
from tests.unit.trainer.ppo.test_step import FakeGroup, config_of, learn, log_probs_of, remote, rollout_batch, step_of


class Generous(FakeGroup):
    """Returns what it is asked for."""

    @remote
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        returned = log_probs_of(self, batch)
        if batch.meta_info.get("sum_pi_squared"):
            # a policy that is surer of some tokens than of others
            returned.batch["sum_pi_squared"] = returned.batch["old_log_probs"].exp().square()
        return returned


def run(group: type[FakeGroup]) -> tuple[torch.Tensor, list[Any]]:
    calls: list[Any] = []
    batch = rollout_batch(2)
    step_of(config_of("optimal_token_baseline"), calls, group("actor", calls), None, [batch])(1, iter(()))
    return batch.batch["advantages"], calls


def test_it_is_asked_for_in_the_pass_of_the_old_log_probs() -> None:
    advantages, calls = run(Generous)
    (asked,) = [call for call in calls if call.name == "actor.compute_log_prob"]
    assert asked.meta == {"sum_pi_squared": True}
    assert advantages.isfinite().all() and advantages.any()
    with pytest.raises(KeyError):  # the control: an actor that does not return it
        run(FakeGroup)


def test_others_do_not_ask() -> None:
    assert learn(config_of("grpo", mini=1)).sent("actor.compute_log_prob").meta == {}
