"""Random micro-batches for policy losses, and what must hold of every loss: formula, gradient, and what it may depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.masked import Denominators, aggregate
from rlhub.algorithms.registry import POLICY_LOSSES
from tests.unit.algorithms.cases import assert_close, dtypes, exact, garbage, masks, numbers, seeds, tensor
from tests.unit.algorithms.loss_references import REFERENCES, Token

Loss = Callable[[PolicyLossInputs, Any], PolicyLossOutputs]
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]
COLUMNS = ["log_probs", "old_log_probs", "advantages", "weights", "rollout_log_probs", "selected"]

MEASURED = ("ppo_kl", "pg_gate", "policy_drift")
"""Sums of measured numbers; all others count tokens."""

eps = st.sampled_from([0.0, 0.1, 0.2])
own_eps = st.sampled_from([None, 0.05, 0.28])
ppo = {"clip_ratio": eps, "clip_ratio_low": own_eps, "clip_ratio_high": own_eps}
small = st.sampled_from([0.0, 3e-4, 4e-3, 0.1])
KNOBS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "vanilla": ppo | {"clip_ratio_c": st.sampled_from([1.5, 3.0])},
    "gspo": {"clip_low": small, "clip_high": small},
    "sapo": {"tau_pos": st.sampled_from([0.5, 1.0, 3.0]), "tau_neg": st.sampled_from([1.05, 2.0])},
    "gpg": {},
    "reinforce": {},
    "clip_cov": ppo,
    "kl_cov": {"ppo_kl_coef": st.sampled_from([0.0, 0.1, 1.0])},
    "geo_mean": {"clip_low": st.sampled_from([0.0, 0.1, 0.4]), "clip_high": st.sampled_from([0.0, 0.2, 0.4])},
    "cispo": {"clip_low": own_eps, "clip_high": st.sampled_from([0.0, 0.2, 4.0])},
    "dppo_tv": {name: st.sampled_from([0.0, 0.05, 0.15]) for name in ("divergence_low", "divergence_high")}
    | {"ratio_cap": st.sampled_from([1.1, 20.0])},
    "dppo_kl": {name: st.sampled_from([0.0, 0.02, 0.1]) for name in ("divergence_low", "divergence_high")}
    | {"ratio_cap": st.sampled_from([1.1, 20.0])},
    "cpgd": ppo | {"drift_coef": st.sampled_from([0.0, 0.001, 0.5]), "drift_bound": st.sampled_from([0.5, 2.0])},
}


@dataclasses.dataclass
class Case:
    """distance: of the new log-probs from the old ones; kind of advantages: a number a token, a number a row, coarse (with
    zeros and ties), all zero."""

    mask: list[list[int]]
    seed: int
    dtype: torch.dtype
    distance: float
    kind: str
    weighted: bool
    knobs: Any


def cases(name: str, *, width: int = 7) -> st.SearchStrategy[Case]:
    knobs_class = POLICY_LOSSES.knobs_class(name)
    return st.builds(
        Case,
        mask=masks(max_width=width),
        seed=seeds,
        dtype=dtypes,
        distance=st.sampled_from([0.0, 1e-3, 0.3, 3.0, 50.0]),
        kind=st.sampled_from(["token", "row", "coarse", "zero"]),
        weighted=st.booleans(),
        knobs=st.builds(knobs_class, **KNOBS[name]) if knobs_class else st.none(),
    )


def advantages_of(case: Case) -> list[list[float]]:
    table = numbers(case.seed + 2, case.mask, scale=2.0)
    if case.kind == "row":
        return [[row[0]] * len(row) for row in table]
    if case.kind == "coarse":
        return [[float(round(x)) for x in row] for row in table]
    return [[0.0] * len(row) for row in table] if case.kind == "zero" else table


def inputs_of(case: Case) -> PolicyLossInputs:
    """NaN outside the mask, also where a token is selected."""
    keep, dtype = torch.tensor(case.mask), case.dtype
    old = tensor(numbers(case.seed, case.mask, scale=-5.0, low=0.0), dtype)
    moved = (old + tensor(numbers(case.seed + 1 + i, case.mask, scale=case.distance), dtype) for i in (0, 4))
    new, rollout = (garbage(x, keep) for x in moved)
    chosen = tensor(numbers(case.seed + 6, case.mask), dtype) > 0
    return PolicyLossInputs(
        log_probs=new.requires_grad_(),
        old_log_probs=garbage(old, keep),
        advantages=garbage(tensor(advantages_of(case), dtype), keep),
        response_mask=keep,
        weights=garbage(tensor(numbers(case.seed + 3, case.mask, scale=2.0, low=0.0), dtype), keep) if case.weighted else None,
        rollout_log_probs=rollout,
        selected=(chosen | (keep == 0)).to(torch.uint8),
    )


def probe_of(case: Case, dtype: torch.dtype) -> Tensor:
    """Factors that tell the tokens' losses apart in a gradient of their sum."""
    return tensor(numbers(case.seed + 9, case.mask, low=0.5), dtype)


def gradient(inputs: PolicyLossInputs, total: Tensor) -> Tensor:
    if not total.requires_grad:
        return torch.zeros_like(inputs.log_probs)
    (result,) = torch.autograd.grad(total, inputs.log_probs)
    return result


def check_formula(name: str, loss: Loss, case: Case) -> None:
    """Value, gradient and metrics against the loop."""
    inputs = inputs_of(case)
    outputs = loss(inputs, case.knobs)
    probe = probe_of(case, case.dtype)
    leaf = inputs.log_probs.detach().double().requires_grad_()
    old, rollout, advantages = (exact(x) for x in (inputs.old_log_probs, inputs.rollout_log_probs, inputs.advantages))
    weights, total, sums = inputs.weights, torch.zeros((), dtype=torch.float64), dict.fromkeys(outputs.sums, 0.0)
    expected = [[0.0] * len(row) for row in case.mask]
    for i, keep in enumerate(case.mask):
        places = [t for t, m in enumerate(keep) if m]
        row = [Token(leaf[i, t], old[i][t], rollout[i][t], advantages[i][t], bool(inputs.selected[i, t])) for t in places]
        for t, (value, binds, counted) in zip(places, REFERENCES[name](row, case.knobs) if row else [], strict=True):
            weight = 1.0 if weights is None else weights[i, t].item()
            expected[i][t] = value.item() * weight
            total = total + value * weight * probe[i, t].item()
            moved = max(-20.0, min(20.0, leaf[i, t].item() - old[i][t]))
            for metric, number in {"pg_clipfrac": binds, "ppo_kl": -moved, **counted}.items():
                sums[metric] += number
    assert_close(outputs.loss, expected)
    wanted = torch.autograd.grad(total, leaf)[0] if total.requires_grad else torch.zeros_like(leaf)
    assert_close(gradient(inputs, (outputs.loss * probe).sum()), wanted.tolist())
    for metric, number in sums.items():
        if metric in MEASURED:
            assert_close(outputs.sums[metric], number, amplification=10.0)
        elif case.dtype == torch.float64:  # a count may differ by a token when float32 rounds a ratio onto its bound
            assert outputs.sums[metric] == number, metric


def check_masked_garbage(loss: Loss, case: Case) -> None:
    """NaN outside the mask: no gradient there, finite ones inside, and the loss is 0 there."""
    inputs = inputs_of(case)
    outputs = loss(inputs, case.knobs)
    outside = inputs.response_mask == 0
    assert outputs.loss.detach()[outside].count_nonzero() == 0
    found = gradient(inputs, outputs.loss.sum())
    assert bool(found.isfinite().all()) and found[outside].count_nonzero() == 0
    assert all(bool(value.isfinite()) and not value.requires_grad for value in outputs.sums.values())


def take(inputs: PolicyLossInputs, rows: list[int], padding: int, log_probs: Tensor) -> PolicyLossInputs:
    """Some rows in a given order, with more columns of garbage."""

    def cut(column: Tensor | None, value: float) -> Tensor | None:
        return None if column is None else torch.nn.functional.pad(column[rows], (0, padding), value=value)

    fill = {name: 1 if name == "selected" else float("nan") for name in COLUMNS}
    columns = {name: cut(log_probs if name == "log_probs" else getattr(inputs, name), fill[name]) for name in COLUMNS}
    mask = cut(inputs.response_mask, 0)
    return dataclasses.replace(inputs, response_mask=mask, **columns)


def check_cut(loss: Loss, case: Case, parts: list[list[int]], mode: str) -> None:
    """The gradient of a step is the same whole and cut: rows in any order, each part with its own padding."""
    inputs = inputs_of(case)
    mask = inputs.response_mask
    counts = Denominators(tokens=float(mask.sum()), sequences=float(mask.any(1).sum()), scale=13.0)
    whole_outputs = loss(inputs, case.knobs)
    whole = aggregate(whole_outputs.loss, mask, mode, counts)
    wanted = gradient(inputs, whole)
    total, found, clips = 0.0, torch.zeros_like(wanted), 0.0
    for padding, rows in enumerate(parts):
        part = take(inputs, rows, padding, inputs.log_probs)
        outputs = loss(part, case.knobs)
        share = aggregate(outputs.loss, part.response_mask, mode, counts)
        total, clips = total + share.detach(), clips + outputs.sums["pg_clipfrac"]
        found = found + gradient(inputs, share)
    size = aggregate(whole_outputs.loss.detach().abs(), mask, mode, counts).item()  # large losses of both signs cancel
    assert_close(total, whole.item(), amplification=size / max(abs(whole.item()), 1.0))
    assert_close(found, wanted.tolist())
    assert clips == whole_outputs.sums["pg_clipfrac"]


def check_weights(loss: Loss, case: Case) -> None:
    """A token's loss is its own weight, once, times the loss without weights."""
    inputs = inputs_of(dataclasses.replace(case, weighted=True))
    plain = loss(dataclasses.replace(inputs, weights=None), case.knobs).loss
    weights = torch.where(inputs.response_mask.bool(), inputs.weights, torch.zeros_like(inputs.weights))
    assert_close(loss(inputs, case.knobs).loss, (plain * weights).tolist())


@st.composite
def cuts(draw: st.DrawFn, rows: int) -> list[list[int]]:
    """A partition of the rows in random order."""
    order = draw(st.permutations(range(rows)))
    ends = sorted(draw(st.lists(st.integers(0, rows), max_size=3)))
    return [list(order[a:b]) for a, b in zip([0, *ends], [*ends, rows], strict=True) if a < b]
