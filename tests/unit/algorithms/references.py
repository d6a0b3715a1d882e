"""Slow references: the formulas written as plain loops over Python floats, independent of rlhub's code."""

from __future__ import annotations

import math
import statistics

Table = list[list[float]]
Mask = list[list[int]]


def inside(table: Table, mask: Mask) -> list[float]:
    """All numbers under the mask."""
    return [x for row, keep in zip(table, mask, strict=True) for x, m in zip(row, keep, strict=True) if m]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def variance(values: list[float]) -> float:
    """Unbiased; 0 for fewer than two numbers."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.fsum((x - centre) ** 2 for x in values) / (len(values) - 1)


def whiten(table: Table, mask: Mask) -> Table:
    centre, spread = mean(inside(table, mask)), math.sqrt(variance(inside(table, mask)) + 1e-8)
    return [
        [(x - centre) / spread if m else 0.0 for x, m in zip(row, keep, strict=True)]
        for row, keep in zip(table, mask, strict=True)
    ]


def gae(rewards: Table, values: Table, mask: Mask, gamma: float, lam: float) -> tuple[Table, Table]:
    """Advantages before whitening, and returns: the definition as a sum over later model tokens (no recursion)."""
    advantages, returns = [], []
    for r, v, keep in zip(rewards, values, mask, strict=True):
        steps = [t for t, m in enumerate(keep) if m]
        deltas = []
        for k, t in enumerate(steps):
            following = v[steps[k + 1]] if k + 1 < len(steps) else 0.0
            deltas.append(r[t] + gamma * following - v[t])
        row, back = [0.0] * len(keep), [0.0] * len(keep)
        for k, t in enumerate(steps):
            row[t] = math.fsum((gamma * lam) ** distance * delta for distance, delta in enumerate(deltas[k:]))
            back[t] = row[t] + v[t]
        advantages.append(row)
        returns.append(back)
    return advantages, returns


def outcomes(rewards: Table, mask: Mask) -> list[float]:
    return [math.fsum(x for x, m in zip(row, keep, strict=True) if m) for row, keep in zip(rewards, mask, strict=True)]


def broadcast(per_row: list[float], mask: Mask) -> Table:
    return [[value if m else 0.0 for m in keep] for value, keep in zip(per_row, mask, strict=True)]


def grpo(outcome: list[float], group: list[int], divide: bool) -> list[float]:
    result = []
    for own, uid in zip(outcome, group, strict=True):
        peers = [r for r, other in zip(outcome, group, strict=True) if other == uid]
        if len(set(peers)) == 1:
            result.append(0.0)
            continue
        centred = own - statistics.fmean(peers)
        result.append(centred / (statistics.stdev(peers) + 1e-6) if divide else centred)
    return result


def rloo(outcome: list[float], group: list[int]) -> list[float]:
    result = []
    for i, uid in enumerate(group):
        others = [outcome[j] for j in range(len(group)) if group[j] == uid and j != i]
        result.append(outcome[i] - statistics.fmean(others) if others else 0.0)
    return result


def peers(values: list[float], group: list[int], i: int) -> list[float]:
    """The values of i's whole group."""
    return [value for value, uid in zip(values, group, strict=True) if uid == group[i]]


def flat(outcome: list[float], group: list[int], i: int) -> bool:
    """Whether i's group says nothing: one sample, or all equal."""
    return len(set(peers(outcome, group, i))) == 1


def centred(outcome: list[float], group: list[int]) -> list[float]:
    """Reward less the mean of the group's."""
    means = [statistics.fmean(peers(outcome, group, i)) for i in range(len(group))]
    return [0.0 if flat(outcome, group, i) else own - means[i] for i, own in enumerate(outcome)]


def grpo_passk(outcome: list[float], group: list[int], divide: bool) -> list[float]:
    result = []
    for i, own in enumerate(outcome):
        ranked = sorted(peers(outcome, group, i), reverse=True)
        ahead = len(ranked) > 1 and own == ranked[0] > ranked[1]
        result.append((ranked[0] - ranked[1]) / (statistics.stdev(ranked) + 1e-6 if divide else 1.0) if ahead else 0.0)
    return result


def opo(outcome: list[float], group: list[int], mask: Mask) -> list[float]:
    result = []
    for i, own in enumerate(outcome):
        members = [j for j, uid in enumerate(group) if uid == group[i]]
        tokens = sum(sum(mask[j]) for j in members)
        if len(members) == 1 or not tokens:
            result.append(own)
        else:
            result.append(own - math.fsum(sum(mask[j]) * outcome[j] for j in members) / tokens)
    return result


def gpg(outcome: list[float], group: list[int], mask: Mask) -> list[float]:
    written = [i for i, row in enumerate(mask) if any(row)]
    silent = [i for i in written if flat(outcome, group, i)]
    alpha = len(written) / (len(written) - len(silent)) if len(written) > len(silent) else 0.0
    return [alpha * value for value in centred(outcome, group)]


def cpgd(outcome: list[float], group: list[int], mask: Mask, weighting: str) -> list[float]:
    if weighting == "std":
        return grpo(outcome, group, True)
    written = {uid for uid, row in zip(group, mask, strict=True) if any(row)}
    spread = {uid for i, uid in enumerate(group) if uid in written and not flat(outcome, group, i)}
    factor = min(len(written) / len(spread), 3.0) if weighting == "clip-scaled" and spread else 1.0
    return [factor * value for value in centred(outcome, group)]


def to_go(rewards: Table, mask: Mask, gamma: float) -> Table:
    """Sum of the discounted rewards of this and later model tokens, as many steps apart as model tokens lie between."""
    result = []
    for r, keep in zip(rewards, mask, strict=True):
        steps, row = [t for t, m in enumerate(keep) if m], [0.0] * len(keep)
        for k, t in enumerate(steps):
            row[t] = math.fsum(gamma**distance * r[later] for distance, later in enumerate(steps[k:]))
        result.append(row)
    return result


def optimal_token_baseline(returns: Table, pi: Table, squares: Table, mask: Mask, group: list[int]) -> Table:
    """Row by row as lists of model tokens; a row meets those of its group that have a token of the same number."""
    steps = [[t for t, m in enumerate(keep) if m] for keep in mask]
    norms = [[1 - 2 * pi[i][t] + squares[i][t] for t in own] for i, own in enumerate(steps)]
    result = [[0.0] * len(keep) for keep in mask]
    for i, own in enumerate(steps):
        for k, t in enumerate(own):
            rows = [j for j, uid in enumerate(group) if uid == group[i] and len(steps[j]) > k]
            weights = [math.fsum(norms[j][: k + 1]) for j in rows]
            weighted = math.fsum(w * returns[j][steps[j][k]] for w, j in zip(weights, rows, strict=True))
            baseline = weighted / math.fsum(weights) if len(rows) > 1 else 0.0
            result[i][t] = returns[i][t] - baseline
    return result


def kl(name: str, log_prob: float, reference: float) -> float:
    d = log_prob - reference
    if name in ("kl", "k1"):
        return d
    if name == "abs":
        return abs(d)
    if name in ("mse", "k2"):
        return 0.5 * d * d
    x = max(-20.0, min(20.0, -d))
    return max(0.0, min(10.0, math.expm1(x) - x))


def aggregate(loss: Table, mask: Mask, mode: str, factor: float) -> float:
    """Over a whole optimizer step, from its own definition of each mean."""
    rows = [[x for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(loss, mask, strict=True)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    tokens, count = [x for row in rows for x in row], len(rows)
    return {
        "token-mean": math.fsum(tokens) / len(tokens),
        "token-sum": math.fsum(tokens),
        "seq-mean-token-sum": math.fsum(math.fsum(row) for row in rows) / count,
        "seq-mean-token-mean": math.fsum(statistics.fmean(row) for row in rows) / count,
        "seq-mean-token-sum-norm": math.fsum(math.fsum(row) / factor for row in rows) / count,
    }[mode]


def value_token(new: float, old: float, target: float, bound: float) -> tuple[float, bool]:
    """Clipped squared error of one token, and whether the clip binds."""
    held = max(old - bound, min(old + bound, new))
    plain, clipped = (new - target) ** 2, (held - target) ** 2
    return max(plain, clipped) / 2, clipped > plain
