"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): no critic and no groups, the batch itself is the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.returns import rewards_to_go
from rlhub.algorithms.statistics import whiten


@dataclass(slots=True, kw_only=True)
class ReinforcePlusPlusKnobs:
    """gamma: discount per model token, in (0, 1]."""

    gamma: float = 1.0


def reinforce_plus_plus(inputs: AdvantageInputs, knobs: ReinforcePlusPlusKnobs) -> AdvantageOutputs:
    """Returns G_t = r_t + gamma G_{t+1}, carried through masked spans unchanged; A = G whitened over the batch's model tokens.

    returns = G.  The paper's per-token KL belongs into the reward (algorithm.use_kl_in_reward).
    """
    returns = rewards_to_go(inputs.token_level_rewards, inputs.response_mask, knobs.gamma)
    return AdvantageOutputs(advantages=whiten(returns, inputs.response_mask, inputs.gather), returns=returns)
