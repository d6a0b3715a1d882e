"""Every advantage estimator with its slow reference, on random batches that hold all an estimator may require."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS
from tests.unit.algorithms import references
from tests.unit.algorithms.cases import assert_close, dtypes, exact, seeds

Tables = tuple[references.Table, references.Table]
VOCAB = 5
KINDS = ("outcome", "process", "dense", "equal", "extreme")
widths = st.one_of(st.integers(1, 8), st.integers(60, 140))
cases = st.tuples(seeds, dtypes, st.sampled_from(KINDS), st.integers(1, 9), widths)


def random_mask(generator: random.Random, rows: int, width: int) -> list[list[int]]:
    """One turn, several turns with tool output between, full and empty rows."""
    mask = []
    for _ in range(rows):
        length, turns = generator.randint(1, width), generator.random() < 0.4
        row = [int(t < length and not (turns and generator.random() < 0.3)) for t in range(width)]
        mask.append([0] * width if generator.random() < 0.12 else row)
    return mask


def random_rewards(generator: random.Random, kind: str, mask: list[list[int]]) -> list[list[float]]:
    """outcome: few values on the last model token; process: some on the way too; dense; equal; extreme: any magnitude."""
    scale = 10 ** generator.uniform(-6, 6) if kind == "extreme" else 1.0
    table = []
    for keep in mask:
        row = [0.0] * len(keep)
        last = max((t for t, m in enumerate(keep) if m), default=None)
        if kind in ("dense", "extreme"):
            row = [scale * generator.uniform(-1, 1) for _ in keep]
        elif kind == "process":
            row = [generator.choice([0.0] * 9 + [0.1, -0.3]) for _ in keep]
        elif last is not None:
            row[last] = 0.1 if kind == "equal" else generator.choice([0.0, 0.1, 1.0, -2.0])
        table.append(row)
    return table


def inputs_of(case: Any) -> AdvantageInputs:
    """All columns, garbage where the mask is 0; a row without model tokens is a group of its own, as the trainer makes it."""
    seed, dtype, kind, rows, width = case
    generator, torch_generator = random.Random(seed), torch.Generator().manual_seed(seed)
    mask = random_mask(generator, rows, width)
    keep = torch.tensor(mask)
    normal = torch.randn(rows, width, VOCAB, generator=torch_generator, dtype=torch.float64)
    log_p = (normal * generator.choice([0.5, 2.0])).log_softmax(-1)
    empty = ~keep.bool().any(1)

    def garbled(values: Tensor) -> Tensor:
        return torch.where(keep.bool(), values.to(dtype), torch.tensor(float("nan"), dtype=dtype))

    def per_row(choices: list[float]) -> Tensor:
        drawn = torch.tensor([generator.choice(choices) for _ in mask], dtype=torch.float64)
        return torch.where(empty, torch.nan, drawn)

    group = torch.tensor([generator.choice([3, 7, 10**12]) for _ in mask])
    return AdvantageInputs(
        token_level_rewards=garbled(torch.tensor(random_rewards(generator, kind, mask))),
        response_mask=keep,
        group=torch.where(empty, -1 - torch.arange(rows), group),
        values=garbled(torch.randn(rows, width, generator=torch_generator, dtype=torch.float64)),
        old_log_probs=garbled(log_p[..., 0]),
        ref_log_prob=garbled(log_p[..., 1]),
        sum_pi_squared=garbled(log_p.exp().square().sum(-1)),
        baseline_rewards=per_row([0.0, 1.0, 0.3]),
        reward_components={"right": per_row([0.0, 1.0]), "length": per_row([-100.0, 20.0, 20.5]), "same": per_row([0.1])},
    )


@dataclasses.dataclass
class Facts:
    """The batch as Python numbers, rounded as the tensors are."""

    inputs: AdvantageInputs
    mask: references.Mask
    rewards: references.Table
    outcome: list[float]
    group: list[int]

    def column(self, name: str) -> references.Table:
        return exact(getattr(self.inputs, name).nan_to_num(nan=0.0))

    def rows(self, per_row: list[float]) -> Tables:
        table = references.broadcast(per_row, self.mask)
        return table, table

    def whitened_rows(self, per_row: list[float]) -> Tables:
        table = references.whiten(references.broadcast(per_row, self.mask), self.mask)
        return table, table


def facts_of(inputs: AdvantageInputs) -> Facts:
    assert inputs.group is not None
    rewards, mask = exact(inputs.token_level_rewards), inputs.response_mask.tolist()
    return Facts(inputs, mask, rewards, references.outcomes(rewards, mask), inputs.group.tolist())


def _gae(facts: Facts, knobs: Any) -> Tables:
    raw, returns = references.gae(facts.rewards, facts.column("values"), facts.mask, knobs.gamma, knobs.lam)
    return references.whiten(raw, facts.mask), returns


def _reinforce(facts: Facts, knobs: Any) -> Tables:
    returns = references.to_go(facts.rewards, facts.mask, knobs.gamma)
    return references.whiten(returns, facts.mask), returns


def _remax(facts: Facts, knobs: Any) -> Tables:
    returns = references.to_go(facts.rewards, facts.mask, knobs.gamma)
    baselines = exact(facts.inputs.baseline_rewards.to(facts.inputs.token_level_rewards.dtype))
    rows = zip(returns, baselines, facts.mask, strict=True)
    return [[g - b if m else 0.0 for g, m in zip(row, keep, strict=True)] for row, b, keep in rows], returns


def _optimal_token_baseline(facts: Facts, knobs: Any) -> Tables:
    returns = references.to_go(facts.rewards, facts.mask, knobs.gamma)
    pi = [[math.exp(x) for x in row] for row in facts.column("old_log_probs")]
    squares = facts.column("sum_pi_squared")
    return references.optimal_token_baseline(returns, pi, squares, facts.mask, facts.group), returns


def _on_policy_distillation(facts: Facts, knobs: Any) -> Tables:
    pairs = zip(facts.column("ref_log_prob"), facts.column("old_log_probs"), strict=True)
    ratios = [[p - q for p, q in zip(*rows, strict=True)] for rows in pairs]
    table = references.to_go(ratios, facts.mask, knobs.discount)
    return table, table


def _gdpo(facts: Facts, knobs: Any) -> Tables:
    components = facts.inputs.reward_components
    weights = knobs.reward_weights or dict.fromkeys(components, 1.0)
    parts = [(w, references.grpo(components[name].tolist(), facts.group, True)) for name, w in weights.items()]
    return facts.whitened_rows([math.fsum(w * part[i] for w, part in parts) for i in range(len(facts.mask))])


def _per_row(function: Callable[..., list[float]], *fields: str) -> Callable[[Facts, Any], Tables]:
    """A reference of (outcome, group, knobs' fields)."""
    return lambda facts, knobs: facts.rows(function(facts.outcome, facts.group, *(getattr(knobs, name) for name in fields)))


# name -> (reference, knobs to try)
REFERENCES: dict[str, tuple[Callable[[Facts, Any], Tables], list[dict[str, Any]]]] = {
    "gae": (_gae, [{}, {"gamma": 0.9, "lam": 0.7}, {"lam": 0.0}]),
    "grpo": (_per_row(references.grpo, "norm_adv_by_std_in_grpo"), [{}, {"norm_adv_by_std_in_grpo": False}]),
    "grpo_passk": (_per_row(references.grpo_passk, "norm_adv_by_std_in_grpo"), [{}, {"norm_adv_by_std_in_grpo": False}]),
    "reinforce_plus_plus": (_reinforce, [{}, {"gamma": 0.8}]),
    "reinforce_plus_plus_baseline": (
        lambda facts, knobs: facts.whitened_rows(references.centred(facts.outcome, facts.group)),
        [{}],
    ),
    "remax": (_remax, [{}, {"gamma": 0.8}]),
    "rloo": (_per_row(references.rloo), [{}]),
    "opo": (lambda facts, knobs: facts.rows(references.opo(facts.outcome, facts.group, facts.mask)), [{}]),
    "gpg": (lambda facts, knobs: facts.rows(references.gpg(facts.outcome, facts.group, facts.mask)), [{}]),
    "optimal_token_baseline": (_optimal_token_baseline, [{}, {"gamma": 0.8}]),
    "on_policy_distillation": (_on_policy_distillation, [{}, {"discount": 0.7}, {"discount": 1.0}]),
    "gdpo": (_gdpo, [{}, {"reward_weights": {"length": 0.5, "right": -2}}]),
    "cpgd": (
        lambda facts, knobs: facts.rows(references.cpgd(facts.outcome, facts.group, facts.mask, knobs.weighting)),
        [{}, {"weighting": "clip-scaled"}, {"weighting": "plain"}],
    ),
}
RUNS = [(name, knobs) for name, (_, several) in REFERENCES.items() for knobs in several]


def run_id(value: Any) -> str:
    return value if isinstance(value, str) else ",".join(f"{name}={choice}" for name, choice in value.items()) or "default"


def estimate(name: str, knobs: dict[str, Any], inputs: AdvantageInputs) -> AdvantageOutputs:
    knobs_class = ADVANTAGE_ESTIMATORS.knobs_class(name)
    outputs: AdvantageOutputs = ADVANTAGE_ESTIMATORS.get(name)(inputs, knobs_class(**knobs) if knobs_class else None)
    return outputs


def check(estimator: Callable[[AdvantageInputs], AdvantageOutputs], case: Any, name: str, knobs: dict[str, Any]) -> None:
    """Compare with the reference, to what the dtype can hold (whitening divides by the spread)."""
    inputs = inputs_of(case)
    outputs = estimator(inputs)
    knobs_class = ADVANTAGE_ESTIMATORS.knobs_class(name)
    facts = facts_of(inputs)
    advantages, returns = REFERENCES[name][0](facts, knobs_class(**knobs) if knobs_class else None)
    assert_close(outputs.returns, returns)
    assert_close(outputs.advantages, advantages, amplification=amplification(facts, returns))
    assert not outputs.advantages.isnan().any() and outputs.advantages.dtype == inputs.token_level_rewards.dtype


def amplification(facts: Facts, returns: references.Table) -> float:
    """How much larger whitening makes the rounding of what it whitens."""
    inside = references.inside(returns, facts.mask)
    return max(map(abs, inside), default=0.0) / math.sqrt(references.variance(inside) + 1e-8)


def check_rearranged(name: str, case: Any, seed: int, extra: int) -> None:
    """Masked columns anywhere (padding, or more tool output), another order of the rows and other group names change nothing."""
    inputs, knobs = inputs_of(case), REFERENCES[name][1][-1]
    rows, width = inputs.response_mask.shape
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)
    where = torch.randperm(width + extra, generator=generator)[:width].sort().values

    def move(value: Tensor) -> Tensor:
        if value.dim() == 1:
            return value[order]
        wide = torch.full((rows, width + extra), junk_of(value), dtype=value.dtype)
        wide[:, where] = value
        return wide[order]

    other = changed(inputs, move)
    assert other.group is not None
    other.group = 5 - 2 * other.group
    got, plain = estimate(name, knobs, other), estimate(name, knobs, inputs)
    for ours, expected in ((got.advantages, plain.advantages), (got.returns, plain.returns)):
        atol = 2e-5 * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(ours[:, where], expected[order], rtol=2e-4, atol=atol)


def check_invalid(name: str, case: Any, count: int) -> None:
    """More rows without model tokens, each a group of its own, as the trainer marks samples without a score, move nobody."""
    inputs, knobs = inputs_of(case), REFERENCES[name][1][-1]
    rows = len(inputs.response_mask)

    def extend(value: Tensor) -> Tensor:
        if value.dtype == torch.int64 and value.dim() == 1:
            return torch.cat([value, -100 - torch.arange(count)])
        return torch.cat([value, torch.full((count, *value.shape[1:]), junk_of(value), dtype=value.dtype)])

    plain, other = estimate(name, knobs, inputs), estimate(name, knobs, changed(inputs, extend))
    torch.testing.assert_close(other.advantages[:rows], plain.advantages, rtol=1e-4, atol=1e-6)
    assert not other.advantages[rows:].any() and not other.returns[rows:].any()


def junk_of(column: Tensor) -> float:
    """What may stand where no token is: NaN, and 0 in the mask itself."""
    return float("nan") if column.dtype.is_floating_point else 0


def columns_of(inputs: AdvantageInputs) -> list[dataclasses.Field[Any]]:
    """Those that the cases have; columns of episodes have cases of their own."""
    return [field for field in dataclasses.fields(inputs) if field.name != "gather" and getattr(inputs, field.name) is not None]


def changed(inputs: AdvantageInputs, change: Callable[[Tensor], Tensor]) -> AdvantageInputs:
    """`change` applied to every column."""
    columns: dict[str, Any] = {field.name: getattr(inputs, field.name) for field in columns_of(inputs)}
    components = {name: change(column) for name, column in columns.pop("reward_components").items()}
    return AdvantageInputs(**{name: change(column) for name, column in columns.items()}, reward_components=components)
