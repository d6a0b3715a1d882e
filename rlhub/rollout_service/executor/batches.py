"""From finished groups to a training batch: the columns that batch generation makes, and those that only episodes have.

Rows are in the order of the groups, samples of a prompt side by side.  Prompts are padded on the left and responses on the
right to the longest of the batch, so equal samples give an equal batch whatever path they came by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlhub.agents.trajectory import NOT_SAMPLED, Trajectory
from rlhub.engines.rollout.base import FINISH_CODES
from rlhub.errors import WorkflowError
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rollout_service.executor.episode_groups import Group

ADDED = "added_rewards"
COMPONENT = "reward/"
"""Prefix of the columns that hold the scorer's own numbers."""


def to_batch(groups: Sequence[Group], *, pad_id: int, vocab_size: int | None = None) -> DataProto:
    """Columns of the samples of all groups, T the longest response:

    input_ids, attention_mask (rows, prompt + T); responses, response_mask, policy_version (rows, T) int64;
    rollout_log_probs (rows, T) float32; response_length, finish_reason, ordinal, uid (rows,) int64; the prompts' other columns.
    Where tools gave rewards also added_rewards (rows, T) float32, which belong to the configured reward (see `add_rewards`).
    Where the samples are scored also token_level_scores (rows, T) float32, scores (rows,) float32, valid (rows,) bool and
    reward/<name> (rows,) float64, the scorer's other numbers.

    policy_version is NOT_SAMPLED on what the policy did not write.  vocab_size: WorkflowError for tokens outside of it.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    counts = [len(group.trajectories) for group in groups]
    columns = token_columns(trajectories, pad_id)
    columns["ordinal"] = torch.from_numpy(np.repeat(np.array([group.ordinal for group in groups], dtype=np.int64), counts))
    columns["uid"] = torch.from_numpy(np.repeat(np.arange(len(groups)), counts))
    check(columns, vocab_size)
    columns |= added_columns(trajectories, columns["responses"].shape[1])
    columns |= score_columns(groups, columns["responses"].shape[1])
    add_rewards(columns)
    return DataProto.from_dict(columns, prompt_columns(groups))


def check(columns: Mapping[str, Tensor], vocab_size: int | None) -> None:
    """WorkflowError for what would corrupt training silently: tokens outside the vocabulary, log-probs that are not finite."""
    tokens, log_probs = columns["responses"].numpy(), columns["rollout_log_probs"].numpy()
    finite = np.isfinite(log_probs).all(1)
    if not finite.all():
        ordinal = int(columns["ordinal"][int(finite.argmin())])
        raise WorkflowError(f"a sample of prompt {ordinal} has a log-prob that is not finite; check dtype and sampling settings")
    if vocab_size is not None:
        written = columns["attention_mask"].numpy()[:, -tokens.shape[1] :] == 1
        outside = written & ((tokens < 0) | (tokens >= vocab_size))
        if outside.any():
            row, position = np.argwhere(outside)[0]
            raise WorkflowError(
                f"a sample of prompt {int(columns['ordinal'][row])} has token id {tokens[row, position]}, outside the vocabulary "
                f"of {vocab_size}"
            )


def token_columns(trajectories: Sequence[Trajectory], pad_id: int) -> dict[str, Tensor]:
    """What follows from the tokens alone."""
    prompts, prompt_mask = left_padded([trajectory.prompt_ids for trajectory in trajectories], pad_id)
    lengths = np.array([len(trajectory.response_ids) for trajectory in trajectories], dtype=np.int64)
    filled = np.arange(lengths.max())[None, :] < lengths[:, None]

    def padded(column: Iterable[Sequence[Any]], fill: float, dtype: Any) -> Tensor:
        return torch.from_numpy(placed(column, filled, fill, dtype))

    responses = placed((t.response_ids for t in trajectories), filled, pad_id, np.int64)
    return {
        "input_ids": torch.from_numpy(np.concatenate([prompts, responses], 1)),
        "attention_mask": torch.from_numpy(np.concatenate([prompt_mask, filled], 1).astype(np.int64)),
        "responses": torch.from_numpy(responses),
        "response_mask": padded((t.response_mask for t in trajectories), 0, np.int64),
        "response_length": torch.from_numpy(lengths),
        "finish_reason": torch.from_numpy(np.array([FINISH_CODES[t.finish_reason] for t in trajectories], dtype=np.int64)),
        "rollout_log_probs": padded((t.rollout_log_probs for t in trajectories), 0.0, np.float32),
        "policy_version": padded((t.versions for t in trajectories), NOT_SAMPLED, np.int64),
    }


def placed(column: Iterable[Sequence[Any]], filled: np.ndarray, fill: float, dtype: Any) -> np.ndarray:
    """The rows' values one after the other where `filled` (rows, width) is true, `fill` elsewhere.  ValueError if their number
    is another."""
    values = np.full(filled.shape, fill, dtype=dtype)
    values[filled] = np.fromiter(chain.from_iterable(column), dtype)
    return values


def left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int64 and where they are bool, both (rows, longest)."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    width = int(lengths.max())
    filled = np.arange(width)[None, :] >= width - lengths[:, None]
    return placed(rows, filled, pad_id, np.int64), filled


def added_columns(trajectories: Sequence[Trajectory], width: int) -> dict[str, Tensor]:
    """Nothing where no tool gave a reward."""
    if all(trajectory.added_rewards is None for trajectory in trajectories):
        return {}
    added = torch.zeros(len(trajectories), width)
    for row, trajectory in enumerate(trajectories):
        if trajectory.added_rewards is not None:
            added[row, : len(trajectory.added_rewards)] = torch.tensor(trajectory.added_rewards)
    return {ADDED: added}


def add_rewards(columns: MutableMapping[str, Tensor] | TensorDict) -> None:
    """Add the rewards that tools gave to those of the scored samples, once; a sample without a valid score has no reward."""
    if ADDED not in columns.keys() or "token_level_scores" not in columns.keys():
        return
    added = columns.pop(ADDED) * columns["valid"][:, None]
    columns["token_level_scores"] = columns["token_level_scores"] + added
    columns["scores"] = columns["scores"] + added.sum(1)


def score_columns(groups: Sequence[Group], width: int) -> dict[str, Tensor]:
    """Nothing where no sample has rewards yet.  WorkflowError where only some have: half a batch cannot be scored later."""
    scored = [[t.rewards is not None for t in group.trajectories] for group in groups]
    if not any(map(any, scored)):
        return {}
    rewards = torch.zeros(sum(map(len, scored)), width)
    for row, (ordinal, trajectory) in enumerate((group.ordinal, t) for group in groups for t in group.trajectories):
        if trajectory.rewards is None:
            raise WorkflowError(f"prompt {ordinal} has samples without rewards in a batch in which others have them")
        if not trajectory.finite_rewards:
            raise WorkflowError(f"a sample of prompt {ordinal} has rewards that are, or add up to, no finite float32")
        rewards[row, : len(trajectory.rewards)] = torch.tensor(trajectory.rewards)
    names = dict.fromkeys(name for group in groups for numbers in group.numbers for name in numbers)
    columns = {COMPONENT + name: number_column(groups, name) for name in names}
    valid = torch.tensor([sample for group in groups for sample in group.valid])
    return {"token_level_scores": rewards, "scores": rewards.sum(1), "valid": valid} | columns


def number_column(groups: Sequence[Group], name: str) -> Tensor:
    """(rows,) float64; 0 for a sample without a valid score.  WorkflowError for a scored one that has no such number."""
    values = []
    for group in groups:
        for valid, numbers in zip(group.valid, group.numbers, strict=True):
            if valid and name not in numbers:
                raise WorkflowError(f"the scorer gave no {name!r} for a sample of prompt {group.ordinal}, which others have")
            values.append(numbers.get(name, 0.0))
    return torch.tensor(values, dtype=torch.float64)


def prompt_columns(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """The prompts' other columns, a value for each sample."""
    rows: list[Mapping[str, Any]] = [group.item.row for group in groups for _ in group.trajectories]
    return {name: object_array(row[name] for row in rows) for name in rows[0]} if rows else {}


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`episode/<name>`: the mean of each number of the episodes, over those that have it."""
    found: dict[str, list[float]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            for name, value in trajectory.metrics.items():
                found.setdefault(f"episode/{name}", []).append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}
