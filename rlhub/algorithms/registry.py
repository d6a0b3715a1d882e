"""The names of all algorithms, with module, requirements and knobs; no algorithm is loaded.

`requires` of an advantage estimator: "values" (a critic must predict them), "groups" (several samples per prompt),
"old_log_probs" and "sum_pi_squared" (a forward pass of its own before the update), "reference" (log-probs of the frozen
reference), "baseline_rewards" (a greedy response per
prompt), "episodes" (rows are calls of a policy in episodes: columns episode, call and terminated), "next_values" (of the state
after a call), "reward_components" (the scorer's own numbers by name), "components_only" (and nothing of the token-level rewards),
"gather" (it is given some rows of the batch and takes statistics of the batch and of groups through `inputs.gather`; without the
word it is given the whole batch, whose columns then cross between the ranks).  Its companion "per_sample" is the estimator on one
number a row (inputs.SampleInputs), for those whose advantage is the same on all tokens of a sample; only these numbers cross.

Of a policy loss: "old_log_probs" (as above), "rollout_log_probs" (of the policy that sampled) and "weights" (the loss has no
ratio pi / pi_old of its own, so that only importance weights can correct samples of another policy).  Its companion "select"
chooses tokens once per mini-batch, before it is cut.  Of a KL estimator: "value_only", where the gradient of its value is not
that of the KL, so that it suits the reward.
"""

from __future__ import annotations

from typing import Any

from rlhub.registry import Registry

_HERE = "rlhub.algorithms"

ADVANTAGE_ESTIMATORS: Registry[Any] = Registry("advantage estimator")
_ONE_NUMBER_A_SAMPLE = ("grpo", "grpo_passk", "rloo", "opo", "gpg", "cpgd")
for _name, _requires, _class in (
    ("gae", {"values", "gather"}, "GAEKnobs"),
    ("grpo", {"groups"}, "GRPOKnobs"),
    ("grpo_passk", {"groups"}, "GRPOPassKKnobs"),
    ("reinforce_plus_plus", {"gather"}, "ReinforcePlusPlusKnobs"),
    ("reinforce_plus_plus_baseline", {"groups", "gather"}, None),
    ("remax", {"baseline_rewards", "gather"}, "ReMaxKnobs"),
    ("rloo", {"groups"}, None),
    ("opo", {"groups"}, None),
    ("gpg", {"groups"}, None),
    ("optimal_token_baseline", {"groups", "old_log_probs", "sum_pi_squared"}, "OptimalTokenBaselineKnobs"),
    ("gdpo", {"groups", "reward_components", "components_only", "gather"}, "GDPOKnobs"),
    ("cpgd", {"groups"}, "CPGDKnobs"),
    ("on_policy_distillation", {"old_log_probs", "reference", "components_only", "gather"}, "OnPolicyDistillationKnobs"),
):
    _module = f"{_HERE}.advantages.{_name}"
    ADVANTAGE_ESTIMATORS.add_lazy(
        _name,
        f"{_module}:{_name}",
        requires=_requires,
        knobs=f"{_module}:{_class}" if _class else None,
        companions={"per_sample": f"{_module}:per_sample"} if _name in _ONE_NUMBER_A_SAMPLE else None,
    )

for _name, _file, _requires, _class in (
    ("chunk_gae", "gae", {"values", "episodes", "next_values", "gather"}, "ChunkGAEKnobs"),
    ("chunk_grpo", "grpo", {"groups", "episodes", "gather"}, "GRPOKnobs"),
):
    _module = f"{_HERE}.advantages.{_file}"
    ADVANTAGE_ESTIMATORS.add_lazy(_name, f"{_module}:{_name}", requires=_requires, knobs=f"{_module}:{_class}")

POLICY_LOSSES: Registry[Any] = Registry("policy loss")
for _name, _class in (
    ("vanilla", "VanillaKnobs"),
    ("gspo", "GSPOKnobs"),
    ("sapo", "SAPOKnobs"),
    ("geo_mean", "GeoMeanKnobs"),
    ("cispo", "CISPOKnobs"),
):
    POLICY_LOSSES.add_lazy(_name, f"{_HERE}.policy_losses.{_name}:{_name}", knobs=f"{_HERE}.policy_losses.{_name}:{_class}")
for _name, _file, _knobs in (
    ("reinforce", "reinforce", None),
    ("gpg", "reinforce", None),
    ("cpgd", "cpgd", f"{_HERE}.policy_losses.cpgd:CPGDKnobs"),
):
    POLICY_LOSSES.add_lazy(_name, f"{_HERE}.policy_losses.{_file}:{_name}", requires={"weights"}, knobs=_knobs)
for _name, _class in (("dppo_tv", "DPPOTVKnobs"), ("dppo_kl", "DPPOKLKnobs")):
    POLICY_LOSSES.add_lazy(
        _name,
        f"{_HERE}.policy_losses.{_name}:{_name}",
        requires={"rollout_log_probs"},
        knobs=f"{_HERE}.policy_losses.{_name}:{_class}",
    )
for _name, _class in (("clip_cov", "ClipCovKnobs"), ("kl_cov", "KLCovKnobs")):
    POLICY_LOSSES.add_lazy(
        _name,
        f"{_HERE}.policy_losses.{_name}:{_name}",
        requires={"old_log_probs"},
        knobs=f"{_HERE}.policy_losses.{_name}:{_class}",
        companions={"select": f"{_HERE}.policy_losses.{_name}:select"},
    )

PREFERENCE_LOSSES: Registry[Any] = Registry("preference loss")
for _name, _function, _class in (
    ("sigmoid", "rlhub.algorithms.preference:dpo_sigmoid", "rlhub.algorithms.preference:SigmoidKnobs"),
    ("ipo", "rlhub.algorithms.preference:ipo", "rlhub.algorithms.preference:BetaKnobs"),
    ("hinge", "rlhub.algorithms.preference:hinge", "rlhub.algorithms.preference:BetaKnobs"),
):
    PREFERENCE_LOSSES.add_lazy(_name, _function, knobs=_class)

KL_ESTIMATORS: Registry[Any] = Registry("KL estimator")
for _names, _function, _words in (
    (("kl", "k1"), "rlhub.algorithms.kl:k1", {"value_only"}),
    (("abs",), "rlhub.algorithms.kl:absolute", {"value_only"}),
    (("mse", "k2"), "rlhub.algorithms.kl:k2", set()),
    (("low_var_kl", "k3"), "rlhub.algorithms.kl:k3", {"value_only"}),
):
    for _name in _names:
        KL_ESTIMATORS.add_lazy(_name, _function, requires=_words)
        KL_ESTIMATORS.add_lazy(f"{_name}+", f"{_function}_straight_through")
