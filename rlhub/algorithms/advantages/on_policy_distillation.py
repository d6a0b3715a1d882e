"""On-policy distillation (Agarwal et al. 2024, arXiv 2306.13649; Gu et al. 2024, arXiv 2306.08543): a teacher grades each token
that the student wrote."""

from __future__ import annotations

from dataclasses import dataclass

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.masked import masked
from rlhub.algorithms.returns import rewards_to_go
from rlhub.algorithms.statistics import batch_moments, row_moments


@dataclass(slots=True, kw_only=True)
class OnPolicyDistillationKnobs:
    """discount: of later tokens' log-ratios, per model token, in [0, 1].

    With 0 a token answers for its own log-ratio alone, with little variance; with 1 the expected gradient is that of the
    reverse KL of whole responses.
    """

    discount: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.discount <= 1:
            raise ValueError(f"discount is a number from 0 to 1, got {self.discount}")


def on_policy_distillation(inputs: AdvantageInputs, knobs: OnPolicyDistillationKnobs) -> AdvantageOutputs:
    """Returns A_t = sum_{k >= t} discount^{k-t} d_k, d_t = log p(y_t) - log pi(y_t), on model tokens; p is the reference, the
    teacher, and pi the policy before the update.

    -d_t is an unbiased estimate of the reverse KL(pi || p) at a token's place, so these advantages lower it.  Rewards are not
    read.  inputs: old_log_probs and ref_log_prob (batch, response).  returns = A.
    """
    assert inputs.old_log_probs is not None and inputs.ref_log_prob is not None, "the estimator requires both"
    mask = inputs.response_mask
    ratios = masked(inputs.ref_log_prob - inputs.old_log_probs, mask)
    found = rewards_to_go(ratios, mask, knobs.discount) if knobs.discount else ratios
    mean = batch_moments(inputs.gather(row_moments(-ratios, mask))).mean.item()
    return AdvantageOutputs(advantages=found, returns=found, metrics={"actor/reverse_kl": mean})
