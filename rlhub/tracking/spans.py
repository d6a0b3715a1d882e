"""The timeline of a run: named spans of time on lanes, for the report's Gantt chart and for a trace viewer.

    spans = SpanLog()
    spans.record("publication", "version 3", start, end, bytes=1 << 20)     # from any thread
    with spans.measure("validation", "step 20"):
        ...
    write_trace(folder.trace, spans.latest())                               # Perfetto and chrome://tracing open it

Times are those of `time.perf_counter()`, in seconds; on Linux it is one clock for all processes of a machine, so a span that
another process has measured there can be recorded as it is.  Only the newest spans are kept: a run may be long.

CallTiming times worker-group calls in dispatch, and counts what they carry: the training loop itself does neither.
"""

from __future__ import annotations

import heapq
import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlhub.utils.atomic import write_text
from rlhub.utils.timing import PhaseTimer

if TYPE_CHECKING:  # its package loads torch, which readers of a trace do not need
    from rlhub.single_controller.calls import ObservedCall

CAPACITY = 20_000
"""Number of spans that are kept: about 3 MB of trace, and some hundred steps of a run with a dozen replicas."""

EPISODES = 12
"""Number of the slowest episodes whose spans are kept, and of those that are drawn at random."""

STEPS = "steps"
"""The lane whose spans are the training steps."""
TRAINER = "trainer"
"""The lane of the training loop's own work between worker calls."""

BYTES_OUT, BYTES_IN, CALLS = "perf/driver_bytes_out", "perf/driver_bytes_in", "perf/driver_calls"
BYTES_PROMPTS = "perf/driver_bytes_prompts"
PROMPT_CALLS = ("generate_sequences", "begin_scoring", "take_prompt")
"""Methods that carry the data's columns: the tokens of prompts, and what a reward function reads beside responses."""

EPISODE = "episode"
"""The first word of the lanes of single episodes, of which only some are kept."""

AHEAD = "episodes"
"""Name of the thread that waits for episodes while the training loop goes on: its calls are no phases of a step."""

MICROSECONDS = 1e6
_PID = 1

Value = str | int | float | bool


@dataclass(slots=True, kw_only=True, frozen=True)
class Span:
    """A span of time in seconds.

    lane: what was busy (a role, a replica, "publication"); name: the work; args: details for the reader.
    """

    lane: str
    name: str
    start: float
    end: float
    args: Mapping[str, Value] = field(default_factory=dict)


def episode_lane(ordinal: int, sample: int) -> str:
    """Returns the lane of an episode: sample number `sample` of the prompt with number `ordinal`."""
    return f"{EPISODE} {ordinal}-{sample}"


def is_episode(span: Span) -> bool:
    """Returns whether the span is one of a single episode."""
    return span.lane.startswith(f"{EPISODE} ")


class RecordSpan(Protocol):
    """Records a span, for packages that do not import this one: `SpanLog.record`, or `ignore_span`."""

    def __call__(self, lane: str, name: str, start: float, end: float, /, **args: Value) -> None: ...


def ignore_span(lane: str, name: str, start: float, end: float, /, **args: Value) -> None:
    """Records nothing, for runs without a trace."""


class EpisodeSpans:
    """Keeps the spans of the slowest episodes of a run, and of as many drawn at random.  An episode's time counts from the end of
    its first span, in which it waits."""

    def __init__(self, count: int = EPISODES) -> None:
        self.count = count
        self._kept: dict[str, list[Span]] = {}
        self._slowest: list[tuple[float, int, str]] = []
        self._drawn: list[str] = []
        self._num_added = 0
        self._chance = random.Random(0)  # its own, so that a run's numbers do not depend on its trace
        self._lock = threading.Lock()

    def add(self, spans: Sequence[Span]) -> None:
        """Takes the spans of an episode, or of one more attempt at it."""
        if not spans:
            return
        lane, seconds = spans[0].lane, max(span.end for span in spans) - spans[0].end
        with self._lock:
            self._num_added += 1
            if lane in self._kept:
                self._kept[lane] += spans
                return
            heapq.heappush(self._slowest, (seconds, self._num_added, lane))
            if len(self._slowest) > self.count:
                heapq.heappop(self._slowest)
            place = len(self._drawn) if len(self._drawn) < self.count else self._chance.randrange(self._num_added)
            if place < self.count:
                self._drawn[place : place + 1] = [lane]
            wanted = {*self._drawn, *(slow for *_, slow in self._slowest)}
            self._kept = {name: kept for name, kept in (self._kept | {lane: list(spans)}).items() if name in wanted}

    def extend(self, span: Span) -> None:
        """Adds a span to its episode, if that is kept."""
        with self._lock:
            if span.lane in self._kept:
                self._kept[span.lane].append(span)

    def latest(self) -> list[Span]:
        """Returns the spans of the episodes that are kept."""
        with self._lock:
            return [span for spans in self._kept.values() for span in spans]


class SpanLog:
    """Keeps the newest spans; recording one costs about a microsecond.  episodes: those of some single episodes."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.episodes = EpisodeSpans()
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._lock = threading.Lock()  # a deque must not grow while it is copied

    def record(self, lane: str, name: str, start: float, end: float, /, **args: Value) -> None:
        """Adds a span that has ended."""
        span = Span(lane=lane, name=name, start=start, end=end, args=args)
        with self._lock:
            self._spans.append(span)

    @contextmanager
    def measure(self, lane: str, name: str, /, **args: Value) -> Iterator[None]:
        """Records the block's span, also when the block raises an exception."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.record(lane, name, start, time.perf_counter(), **args)

    def block(self, name: str, start: float, end: float) -> None:
        """Records a block of a PhaseTimer on the lane TRAINER, or on another thread's own lane."""
        thread = threading.current_thread()
        self.record(TRAINER if thread is threading.main_thread() else thread.name, name, start, end)

    def latest(self) -> list[Span]:
        """Returns the spans that are kept, in the order in which they ended, and after them those of single episodes."""
        with self._lock:
            return [*self._spans, *self.episodes.latest()]


class CallTiming:
    """Observes worker-group calls, and adds each call's seconds to the timer under the method's name.

    Of calls that run at the same time, each counts from the end of the call that ended before it, so that the phases still add up
    to the elapsed time.  on_phase: receives the method's name when a call starts.  record: receives each call's whole span, on
    the lane of its role.

    It also counts the calls' traffic through the driver; see `traffic`.
    """

    def __init__(
        self, timer: PhaseTimer, on_phase: Callable[[str], None] | None = None, record: RecordSpan = ignore_span
    ) -> None:
        self._timer = timer
        self._record = record
        self._on_phase = on_phase
        self._last_end = 0.0
        self._lock = threading.Lock()
        self._traffic: dict[str, float] = {}
        self.reset_traffic()

    def reset_traffic(self) -> None:
        """Starts counting traffic from zero."""
        with self._lock:
            self._traffic = dict.fromkeys((BYTES_OUT, BYTES_IN, CALLS), 0.0)

    def traffic(self) -> dict[str, float]:
        """Returns perf/driver_{bytes_out,bytes_in,calls} since `reset_traffic`, and perf/driver_bytes_prompts where a worker
        group generated or scored: bytes of arguments and of results, and calls of ranks (a call of four ranks counts four)."""
        with self._lock:
            return dict(self._traffic)

    def _count(self, name: str, amount: int) -> None:
        with self._lock:
            self._traffic[name] = self._traffic.get(name, 0.0) + amount

    def on_start(self, call: ObservedCall) -> None:
        self._count(CALLS, len(call.workers))
        if self._on_phase is not None and threading.current_thread().name != AHEAD:
            self._on_phase(call.method)

    def on_end(self, call: ObservedCall, seconds: float, error: BaseException | None) -> None:
        now = time.perf_counter()
        failed = {} if error is None else {"failed": type(error).__name__}
        self._record(call.role, call.method, now - seconds, now, **failed)
        if threading.current_thread().name == AHEAD:
            return
        if error is None:
            self._timer.add(call.method, min(seconds, now - self._last_end))
        self._last_end = now

    def on_transfer(self, call: ObservedCall, *, sent: int = 0, received: int = 0) -> None:
        self._count(BYTES_OUT, sent)
        self._count(BYTES_IN, received)
        if call.method in PROMPT_CALLS:
            self._count(BYTES_PROMPTS, sent)


def lanes_of(spans: Sequence[Span]) -> list[str]:
    """Returns the lanes in the order of a drawing: steps, the trainer, then the others by name."""
    found = {span.lane for span in spans}
    return [lane for lane in (STEPS, TRAINER) if lane in found] + sorted(found - {STEPS, TRAINER})


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Writes a file in Chrome's trace event format (JSON object form), which Perfetto reads too, in place of the old one.

    Every lane is a thread of one process; times are microseconds.
    """
    lanes = {lane: number for number, lane in enumerate(lanes_of(spans), 1)}
    events: list[dict[str, object]] = [
        event
        for lane, number in lanes.items()
        for event in (
            {"ph": "M", "name": "thread_name", "pid": _PID, "tid": number, "args": {"name": lane}},
            {"ph": "M", "name": "thread_sort_index", "pid": _PID, "tid": number, "args": {"sort_index": number}},
        )
    ]
    for span in spans:
        start, length = span.start * MICROSECONDS, max(0.0, span.end - span.start) * MICROSECONDS
        event = {"ph": "X", "name": span.name, "pid": _PID, "tid": lanes[span.lane], "ts": round(start, 1)}
        events.append({**event, "dur": round(length, 1), "args": dict(span.args)})
    write_text(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")))


def read_trace(path: Path) -> list[Span]:
    """Returns the spans of a file of `write_trace`; [] where there is none."""
    try:
        events = json.loads(path.read_bytes())["traceEvents"]
        lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        return [
            Span(
                lane=lanes[event["tid"]],
                name=event["name"],
                start=event["ts"] / MICROSECONDS,
                end=(event["ts"] + event["dur"]) / MICROSECONDS,
                args=event["args"],
            )
            for event in events
            if event["ph"] == "X"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []
