"""What estimators refuse, in the user's words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rlhub.algorithms.inputs import AdvantageInputs
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS
from rlhub.config.sections.algorithm import AlgorithmConfig
from rlhub.errors import ConfigError
from rlhub.registry import knobs_for
from tests.unit.algorithms.advantages.estimators import estimate


def knobs(name: str, **kwargs: Any) -> Any:
    return knobs_for(ADVANTAGE_ESTIMATORS.knobs_class(name), AlgorithmConfig(gamma=0.5), kwargs, where="algorithm.adv_kwargs")


@pytest.mark.parametrize(
    ("name", "kwargs", "text"),
    [
        ("cpgd", {"weighting": "sdt"}, "algorithm.adv_kwargs: weighting='sdt' is not one of std, clip-scaled, plain"),
        ("gdpo", {"reward_weights": {"right": "1"}}, "reward_weights.right='1' is not a number"),
        ("opo", {"weighting": "std"}, "this algorithm has no knobs"),
        ("remax", {"gama": 0.5}, "did you mean 'gamma'"),
    ],
)
def test_bad_knobs(name: str, kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        knobs(name, **kwargs)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax", "optimal_token_baseline"])
def test_the_sections_discount_reaches_every_estimator_that_discounts(name: str) -> None:
    assert knobs(name).gamma == 0.5


def test_an_unknown_estimator_is_answered_with_all() -> None:
    with pytest.raises(LookupError, match="known: .*" + ".*".join(sorted(["cpgd", "gdpo", "gpg", "opo", "remax"]))):
        ADVANTAGE_ESTIMATORS.row("list")


def components(present: dict[str, float]) -> AdvantageInputs:
    return AdvantageInputs(
        token_level_rewards=torch.zeros(2, 1),
        response_mask=torch.ones(2, 1).long(),
        group=torch.tensor([0, 0]),
        reward_components={name: torch.tensor([0.0, value], dtype=torch.float64) for name, value in present.items()},
    )


def test_a_missing_reward_component_is_named_with_those_there_are() -> None:
    inputs = components({"right": 1.0, "format": 2.0})
    with pytest.raises(ValueError, match="reward components lenght of the reward function, but it returned format, right;"):
        estimate("gdpo", {"reward_weights": {"lenght": 1.0, "right": 1.0}}, inputs)
    with pytest.raises(ValueError, match="but it returned none; let compute_score return a dict"):
        estimate("gdpo", {}, components({}))
