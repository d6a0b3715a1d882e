"""What algorithms there are, without loading them: name -> module, needs and knobs.

`requires` of an advantage estimator: "values" (a critic must predict them), "groups" (several samples per prompt).
"""

from __future__ import annotations

from typing import Any

from rlhub.registry import Registry

_HERE = "rlhub.algorithms"

ADVANTAGE_ESTIMATORS: Registry[Any] = Registry("advantage estimator")
ADVANTAGE_ESTIMATORS.add_lazy("gae", f"{_HERE}.advantages.gae:gae", requires={"values"}, knobs=f"{_HERE}.advantages.gae:GAEKnobs")
ADVANTAGE_ESTIMATORS.add_lazy(
    "grpo", f"{_HERE}.advantages.grpo:grpo", requires={"groups"}, knobs=f"{_HERE}.advantages.grpo:GRPOKnobs"
)
ADVANTAGE_ESTIMATORS.add_lazy("rloo", f"{_HERE}.advantages.rloo:rloo", requires={"groups"})

POLICY_LOSSES: Registry[Any] = Registry("policy loss")
for _name, _class in (
    ("vanilla", "VanillaKnobs"),
    ("gspo", "GSPOKnobs"),
    ("sapo", "SAPOKnobs"),
    ("geo_mean", "GeoMeanKnobs"),
    ("cispo", "CISPOKnobs"),
    ("cpgd", "CPGDKnobs"),
):
    POLICY_LOSSES.add_lazy(_name, f"{_HERE}.policy_losses.{_name}:{_name}", knobs=f"{_HERE}.policy_losses.{_name}:{_class}")
for _name in ("reinforce", "gpg"):
    POLICY_LOSSES.add_lazy(_name, f"{_HERE}.policy_losses.{_name}:{_name}")
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
for _name, _function, _knobs in (
    ("sigmoid", "dpo_sigmoid", "SigmoidKnobs"),
    ("ipo", "ipo", "BetaKnobs"),
    ("hinge", "hinge", "BetaKnobs"),
):
    PREFERENCE_LOSSES.add_lazy(_name, f"{_HERE}.preference:{_function}", knobs=f"{_HERE}.preference:{_knobs}")

KL_ESTIMATORS: Registry[Any] = Registry("KL estimator")
for _names, _function in (
    (("kl", "k1"), "k1"),
    (("abs",), "absolute"),
    (("mse", "k2"), "k2"),
    (("low_var_kl", "k3"), "k3"),
):
    for _name in _names:
        KL_ESTIMATORS.add_lazy(_name, f"{_HERE}.kl:{_function}")
        KL_ESTIMATORS.add_lazy(f"{_name}+", f"{_HERE}.kl:{_function}_straight_through")
