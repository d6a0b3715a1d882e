"""Real children, with functions that do everything a function must not."""

import os
import select
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhub.errors import LoadError
from rlhub.utils.children import pool as pools
from rlhub.utils.children.access import Access
from rlhub.utils.children.pool import CallResult, KillablePool
from rlhub.utils.children.process import ChildRequest, spawn
from tests.support.hanging import SAYS_SO, only_hanging_calls_are_late

FUNCTION = """
import ctypes, glob, os, signal, subprocess, sys, time
KEPT = []

def act(x):
    if x == "raise": raise ValueError("no good")
    if x == "exit": os._exit(3)
    if x == "sys.exit": sys.exit("bye")
    if x == "crash": ctypes.string_at(0)
    if x == "hang":
        SAYS SO
        ctypes.PyDLL(None).sleep(1000)
    if x == "print":
        print("x" * (1 << 26)); print("x" * (1 << 26), file=sys.__stderr__)
    if x == "eat": return len(bytearray(1 << 34))
    if x == "leak": KEPT.append(bytearray(200 << 20))
    if x == "closure": return lambda: x
    if x == "huge": return "x" * (1 << 22)
    if x == "interrupt": raise KeyboardInterrupt
    if x == "close": os.closerange(3, 100)
    if x == "spawn":
        subprocess.Popen(["sh", "-c", "sleep 98765.25 & exit"], start_new_session=True).wait()
        SAYS SO
        while True: pass
    if x == "pid": return os.getpid()
    if x == "meet":  # two children at least
        open(f"{__file__}.{os.getpid()}.met", "w").close()
        while len(glob.glob(f"{__file__}.*.met")) < 2: time.sleep(0.01)
        return os.getpid()
    if x == "modules": return sorted(sys.modules)
    return x

async def later(x): return x
NUMBER = 3
""".replace("SAYS SO", SAYS_SO)
DEADLINE_S = 2.5


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "act.py"
    path.write_text(textwrap.dedent(FUNCTION))
    return f"{path}:act"


@pytest.fixture
def ends_hanging_calls(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_hanging_calls_are_late(monkeypatch, Path(target.removesuffix(":act")))


@pytest.fixture
def make(target: str) -> Iterator[Callable[..., KillablePool]]:
    pools: list[KillablePool] = []

    def build(**settings: object) -> KillablePool:
        pools.append(KillablePool(target, ["x"], **{"num_workers": 1, "timeout_s": 60.0, "memory_gb": 1.0} | settings))  # type: ignore[arg-type]
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def run(pool: KillablePool, *values: object) -> list[CallResult]:
    return pool.map([{"x": value} for value in values])


def kinds(outcomes: list[CallResult]) -> list[str | None]:
    return [None if outcome.failure is None else outcome.failure.kind for outcome in outcomes]


def test_values_come_back_in_order_from_one_persistent_child_without_torch(make: Callable[..., KillablePool]) -> None:
    pool = make(num_workers=3)
    assert [outcome.value for outcome in run(pool, *range(1000))] == list(range(1000))
    first, second = run(pool, "pid")[0].value, run(pool, "pid")[0].value
    assert first == second
    assert not {"torch", "numpy", "ray", "pickle"} & set(run(pool, "modules")[0].value)
    assert run(pool) == []


@pytest.mark.parametrize(
    ("action", "kind", "says"),
    [
        ("raise", "raised", "ValueError: no good"),
        ("sys.exit", "raised", "SystemExit: bye"),
        ("interrupt", "raised", "KeyboardInterrupt"),
        ("exit", "died", "exit code 3"),
        ("crash", "died", "Segmentation fault"),
        ("eat", "memory", "1 GiB"),
        ("closure", "bad_result", "function"),
        ("huge", "bad_result", "bytes"),
        ("close", "died", "its process"),
    ],
)
def test_a_failing_call_is_a_typed_failure_and_its_neighbours_are_scored(
    make: Callable[..., KillablePool], action: str, kind: str, says: str
) -> None:
    outcomes = run(make(), 1, action, 2)
    assert kinds(outcomes) == [None, kind, None]
    assert outcomes[1].failure is not None and says in outcomes[1].failure.message
    assert (outcomes[0].value, outcomes[2].value) == (1, 2)


def test_an_argument_that_cannot_be_sent_fails_alone(make: Callable[..., KillablePool]) -> None:
    assert kinds(run(make(), 1, object(), 2)) == [None, "bad_argument", None]


@pytest.mark.usefixtures("ends_hanging_calls")
def test_a_call_that_holds_the_interpreter_lock_is_killed_at_its_deadline(make: Callable[..., KillablePool]) -> None:
    pool = make(timeout_s=DEADLINE_S)
    assert kinds(run(pool, 1, "hang", 2, "hang", 3)) == [None, "timeout", None, "timeout", None]


def test_a_driver_that_was_held_up_reads_the_answer_that_is_there_before_it_looks_at_the_deadline(
    make: Callable[..., KillablePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, pump, held_up = make(timeout_s=0.05), KillablePool._pump, [True]
    pool.start()

    def late(pool: KillablePool, *arguments: Any) -> None:
        """It wakes for something else, and then has no core until the answer is there and its time has passed."""
        if held_up:
            held_up.clear()
            assert select.select([pool._children[0].reply_fd], [], [], 60.0)[0]
            time.sleep(0.1)
        else:
            pump(pool, *arguments)

    monkeypatch.setattr(KillablePool, "_pump", late)
    assert kinds(run(pool, 1)) == [None] and not held_up


def test_how_a_process_has_ended_is_known_though_its_supervisor_gets_no_core_for_a_while(target: str) -> None:
    child = spawn(target, ["x"], memory_gb=1.0, access=Access())

    def read_until(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline
            child.read()
            time.sleep(0.01)

    read_until(lambda: child.ready)
    os.kill(child.process.pid, signal.SIGSTOP)
    child.give([0], ChildRequest.of([{"x": "exit"}]))
    read_until(lambda: child.finished)
    threading.Timer(3.0, os.kill, (child.process.pid, signal.SIGCONT)).start()
    assert child.kill() == "ended with exit code 3"


@pytest.mark.usefixtures("ends_hanging_calls")
def test_after_too_many_failures_the_rest_is_skipped(make: Callable[..., KillablePool]) -> None:
    """Its child is at work then.  With the control: without a limit every call is done."""
    pool = make(timeout_s=DEADLINE_S)
    calls = [{"x": x} for x in (1, "raise", "raise", "hang", *[2] * 5)]
    assert kinds(pool.map(calls, max_failures=1)) == [None, "raised", "raised", *["skipped"] * 6]
    assert kinds(pool.map(calls)) == [None, "raised", "raised", "timeout", *[None] * 5]
    assert kinds(pool.map([{"x": "raise"}] * 3, max_failures=0))[0] == "raised"


def test_output_goes_nowhere_whatever_its_size(make: Callable[..., KillablePool]) -> None:
    assert run(make(), "print")[0].value == "print"


@pytest.mark.usefixtures("ends_hanging_calls")
def test_descendants_in_sessions_of_their_own_die_with_the_call(make: Callable[..., KillablePool]) -> None:
    assert kinds(run(make(timeout_s=0.5), "spawn")) == ["timeout"]
    deadline = time.monotonic() + 60  # what was killed ends when it gets a core
    while [p for p in psutil.process_iter(["cmdline"]) if "98765.25" in (p.info["cmdline"] or [])]:
        assert time.monotonic() < deadline, "a descendant is still there"
        time.sleep(0.05)


def test_a_leak_costs_fresh_children_but_no_call(make: Callable[..., KillablePool]) -> None:
    """Six calls leak 1.2 GiB together under a cap of 0.5: each succeeds at its second chance at the latest."""
    assert kinds(run(make(memory_gb=0.5), *["leak"] * 6)) == [None] * 6


def test_a_child_that_died_between_calls_is_replaced(make: Callable[..., KillablePool]) -> None:
    pool = make()
    pid = run(pool, "pid")[0].value
    psutil.Process(pid).kill()
    (after,) = run(pool, "pid")
    assert after.failure is None and after.value != pid


def test_slow_calls_spread_over_the_workers_and_trivial_ones_do_not(
    make: Callable[..., KillablePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make(num_workers=2, timeout_s=60.0)
    pool.start()
    with monkeypatch.context() as patch:
        patch.setattr(pools, "GROW_AFTER_S", 60.0)  # trivial calls may have to wait for a core
        assert len({outcome.value for outcome in run(pool, *["pid"] * 64)}) == 1
    assert len({outcome.value for outcome in run(pool, *["meet"] * 4)}) == 2


def test_trivial_calls_cost_few_round_trips(make: Callable[..., KillablePool], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the control: by shares of what is left alone there are many."""
    chunks: list[int] = []
    give = pools.ChildProcess.give

    def counted(child: pools.ChildProcess, items: list[int], line: bytes) -> None:
        chunks.append(len(items))
        give(child, items, line)

    monkeypatch.setattr(pools.ChildProcess, "give", counted)
    monkeypatch.setattr(pools, "TRIVIAL_CHUNK_S", 60.0)  # trivial calls may have to wait for a core
    alone, two = make(), make(num_workers=2)
    run(alone, *range(64))
    assert chunks == [64]
    chunks.clear()
    run(two, *range(64))
    assert sum(chunks) == 64 and len(chunks) <= 4
    chunks.clear()
    monkeypatch.setattr(pools, "TRIVIAL_CHUNK", 1)
    run(two, *range(64))
    assert len(chunks) > 8


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import nothing_of_this_name", "nothing_of_this_name"),
        ("def other(x): pass", "act"),
        ("act = 3", "not a function"),
        ("def act(y): pass", "keywords x"),
        ("async def act(x): pass", "async"),
        ("def act(x:", "SyntaxError"),
        ("import os; os._exit(7)", "exit code 7"),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_error(tmp_path: Path, source: str, says: str) -> None:
    (tmp_path / "act.py").write_text(source)
    pool = KillablePool(f"{tmp_path / 'act.py'}:act", ["x"])
    with pytest.raises(LoadError, match="cannot load") as error:
        pool.start()
    assert says in str(error.value)


def test_a_module_attribute_and_threads(make: Callable[..., KillablePool]) -> None:
    pool = KillablePool("textwrap:dedent", ["text"])
    results: dict[int, list[CallResult]] = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: pool.map([{"text": f" {n}"}] * 50)})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert all(outcome.value == str(n) for n, outcomes in results.items() for outcome in outcomes) and len(results) == 4


def test_closing_ends_the_children(make: Callable[..., KillablePool]) -> None:
    pool = make()
    pid = run(pool, "pid")[0].value
    assert psutil.pid_exists(pid)
    pool.close()
    assert not psutil.pid_exists(pid)
