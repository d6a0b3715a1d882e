"""rlhub's side of algorithm_cost.py: the same cases by the same names, and where rlhub means to differ, which docstring says
why."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import algorithm_inputs as drawn
import torch
from algorithm_inputs import Batch
from torch import Tensor

from rlhub.algorithms.correction.correct import kept
from rlhub.algorithms.correction.weights import RATIOS, bounded, normalized
from rlhub.algorithms.inputs import AdvantageInputs, PolicyLossInputs, SelectionInputs
from rlhub.algorithms.kl import AdaptiveKLController
from rlhub.algorithms.masked import Denominators, aggregate
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES
from rlhub.algorithms.returns import value_loss
from rlhub.config.sections.rollout_correction import rejection_bounds, weight_bounds
from rlhub.utils.balance import partition

Numbers = dict[str, Tensor]

_HERE = "rlhub.algorithms"
DIFFERS: dict[str, tuple[str, str]] = {
    "grpo, groups of one": (f"{_HERE}.advantages.grpo", "for a group of one (elsewhere its reward is taken as the advantage)"),
    "gpg, some rewards of 0": (f"{_HERE}.advantages.gpg", "which depends on where the scorer puts its zero"),
    "reinforce_plus_plus_baseline, groups of one": (
        f"{_HERE}.advantages.reinforce_plus_plus_baseline",
        "is exactly 0 for equal rewards and for a group of one (elsewhere R_i)",
    ),
    "gspo, PPO's clip_ratio": (f"{_HERE}.policy_losses.gspo", "so PPO's 0.2, which other implementations read here, never clips"),
    "dppo_tv, pi_old recomputed": (f"{_HERE}.policy_losses.divergence", "Everything is relative to mu, the rollout policy"),
    "clip_cov, a share at random": (f"{_HERE}.policy_losses.covariance", "Here tokens are selected once for each mini-batch"),
    "geo_mean, weighted": (f"{_HERE}.policy_losses.geo_mean", "Here each token keeps its own advantage and weight"),
    "cispo": (f"{_HERE}.policy_losses.cispo", "bound it below at 0.8"),
    "aggregation seq-mean-token-sum-norm, no factor given": (f"{_HERE}.masked", "never the padded width"),
}
"""Case -> (module, words of a docstring in it)."""


def inputs(b: Batch, rewards: Tensor, **more: Any) -> AdvantageInputs:
    return AdvantageInputs(token_level_rewards=rewards, response_mask=b.mask, group=b.group, **more)


def estimate(name: str, given: AdvantageInputs, **knobs: Any) -> Numbers:
    made = ADVANTAGE_ESTIMATORS.knobs_class(name)
    out = ADVANTAGE_ESTIMATORS.get(name)(given, made(**knobs) if made else None)
    return {"advantages": out.advantages, "returns": out.returns}


def estimators() -> dict[str, Numbers]:
    b, one, single = drawn.batch(), drawn.batch(group=1), drawn.batch(holes=False)
    some_alone = drawn.batch()
    some_alone.group[0] = -1
    components = {name: b.per_row * (index + 1) + index for index, name in enumerate(drawn.COMPONENTS)}
    otb = {"old_log_probs": b.old_log_probs, "sum_pi_squared": b.sum_pi_squared}
    grouped, alone = inputs(b, b.scores), inputs(one, one.scores)
    found = {
        "gae": estimate("gae", inputs(b, b.rewards, values=b.values), gamma=drawn.GAMMA, lam=drawn.LAM),
        "grpo": estimate("grpo", grouped),
        "grpo without std": estimate("grpo", grouped, norm_adv_by_std_in_grpo=False),
        "grpo, groups of one": estimate("grpo", alone),
        "grpo_passk": estimate("grpo_passk", grouped),
        "gdpo": estimate(
            "gdpo", inputs(single, single.scores, reward_components=components), reward_weights=dict(drawn.COMPONENTS)
        ),
        "rloo": estimate("rloo", grouped),
        "rloo, groups of one": estimate("rloo", alone),
        "opo": estimate("opo", grouped),
        "opo, groups of one": estimate("opo", alone),
        "gpg, no reward of 0": estimate("gpg", grouped),
        "gpg, some rewards of 0": estimate("gpg", inputs(b, b.scores * (b.scores > 0))),
        "reinforce_plus_plus": estimate("reinforce_plus_plus", inputs(b, b.rewards), gamma=drawn.GAMMA),
        "reinforce_plus_plus_baseline": estimate("reinforce_plus_plus_baseline", grouped),
        "reinforce_plus_plus_baseline, groups of one": estimate(
            "reinforce_plus_plus_baseline", inputs(some_alone, some_alone.scores)
        ),
        "remax": estimate("remax", inputs(b, b.rewards, baseline_rewards=b.per_row)),
        "optimal_token_baseline": estimate("optimal_token_baseline", inputs(single, single.rewards, **otb)),
        "optimal_token_baseline, several turns": estimate("optimal_token_baseline", inputs(b, b.rewards, **otb)),
    }
    for name in ("grpo", "rloo"):
        found[f"{name}, vectorised"] = found[name]
    return found


def loss(name: str, b: Batch, advantages: Tensor, log_probs: Tensor, mode: str = "token-mean", **options: Any) -> Numbers:
    """The aggregated loss and its gradient; a loss that selects tokens does so first, as the trainer lets it."""
    made, weights = POLICY_LOSSES.knobs_class(name), options.pop("weights", None)
    knobs = made(**options) if made else None
    selected = None
    if (select := POLICY_LOSSES.companion(name, "select")) is not None:
        keys = torch.rand(b.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        selection = SelectionInputs(old_log_probs=b.old_log_probs, advantages=advantages, response_mask=b.mask, keys=keys)
        selected = select(selection, knobs)
    current = log_probs.clone().requires_grad_()
    out = POLICY_LOSSES.get(name)(
        PolicyLossInputs(
            log_probs=current,
            old_log_probs=b.old_log_probs,
            advantages=advantages,
            response_mask=b.mask,
            weights=weights,
            rollout_log_probs=b.rollout_log_probs,
            selected=selected,
        ),
        knobs,
    )
    value = aggregate(out.loss, b.mask, mode, denominators(b))
    (gradient,) = torch.autograd.grad(value, current)
    return {"loss": value.detach(), "gradient": gradient}


def denominators(b: Batch, scale: float = drawn.SCALE) -> Denominators:
    return Denominators(tokens=float(b.mask.sum()), sequences=float(b.mask.any(1).sum()), scale=scale)


def losses() -> dict[str, Numbers]:
    b = drawn.batch()
    shifted = b.old_log_probs + 0.05
    token, now, sequence = b.advantages, b.log_probs, "seq-mean-token-mean"
    ppo = {"clip_ratio_low": drawn.CLIP_LOW, "clip_ratio_high": drawn.CLIP_HIGH}
    both = {"clip_low": drawn.CLIP_LOW, "clip_high": drawn.CLIP_HIGH}
    near = {"clip_low": drawn.SEQUENCE_CLIP_LOW, "clip_high": drawn.SEQUENCE_CLIP_HIGH}
    limits = {"divergence_low": drawn.DIVERGENCE, "divergence_high": drawn.DIVERGENCE}
    return {
        "vanilla": loss("vanilla", b, token, now, **ppo),
        "vanilla, weighted": loss("vanilla", b, token, now, weights=b.weights, **ppo),
        "gspo": loss("gspo", b, token, now, sequence, **near),
        "gspo, PPO's clip_ratio": loss("gspo", b, token, now, sequence),
        "sapo": loss("sapo", b, token, now, sequence),
        "gpg loss": loss("gpg", b, token, now),
        "reinforce": loss("reinforce", b, token, now, weights=b.weights),
        "dppo_tv": loss("dppo_tv", b, token, now, **limits),
        "dppo_tv, pi_old recomputed": loss("dppo_tv", b, token, now, **limits),
        "dppo_kl": loss("dppo_kl", b, token, now, **limits),
        "clip_cov, the whole band": loss("clip_cov", b, token, shifted, clip_cov_ratio=1.0, clip_cov_lb=0.2, **ppo),
        "clip_cov, a share at random": loss("clip_cov", b, token, now, clip_cov_ratio=0.05, clip_cov_lb=0.2, **ppo),
        "kl_cov": loss("kl_cov", b, token, shifted, kl_cov_ratio=0.1, ppo_kl_coef=0.1),
        "geo_mean": loss("geo_mean", b, b.sequence_advantages, now, sequence, **both),
        "geo_mean, weighted": loss("geo_mean", b, b.sequence_advantages, now, sequence, weights=b.weights, **both),
        "cispo, bounded below": loss("cispo", b, token, now, **both),
        "cispo": loss("cispo", b, token, now, clip_high=drawn.CLIP_HIGH),
    }


def pieces() -> dict[str, Numbers]:
    b = drawn.batch()
    b.mask[5] = 0
    found: dict[str, Numbers] = {}
    for name in drawn.KL_NAMES:
        current = b.log_probs.clone().requires_grad_()
        value = KL_ESTIMATORS.get(name)(current, b.rollout_log_probs)
        found[f"KL {name}"] = {"value": value.detach(), "gradient": torch.autograd.grad(value.sum(), current)[0]}
    for mode in drawn.AGGREGATIONS:
        found[f"aggregation {mode}"] = {"loss": aggregate(b.advantages, b.mask, mode, denominators(b))}
    norm = "seq-mean-token-sum-norm"  # the default factor is the longest response allowed, say twice this batch's width
    longest = denominators(b, 2.0 * b.mask.shape[1])
    found[f"aggregation {norm}, no factor given"] = {"loss": aggregate(b.advantages, b.mask, norm, longest)}
    values = b.values.clone().requires_grad_()
    out = value_loss(values, b.values + b.advantages, b.rewards, b.mask, 0.5)
    value = aggregate(out.loss, b.mask, "token-mean", denominators(b))
    clipped = out.sums["vf_clipfrac"] / b.mask.sum()
    found["value loss"] = {"loss": value.detach(), "gradient": torch.autograd.grad(value, values)[0], "clipped": clipped}
    controller = AdaptiveKLController(0.2, 6.0, 10_000)
    for current_kl in (3.0, 6.3, 20.0):
        controller.update(current_kl, 512)
    found["adaptive KL coefficient"] = {"value": torch.tensor(controller.value, dtype=torch.float64)}
    return found


def corrections() -> dict[str, Numbers]:
    b = drawn.batch()
    ratio = (b.old_log_probs - b.rollout_log_probs) * b.mask
    found: dict[str, Numbers] = {}
    for level in ("token", "sequence"):
        for name, threshold in (("truncated", 1.5), ("band", "0.7_1.4")):
            found[f"weights by {level}, {name}"] = {
                "weights": bounded(RATIOS[level](ratio, b.mask), b.mask, weight_bounds(threshold))
            }
        truncated = found[f"weights by {level}, truncated"]["weights"]
        found[f"weights by {level}, normalised"] = {"weights": normalized(truncated, b.mask, level)}
    cases = {f"rejection {rule}": (rule, threshold) for rule, threshold in drawn.REJECTION.items()}
    cases["rejection token_k1, a lopsided band"] = ("token_k1", drawn.ONE_SIDED)
    for case, (rule, threshold) in cases.items():
        found[case] = {"kept": kept(ratio, b.mask, rule, rejection_bounds([rule], [threshold])[rule]).double()}
    return found


def agreement() -> dict[str, Numbers]:
    return {**estimators(), **losses(), **pieces(), **corrections()}


def cost_calls() -> dict[str, Callable[[], Any]]:
    b = drawn.cost_batch()
    given = inputs(b, b.scores, values=b.values)
    return {
        "gae": lambda: estimate("gae", given, gamma=1.0, lam=0.95),
        "grpo": lambda: estimate("grpo", given),
        "rloo": lambda: estimate("rloo", given),
    }


def balance(kind: str, items: int, seed: int, equal: bool) -> list[list[int]]:
    capacities = [items // drawn.NUM_PARTS] * drawn.NUM_PARTS if equal else None
    return partition(drawn.lengths(kind, items, seed), drawn.NUM_PARTS, capacities=capacities)


def main() -> None:
    """Answer questions about costs, as algorithm_verl.py does."""
    torch.set_num_threads(1)
    calls = cost_calls()
    for line in sys.stdin:
        print(json.dumps({"cpu_s": drawn.cpu_seconds(calls[json.loads(line)["name"]])}), flush=True)


if __name__ == "__main__":
    main()
