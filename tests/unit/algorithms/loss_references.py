"""Slow references of the policy losses: one token after the other, in float64, with branches where the code has clamps.

A row holds its model tokens only, so a reference knows neither padding nor masks.  Numbers that carry a gradient are tensors
without dimensions, and autograd of these loops is the reference of the gradient; everything else is a Python float.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.unit.algorithms import references

Table = list[list[float]]
Mask = list[list[int]]


@dataclass
class Token:
    """new carries the gradient."""

    new: Tensor
    old: float
    rollout: float
    advantage: float
    selected: bool

    @property
    def now(self) -> float:
        return self.new.item()


class Result(NamedTuple):
    """The token's loss without its weight, whether its own gradient is bounded or dropped, and what it adds to further sums."""

    loss: Tensor
    bounded: bool
    counted: dict[str, float] = {}


Reference = Callable[[list[Token], Any], list[Result]]


def constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def ratio_to(old: float, token: Token) -> Tensor:
    distance = token.now - old
    if abs(distance) > 20:
        return constant(math.exp(math.copysign(20, distance)))
    return (token.new - old).exp()


def ppo_bounds(knobs: Any) -> tuple[float, float]:
    low = knobs.clip_ratio if knobs.clip_ratio_low is None else knobs.clip_ratio_low
    high = knobs.clip_ratio if knobs.clip_ratio_high is None else knobs.clip_ratio_high
    return low, high


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Result:
    """The pessimistic side of the clip: above 1 + high it binds for A > 0, below 1 - low for A < 0."""
    if advantage > 0 and ratio.item() > 1 + high:
        return Result(constant(-advantage * (1 + high)), True)
    if advantage < 0 and ratio.item() < 1 - low:
        return Result(constant(-advantage * (1 - low)), True)
    return Result(-advantage * ratio, False)


def each(token_loss: Callable[[Token, Any], Result]) -> Reference:
    return lambda row, knobs: [token_loss(token, knobs) for token in row]


def vanilla(token: Token, knobs: Any) -> Result:
    loss, bounded, _ = clipped(ratio_to(token.old, token), token.advantage, *ppo_bounds(knobs))
    ceiling = -token.advantage * knobs.clip_ratio_c
    beyond = token.advantage < 0 and loss.item() > ceiling
    return Result(constant(ceiling) if beyond else loss, bounded, {"pg_clipfrac_lower": beyond})


def gspo(row: list[Token], knobs: Any) -> list[Result]:
    mean = math.fsum(token.now - token.old for token in row) / len(row)
    results = []
    for token in row:
        own = (token.new - token.now).exp() if abs(mean) <= 20 else constant(1.0)
        ratio = math.exp(max(-20.0, min(20.0, mean))) * own
        results.append(clipped(ratio, token.advantage, knobs.clip_low, knobs.clip_high))
    return results


def sapo(token: Token, knobs: Any) -> Result:
    tau = knobs.tau_pos if token.advantage > 0 else knobs.tau_neg
    ratio = ratio_to(token.old, token)
    exponent = tau * (ratio.item() - 1)
    passed = 1 / math.cosh(exponent / 2) ** 2 if exponent < 700 else 0.0  # 4 p (1 - p)
    loss = -token.advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return Result(loss, passed < 0.5 and token.advantage != 0, {"pg_gate": passed})


def reinforce(token: Token, knobs: Any) -> Result:
    return Result(-token.advantage * token.new, False)


def cispo(token: Token, knobs: Any) -> Result:
    ratio = ratio_to(token.old, token).item()
    weight = min(ratio, 1 + knobs.clip_high)
    if knobs.clip_low is not None:
        weight = max(weight, 1 - knobs.clip_low)
    return Result(-weight * token.advantage * token.new, weight != ratio)


def geo_mean(row: list[Token], knobs: Any) -> list[Result]:
    logs, bounded = [], []
    for token in row:
        distance = token.now - token.old
        above, below = distance > knobs.clip_high and token.advantage >= 0, distance < -knobs.clip_low and token.advantage <= 0
        logs.append(constant(knobs.clip_high) if above else constant(-knobs.clip_low) if below else token.new - token.old)
        bounded.append(above or below)
    mean = torch.stack(logs).sum() / len(row)
    ratio = mean.exp() if abs(mean.item()) <= 20 else constant(math.exp(math.copysign(20, mean.item())))
    return [Result(-token.advantage * ratio, binds) for token, binds in zip(row, bounded, strict=True)]


def cpgd(token: Token, knobs: Any) -> Result:
    low, high = ppo_bounds(knobs)
    capped, bounded = token.new, False
    if token.advantage > 0 and token.now > token.old + math.log(1 + high):
        capped, bounded = constant(token.old + math.log(1 + high)), True
    if token.advantage < 0 and low < 1 and token.now < token.old + math.log(1 - low):
        capped, bounded = constant(token.old + math.log(1 - low)), True
    drift = min(ratio_to(token.old, token).item() - 1, knobs.drift_bound)
    return Result(-token.advantage * capped + knobs.drift_coef * drift * token.new, bounded, {"policy_drift": drift})


def dppo(divergence: Callable[[float, float], float]) -> Reference:
    def loss(token: Token, knobs: Any) -> Result:
        apart = divergence(token.now, token.rollout)
        away_up = token.advantage > 0 and token.now > token.rollout and apart > knobs.divergence_high
        away_down = token.advantage < 0 and token.now < token.rollout and apart > knobs.divergence_low
        if away_up or away_down:
            return Result(constant(0.0), True)
        ratio = ratio_to(token.rollout, token).item()
        loss = -token.advantage * min(ratio, knobs.ratio_cap) * token.new
        return Result(loss, False, {"pg_ratio_capped": ratio > knobs.ratio_cap})

    return each(loss)


def total_variation(log_pi: float, log_mu: float) -> float:
    return abs(math.exp(log_pi) - math.exp(log_mu))


def bernoulli_kl(log_pi: float, log_mu: float) -> float:
    rest_pi, rest_mu = (-math.expm1(min(x, 0.0)) + 1e-8 for x in (log_pi, log_mu))
    return math.exp(log_mu) * (log_mu - log_pi) + rest_mu * math.log(rest_mu / rest_pi)


def clip_cov(token: Token, knobs: Any) -> Result:
    plain = clipped(ratio_to(token.old, token), token.advantage, *ppo_bounds(knobs))
    return Result(constant(0.0), True, {"cov_selected": True}) if token.selected else plain


def kl_cov(token: Token, knobs: Any) -> Result:
    loss = -token.advantage * ratio_to(token.old, token)
    apart = token.new - token.old
    if token.selected and apart.item() != 0:
        loss = loss + knobs.ppo_kl_coef * (apart if apart.item() > 0 else -apart)
    return Result(loss, token.selected, {"cov_selected": token.selected})


REFERENCES: dict[str, Reference] = {
    "vanilla": each(vanilla),
    "gspo": gspo,
    "sapo": each(sapo),
    "gpg": each(reinforce),
    "reinforce": each(reinforce),
    "clip_cov": each(clip_cov),
    "kl_cov": each(kl_cov),
    "geo_mean": geo_mean,
    "cispo": each(cispo),
    "dppo_tv": dppo(total_variation),
    "dppo_kl": dppo(bernoulli_kl),
    "cpgd": each(cpgd),
}


def covariances(advantages: Table, log_probs: Table, mask: Mask) -> dict[tuple[int, int], float]:
    """By place of each model token of a mini-batch."""
    centres = references.mean(references.inside(advantages, mask)), references.mean(references.inside(log_probs, mask))
    places = [(i, t) for i, row in enumerate(mask) for t, m in enumerate(row) if m]
    return {(i, t): (advantages[i][t] - centres[0]) * (log_probs[i][t] - centres[1]) for i, t in places}


def select_clip_cov(covariance: dict[tuple[int, int], float], keys: Table, knobs: Any) -> set[tuple[int, int]]:
    band = [place for place, value in covariance.items() if knobs.clip_cov_lb < value < knobs.clip_cov_ub]
    count = max(1, math.floor(knobs.clip_cov_ratio * len(covariance)))
    return set(sorted(band, key=lambda place: keys[place[0]][place[1]])[:count])


def select_kl_cov(covariance: dict[tuple[int, int], float], keys: Table, knobs: Any) -> set[tuple[int, int]]:
    count = max(1, math.floor(knobs.kl_cov_ratio * len(covariance)))
    ordered = sorted(covariance, key=lambda place: (-covariance[place], keys[place[0]][place[1]]))
    return set(ordered[:count])
