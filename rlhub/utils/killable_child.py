"""The program of a killable child: load one function, call it for every request line, answer every call with a line.

Runs in its own session with memory and file limits; the functions it calls are not trusted to return, to leave the
interpreter alive or to keep quiet.  Standard library only, so that a child is up in some 50 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import inspect
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

from rlhub.utils.killable_wire import WireError, decode, encode

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ORPHAN_CHECK_S = 5.0
MAX_REPLY_BYTES = 1 << 20
MAX_TEXT = 4000
ALARM_FACTOR, ALARM_EXTRA_S = 2.0, 2.0  # later than any kill from the driver, which may no longer be there


def main(setup: dict[str, Any]) -> NoReturn:
    """Serve until the request pipe closes or the driver is gone.  `setup` is written by `killable_process.spawn`."""
    requests, reply_fd = os.fdopen(setup["request_fd"], "rb"), int(setup["reply_fd"])
    driver = os.getppid()
    faulthandler.enable(file=setup["crash_fd"], all_threads=False)
    _silence()
    _limit(int(setup["memory_bytes"]))
    try:
        function = load(setup["target"])
        _check(function, setup["parameters"])
    except BaseException:  # noqa: BLE001  # process boundary: whatever the user's module does becomes the driver's LoadError
        _send(reply_fd, {"load_error": traceback.format_exc()[-MAX_TEXT:]})
        _leave()
    _send(reply_fd, {"ready": True})
    alarm_s = float(setup["timeout_s"]) * ALARM_FACTOR + ALARM_EXTRA_S
    while _wait_for_request(requests, driver):
        line = requests.readline()
        if not line:
            break
        for arguments in decode(line):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, alarm_s)
            _send(reply_fd, call(function, arguments))
        signal.setitimer(signal.ITIMER_REAL, 0)
    _leave()


def load(target: str) -> Callable[..., Any]:
    """`"/path/to/file.py:name"` or `"package.module:name"` -> the function."""
    where, _, name = target.rpartition(":")
    module = _module_from_file(where) if where.endswith(".py") or os.sep in where else importlib.import_module(where)
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    if not callable(value):
        raise TypeError(f"{name} in {where} is a {type(value).__name__}, not a function")
    return value  # type: ignore[no-any-return]


def _check(function: Callable[..., Any], parameters: list[str]) -> None:
    """TypeError if the function cannot be called with these keywords."""
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(parameters))
    except TypeError as error:
        raise TypeError(
            f"{function!r} takes {signature}, but is called with the keywords {', '.join(parameters)}: {error}"
        ) from None
    if inspect.iscoroutinefunction(function):
        raise TypeError("an async function is not called here; write a plain one")


def _module_from_file(path: str) -> ModuleType:
    folder, stem = os.path.dirname(os.path.abspath(path)), os.path.splitext(os.path.basename(path))[0]
    sys.path.append(folder)  # at the end: a neighbour may be imported, but shadows nothing
    spec = importlib.util.spec_from_file_location(f"user_function_{stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The reply to one call: `{"value": ...}` or `{"failed": kind, "message": ...}`."""
    try:
        value = function(**arguments)
    except MemoryError:
        return {"failed": "memory", "message": "MemoryError"}
    except BaseException as error:  # noqa: BLE001  # process boundary: an untrusted function, which may also sys.exit
        return {"failed": "raised", "message": _brief(error)}
    return {"value": value}


def _brief(error: BaseException) -> str:
    """The error and its innermost frames, less our own; bounded, and safe against a broken `__str__`."""
    try:
        own = error.__traceback__
        lines = traceback.format_exception(type(error), error, own.tb_next if own is not None else None, limit=-5)
    except BaseException:  # noqa: BLE001  # an untrusted __str__ runs in here
        return f"{type(error).__name__} (its text cannot be formatted)"
    return "".join(lines).strip()[-MAX_TEXT:]


def _send(reply_fd: int, reply: dict[str, Any]) -> None:
    try:
        line = encode(reply)
    except WireError as error:
        line = _bad_result(reply, str(error))
    except BaseException as error:  # noqa: BLE001  # an untrusted `tolist` or `isoformat` runs in the encoder
        line = _bad_result(reply, f"turning it into JSON raised {_brief(error)}")
    if len(line) > MAX_REPLY_BYTES:
        line = _bad_result(reply, f"{len(line)} bytes as JSON, at most {MAX_REPLY_BYTES} are taken")
    while line:
        line = line[os.write(reply_fd, line) :]
    if reply.get("failed") == "memory":  # the heap is spent, perhaps by earlier calls: the driver starts a fresh child
        _leave()


def _bad_result(reply: dict[str, Any], reason: str) -> bytes:
    return encode({"failed": "bad_result", "message": f"returned a {type(reply.get('value')).__name__}: {reason[:MAX_TEXT]}"})


def _wait_for_request(requests: BinaryIO, driver: int) -> bool:
    """True when there is something to read; False when the driver has died while another process kept the pipe open."""
    while not select.select([requests], [], [], ORPHAN_CHECK_S)[0]:
        if os.getppid() != driver:
            return False
    return True


def _silence() -> None:
    """Standard input is empty, standard output and error go nowhere, whatever amount is printed."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _limit(memory_bytes: int) -> None:
    """Address space and file sizes are bounded, no core files; orphaned grandchildren stay below this process, where the
    driver finds them."""
    for kind, wanted in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, memory_bytes), (resource.RLIMIT_AS, memory_bytes)):
        ceiling = resource.getrlimit(kind)[1]
        value = wanted if ceiling == resource.RLIM_INFINITY else min(wanted, ceiling)
        resource.setrlimit(kind, (value, value))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _leave() -> NoReturn:
    """End with everything that was started in this session, without running exit handlers of unknown code."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
