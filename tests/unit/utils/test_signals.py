"""Stop signals."""

from __future__ import annotations

import os
import signal

import pytest

from rlhub.trainer.run import StopSignals


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
