"""The program of the python tool's children.  It uses only the standard library, because each call is a fork of this process."""

from __future__ import annotations

import ast
import io
import json
import os
import sys
import traceback
from typing import Any, NoReturn

from rlhub.utils.children.supervisor import PR_SET_DUMPABLE, drop_capabilities, end_descendants, set_process

MAX_OUTPUT = 20_000  # characters kept of what is printed; the workflow shortens further
MAX_BYTES = 6 * MAX_OUTPUT + 1000  # of a reply: control characters are written with six, all others with at most four
_EXIT = os._exit  # before any code could replace it
ENDED_BADLY = {"text": "Error: the code ended its process", "failed": True}


class _BoundedOutput(io.TextIOBase):
    """Keeps the first MAX_OUTPUT characters and counts the rest."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._remaining = MAX_OUTPUT
        self._num_dropped = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        part = text[: self._remaining]
        self._parts.append(part)
        self._remaining -= len(part)
        self._num_dropped += len(text) - len(part)
        return len(text)

    def text(self) -> str:
        note = f"\n({self._num_dropped} more characters)" if self._num_dropped else ""
        return "".join(self._parts) + note


def run_code(code: str) -> dict[str, Any]:
    """Runs code in a fork and returns {"text": what it printed and the value of its last expression, or its error, "failed":
    whether it raised an error}."""
    read_end, write_end = os.pipe()
    process = os.fork()
    if process == 0:
        _answer(code, write_end)
    os.close(write_end)
    data = b""
    with os.fdopen(read_end, "rb", buffering=0) as replies:
        while not data.endswith(b"\n") and (more := replies.read(MAX_BYTES)):  # what the code has started may hold the pipe open
            data = (data + more)[:MAX_BYTES]
    status = 0 if data else os.waitpid(process, 0)[1]
    end_descendants()
    if os.WIFSIGNALED(status):
        return {"text": f"Error: the code was ended by signal {os.WTERMSIG(status)}", "failed": True}
    try:
        reply = json.loads(data)
    except ValueError:
        return ENDED_BADLY
    return reply if isinstance(reply, dict) and reply.keys() == ENDED_BADLY.keys() else ENDED_BADLY


def _answer(code: str, write_end: int) -> NoReturn:
    """Runs the code in the fork, writes the reply and exits, without running anything that the code has registered.

    Whatever the code has done to the interpreter, this process must not return into the child's loop, because it would answer its
    calls.
    """
    try:
        os.closerange(3, write_end)
        os.closerange(write_end + 1, os.sysconf("SC_OPEN_MAX"))
        drop_capabilities()
        set_process(PR_SET_DUMPABLE, 1)  # its own /proc/self is open to it; that of the child is not
        _write(write_end, _run(code))
    finally:
        _EXIT(0)


def _run(code: str) -> dict[str, Any]:
    output = _BoundedOutput()
    sys.stdout = sys.stderr = output
    try:
        _execute(code)
    except SystemExit as end:
        return {"text": output.text(), "failed": bool(end.code)}
    except BaseException as error:  # noqa: BLE001  # process boundary: a model's code
        own = error.__traceback__
        tail = own.tb_next.tb_next if own is not None and own.tb_next is not None else None
        output.write("".join(traceback.format_exception(type(error), error, tail, limit=-5)))
        return {"text": output.text(), "failed": True}
    return {"text": output.text(), "failed": False}


def _write(write_end: int, reply: dict[str, Any]) -> None:
    data = json.dumps(reply, ensure_ascii=False).encode(errors="surrogatepass")[: MAX_BYTES - 1] + b"\n"
    while data:
        data = data[os.write(write_end, data) :]


def _execute(code: str) -> None:
    """Runs the code; if its last statement is an expression, prints the value as an interactive interpreter does."""
    tree = ast.parse(code, "<code>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(tree, "<code>", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")
