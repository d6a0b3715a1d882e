"""What the ranks of test_estimation_ranks.py run: the work on token columns over a real process group."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rlhub.algorithms.estimation import compute_advantages, rollout_correction, select_tokens
from rlhub.algorithms.statistics import Gather
from rlhub.config.sections.actor import ActorConfig, PolicyLossConfig
from rlhub.config.sections.algorithm import AlgorithmConfig
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig
from rlhub.engines.training.collectives import ensure_process_group, gather_rows
from tests.unit.algorithms.estimation_cases import KNOBS, VERSION, cut, make_batch

CPU, ROWS, WIDTH = torch.device("cpu"), 29, 9
CORRECTION = RolloutCorrectionConfig(rollout_is="token", rollout_is_batch_normalize=True, m2po_threshold=0.01)


def work(columns: dict[str, torch.Tensor], gather: Gather, estimator: str) -> dict[str, Any]:
    """All three parts one after the other, as a step has them: the columns and the metrics."""
    algorithm = AlgorithmConfig(adv_estimator=estimator, use_kl_in_reward=True, whiten_rewards=True)
    advantages = compute_advantages(columns, gather, algorithm, kl_coef=0.2, version=VERSION)
    columns = columns | advantages.columns
    corrected = rollout_correction(columns, gather, CORRECTION)
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="clip_cov", kwargs=dict(KNOBS["clip_cov"])))
    chosen = select_tokens(columns | corrected.columns, gather, actor, seed=3, step=2)
    made = advantages.columns | corrected.columns | chosen.columns
    return {"columns": {name: column.numpy() for name, column in made.items()}, "metrics": advantages.metrics | corrected.metrics}


def of_the_whole(estimator: str) -> dict[str, Any]:
    columns = make_batch(11, ROWS, WIDTH)
    return work(columns, Gather.of(columns["sample_index"]), estimator)


def of_own_rows(cuts: list[list[int]], estimator: str) -> dict[str, Any]:
    """The same of this rank's rows."""
    ensure_process_group(CPU)
    parts = cut(make_batch(11, ROWS, WIDTH), WIDTH, [torch.tensor(rows, dtype=torch.int64) for rows in cuts])
    columns = parts[torch.distributed.get_rank()]
    return work(columns, Gather.of(columns["sample_index"], partial(gather_rows, device=CPU)), estimator)


def gathered(dtype: str) -> Any:
    """Rank r has r rows, of r + 1 tokens; the numbers say whose they are."""
    ensure_process_group(CPU)
    rank = torch.distributed.get_rank()
    rows = torch.full((rank, rank + 1), rank).to(getattr(torch, dtype))
    numbers = torch.full((rank,), rank).to(getattr(torch, dtype))
    return [gather_rows(column, CPU).to(torch.float64).numpy() for column in (rows, numbers)]
