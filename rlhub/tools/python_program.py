"""Runs one Python program that a model wrote and keeps what it prints: in a fork of a child (python_child), or as a program of
its own in a sandbox, which reads the code from standard input and writes the reply.

It uses only the standard library and nothing of rlhub, because a sandbox has only its text.
"""

from __future__ import annotations

import ast
import io
import json
import os
import sys
import traceback
from typing import Any, NoReturn

MAX_OUTPUT = 20_000  # characters kept of what is printed; the workflow shortens further
MAX_BYTES = 6 * MAX_OUTPUT + 1000  # of a reply: control characters are written with six, all others with at most four
ENDED_BADLY = {"text": "Error: the code ended its process", "failed": True}
_EXIT = os._exit  # before any code could replace it


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


def run_program(code: str) -> dict[str, Any]:
    """Runs the code and returns {"text": what it printed and the value of its last expression, or its error, "failed": whether it
    raised an error}."""
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


def write_reply(fd: int, reply: dict[str, Any]) -> None:
    """Writes a reply of `run_program` as one line of at most MAX_BYTES bytes."""
    data = json.dumps(reply, ensure_ascii=False).encode(errors="surrogatepass")[: MAX_BYTES - 1] + b"\n"
    while data:
        data = data[os.write(fd, data) :]


def read_reply(data: bytes) -> dict[str, Any]:
    """Returns the reply in these bytes, and ENDED_BADLY for anything else: the code may have written them."""
    try:
        reply = json.loads(data)
    except ValueError:
        return ENDED_BADLY
    return reply if isinstance(reply, dict) and reply.keys() == ENDED_BADLY.keys() else ENDED_BADLY


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


def _main() -> NoReturn:
    """Runs the code on standard input.  Its own descriptors lead nowhere, so that what it starts cannot write the reply."""
    reply, code = os.dup(1), sys.stdin.buffer.read().decode(errors="replace")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
    try:
        write_reply(reply, run_program(code))
    finally:
        _EXIT(0)


if __name__ == "__main__":
    _main()
