"""TrajectoryStore: the tokens of finished episodes in the process that ran them, until they are trained.

The driver gets a TrajectoryRef of each episode, one number a row.  Columns are jagged, one row an episode: prompts, responses and
policy_version int32, response_mask bool, rollout_log_probs float32; where the workflow or its tools gave rewards also
given_rewards and added_rewards float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor

from rlhub.agents.trajectory import NOT_SAMPLED, Episode, Trajectory, TrajectoryRef, last_written, moved_inside
from rlhub.checkpoint.files import FileEntry, RawTensor, write_safetensors
from rlhub.errors import WorkflowError
from rlhub.protocol import ColumnStore, DataProto
from rlhub.protocol.columns import dense_rows, jagged

PROMPTS, RESPONSES, MASK, LOG_PROBS, VERSIONS = "prompts", "responses", "response_mask", "rollout_log_probs", "policy_version"
SCORES, ADDED = "given_rewards", "added_rewards"
WIDE: dict[str, torch.dtype] = {
    PROMPTS: torch.int32,
    RESPONSES: torch.int32,
    MASK: torch.bool,
    LOG_PROBS: torch.float32,
    VERSIONS: torch.int32,
    SCORES: torch.float32,
    ADDED: torch.float32,
}
"""The columns; the last two are those that only some episodes have."""
_CODES = {torch.int32: "I32", torch.bool: "BOOL", torch.float32: "F32", torch.int64: "I64"}
_LENGTHS = ".lengths"


@dataclass(slots=True, frozen=True)
class RowRequest:
    """The rows to read, one key each.

    names: of the columns; a row without rewards has zeros in theirs.  oldest: by row, tokens of versions before it are masked.
    rewards: by row, the reward that its last token gets; None leaves the row's own.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    oldest: tuple[int, ...] = ()
    rewards: tuple[float | None, ...] = ()

    @classmethod
    def of(cls, rows: Sequence[TrajectoryRef], names: tuple[str, ...]) -> RowRequest:
        """Returns the request for columns of these rows, which are in one process."""
        oldest = tuple(row.oldest for row in rows) if any(row.oldest > NOT_SAMPLED for row in rows) else ()
        rewards = tuple(row.late_reward for row in rows) if any(row.late_reward is not None for row in rows) else ()
        return cls(tuple(row.key for row in rows), names, oldest, rewards)


def wide_names(rows: Iterable[TrajectoryRef]) -> tuple[str, ...]:
    """Returns the names of the columns of a batch of these rows."""
    rows = list(rows)
    scored = (SCORES,) if any(row.rewards is not None for row in rows) else ()
    added = (ADDED,) if any(row.added_rewards is not None for row in rows) else ()
    return PROMPTS, RESPONSES, MASK, LOG_PROBS, VERSIONS, *scored, *added


class TrajectoryStore:
    """Keeps the columns of this process's finished episodes.

    home: the process's name in references.  vocab_size: token ids from it on are refused; None: all are taken.
    """

    def __init__(self, home: str, *, vocab_size: int | None = None) -> None:
        self.home, self.vocab_size = home, vocab_size
        self._store = ColumnStore()
        self._names: dict[str, frozenset[str]] = {}

    def keep(self, key: str, trajectory: Trajectory) -> TrajectoryRef:
        """Takes the tokens of an episode that has ended.  Raises ValueError or WorkflowError for one that cannot be trained."""
        trajectory.check()
        columns = columns_of(trajectory)
        check_columns(f"episode {key}", columns, self.vocab_size)
        self._put(key, columns)
        return TrajectoryRef.of(trajectory, self.home, key)

    def keep_episode(self, key: str, episode: Episode) -> Episode:
        """Takes the tokens of an episode of several trajectories as rows `key.0`, `key.1` and so on.  Raises what `keep` does."""
        episode.check()
        whole = [row for row in episode.trajectories if isinstance(row, Trajectory)]
        for number, row in enumerate(whole):  # before any is taken: none of a bad episode stays
            check_columns(f"episode {key}.{number}", columns_of(row), self.vocab_size)
        refs = [self.keep(f"{key}.{number}", row) for number, row in enumerate(whole)]
        return Episode(trajectories=refs, metrics=episode.metrics)

    def forget(self, key: str) -> None:
        """Drops the rows that `keep` or `keep_episode` took under this key, if there are any."""
        self.drop([name for name in self._names if name == key or name.rpartition(".")[0] == key])

    def _put(self, key: str, columns: Mapping[str, Tensor]) -> None:
        self._store.put(key, {name: _row(values) for name, values in columns.items()})
        self._names[key] = frozenset(columns)

    def read(self, request: RowRequest) -> DataProto:
        """Returns these rows.  Raises ColumnStoreError for one that is not here."""
        return joined_rows([self._flat(key, request.names) for key in request.keys], request)

    def _flat(self, key: str, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns the values of a row."""
        missing = {SCORES, ADDED} - self._names.get(key, frozenset())
        found = self._store.take(key, [name for name in names if name not in missing])
        return {name: dense_rows(column)[0] for name, column in found.items()}

    def responses(self, keys: Sequence[str]) -> list[list[int]]:
        """Returns the response tokens of these rows.  Raises ColumnStoreError for one that is not here."""
        return [self._flat(key, [RESPONSES])[RESPONSES].tolist() for key in keys]

    def drop(self, keys: Iterable[str]) -> None:
        """Forgets rows: they are trained, or will not be."""
        for key in keys:
            self._store.drop(key)
            self._names.pop(key, None)

    def size(self) -> tuple[int, int]:
        """Returns the number of rows, and their bytes."""
        return len(self._names), self._store.nbytes()

    def save(self, path: Path, keys: Sequence[str]) -> FileEntry:
        """Writes these rows to a file of a checkpoint, in the order of the keys."""
        data = self.read(RowRequest(tuple(keys), tuple(WIDE)))
        return write_safetensors(path, [raw for name in WIDE for raw in _raw(name, data.batch[name])])

    def load(self, path: Path, keys: Sequence[str]) -> None:
        """Takes the rows of a file that `save` wrote with these keys."""
        entries = load_file(str(path))
        parts = {name: torch.split(entries[name], entries[name + _LENGTHS].tolist()) for name in WIDE}
        for number, key in enumerate(keys):
            self._put(key, {name: parts[name][number].clone() for name in WIDE})


def check_columns(what: str, columns: Mapping[str, Tensor], vocab_size: int | None) -> None:
    """Raises WorkflowError for a row that would corrupt training silently.  what: names it; vocab_size: None takes all ids."""
    tokens = columns[RESPONSES]
    outside = tokens < 0 if vocab_size is None else (tokens < 0) | (tokens >= vocab_size)
    if outside.any():
        raise WorkflowError(f"{what} has token id {int(tokens[outside][0])}, outside the vocabulary of {vocab_size}")
    if not columns[LOG_PROBS].isfinite().all():
        raise WorkflowError(f"{what} has a log-prob that is not finite; check dtype and sampling settings")


def joined_rows(rows: Sequence[dict[str, Tensor]], request: RowRequest) -> DataProto:
    """Returns the rows of a request, given by their columns (length,) each, masked and rewarded as it says."""
    for columns in rows:
        columns |= {name: torch.zeros(len(columns[RESPONSES])) for name in request.names if name not in columns}
    for columns, oldest in zip(rows, request.oldest, strict=False):
        _mask_older(columns, oldest)
    for columns, reward in zip(rows, request.rewards, strict=False):
        _set_reward(columns, reward)
    joined = {name: _join([columns[name] for columns in rows], WIDE[name]) for name in request.names}
    return DataProto(TensorDict(joined, batch_size=[len(rows)]))


def columns_of(trajectory: Trajectory) -> dict[str, Tensor]:
    """Returns the columns of one episode, each (length,)."""
    values = {
        PROMPTS: trajectory.prompt_ids,
        RESPONSES: trajectory.response_ids,
        MASK: trajectory.response_mask,
        LOG_PROBS: trajectory.rollout_log_probs,
        VERSIONS: trajectory.versions,
        SCORES: trajectory.rewards,
        ADDED: trajectory.added_rewards,
    }
    return {name: torch.tensor(found, dtype=WIDE[name]) for name, found in values.items() if found is not None}


def trajectories_of(rows: Sequence[TrajectoryRef], data: DataProto) -> list[Trajectory]:
    """Returns the episodes of rows that were read, in order."""
    parts = {name: column.unbind() for name, column in data.tensors().items()}

    def values(name: str, row: int) -> list[float]:
        return parts[name][row].tolist()

    return [
        Trajectory(
            prompt_ids=parts[PROMPTS][number].tolist(),
            response_ids=parts[RESPONSES][number].tolist(),
            response_mask=parts[MASK][number].int().tolist(),
            rollout_log_probs=values(LOG_PROBS, number),
            versions=parts[VERSIONS][number].tolist(),
            finish_reason=row.finish_reason,
            rewards=None if row.rewards is None else values(SCORES, number),
            added_rewards=None if row.added_rewards is None else values(ADDED, number),
            metrics=row.metrics,
            comparison=row.comparison,
        )
        for number, row in enumerate(rows)
    ]


def _row(values: Tensor) -> Tensor:
    return jagged(values, torch.tensor([len(values)]))


def _join(rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    values = torch.cat([torch.empty(0, dtype=dtype), *rows])
    return jagged(values, torch.tensor([len(row) for row in rows], dtype=torch.int64))


def _mask_older(columns: dict[str, Tensor], oldest: int) -> None:
    if oldest <= NOT_SAMPLED:
        return
    columns[MASK] = columns[MASK] & (columns[VERSIONS] >= oldest)
    for name in (SCORES, ADDED):
        if name in columns:
            columns[name] = torch.tensor(moved_inside(columns[name].tolist(), columns[MASK].tolist()), dtype=WIDE[name])


def _set_reward(columns: dict[str, Tensor], reward: float | None) -> None:
    if reward is not None:
        columns[SCORES] = torch.zeros(len(columns[RESPONSES]))
        last = last_written(columns[MASK].tolist())
        if last is not None:
            columns[SCORES][last] = reward


def _raw(name: str, column: Tensor) -> list[RawTensor]:
    values, lengths = dense_rows(column)
    return [_raw_tensor(name, values), _raw_tensor(name + _LENGTHS, lengths)]


def _raw_tensor(name: str, values: Tensor) -> RawTensor:
    return RawTensor(
        name=name,
        dtype=_CODES[values.dtype],
        shape=tuple(values.shape),
        num_bytes=values.nbytes,
        data=partial(_memory, values.contiguous()),
    )


def _memory(values: Tensor) -> memoryview:
    array: Any = values.numpy()
    return memoryview(array).cast("B") if values.numel() else memoryview(b"")
