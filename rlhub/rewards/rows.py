"""The part of scoring that reads tokens: responses become texts, and the reward function's processes score them.

It runs wherever the rows are: on the ranks that generated them while these do other work (`BackgroundScorer`), in the processes
of episodes (`RowScorer`), or on the driver.  Outcomes then travel as columns (`PackedOutcomes`), a few bytes a row; managers.py
makes a batch's rewards of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlhub.errors import RewardError
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
    """Outcomes of rows as they travel between processes; arrays travel as bytes, which are half as many for few rows.

    scores: (rows,) float64.  details: for each name the rows that have it, int32 (None: all of them), and their values: a type
    and its numbers where all are of one type.  failures: the row, kind and message of each.
    """

    scores: bytes
    details: dict[str, tuple[bytes | None, tuple[str, bytes] | list[Any]]]
    failures: list[tuple[int, RewardFailureKind, str]]


def pack_outcomes(outcomes: Sequence[RewardOutcome]) -> PackedOutcomes:
    """Returns the outcomes as columns, from which `unpack_outcomes` makes equal ones."""
    details: dict[str, tuple[bytes | None, tuple[str, bytes] | list[Any]]] = {}
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome.details):
        rows = [row for row, outcome in enumerate(outcomes) if name in outcome.details]
        places = None if len(rows) == len(outcomes) else np.array(rows, dtype=np.int32).tobytes()
        details[name] = places, _packed([outcomes[row].details[name] for row in rows])
    failures = [(row, one.error.kind, one.error.message) for row, one in enumerate(outcomes) if one.error is not None]
    return PackedOutcomes(np.array([outcome.score for outcome in outcomes], dtype=np.float64).tobytes(), details, failures)


def _packed(values: list[Any]) -> tuple[str, bytes] | list[Any]:
    kinds = set(map(type, values))
    dtype = _ARRAYS.get(kinds.pop()) if len(kinds) == 1 else None
    try:
        return values if dtype is None else (np.dtype(dtype).char, np.array(values, dtype=dtype).tobytes())
    except OverflowError:  # an integer beyond int64
        return values


def unpack_outcomes(packed: PackedOutcomes) -> list[RewardOutcome]:
    """Returns the outcomes, in the rows' order."""
    scores: list[float] = np.frombuffer(packed.scores).tolist()
    details: list[dict[str, Any]] = [{} for _ in scores]
    for name, (places, values) in packed.details.items():
        rows = range(len(details)) if places is None else np.frombuffer(places, dtype=np.int32).tolist()
        found = values if isinstance(values, list) else np.frombuffer(values[1], dtype=values[0]).tolist()
        for row, value in zip(rows, found, strict=True):
            details[row][name] = value
    errors = {row: RewardFailure(kind=kind, message=message) for row, kind, message in packed.failures}
    return [
        RewardOutcome(score=score, details=found, error=errors.get(row))
        for row, (score, found) in enumerate(zip(scores, details, strict=True))
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


@dataclass(slots=True)
class _ScoringRequest:
    rows: Sequence[RewardRequest]
    outcomes: asyncio.Future[list[RewardOutcome]]


class RowScorer:
    """Scores rows for many callers on one event loop; requests that come while the function's processes are at work are scored
    together in their next turn."""

    def __init__(self, pool: RewardPool, tokenizer: Decoder) -> None:
        self._pool, self._tokenizer = pool, tokenizer
        self._waiting: list[_ScoringRequest] = []
        self._work: asyncio.Task[None] | None = None

    async def score(self, prompt: Mapping[str, Any], responses: list[list[int]]) -> list[RewardOutcome]:
        """Returns the outcome of each of the responses to a prompt, given as tokens.

        prompt: has REWARD_FIELDS.  Raises LoadError.
        """
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True) if responses else []
        return await self._score([request_of(prompt, text) for text in texts])

    async def score_text(self, row: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
        """Is `agents.workflows.base.Score`, for workflows that want the reward of a turn."""
        (outcome,) = await self._score([request_of(row, text)])
        if outcome.error is not None:
            raise RewardError(f"scoring a turn failed: {outcome.error.kind}: {outcome.error.message}")
        numbers = ((name, item) for name, item in outcome.details.items() if isinstance(item, bool | int | float))
        return outcome.score, {name: float(item) for name, item in numbers}

    async def _score(self, rows: Sequence[RewardRequest]) -> list[RewardOutcome]:
        if not rows:
            return []
        loop = asyncio.get_running_loop()
        request = _ScoringRequest(rows, loop.create_future())
        self._waiting.append(request)
        if self._work is None:
            self._work = loop.create_task(self._run())
        return await request.outcomes

    async def _run(self) -> None:
        await self._gather()
        while self._waiting:
            requests, self._waiting = self._waiting, []
            rows = [row for request in requests for row in request.rows]
            try:
                found = iter(await asyncio.to_thread(self._pool.score, rows))
            except Exception as error:  # noqa: BLE001  the thread's boundary: whoever asked gets the error
                for request in requests:
                    if not request.outcomes.done():
                        request.outcomes.set_exception(error)
                continue
            for request in requests:
                outcomes = [next(found) for _ in request.rows]
                if not request.outcomes.done():
                    request.outcomes.set_result(outcomes)
        self._work = None

    async def _gather(self) -> None:
        """Groups that end together ask in one pass of the loop after the other: waits for the first in which none does."""
        known = 0
        while len(self._waiting) > known:
            known = len(self._waiting)
            await asyncio.sleep(0)

    def close(self) -> None:
        """Ends the reward function's processes."""
        self._pool.close()


def request_of(prompt: Mapping[str, Any], text: str) -> RewardRequest:
    """Returns what the reward function reads of a response to this prompt."""
    return RewardRequest(
        data_source=prompt["data_source"],
        solution_str=text,
        ground_truth=prompt["ground_truth"],
        extra_info=prompt["extra_info"],
    )


async def no_turn_scores(row: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
    """Is `agents.workflows.base.Score` where no function judges a row alone."""
    raise RewardError("a workflow asks for the reward of a turn, but no reward function is on: set reward_model.function_weight")
