"""An estimator that reads the scorer's own numbers alone: what changes the tokens' rewards then changes nothing."""

from __future__ import annotations

import pytest

from rlhub.trainer.preflight import checks as preflight
from tests.unit.trainer.preflight.test_checks import sound

SET = frozenset({"algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.whiten_rewards"})


@pytest.mark.parametrize(("estimator", "expected"), [("gdpo", 3), ("grpo", 0)])
def test_a_kl_in_the_reward_without_effect_is_a_warning(estimator: str, expected: int) -> None:
    config = sound()
    config.algorithm.adv_estimator = estimator
    config.algorithm.use_kl_in_reward, config.algorithm.whiten_rewards, config.algorithm.kl_ctrl.kl_coef = True, True, 0.1
    found = preflight.warnings(config, SET)
    assert len(found) == expected, found
    if expected:
        assert any("use_kl_in_reward=true has no effect: algorithm.adv_estimator=gdpo" in warning for warning in found)
        assert any("use_kl_loss" in warning for warning in found)
    config.algorithm.use_kl_in_reward = config.algorithm.whiten_rewards = False
    assert preflight.warnings(config, SET) == []
