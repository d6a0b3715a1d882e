"""What the ranks of test_correction_engine.py run: the policy's update with a sampler that is not the model, against a plain
Hugging Face loop whose token slopes are worked out one by one."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rlhub.algorithms.estimation import rollout_correction
from rlhub.algorithms.mismatch import measure_mismatch
from rlhub.algorithms.statistics import HERE
from rlhub.config.sections.actor import ActorConfig
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig, rejection_bounds, weight_bounds
from rlhub.engines.training.base import StepReport
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.engines.training.updates import PolicyUpdater
from tests.integration.fsdp_checks import make_engine, make_rows, my_rows, plain_model, plain_outputs, relative_error
from tests.unit.algorithms.correction.correction_cases import Case, slow_kept, slow_weights

GAP = 0.6  # nats a token between the sampler and the model


def sampled_rows(pi: Tensor, gap: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    rows = make_rows()
    noise = gap * (2 * torch.rand(pi.shape, generator=generator, dtype=torch.float64) - 1)
    rows["advantages"] = rows.pop("target")
    rows["rollout_log_probs"] = torch.where(rows["response_mask"].bool(), pi + noise, torch.full_like(pi, math.nan))
    rows["mini_batch"] = torch.zeros(len(pi), dtype=torch.int64)
    return rows


def slope(new: float, old: float, advantage: float) -> float:
    """dL/dlog pi of PPO's clipped loss, eps 0.2, c 3."""
    ratio = math.exp(new - old)
    held = ratio > 1.2 if advantage > 0 else not 0.8 <= ratio <= 3.0
    return 0.0 if held else -advantage * ratio


def expected_slopes(rows: dict[str, Tensor], pi: Tensor, config: RolloutCorrectionConfig, factors_on: bool) -> tuple[Tensor, int]:
    """dL/dlog pi of each token before the division, and the tokens that are divided by."""
    mask, mu = rows["response_mask"], rows["rollout_log_probs"]
    old = mu if config.bypass_mode else pi
    case = Case(pi, mu, rows["advantages"], mask)
    factors, keep = mask.double(), mask
    if factors_on and config.rollout_is:
        weights = slow_weights(case, config.rollout_is, weight_bounds(config.rollout_is_threshold))
        factors = torch.tensor(weights, dtype=torch.float64)
    for rule, bounds in rejection_bounds(config.rollout_rs, config.rollout_rs_threshold).items() if factors_on else ():
        keep = keep * torch.tensor(slow_kept(case, rule, bounds))
    result = torch.zeros(mask.shape, dtype=torch.float64)
    for i, t in keep.nonzero().tolist():
        result[i, t] = factors[i, t] * slope(pi[i, t].item(), old[i, t].item(), rows["advantages"][i, t].item())
    return result, int(mask.sum() if config.bypass_mode else keep.sum())


def gradient(path: str, settings: dict[str, Any], gap: float, case: dict[str, Any]) -> dict[str, Any]:
    """Relative errors of the gradient to the corrected and to the uncorrected one, and the update's metrics."""
    config = RolloutCorrectionConfig(**settings)
    with torch.no_grad():
        pi = plain_outputs(plain_model(path, "policy", torch.float64), make_rows(), "policy")["log_probs"]
    rows = sampled_rows(pi, gap)
    plain_rows = dict(rows)
    rows |= {} if config.in_update else {"old_log_probs": pi}
    columns, metrics = rows | {"learn_mask": rows["response_mask"]}, {}
    if not config.in_update:
        corrected = rollout_correction(columns, HERE, config)
        columns, metrics = columns | corrected.columns, measure_mismatch(columns, HERE) | corrected.metrics
    engine = make_engine(path, micro_batch=MicroBatchConfig(**case.get("micro", {})))
    if not config.in_update:
        del columns["rollout_log_probs"]
    updater = PolicyUpdater(engine, ActorConfig(), scale=1.0, correction=config)
    with mock.patch.object(engine, "optimizer_step", return_value=StepReport(grad_norm=1.0, lr=0.0, skipped=False)):
        metrics |= updater.update(my_rows(columns, case.get("uneven", False)), 1)
    errors = []
    for factors_on in (True, False):
        reference = plain_model(path, "policy", torch.float64)
        slopes, tokens = expected_slopes(plain_rows, pi, config, factors_on)
        (plain_outputs(reference, make_rows(), "policy")["log_probs"] * slopes / tokens).sum().backward()
        errors.append(relative_error(engine, reference))
    return {"corrected": errors[0], "uncorrected": errors[1], "metrics": metrics}
