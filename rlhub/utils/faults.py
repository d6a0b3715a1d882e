"""Injects faults: a plan names what fails, where and in which step, to prove that a run survives it.

The code passes places (`faults.at("checkpoint.write")`), which `PLACES` lists; without a plan that is one comparison.  A plan is
installed in the driver and in every process that the driver starts for the run.  Each of its faults strikes once per run folder,
also over resumes and in processes that replace others: the process in which it strikes leaves a file that says so.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhub.errors import InjectedFaultError
from rlhub.utils.children.child import load

logger = logging.getLogger(__name__)


FaultKind = Literal[
    "kill", "stop", "segfault", "raise", "delay", "lost", "duplicate", "refused", "reset", "full", "readonly", "truncate", "flip",
    "nonfinite", "wrong",
]  # fmt: skip
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segfault": signal.SIGSEGV}
_ERRORS = {"refused": errno.ECONNREFUSED, "reset": errno.ECONNRESET, "full": errno.ENOSPC, "readonly": errno.EROFS}


@dataclass(slots=True, kw_only=True, frozen=True)
class Place:
    """A point that the code passes.  doc: what happens there.  kinds: the faults that are possible there.  own: the place carries
    out its fault itself, and `at` only returns the kind."""

    doc: str
    kinds: tuple[FaultKind, ...]
    own: bool = False


_PROCESS: tuple[FaultKind, ...] = ("kill", "stop", "raise", "delay")
_STORAGE: tuple[FaultKind, ...] = ("full", "readonly", "kill", "delay")
_DAMAGE: tuple[FaultKind, ...] = ("truncate", "flip")
_CALLS = {
    "actor": "init_model compute_log_prob update_actor sync_weights write_weights save_checkpoint load_checkpoint",
    "rollout": "init_model generate_sequences begin_scoring take_outcomes sync_weights",
    "reference": "init_model compute_ref_log_prob",
    "critic": "init_model compute_values update_critic save_checkpoint load_checkpoint",
    "reward_model": "init_model compute_rm_score",
    "judge": "init_model generate_judgements",
    "model": "init_model train_step evaluate save_checkpoint load_checkpoint",
}
"""Role -> methods of its ranks; `model` is the role of the supervised trainers."""
_COLOCATED = "actor_rollout_ref"
_OWNERS = {
    **dict.fromkeys(("generate_sequences", "begin_scoring", "take_outcomes"), "rollout"),
    "compute_ref_log_prob": "reference",
}
"""Methods that the actor's processes may execute for another role."""

PLACES: dict[str, Place] = {
    "driver.step": Place(doc="the driver begins a step", kinds=_PROCESS),
    "driver.commit": Place(doc="all files of a checkpoint are written, it does not count yet", kinds=_PROCESS),
    "driver.log": Place(doc="the checkpoint counts, its step's line in metrics.jsonl is missing", kinds=_PROCESS),
    "checkpoint.write": Place(doc="a process writes a file of a checkpoint", kinds=_STORAGE),
    "checkpoint.written": Place(doc="a file of a checkpoint is written, the checkpoint does not count yet", kinds=_DAMAGE),
    "checkpoint.committed": Place(doc="a checkpoint counts; its largest file is damaged", kinds=_DAMAGE),
    "weights.written": Place(doc="new weights are there for replicas to read; their largest file is damaged", kinds=_DAMAGE),
    "metrics.write": Place(doc="the driver writes a step's line to metrics.jsonl", kinds=_STORAGE),
    "replica.start": Place(doc="a replica (rank: its number) builds its engine", kinds=_PROCESS),
    "replica.generate": Place(doc="a replica takes a request", kinds=_PROCESS),
    "replica.update_weights": Place(doc="a replica reads new weights", kinds=_PROCESS),
    "replica.reply": Place(doc="a process of a replica or environment host answers", kinds=("lost", "duplicate"), own=True),
    "engine.step": Place(doc="the engine of a replica samples a token of each running request", kinds=_PROCESS),
    "engine.weights": Place(
        doc="new weights have reached the rollout engine and were compared", kinds=("nonfinite", "wrong"), own=True
    ),
    "engine.log_probs": Place(doc="the rollout engine returns completions", kinds=("nonfinite", "wrong"), own=True),
    "remote.request": Place(doc="a request goes to a rollout server of another job", kinds=("refused", "reset", "delay")),
    "reward.call": Place(
        doc="the reward function scores the first of some samples",
        kinds=("raise", "delay", "kill", "segfault", "nonfinite"),
        own=True,
    ),
    "environment.call": Place(doc="an environment's process is asked for something", kinds=("kill", "stop", "raise")),
} | {
    f"{role}.{method}": Place(doc=f"a rank of the {role.replace('_', ' ')} begins {method}", kinds=_PROCESS)
    for role, methods in _CALLS.items()
    for method in methods.split()
}
"""The places by name.  A rank counts within its group; in a replica, serving the weights of version v belongs to step v + 1."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Fault:
    """A fault of a plan.  seconds: the duration of a delay, or of the stop of a process.  rank: the rank of the process that
    fails, where several processes pass the place."""

    kind: FaultKind
    place: str
    rank: int = 0
    step: int = 1
    seconds: float = 60.0

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}, rank {self.rank}, step {self.step}"


@dataclass(slots=True, kw_only=True, frozen=True)
class FaultPlan:
    """The faults of a run.  record: the folder in which each fault that strikes leaves its file; all processes of the run reach
    it."""

    faults: tuple[Fault, ...]
    record: str

    def record_of(self, fault: Fault) -> Path:
        """Returns the file that records that the fault has struck."""
        return Path(self.record) / f"fault-{fault.kind}-{fault.place}-rank{fault.rank}-step{fault.step}.json"

    def unstruck(self) -> Iterator[Fault]:
        """Returns the faults that have not struck yet."""
        return (fault for fault in self.faults if not self.record_of(fault).exists())


@dataclass(slots=True, kw_only=True)
class _Installed:
    """A plan in this process.  rank, step: the defaults for places that give none.  struck: used if the record cannot be
    written."""

    plan: FaultPlan
    rank: int
    step: int = 0
    struck: set[Fault] = field(default_factory=set)

    def due(self, place: str, rank: int, step: int) -> Fault | None:
        """Returns the fault that strikes now, if this process is the first to claim it."""
        for fault in self.plan.faults:
            if (fault.place, fault.rank, fault.step) == (place, rank, step) and fault not in self.struck:
                self.struck.add(fault)
                if self._claim(fault):
                    return fault
        return None

    def _claim(self, fault: Fault) -> bool:
        text = json.dumps(asdict(fault) | {"pid": os.getpid(), "time": time.time()})
        try:
            with self.plan.record_of(fault).open("x") as file:
                file.write(text + "\n")
        except FileExistsError:
            return False
        except OSError as error:
            logger.warning("cannot record that a fault strikes, so it may strike again in another process: %s", error)
        return True


_installed: _Installed | None = None


def install(plan: FaultPlan | None, *, rank: int = 0) -> None:
    """Makes this process follow the plan (None: no plan).  rank: the rank of this process in its group."""
    global _installed
    _installed = _Installed(plan=plan, rank=rank) if plan is not None and plan.faults else None


def installed() -> FaultPlan | None:
    """Returns the plan of this process, for a process that it starts."""
    return None if _installed is None else _installed.plan


def may_strike(place: str) -> bool:
    """Returns whether this process's plan has a fault for the place."""
    return _installed is not None and any(fault.place == place for fault in _installed.plan.faults)


def begin_step(step: int) -> None:
    """Sets the current training step of this process; before the first it is 0."""
    if _installed is not None:
        _installed.step = step


def current_step() -> int:
    """Returns the current step of this process, 0 without a plan."""
    return 0 if _installed is None else _installed.step


def at_call(role: str, method: str, step: int, rank: int) -> None:
    """Passes the place where a rank begins a method of a role, in that step of the driver."""
    if _installed is not None:
        begin_step(step)
        at(f"{_OWNERS.get(method, role.replace(_COLOCATED, 'actor'))}.{method}", rank=rank)


def at(
    place: str,
    *,
    rank: int | None = None,
    step: int | None = None,
    path: Path | None = None,
    pid: Callable[[], int] = os.getpid,
) -> FaultKind | None:
    """Passes a place: a fault that the plan has for it happens here.  Returns the kind if the place carries it out itself.

    rank, step: given where they are not the process's own.  path: the file to damage, or a folder that contains it.  pid: returns
    the number of the process to kill or stop, where it is another one.
    """
    if _installed is None:
        return None
    own = _installed
    fault = own.due(place, own.rank if rank is None else rank, own.step if step is None else step)
    if fault is None:
        return None
    logger.warning("trainer.faults: %s", fault)
    if PLACES[place].own:
        return fault.kind
    _strike(fault, path, pid())
    return None


def _strike(fault: Fault, path: Path | None, pid: int) -> None:
    kind = fault.kind
    if kind in _SIGNALS:
        _send(pid, _SIGNALS[kind], fault.seconds)
    elif kind in _ERRORS:
        number = _ERRORS[kind]
        raise OSError(number, f"{os.strerror(number)} (by trainer.faults)", fault.place)
    elif kind == "delay":
        time.sleep(fault.seconds)
    elif kind == "raise":
        raise InjectedFaultError(f"trainer.faults: {fault}")
    elif path is not None:
        _damage(path, truncate=kind == "truncate")


def _send(pid: int, number: signal.Signals, seconds: float) -> None:
    """Sends the signal.  A stopped process is continued after `seconds` by a process of another session, because its own session
    may be stopped too."""
    if number == signal.SIGSTOP:
        command = ["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {pid}"]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    os.kill(pid, number)


def _damage(path: Path, *, truncate: bool) -> None:
    """Cuts the file in half, or flips a bit in the middle of it."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    half = largest.stat().st_size // 2
    if truncate:
        os.truncate(largest, half)
        return
    with largest.open("r+b") as file:
        file.seek(half)
        byte = file.read(1)
        file.seek(half)
        file.write(bytes([byte[0] ^ 1]))


FAULTY_CALL = "rlhub.utils.faults:call_with_fault"
FAULTY_CALL_PARAMETERS = ("target", "fault", "arguments")
_load = functools.cache(load)


def call_with_fault(target: str, fault: str | None, arguments: dict[str, Any]) -> Any:
    """Returns the result of `target` for the arguments, or fails as a fault plan says.  A child of a pool runs it where faults
    are planned for the pool's function, or where calls name functions of their own."""
    function = _load(target)
    match fault:
        case "raise":
            raise RuntimeError("by trainer.faults")
        case "delay":
            time.sleep(1e6)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "nonfinite":
            return float("nan")
    return function(**arguments)
