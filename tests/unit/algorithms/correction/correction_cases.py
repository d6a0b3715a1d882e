"""Random batches for the corrections, and the corrections as loops over Python floats."""

from __future__ import annotations

import dataclasses
import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlhub.algorithms.correction.weights import log_ratios
from rlhub.config.sections.rollout_correction import RATIO_RULES, Bounds, RolloutCorrectionConfig
from tests.unit.algorithms.cases import Table, dtypes, exact, garbage, masks, numbers, seeds, tensor

Mask = list[list[int]]
RULES = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
)  # fmt: skip


@dataclasses.dataclass(slots=True)
class Case:
    """log pi, log mu and advantages (rows, response), NaN outside the mask."""

    pi: Tensor
    mu: Tensor
    advantages: Tensor
    mask: Tensor

    def log_ratio(self) -> Tensor:
        return log_ratios(self.pi, self.mu, self.mask)

    def rows(self, index: list[int]) -> Case:
        return Case(self.pi[index], self.mu[index], self.advantages[index], self.mask[index])

    def padded(self, width: int) -> Case:
        """`width` more columns on the right, NaN and masked."""
        more = torch.full((len(self.mask), width), math.nan, dtype=self.pi.dtype)
        zeros = torch.zeros(len(self.mask), width, dtype=self.mask.dtype)
        parts = [torch.cat([column, more], 1) for column in (self.pi, self.mu, self.advantages)]
        return Case(*parts, torch.cat([self.mask, zeros], 1))


@st.composite
def cases(draw: st.DrawFn, max_rows: int = 6, max_width: int = 7) -> Case:
    """Mismatches from none over small ones to some beyond exp's bound; advantages of both signs and 0."""
    mask, seed, dtype = draw(masks(max_rows, max_width)), draw(seeds), draw(dtypes)
    keep = torch.tensor(mask)
    mu = tensor(numbers(seed, mask, scale=3.0), dtype) - 3
    pi = mu + tensor(numbers(seed + 1, mask, scale=draw(st.sampled_from([0.0, 0.01, 0.7, 3.0, 30.0]))), dtype)
    advantages = tensor(numbers(seed + 2, mask, scale=2.0), dtype)
    if draw(st.booleans()):
        advantages = advantages.round()
    return Case(garbage(pi, keep), garbage(mu, keep), garbage(advantages, keep), keep)


bands = st.builds(lambda low, width: Bounds(lower=low, upper=low * width), st.floats(0.2, 1.0), st.floats(1.0, 20.0))
truncations = st.builds(lambda upper: Bounds(lower=None, upper=upper), st.floats(0.5, 8.0))
divergences = st.builds(lambda upper: Bounds(lower=None, upper=upper), st.floats(1e-5, 3.0))
levels = st.sampled_from(["token", "sequence"])


@st.composite
def rules(draw: st.DrawFn) -> tuple[str, Bounds]:
    name = draw(st.sampled_from(RULES))
    return name, draw(bands if name in RATIO_RULES else divergences)


@st.composite
def configs(draw: st.DrawFn) -> RolloutCorrectionConfig:
    """Settings as a user would write them."""
    names = draw(st.lists(st.sampled_from(RULES), max_size=3, unique=True))
    thresholds = [
        draw(st.sampled_from(["0.5_2.0", "0.9_3.5", "1.5"] if name in RATIO_RULES else ["0.01", "0.5"])) for name in names
    ]
    return RolloutCorrectionConfig(
        rollout_is=draw(st.sampled_from([None, "token", "sequence"])),
        rollout_is_threshold=draw(st.sampled_from([2.0, 1.3, "0.5_5.0", "0.9_1.1"])),
        rollout_is_batch_normalize=draw(st.booleans()),
        rollout_rs=names or None,
        rollout_rs_threshold=thresholds or None,
        m2po_threshold=draw(st.sampled_from([None, 0.04, 0.5])),
    )


# Loops


def clamp(x: float) -> float:
    return max(-20.0, min(20.0, x))


def log_ratio_table(case: Case) -> Table:
    pairs = zip(exact(case.pi), exact(case.mu), case.mask.tolist(), strict=True)
    return [[p - q if m else 0.0 for p, q, m in zip(*row, strict=True)] for row in pairs]


def slow_weights(case: Case, level: str, bounds: Bounds, normalize: bool = False) -> Table:
    weights, counted = [], []
    for ratios, keep in zip(log_ratio_table(case), case.mask.tolist(), strict=True):
        total = math.fsum(x for x, m in zip(ratios, keep, strict=True) if m)
        row = []
        for x, m in zip(ratios, keep, strict=True):
            w = math.exp(clamp(x if level == "token" else total))
            if bounds.lower is None:
                w = min(w, bounds.upper)
            elif not bounds.lower <= w <= bounds.upper:
                w = 0.0
            row.append(w if m else 0.0)
        weights.append(row)
        inside = [w for w, m in zip(row, keep, strict=True) if m]
        counted += inside if level == "token" else inside[:1]
    mean = math.fsum(counted) / len(counted) if counted else 0.0
    if normalize and mean > 1e-8:
        weights = [[w / mean for w in row] for row in weights]
    return weights


def slow_kept(case: Case, rule: str, bounds: Bounds) -> Mask:
    scope, _, kind = rule.rpartition("_")
    result = []
    for ratios, keep in zip(log_ratio_table(case), case.mask.tolist(), strict=True):
        each = []
        for x in map(clamp, ratios):
            each.append({"k1": -x, "k2": x * x / 2, "k3": math.expm1(x) - x}[kind])
        inside = [value for value, m in zip(each, keep, strict=True) if m]
        if inside and scope != "token":
            whole = {"seq_sum": math.fsum(inside), "seq_mean": math.fsum(inside) / len(inside), "seq_max": max(inside)}[scope]
            each = [whole] * len(each)
        low = -math.inf if bounds.lower is None else math.log(bounds.lower)
        high = math.log(bounds.upper) if kind == "k1" else bounds.upper
        result.append([int(bool(m) and low <= value <= high) for value, m in zip(each, keep, strict=True)])
    return result


def slow_m2po(case: Case, threshold: float, mask: Mask | None = None) -> Mask:
    keep = [list(row) for row in (mask or case.mask.tolist())]
    ratios, advantages = log_ratio_table(case), exact(case.advantages)
    held = [
        (i, t)
        for i, row in enumerate(keep)
        for t, m in enumerate(row)
        if m and ((advantages[i][t] > 0 and ratios[i][t] > 0) or (advantages[i][t] < 0 and ratios[i][t] < 0))
    ]
    while held and math.fsum(ratios[i][t] ** 2 for i, t in held) / len(held) > threshold:
        largest = max(ratios[i][t] ** 2 for i, t in held)
        for i, t in held:
            if ratios[i][t] ** 2 == largest:
                keep[i][t] = 0
        held = [(i, t) for i, t in held if keep[i][t]]
    return keep
