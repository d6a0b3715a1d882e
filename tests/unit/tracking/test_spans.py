"""What ran when: kept from any thread, bounded, cheap, and the same after a way through a trace file."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from rlhub.single_controller.calls import ObservedCall
from rlhub.tracking.spans import (
    STEPS,
    TRAINER,
    CallTiming,
    EpisodeSpans,
    Span,
    SpanLog,
    episode_lane,
    ignore_span,
    is_episode,
    lanes_of,
    read_trace,
    write_trace,
)
from rlhub.utils.collector import without_collector
from rlhub.utils.timing import PhaseTimer


def span(lane: str, name: str, start: float, end: float) -> Span:
    return Span(lane=lane, name=name, start=start, end=end)


def test_spans_of_many_threads_are_all_kept_up_to_the_bound() -> None:
    log, count = SpanLog(capacity=3000), 1000

    def work(lane: str) -> None:
        for number in range(count):
            log.record(lane, str(number), float(number), number + 1.0)
            assert len(log.latest()) <= 3000  # copied while others write

    threads = [threading.Thread(target=work, args=(f"replica {n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lane in ("replica 0", "replica 1", "replica 2"):
        assert [one.name for one in log.latest() if one.lane == lane] == [str(n) for n in range(count)]
    log.record("last", "one", 0.0, 1.0)
    assert len(log.latest()) == 3000 and log.latest()[-1].lane == "last"


def test_the_slowest_episodes_are_kept_and_some_of_the_others() -> None:
    """An episode's wait for its first generation does not make it slow."""
    log = SpanLog()
    episodes = log.episodes = EpisodeSpans(3)
    for number in range(100):
        lane, seconds = episode_lane(number, 0), float(number % 10)
        waits = span(lane, "queue", 0.0, 100.0 - number)
        episodes.add([waits, span(lane, "generate", waits.end, waits.end + seconds)])
    episodes.add([])
    kept = {one.lane for one in log.latest()}
    assert all(is_episode(one) for one in log.latest())
    slow = {lane for lane in kept if lane.endswith("9-0")}
    assert len(slow) >= 3 and 3 <= len(kept) <= 6 and len(log.latest()) == 2 * len(kept)
    assert kept != slow  # drawn at random
    lane = min(kept)
    episodes.extend(span(lane, "reward", 200.0, 201.0))
    episodes.extend(span("episode 1000-0", "reward", 200.0, 201.0))
    assert [one.name for one in log.latest() if one.lane == lane] == ["queue", "generate", "reward"]
    assert {one.lane for one in log.latest()} == kept
    episodes.add([span(lane, "queue", 300.0, 301.0)])  # another attempt
    assert [one.name for one in log.latest() if one.lane == lane][-1] == "queue"


def test_a_stretch_costs_next_to_nothing() -> None:
    log = SpanLog()
    with without_collector():  # else all that the tests before have made may be looked through in here
        begin = time.thread_time()
        for _ in range(10_000):
            log.record("lane", "name", 0.0, 1.0, tokens=3)
        spent = time.thread_time() - begin
    assert spent / 10_000 < 50e-6


def test_blocks_are_measured_and_end_with_an_error_too() -> None:
    log = SpanLog()
    with pytest.raises(ValueError, match="no"), log.measure("validation", "step 4", version=3):
        raise ValueError("no")
    (one,) = log.latest()
    assert (one.lane, one.name, one.args) == ("validation", "step 4", {"version": 3}) and one.end >= one.start


def test_phases_and_calls_become_spans() -> None:
    log = SpanLog()
    timer = PhaseTimer(log.block)
    calls = CallTiming(timer, record=log.record)
    with timer.measure("sample"):
        calls.on_end(ObservedCall(role="actor", method="update_actor", blocking=True, workers=()), 0.25, None)
        calls.on_end(ObservedCall(role="critic", method="update_critic", blocking=True, workers=()), 0.5, KeyError("x"))

    def elsewhere() -> None:
        with timer.measure("deliver"):
            pass

    thread = threading.Thread(target=elsewhere, name="publish_0")
    thread.start()
    thread.join()
    found = {(one.lane, one.name): one for one in log.latest()}
    assert list(found) == [("actor", "update_actor"), ("critic", "update_critic"), (TRAINER, "sample"), ("publish_0", "deliver")]
    update = found["actor", "update_actor"]
    assert update.end - update.start == pytest.approx(0.25) and not update.args
    assert found["critic", "update_critic"].args == {"failed": "KeyError"}
    block = found[TRAINER, "sample"]
    assert block.start <= update.end <= block.end
    CallTiming(PhaseTimer()).on_end(ObservedCall(role="actor", method="x", blocking=True, workers=()), 1.0, None)  # without a log
    ignore_span("a", "b", 0.0, 1.0, more=1)


def test_a_trace_is_in_the_viewers_format_and_reads_back(tmp_path: Path) -> None:
    spans = [
        Span(lane="replica 1", name="pause </script>", start=12.5, end=12.75, args={"version": 2, "why": "weights"}),
        span(TRAINER, "update_actor", 11.0, 12.5),
        span(STEPS, "step 1", 11.0, 13.0),
        span("replica 1", "ended before it began", 13.0, 12.9),
    ]
    path = tmp_path / "trace.json"
    write_trace(path, spans)
    written = json.loads(path.read_text())
    events = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 and {"name", "pid", "tid", "args"} <= event.keys() for event in events)
    names = {event["tid"]: event["args"]["name"] for event in written["traceEvents"] if event["name"] == "thread_name"}
    assert list(names.values()) == lanes_of(spans) == [STEPS, TRAINER, "replica 1"]
    assert [names[event["tid"]] for event in events] == [one.lane for one in spans]
    assert (events[0]["ts"], events[0]["dur"]) == (12.5e6, 0.25e6)
    back = read_trace(path)
    assert back[:3] == spans[:3] and back[3].start == back[3].end == 13.0


def test_what_is_no_trace_has_no_spans(tmp_path: Path) -> None:
    assert read_trace(tmp_path / "nothing") == []
    for content in ("", "{", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}'):
        (tmp_path / "trace.json").write_text(content)
        assert read_trace(tmp_path / "trace.json") == []


def test_a_full_trace_is_small(tmp_path: Path) -> None:
    log = SpanLog()
    for number in range(30_000):
        log.record(f"replica {number % 8}", "generate_sequences", 1e5 + number, 1e5 + number + 0.5, tokens=number)
    write_trace(tmp_path / "trace.json", log.latest())
    assert (tmp_path / "trace.json").stat().st_size < 4e6
