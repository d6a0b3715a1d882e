"""RewardPool: scores from a function of the user's own, which may hang, crash or return no number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.utils import faults
from rlhub.utils.children.access import Access
from rlhub.utils.children.pool import CallResult, KillablePool, default_num_workers

RewardFailureKind = Literal["raised", "timeout", "died", "memory", "bad_value", "bad_input", "skipped"]
LARGEST_SCORE = 3.4e38  # float32, the dtype of the reward columns
PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """The arguments of one `compute_score` call.  ground_truth and extra_info: anything with a JSON form, arrays, bytes."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """The reason why a sample has no score.

    bad_value: the function returned no finite number; bad_input: the row cannot be sent to the function; skipped: it was not
    scored, because more samples had failed than the caller allows.
    """

    kind: RewardFailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """The score of one sample.  score: 0.0 where `error` is set; details: the other entries of a returned dict."""

    score: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    error: RewardFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """The reward function and the limits of its processes, as they travel to the ranks; see RewardPool.

    num_workers: processes on a machine; None: one per CPU core, at most 4.
    """

    target: str
    sources: Mapping[str, str] = field(default_factory=dict)
    num_workers: int | None = None
    timeout_s: float = 30.0
    memory_gb: float = 4.0
    env: tuple[str, ...] = ()

    def pool(self, share: int = 0, num_shares: int = 1) -> RewardPool:
        """Returns a pool with this one of the even shares of a machine's processes; each share has at least one."""
        number, more = divmod(self.num_workers or default_num_workers(), num_shares)
        return RewardPool(
            self.target,
            sources=self.sources,
            num_workers=max(1, number + (share < more)),
            timeout_s=self.timeout_s,
            memory_gb=self.memory_gb,
            env=self.env,
        )


class RewardPool:
    """Scores samples in killable processes.  target: `"/path/to/file.py:name"` or `"package.module:name"` of the function."""

    def __init__(
        self,
        target: str,
        *,
        sources: Mapping[str, str] | None = None,
        num_workers: int | None = None,
        timeout_s: float = 30.0,
        memory_gb: float = 4.0,
        env: Sequence[str] = (),
    ) -> None:
        """sources: by data_source, the function that scores its samples instead.  timeout_s: seconds for one sample, without the
        time of imports; memory_gb: address space of one process, in GiB; num_workers: largest number of processes, which start as
        needed; env: environment variables that the function may read although they look like secrets."""
        access = Access(setting="custom_reward_function.env", env=tuple(env))
        self._target, self._may_fail = target, faults.may_strike("reward.call")
        self._sources = dict(sources or {})
        self._pool = KillablePool(
            *self._in_child(), num_workers=num_workers, timeout_s=timeout_s, memory_gb=memory_gb, access=access
        )

    def start(self) -> None:
        """Loads the function in a first process.  Raises LoadError with its traceback, and ConfigError for `env`."""
        self._pool.start()

    def score(self, requests: Sequence[RewardRequest], *, max_failures: int | None = None) -> list[RewardOutcome]:
        """Blocks, and returns one outcome for each request, in order, within the deadlines whatever the function does.

        max_failures: after more failures the other requests are skipped; None: all are scored.
        """
        calls = [_arguments(request) for request in requests]
        if self._names_target:
            struck = faults.at("reward.call") if calls and self._may_fail else None
            calls = [
                {"target": self._target_of(request), "fault": struck if number == 0 else None, "arguments": call}
                for number, (request, call) in enumerate(zip(requests, calls, strict=True))
            ]
        outcomes = self._pool.map(calls, max_failures=max_failures)
        return [read_outcome(outcome) for outcome in outcomes]

    @property
    def _names_target(self) -> bool:
        """Returns whether each call names its function: where sources have their own, or faults are planned."""
        return self._may_fail or bool(self._sources)

    def _target_of(self, request: RewardRequest) -> str:
        return self._sources.get(request.data_source, self._target)

    def _in_child(self) -> tuple[str, tuple[str, ...]]:
        """Returns the function that the processes load and its parameters; one that calls others, where calls name theirs."""
        return (faults.FAULTY_CALL, faults.FAULTY_CALL_PARAMETERS) if self._names_target else (self._target, PARAMETERS)

    def close(self) -> None:
        self._pool.close()


def _arguments(request: RewardRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in PARAMETERS}


def read_outcome(outcome: CallResult) -> RewardOutcome:
    """Returns the outcome of a number (True and False are 1 and 0), or of a dict with one under "score"; else a bad_value."""
    if outcome.failure is not None:
        kinds: dict[str, RewardFailureKind] = {"bad_argument": "bad_input", "bad_result": "bad_value"}
        failure = outcome.failure
        return RewardOutcome(error=RewardFailure(kind=kinds.get(failure.kind, failure.kind), message=failure.message))  # type: ignore[arg-type]
    value, details = outcome.value, {}
    if isinstance(value, dict):
        if "score" not in value:
            return _bad_value(f'a dict without "score": keys {sorted(value)[:10]}')
        value, details = value["score"], {key: item for key, item in value.items() if key != "score"}
    if not isinstance(value, bool | int | float):
        return _bad_value(f"{'None' if value is None else type(value).__name__ + ' ' + repr(value)[:80]}")
    if not abs(value) <= LARGEST_SCORE:  # also true of NaN
        return _bad_value(f"{value}, which is no finite float32" if not isinstance(value, int) else "an integer beyond float32")
    return RewardOutcome(score=float(value), details=details)


def _bad_value(got: str) -> RewardOutcome:
    return RewardOutcome(
        error=RewardFailure(kind="bad_value", message=f'returned {got}; expected a finite number or a dict with "score"')
    )
