"""ReMax (Li et al. 2024, arXiv 2310.10505): the reward of the prompt's greedy response is the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.returns import rewards_to_go


@dataclass(slots=True, kw_only=True)
class ReMaxKnobs:
    """gamma: discount per model token, in (0, 1]; the paper's is 1 (elsewhere it cannot be changed)."""

    gamma: float = 1.0


def remax(inputs: AdvantageInputs, knobs: ReMaxKnobs) -> AdvantageOutputs:
    """Returns A_t = G_t - b_i on model tokens, G_t = r_t + gamma G_{t+1} carried through masked spans, b_i the reward of the
    greedy response to sample i's prompt.

    inputs: baseline_rewards (batch,).  returns = G.
    """
    assert inputs.baseline_rewards is not None, "remax requires baseline_rewards"
    mask = inputs.response_mask
    returns = rewards_to_go(inputs.token_level_rewards, mask, knobs.gamma)
    return AdvantageOutputs(advantages=returns - inputs.on_tokens(inputs.baseline_rewards), returns=returns)
