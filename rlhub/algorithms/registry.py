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
POLICY_LOSSES.add_lazy("vanilla", f"{_HERE}.policy_losses.vanilla:vanilla", knobs=f"{_HERE}.policy_losses.vanilla:VanillaKnobs")

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
