"""The program of a child: it loads one function, calls it for every call of a request, and answers every call with a line.

It runs below a supervisor, in a session of its own, with memory and file limits.  The functions that it calls are not trusted to
return, to leave the interpreter alive or to print little.  It loads the standard library and little else, so that a child starts
in about 70 ms.
"""

from __future__ import annotations

import _thread
import builtins
import faulthandler
import importlib
import importlib.util
import inspect
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, NoReturn

from rlhub.utils.children.supervisor import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, become_child, set_process
from rlhub.utils.children.wire import WireError, decode, encode
from rlhub.utils.user_code import resolve

MAX_REPLY_BYTES = 1 << 20
MAX_TEXT = 4000
READ_BYTES = 1 << 16


def main(setup: dict[str, Any]) -> NoReturn:
    """Serves calls until the request pipe closes.  setup: written by `process.spawn`."""
    request_fd, reply_fd, crash_fd = setup["request_fd"], setup["reply_fd"], setup["crash_fd"]
    for fd in (request_fd, reply_fd, crash_fd):
        os.set_inheritable(fd, False)
    become_child(request_fd, (reply_fd, crash_fd), namespace=setup["namespace"])
    channel = DriverPipes(request_fd, reply_fd)
    faulthandler.enable(file=crash_fd, all_threads=False)
    _silence()
    _limit(int(setup["memory_bytes"]), setup["memory_kind"], open_to_others=not setup["untrusted"])
    if setup["cpus"]:
        os.sched_setaffinity(0, setup["cpus"])
    try:
        function = load(setup["target"])
        _check(function, setup["parameters"])
    except BaseException:  # noqa: BLE001  # process boundary: whatever the user's module does becomes the driver's LoadError
        channel.send({"load_error": traceback.format_exc()[-MAX_TEXT:]})
        os._exit(0)
    if not setup["untrusted"]:
        _Imports(channel).watch()
    channel.send({"ready": os.getpid()})
    for arguments in channel.calls():
        channel.send(call(function, arguments))
    os._exit(0)  # without running exit handlers of unknown code


class DriverPipes:
    """The pipes to the driver.  A fork of this process does not have them, so it can neither take a call nor answer one."""

    def __init__(self, request_fd: int, reply_fd: int) -> None:
        self._request_fd, self._reply_fd, self._owner = request_fd, reply_fd, os.getpid()
        self._id: str | None = None  # of the current call
        os.register_at_fork(after_in_child=self._close)

    def calls(self) -> Iterator[dict[str, Any]]:
        """Yields the arguments of one call after the other; each is answered before the next."""
        for line in self._lines():
            request = decode(line)
            for number, arguments in enumerate(request["calls"]):
                self._id = f"{request['id']}.{number}"
                yield arguments

    def send(self, reply: dict[str, Any]) -> None:
        """Answers the current call."""
        if os.getpid() != self._owner:  # a fork that came back from the function
            os._exit(0)
        number, self._id = self._id, None
        line = _line(reply, number)
        while line:
            line = line[os.write(self._reply_fd, line) :]
        if reply.get("failed") == "memory":  # the heap is spent, perhaps by earlier calls: the driver starts a fresh child
            os._exit(0)

    def note_import(self, *, begins: bool) -> None:
        """Reports to the driver that an import begins or ends in the current call."""
        number = self._id
        if number is not None and os.getpid() == self._owner:
            os.write(self._reply_fd, encode({"id": number, "importing": begins}))

    def _lines(self) -> Iterator[bytes]:
        parts: list[bytes] = []
        while more := os.read(self._request_fd, READ_BYTES):
            parts.append(more)
            if b"\n" in more:
                line, _, rest = b"".join(parts).partition(b"\n")
                parts = [rest]
                yield line

    def _close(self) -> None:
        os.close(self._request_fd)
        os.close(self._reply_fd)


class _Imports:
    """Import statements and importlib.import_module that report to the driver when they load a module, which is not the call's
    own time."""

    def __init__(self, channel: DriverPipes) -> None:
        self._channel = channel
        self._statement, self._by_name = builtins.__import__, importlib.import_module
        self._busy: set[int] = set()  # threads that are importing

    def watch(self) -> None:
        """Replaces the import functions, in this process and its forks."""
        builtins.__import__ = self._import
        importlib.import_module = self._import_module

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:  # the signature of builtins.__import__
        known = _is_loaded(name, fromlist, level, (globals or {}).get("__package__"))
        return self._noted(known, self._statement, name, globals, locals, fromlist, level)

    def _import_module(self, name: str, package: str | None = None) -> ModuleType:
        return self._noted(name in sys.modules, self._by_name, name, package)

    def _noted(self, known: bool, function: Callable[..., ModuleType], *arguments: Any) -> ModuleType:
        thread = _thread.get_ident()
        if known or thread in self._busy:
            return function(*arguments)
        self._busy.add(thread)
        self._channel.note_import(begins=True)
        try:
            return function(*arguments)
        finally:
            self._busy.discard(thread)
            self._channel.note_import(begins=False)


def _is_loaded(name: str, fromlist: Iterable[str] | None, level: int, package: str | None) -> bool:
    """Returns whether everything that an import statement names is loaded."""
    if level:
        try:
            name = importlib.util.resolve_name("." * level + name, package or "")
        except ImportError:  # for the statement to raise
            return False
    module = sys.modules.get(name)
    return isinstance(module, ModuleType) and all(item in module.__dict__ for item in fromlist or ())


def load(target: str) -> Callable[..., Any]:
    """Returns the function that `target` names."""
    value = resolve(target)
    if not callable(value):
        raise TypeError(f"{target} is a {type(value).__name__}, not a function")
    return value  # type: ignore[no-any-return]


def _check(function: Callable[..., Any], parameters: list[str]) -> None:
    """Raises TypeError if the function cannot be called with these keywords."""
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(parameters))
    except TypeError as error:
        raise TypeError(
            f"{function!r} takes {signature}, but is called with the keywords {', '.join(parameters)}: {error}"
        ) from None
    if inspect.iscoroutinefunction(function):
        raise TypeError("an async function is not called here; write a plain one")


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the reply to one call: `{"value": ...}` or `{"failed": kind, "message": ...}`."""
    try:
        value = function(**arguments)
    except MemoryError:
        return {"failed": "memory", "message": "MemoryError"}
    except BaseException as error:  # noqa: BLE001  # process boundary: an untrusted function, which may also sys.exit
        return {"failed": "raised", "message": _brief(error)}
    return {"value": value}


def _brief(error: BaseException) -> str:
    """Returns the error and its innermost frames, without this module's own; the text is bounded, and safe against a broken
    `__str__`."""
    try:
        own = error.__traceback__
        lines = traceback.format_exception(type(error), error, own.tb_next if own is not None else None, limit=-5)
    except BaseException:  # noqa: BLE001  # an untrusted __str__ runs in here
        return f"{type(error).__name__} (its text cannot be formatted)"
    return "".join(lines).strip()[-MAX_TEXT:]


def _line(reply: dict[str, Any], number: str | None) -> bytes:
    numbered = reply if number is None else {"id": number, **reply}
    try:
        line = encode(numbered)
    except WireError as error:
        return _bad_result(reply, number, str(error))
    except BaseException as error:  # noqa: BLE001  # an untrusted `tolist` or `isoformat` runs in the encoder
        return _bad_result(reply, number, f"turning it into JSON raised {_brief(error)}")
    if len(line) > MAX_REPLY_BYTES:
        return _bad_result(reply, number, f"{len(line)} bytes as JSON, at most {MAX_REPLY_BYTES} are taken")
    return line


def _bad_result(reply: dict[str, Any], number: str | None, reason: str) -> bytes:
    message = f"returned a {type(reply.get('value')).__name__}: {reason[:MAX_TEXT]}"
    return encode({"id": number, "failed": "bad_result", "message": message})


def _silence() -> None:
    """Empties standard input, and discards standard output and error, whatever amount is printed."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _limit(memory_bytes: int, memory_kind: str, *, open_to_others: bool) -> None:
    """Limits memory and file sizes, and forbids core files; orphaned grandchildren stay below this process.

    open_to_others: processes of the same user may inspect this one, as is usual.
    """
    memory = resource.RLIMIT_DATA if memory_kind == "data" else resource.RLIMIT_AS
    for kind, wanted in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, memory_bytes), (memory, memory_bytes)):
        ceiling = resource.getrlimit(kind)[1]
        value = wanted if ceiling == resource.RLIM_INFINITY else min(wanted, ceiling)
        resource.setrlimit(kind, (value, value))
    set_process(PR_SET_CHILD_SUBREAPER, 1)
    set_process(PR_SET_DUMPABLE, int(open_to_others))
