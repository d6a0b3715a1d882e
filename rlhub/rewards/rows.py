"""The part of scoring that reads tokens: responses become texts, and the reward function's processes score them.

It runs wherever the rows are: on the ranks that generated them while these do other work (`BackgroundScorer`), or on the driver.
Outcomes then travel as columns (`PackedOutcomes`), a few bytes a row; managers.py makes a batch's rewards of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlhub.protocol import Batch, DataProto
from rlhub.rewards.pool import RewardFailure, RewardFailureKind, RewardOutcome, RewardPool, RewardRequest

ROW_TOKENS = ("responses", "response_length")
"""Columns of tokens that scoring reads."""
REWARD_FIELDS = ("data_source", "ground_truth", "extra_info")
"""Columns of the data that scoring reads: the same object for all samples of a prompt."""
_ARRAYS: dict[type, type] = {bool: np.bool_, int: np.int64, float: np.float64}


class Decoder(Protocol):
    """The part of a tokenizer that scoring uses."""

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool = False) -> list[str]: ...


def response_texts(batch: DataProto, tokenizer: Decoder, rows: Sequence[int] | None = None) -> list[str]:
    """Returns the responses without padding and special tokens, those of an environment's tokens included.  rows: None: all."""
    responses, lengths = batch.batch["responses"], batch.batch["response_length"].tolist()
    chosen = range(len(lengths)) if rows is None else rows
    ids = [responses[row, : lengths[row]].tolist() for row in chosen]
    return tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []  # a tokenizer makes one text of no rows


def score_rows(
    batch: DataProto, tokenizer: Decoder, pool: RewardPool, max_failures: int, rows: Sequence[int] | None = None
) -> list[RewardOutcome]:
    """Returns the outcome of each row.  Blocks until the pool has scored them.

    batch: needs ROW_TOKENS and REWARD_FIELDS.  max_failures: after more failures the other rows are skipped.  rows: None: all.
    """
    columns = [batch.non_tensor_batch[name] for name in REWARD_FIELDS]
    chosen = range(len(batch)) if rows is None else rows
    requests = [
        RewardRequest(data_source=source, solution_str=text, ground_truth=truth, extra_info=info)
        for text, source, truth, info in zip(
            response_texts(batch, tokenizer, chosen), *(column[list(chosen)] for column in columns), strict=True
        )
    ]
    return pool.score(requests, max_failures=max_failures)


def rows_here(batch: Batch) -> DataProto:
    """Returns the rows with all columns in this process; those that the ranks keep are fetched, and their bytes are counted."""
    return batch.select() if isinstance(batch, DataProto) else batch.fetch_all()


class PackedOutcomes(NamedTuple):
    """Outcomes of rows as they travel between processes.

    scores: (rows,) float64.  details: for each name the rows that have it (None: all of them) and their values, an array where
    all are numbers of one type.  failures: the row, kind and message of each.
    """

    scores: np.ndarray
    details: dict[str, tuple[np.ndarray | None, np.ndarray | list[Any]]]
    failures: list[tuple[int, RewardFailureKind, str]]


def pack_outcomes(outcomes: Sequence[RewardOutcome]) -> PackedOutcomes:
    """Returns the outcomes as columns, from which `unpack_outcomes` makes equal ones."""
    details: dict[str, tuple[np.ndarray | None, np.ndarray | list[Any]]] = {}
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome.details):
        rows = [row for row, outcome in enumerate(outcomes) if name in outcome.details]
        places = None if len(rows) == len(outcomes) else np.array(rows, dtype=np.int32)
        details[name] = places, _packed([outcomes[row].details[name] for row in rows])
    failures = [(row, one.error.kind, one.error.message) for row, one in enumerate(outcomes) if one.error is not None]
    return PackedOutcomes(np.array([outcome.score for outcome in outcomes], dtype=np.float64), details, failures)


def _packed(values: list[Any]) -> np.ndarray | list[Any]:
    kinds = set(map(type, values))
    dtype = _ARRAYS.get(kinds.pop()) if len(kinds) == 1 else None
    try:
        return values if dtype is None else np.array(values, dtype=dtype)
    except OverflowError:  # an integer beyond int64
        return values


def unpack_outcomes(packed: PackedOutcomes) -> list[RewardOutcome]:
    """Returns the outcomes, in the rows' order."""
    details: list[dict[str, Any]] = [{} for _ in packed.scores]
    for name, (places, values) in packed.details.items():
        rows = range(len(details)) if places is None else places.tolist()
        for row, value in zip(rows, values if isinstance(values, list) else values.tolist(), strict=True):
            details[row][name] = value
    errors = {row: RewardFailure(kind=kind, message=message) for row, kind, message in packed.failures}
    return [
        RewardOutcome(score=score, details=found, error=errors.get(row))
        for row, (score, found) in enumerate(zip(packed.scores.tolist(), details, strict=True))
    ]


class BackgroundScorer:
    """Scores batches one after the other in a thread of its own, beside whatever its process does."""

    def __init__(self, pool: RewardPool, tokenizer: Decoder) -> None:
        self._pool, self._tokenizer = pool, tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        self._begun: dict[str, Future[list[RewardOutcome]]] = {}

    def begin(self, key: str, batch: DataProto, max_failures: int) -> None:
        """Begins to score the rows of a batch; see `score_rows`."""
        self._begun[key] = self._thread.submit(score_rows, batch, self._tokenizer, self._pool, max_failures)

    def take(self, key: str) -> PackedOutcomes:
        """Waits for the outcomes of the batch that began under this key, and forgets them.  Raises LoadError."""
        return pack_outcomes(self._begun.pop(key).result())

    def close(self) -> None:
        """Ends the reward function's processes; what is not scored by then is not scored."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._pool.close()
