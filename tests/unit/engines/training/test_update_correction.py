"""Weights and rejection as the policy's gradient has them, on the bigram model whose gradient is a short sum."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from rlhub.algorithms.correction import correct as correct_module
from rlhub.algorithms.correction.correct import correct, token_factors
from rlhub.algorithms.correction.weights import log_ratios
from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.masked import masked
from rlhub.algorithms.registry import POLICY_LOSSES
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig
from rlhub.engines.training.updates import PolicyUpdater
from rlhub.registry import Row
from tests.unit.algorithms.correction.correction_cases import Case, slow_kept, slow_weights
from tests.unit.engines.training.test_updates import MASK, PROMPT, RESPONSE, ROWS, VOCABULARY, FakeTrainEngine, actor, batch, part

Table = list[list[float]]


def settings(**changes: object) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(**changes)  # type: ignore[arg-type]


def sampled(name: str = "rollout_log_probs", gap: float = 0.8) -> dict[str, Tensor]:
    """Rows whose sampler differs from the model by up to `gap` nats a token."""
    rows = batch("advantages", "rollout_log_probs")
    generator = torch.Generator().manual_seed(9)
    own = FakeTrainEngine().infer(rows, outputs=("log_probs",))["log_probs"]
    noise = gap * (2 * torch.rand(ROWS, RESPONSE, generator=generator, dtype=torch.float64) - 1)
    mu = torch.where(rows["response_mask"].bool(), own + noise, torch.full_like(own, math.nan))
    del rows["rollout_log_probs"]
    return rows | {name: mu}


def update(
    rows: dict[str, Tensor], config: RolloutCorrectionConfig, *, micro_rows: int = ROWS, mini_batches: int = 1, **changes: object
) -> tuple[FakeTrainEngine, dict[str, float]]:
    engine = FakeTrainEngine(micro_rows=micro_rows)
    updater = PolicyUpdater(engine, actor(**changes), scale=float(RESPONSE), correction=config)
    return engine, updater.update(rows, mini_batches)


@pytest.mark.parametrize("changes", [{"bypass_mode": True}, {"proximal": "a3po"}])
@pytest.mark.parametrize("micro_rows", [1, ROWS])
def test_the_mismatch_is_told_apart_by_staleness_where_it_is_measured_here(changes: dict[str, object], micro_rows: int) -> None:
    rows = sampled("old_log_probs" if "bypass_mode" in changes else "rollout_log_probs")
    mu = rows.get("old_log_probs", rows.get("rollout_log_probs"))
    assert mu is not None
    ages = torch.arange(ROWS * RESPONSE).reshape(ROWS, RESPONSE) % 3
    _, metrics = update(rows | {"staleness": ages}, settings(**changes), micro_rows=micro_rows, mini_batches=2)
    first = (rows["mini_batch"] == 0)[:, None] & rows["response_mask"].bool()
    found = {name: value for name, value in metrics.items() if "staleness" in name}
    assert found == pytest.approx(
        {f"mismatch/kl/staleness_{age}": (mu - own(rows))[first & (ages == age)].mean().item() for age in range(3)}
    )
    assert not any("mismatch_" in name for name in metrics)
    assert not any("staleness" in name for name in update(rows, settings(**changes), mini_batches=2)[1])


def own(rows: dict[str, Tensor]) -> Tensor:
    return FakeTrainEngine().infer(rows, outputs=("log_probs",))["log_probs"]


def gradient_of(rows: dict[str, Tensor], slopes: Table, mask: list[list[int]] = MASK, tokens: int | None = None) -> Tensor:
    """sum over tokens of dL/dlog pi times the gradient of log pi, one-hot less softmax, over the number of tokens."""
    table = FakeTrainEngine().table.detach().tolist()
    total = [[0.0] * VOCABULARY for _ in range(VOCABULARY)]
    for i, t in ((i, t) for i in range(ROWS) for t in range(RESPONSE) if mask[i][t]):
        before, token = int(rows["input_ids"][i, PROMPT + t - 1]), int(rows["input_ids"][i, PROMPT + t])
        norm = math.fsum(math.exp(x) for x in table[before])
        for other in range(VOCABULARY):
            total[before][other] += slopes[i][t] * (float(other == token) - math.exp(table[before][other]) / norm)
    return torch.tensor(total, dtype=torch.float64) / (tokens or sum(map(sum, mask)))


def ppo_slope(new: float, old: float, advantage: float) -> float:
    """dL/dlog pi of the clipped surrogate with eps 0.2 and c 3: -A rho where no clip binds."""
    ratio = math.exp(new - old)
    if advantage >= 0:
        return -advantage * ratio if ratio <= 1.2 else 0.0
    return -advantage * ratio if 0.8 <= ratio <= 3.0 else 0.0


def slopes_of(rows: dict[str, Tensor], old: Tensor, factors: Table) -> Table:
    columns = (own(rows).tolist(), old.tolist(), rows["advantages"].tolist(), factors)
    return [[w * ppo_slope(p, q, a) if w else 0.0 for p, q, a, w in zip(*row, strict=True)] for row in zip(*columns, strict=True)]


def case_of(rows: dict[str, Tensor], pi: Tensor, mu: Tensor) -> Case:
    return Case(pi, mu, rows["advantages"], rows["response_mask"])


def check_gradient(engine: FakeTrainEngine, expected: Tensor) -> None:
    torch.testing.assert_close(engine.gradients[0][0], expected, rtol=0, atol=1e-12)


# The column of weights


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES.names()))
def test_every_loss_multiplies_its_gradient_by_the_weight_once(loss: str) -> None:
    """One token weighted 3 adds twice its own gradient; the policy is that at the start of the update, so no clip binds."""
    row = POLICY_LOSSES.row(loss)
    rows = batch("advantages", "old_log_probs")
    rows["old_log_probs"] = own(rows)
    if "rollout_log_probs" in row.requires:
        rows["rollout_log_probs"] = own(rows)
    if "select" in row.companions:
        rows["selected"] = torch.zeros(ROWS, RESPONSE, dtype=torch.uint8)

    def slope(weight: float) -> Tensor:
        weights = torch.ones(ROWS, RESPONSE, dtype=torch.float64)
        weights[1] = weight
        config = actor()
        config.policy_loss.loss_mode = loss
        engine = FakeTrainEngine()
        PolicyUpdater(engine, config, scale=float(RESPONSE)).update(rows | {"importance_weights": weights}, 1)
        return engine.gradients[0][0]

    without, once, thrice = slope(0.0), slope(1.0), slope(3.0)
    assert (once - without).abs().max() > 1e-3
    torch.testing.assert_close(thrice - without, 3 * (once - without), rtol=0, atol=1e-12)


@pytest.mark.parametrize("threshold", [2.0, 1.2, "0.7_1.4"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_weights_change_the_gradient_as_the_formula_says(level: str, threshold: float | str) -> None:
    """Decoupled PPO: old log-probs from a pass of their own, the weight pi_old / mu on the clipped loss."""
    rows = sampled()
    pi, mu = own(rows), rows.pop("rollout_log_probs")
    config = settings(rollout_is=level, rollout_is_threshold=threshold)
    weights = correct(config, log_ratios(pi, mu, rows["response_mask"]), rows["response_mask"]).weights
    rows |= {"old_log_probs": pi, "importance_weights": weights}
    bounds = correct_module.weight_bounds(threshold)
    expected = gradient_of(rows, slopes_of(rows, pi, slow_weights(case_of(rows, pi, mu), level, bounds)))
    engine, _ = update(rows, config)
    check_gradient(engine, expected)
    plain = gradient_of(rows, slopes_of(rows, pi, [[1.0] * RESPONSE] * ROWS))
    assert (expected - plain).abs().max() > 1e-2
    equal = rows | {
        "importance_weights": correct(config, log_ratios(pi, pi, rows["response_mask"]), rows["response_mask"]).weights
    }
    check_gradient(update(equal, config)[0], plain)


# Bypass


BYPASS = {"bypass_mode": True, "rollout_rs": ["token_k1"], "rollout_rs_threshold": ["0.6_1.6"]}


def bypass_expected(rows: dict[str, Tensor]) -> Tensor:
    """The clipped ratio pi / mu without any weight; rejected tokens are 0 and stay in the denominator."""
    mu = rows["old_log_probs"]
    bounds = correct_module.rejection_bounds(["token_k1"], ["0.6_1.6"])["token_k1"]
    kept = slow_kept(case_of(rows, own(rows), mu), "token_k1", bounds)
    assert 0 < sum(map(sum, kept)) < sum(map(sum, MASK))
    return gradient_of(rows, slopes_of(rows, mu, [[float(m) for m in row] for row in kept]))


@pytest.mark.parametrize("micro_rows", [1, 4, ROWS])
def test_in_bypass_mode_a_loss_with_a_ratio_gets_rejection_and_no_weight(micro_rows: int) -> None:
    rows = sampled("old_log_probs")
    for more in ({}, {"rollout_is": "token"}):
        engine, metrics = update(rows, settings(**BYPASS, **more), micro_rows=micro_rows)
        check_gradient(engine, bypass_expected(rows))
        share = metrics["correction/rejected/token_k1"]
        assert metrics["mismatch/masked_share"] == share and 0 < share < 1
        assert "correction/weight_mean" not in metrics


def test_old_minus_rollout_log_probs_would_reject_nothing_in_bypass_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: with l = log pi_old - log mu = 0 the correction vanishes without a word."""
    monkeypatch.setattr(correct_module, "log_ratios", lambda pi, mu, mask: log_ratios(mu, mu, mask))
    rows = sampled("old_log_probs")
    engine, metrics = update(rows, settings(**BYPASS))
    assert metrics["mismatch/masked_share"] == 0
    with pytest.raises(AssertionError):
        check_gradient(engine, bypass_expected(rows))


def without_ratio(inputs: PolicyLossInputs, knobs: None) -> PolicyLossOutputs:
    """-A log pi times the weight."""
    assert inputs.weights is not None
    return PolicyLossOutputs(loss=-masked(inputs.advantages, inputs.response_mask) * inputs.weights * inputs.log_probs)


def test_in_bypass_mode_a_loss_without_a_ratio_gets_the_truncated_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICY_LOSSES._rows, "mine", Row(name="mine", target=without_ratio, requires=frozenset({"weights"})))
    rows = sampled("old_log_probs")
    config = settings(bypass_mode=True, rollout_is="token", rollout_is_threshold=1.3)
    engine = FakeTrainEngine(micro_rows=2)
    loss = actor()
    loss.policy_loss.loss_mode = "mine"
    metrics = PolicyUpdater(engine, loss, scale=1.0, correction=config).update(rows, 1)
    weights = slow_weights(case_of(rows, own(rows), rows["old_log_probs"]), "token", correct_module.weight_bounds(1.3))
    advantages = rows["advantages"].tolist()
    slopes = [[-a * w if w else 0.0 for a, w in zip(*row, strict=True)] for row in zip(advantages, weights, strict=True)]
    check_gradient(engine, gradient_of(rows, slopes))
    tokens = sum(map(sum, MASK))
    assert metrics["correction/weight_mean"] == pytest.approx(math.fsum(map(math.fsum, weights)) / tokens)
    assert max(map(max, weights)) == 1.3 and metrics["correction/outside_share"] > 0


# A-3PO


@pytest.mark.parametrize("per_token", [False, True])
def test_a3po_clips_against_the_interpolated_policy_and_weights_by_it(per_token: bool) -> None:
    rows = sampled(gap=1.2)
    generator = torch.Generator().manual_seed(2)
    rows["staleness"] = torch.randint(0, 4, (ROWS, RESPONSE) if per_token else (ROWS,), generator=generator)
    pi, mu, mask = own(rows), rows["rollout_log_probs"], rows["response_mask"]
    proximal = torch.full((ROWS, RESPONSE), math.nan, dtype=torch.float64)
    for i, t in ((i, t) for i in range(ROWS) for t in range(RESPONSE) if MASK[i][t]):
        d = int(rows["staleness"][i, t] if per_token else rows["staleness"][i])
        proximal[i, t] = pi[i, t] if d == 0 else mu[i, t] + (d - 1) / d * (pi[i, t] - mu[i, t])
    config = settings(proximal="a3po", rollout_is="token", rollout_is_threshold=1.5)
    weights = slow_weights(Case(proximal, mu, rows["advantages"], mask), "token", correct_module.weight_bounds(1.5))
    expected = gradient_of(rows, slopes_of(rows, proximal, weights))
    for micro_rows in (1, ROWS):
        engine, metrics = update(rows, config, micro_rows=micro_rows)
        check_gradient(engine, expected)
    assert metrics["correction/outside_share"] > 0
    fresh = {name: column for name, column in rows.items() if name != "staleness"}
    weights = slow_weights(case_of(rows, pi, mu), "token", correct_module.weight_bounds(1.5))
    check_gradient(update(fresh, config)[0], gradient_of(rows, slopes_of(rows, pi, weights)))
    assert (engine.gradients[0][0] - update(fresh, config)[0].gradients[0][0]).abs().max() > 1e-3


# Metrics


@pytest.mark.parametrize("mode", ["first step", "bypass", "a3po"])
def test_mismatch_and_its_extremes_are_those_of_the_first_step(mode: str) -> None:
    rows = sampled("old_log_probs" if mode == "bypass" else "rollout_log_probs")
    mu = rows["old_log_probs"] if mode == "bypass" else rows["rollout_log_probs"]
    config = settings(bypass_mode=mode == "bypass", proximal="a3po" if mode == "a3po" else "old_log_probs")
    chosen = (rows["mini_batch"] == 0).nonzero().squeeze(1).tolist()
    inside = part({"mask": rows["response_mask"], "ratio": (own(rows) - mu).exp()}, chosen)
    ratios = inside["ratio"][inside["mask"].bool()].tolist()
    for micro_rows in (1, 2, ROWS):
        _, metrics = update(rows, config, micro_rows=micro_rows, mini_batches=3)
        assert metrics["mismatch/weight_min"] == pytest.approx(min(ratios), rel=1e-12)
        assert metrics["mismatch/weight_max"] == pytest.approx(max(ratios), rel=1e-12)
        assert metrics["mismatch/weight_mean"] == pytest.approx(math.fsum(ratios) / len(ratios), rel=1e-12)
        assert not any("mismatch_" in name for name in metrics)


def test_where_the_driver_has_measured_nothing_is_measured_here() -> None:
    rows = sampled() | {"old_log_probs": own(sampled())}
    assert not any(name.startswith(("mismatch", "correction")) for name in update(rows, settings(rollout_is="token"))[1])


@pytest.mark.parametrize(
    "config",
    [
        settings(**BYPASS),
        settings(bypass_mode=True, rollout_rs=["seq_mean_k3"], rollout_rs_threshold=["0.1"]),
        settings(proximal="a3po", rollout_is="sequence", rollout_rs=["seq_max_k2"], rollout_rs_threshold=["0.2"]),
    ],
)
def test_cutting_a_step_into_micro_batches_changes_neither_gradient_nor_metrics(config: RolloutCorrectionConfig) -> None:
    rows = sampled("old_log_probs" if config.bypass_mode else "rollout_log_probs")
    rows["staleness"] = torch.arange(ROWS) % 3
    whole, told = update(rows, config)
    assert 0 < told["mismatch/masked_share"] < 1
    for micro_rows in (1, 2, 5):
        engine, metrics = update(rows, config, micro_rows=micro_rows)
        torch.testing.assert_close(engine.gradients, whole.gradients, rtol=0, atol=1e-12)
        assert metrics == pytest.approx(told, rel=1e-10)


def test_token_factors_keep_a_rejected_token_at_zero_even_where_its_weight_is_not_finite() -> None:
    result = correct(settings(rollout_is="token"), torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2))
    broken = dataclasses.replace(result, weights=torch.tensor([[math.nan, 1.0]]).double(), keep=torch.tensor([[False, True]]))
    assert token_factors(broken).tolist() == [[0.0, 1.0]]
