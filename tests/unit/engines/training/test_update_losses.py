"""Every policy loss inside the update: its columns reach it, and single rows or two ranks take the step of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhub.algorithms.registry import POLICY_LOSSES
from rlhub.config.sections.actor import PolicyLossConfig
from tests.unit.engines.training.test_updates import FakeTrainEngine, batch, part, policy_update

NAMES = POLICY_LOSSES.names()
KNOBS = {"gspo": {"clip_low": 0.5, "clip_high": 0.5}, "clip_cov": {"clip_ratio_low": 0.9, "clip_ratio_high": 5.0}}


def loss_of(name: str) -> PolicyLossConfig:
    return PolicyLossConfig(loss_mode=name, kwargs=dict(KNOBS.get(name, {})))


def rows_near(engine: FakeTrainEngine, *, seed: int = 4) -> dict[str, Tensor]:
    """Old and rollout policy are about 0.2 nats from the engine's, so that clips bind on some tokens."""
    rows = batch("advantages", "old_log_probs", "rollout_log_probs", seed=seed)
    own = engine.infer(rows, outputs=("log_probs",))["log_probs"]
    for name in ("old_log_probs", "rollout_log_probs"):
        rows[name] = own + 0.2 * (rows[name] + 2)
    rows["importance_weights"] = torch.where(rows["response_mask"].bool(), 1 + rows["advantages"].abs(), float("nan"))
    rows["selected"] = (torch.arange(own.numel()).reshape(own.shape) % 3 == 0).to(torch.uint8)
    return rows


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", NAMES)
def test_single_rows_and_two_ranks_take_the_step_of_the_whole(name: str, mode: str) -> None:
    rows = rows_near(FakeTrainEngine())
    settings = {"policy_loss": loss_of(name), "loss_agg_mode": mode}
    whole, metrics = policy_update(rows, **settings)
    single, single_metrics = policy_update(rows, FakeTrainEngine(micro_rows=1), **settings)
    torch.testing.assert_close(single.gradients, whole.gradients, rtol=0, atol=1e-12)
    assert single_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert {"actor/pg_clipfrac", "actor/ppo_kl"} <= set(metrics)
    total = torch.zeros_like(whole.gradients[0][0])
    for here, there in (([0, 2, 5], [1, 3, 4]), ([1, 3, 4], [0, 2, 5])):
        rank, _ = policy_update(part(rows, here), FakeTrainEngine(elsewhere=[rows["response_mask"][there]]), **settings)
        total += rank.gradients[0][0]
    torch.testing.assert_close(total, whole.gradients[0][0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_loss_reads_changes_its_gradient_and_nothing_else_does(name: str) -> None:
    rows, settings = rows_near(FakeTrainEngine()), {"policy_loss": loss_of(name)}
    before = policy_update(rows, **settings)[0].gradients[0][0]
    row = POLICY_LOSSES.row(name)
    changed = {
        "importance_weights": rows["importance_weights"] * 2,
        "rollout_log_probs": rows["rollout_log_probs"] + 0.1,
        "selected": 1 - rows["selected"],
    }
    reads = {"importance_weights"} | ({"rollout_log_probs"} & row.requires) | ({"selected"} if row.companions else set())
    for column, values in changed.items():
        after = policy_update(rows | {column: values}, **settings)[0].gradients[0][0]
        assert torch.equal(after, before) == (column not in reads), column


@pytest.mark.parametrize("name", NAMES)
def test_good_tokens_become_likelier_over_several_steps(name: str) -> None:
    """One advantage a row, as most estimators give; the selection is what the driver sends in each batch."""
    engine = FakeTrainEngine(lr=0.05)
    rows = batch("advantages")
    rows["advantages"] = torch.where(torch.arange(6)[:, None] % 2 == 0, 1.0, -1.0).expand(6, 4).double()
    worth = rows["advantages"] * rows["response_mask"]
    own = engine.infer(rows, outputs=("log_probs",))["log_probs"]
    rows |= {"old_log_probs": own, "rollout_log_probs": own, "selected": torch.zeros(own.shape, dtype=torch.uint8)}
    policy_update(rows, engine, policy_loss=loss_of(name), ppo_epochs=5)
    assert (worth * (engine.infer(rows, outputs=("log_probs",))["log_probs"] - own)).sum() > 0
