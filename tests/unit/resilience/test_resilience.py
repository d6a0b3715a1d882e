"""Stop signals and fault plans."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from rlhub.errors import ConfigError
from rlhub.resilience import FaultInjector, InjectedFaultError, StopSignals, parse_fault_plan
from rlhub.single_controller.observer import Call, WorkerInfo


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_a_request(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with StopSignals() as stop:
        assert not stop.requested and stop.exit_code == 0
        stop.defer()
        os.kill(os.getpid(), number)
        assert stop.requested and stop.exit_code == 128 + number and stop.reason == number.name
    assert signal.getsignal(number) is former


def test_the_second_interrupt_stops_at_once() -> None:
    with StopSignals() as stop, pytest.raises(KeyboardInterrupt):
        stop.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_before_the_first_step_a_signal_stops_at_once(number: signal.Signals, raised: type[BaseException]) -> None:
    with StopSignals() as stop:
        with pytest.raises(raised):
            os.kill(os.getpid(), number)
        assert stop.requested and stop.exit_code == 128 + number


def call(method: str = "update", pid: int = 0) -> Call:
    return Call(role="actor", method=method, blocking=True, workers=(WorkerInfo(rank=1, node="n", pid=pid),))


def test_faults_strike_the_named_call_at_its_count() -> None:
    injector = FaultInjector(parse_fault_plan([{"kind": "raise", "call": "actor.update", "at": 2}]))
    injector.on_start(call())
    injector.on_start(call("other"))
    with pytest.raises(InjectedFaultError, match="call 2"):
        injector.on_start(call())
    injector.on_start(call())


def test_kill_and_stop_reach_the_ranks_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        plan = [{"kind": "stop", "call": "actor.a", "rank": 1}, {"kind": "kill", "call": "actor.b", "rank": 1}]
        injector = FaultInjector(parse_fault_plan(plan))
        injector.on_start(call("a", child.pid))
        deadline = time.monotonic() + 60
        while _state(child.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _state(child.pid) == "T"
        injector.on_start(call("b", child.pid))
        assert child.wait(60) == -signal.SIGKILL


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def test_a_rank_that_does_not_run_the_call_is_an_error() -> None:
    injector = FaultInjector(parse_fault_plan([{"kind": "kill", "call": "actor.update", "rank": 5}]))
    with pytest.raises(ConfigError, match="not on rank 5"):
        injector.on_start(call())


def test_delay_waits() -> None:
    injector = FaultInjector(parse_fault_plan([{"kind": "delay", "call": "actor.update", "seconds": 0.05}]))
    start = time.monotonic()
    injector.on_start(call())
    assert time.monotonic() - start >= 0.05


def test_bad_plans_list_everything_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fault_plan([{"kind": "kil", "call": "update"}, {"kind": "kill", "call": "a.b", "rnk": 1}])
    assert len(caught.value.problems) == 3 and "did you mean 'rank'" in str(caught.value)
