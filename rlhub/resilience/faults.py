"""Fault plans: make a named process fail at a named call, to prove that a run survives it.

A plan is data (`[{"kind": "kill", "call": "actor.update_actor", "rank": 1, "at": 3}]`), so tests and configs share it.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from rlhub.errors import ConfigError, RlhubError
from rlhub.registry import suggest
from rlhub.single_controller.observer import Call, WorkerInfo

logger = logging.getLogger(__name__)

FaultKind = Literal["kill", "stop", "raise", "delay"]


class InjectedFaultError(RlhubError, RuntimeError):
    """The fault plan said that this call fails on the driver."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Fault:
    """kind: kill (SIGKILL) or stop (SIGSTOP, a hang) the rank's process, raise on the driver, or delay the call by `seconds`.

    call: `role.method`.  at: on which call of that method, counted from 1.  rank: whose process.
    """

    kind: FaultKind
    call: str
    at: int = 1
    rank: int = 0
    seconds: float = 1.0


def parse_fault_plan(plan: Sequence[Mapping[str, Any]]) -> list[Fault]:
    """Check a plan given as data; ConfigError lists everything that is wrong with it."""
    known = [field.name for field in fields(Fault)]
    problems = []
    for i, row in enumerate(plan):
        problems += [f"fault {i}: unknown key {key!r}{suggest(key, known)}" for key in row if key not in known]
        if row.get("kind") not in get_args(FaultKind):
            problems.append(f"fault {i}: kind must be one of {', '.join(get_args(FaultKind))}, got {row.get('kind')!r}")
        if str(row.get("call", "")).count(".") != 1:
            problems.append(f"fault {i}: call must be 'role.method', got {row.get('call')!r}")
    if problems:
        raise ConfigError(problems)
    return [Fault(**row) for row in plan]


class FaultInjector:
    """CallObserver that carries out a plan.  Processes on other machines cannot be reached: such a fault is a ConfigError."""

    def __init__(self, plan: Sequence[Fault]) -> None:
        self._plan = list(plan)
        self._counts: dict[str, int] = {}

    def on_start(self, call: Call) -> None:
        name = f"{call.role}.{call.method}"
        self._counts[name] = self._counts.get(name, 0) + 1
        for fault in self._plan:
            if fault.call == name and fault.at == self._counts[name]:
                logger.warning("injecting %s", fault)
                _inject(fault, call)

    def on_end(self, call: Call, seconds: float, error: BaseException | None) -> None:
        return None


def _inject(fault: Fault, call: Call) -> None:
    if fault.kind == "raise":
        raise InjectedFaultError(f"{fault.call}: fails at call {fault.at} by the fault plan")
    if fault.kind == "delay":
        time.sleep(fault.seconds)
        return
    worker = next((worker for worker in call.workers if worker.rank == fault.rank), None)
    if worker is None:
        raise ConfigError(f"fault plan: {fault.call} runs on ranks {[w.rank for w in call.workers]}, not on rank {fault.rank}")
    _signal(worker, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def _signal(worker: WorkerInfo, number: signal.Signals) -> None:
    try:
        os.kill(worker.pid, number)
    except ProcessLookupError as error:
        raise ConfigError(f"fault plan: process {worker.pid} of rank {worker.rank} is not on this machine") from error
