"""Tokens that a policy loss chooses from a whole mini-batch, before it is cut over ranks and micro-batches.

The choice is a function of the run's seed, the step and the samples alone: rows are put in the order in which the samples were
drawn, and each token's random key belongs to its sample and position.  So it does not depend on the number of ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlhub.algorithms.inputs import SelectionInputs
from rlhub.algorithms.knobs import knobs_for
from rlhub.algorithms.registry import POLICY_LOSSES
from rlhub.config.sections.ppo import PPOConfig
from rlhub.protocol import DataProto
from rlhub.utils.seeding import Purpose, uniforms


def number_samples(batch: DataProto) -> None:
    """Adds `sample_index` (rows,) int64, the samples' numbers as they were drawn: before rows are dealt to the ranks."""
    batch.batch["sample_index"] = torch.arange(len(batch))


def select_tokens(batch: DataProto, config: PPOConfig, step: int) -> Tensor:
    """(rows, response), 1 on the tokens that the loss chose in each mini-batch; in the order of the batch's rows.

    batch: needs sample_index, mini_batch, old_log_probs, advantages and response_mask as the update will read it.
    """
    actor, columns = config.actor_rollout_ref.actor, batch.batch
    name = actor.policy_loss.loss_mode
    select = POLICY_LOSSES.companion(name, "select")
    assert select is not None, f"{name} selects no tokens"
    kwargs, where = actor.policy_loss.kwargs, "actor_rollout_ref.actor.policy_loss.kwargs"
    knobs = knobs_for(POLICY_LOSSES.knobs_class(name), actor, kwargs, where=where)
    selected = torch.zeros(columns["response_mask"].shape, dtype=torch.uint8)
    for mini_batch in columns["mini_batch"].unique():
        rows = (columns["mini_batch"] == mini_batch).nonzero().squeeze(1)
        rows = rows[columns["sample_index"][rows].argsort()]
        inputs = SelectionInputs(
            old_log_probs=columns["old_log_probs"][rows],
            advantages=columns["advantages"][rows],
            response_mask=columns["response_mask"][rows],
            keys=token_keys(config.trainer.seed, step, columns["sample_index"][rows].numpy(), selected.shape[1]),
        )
        selected[rows] = select(inputs, knobs).to(torch.uint8)
    return selected


def token_keys(seed: int, step: int, samples: np.ndarray, width: int) -> Tensor:
    """(rows, width) float64 uniforms in [0, 1), a pure function of (seed, step, sample, position)."""
    keys = [uniforms(seed, Purpose.SELECTION, step, sample, count=width) for sample in samples.tolist()]
    return torch.from_numpy(np.array(keys).reshape(len(samples), width))
