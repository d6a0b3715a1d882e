"""The function of the python tool's children.  It uses only the standard library, because each call is a fork of this process."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from rlhub.tools.python_program import MAX_BYTES, read_reply, run_program, write_reply
from rlhub.utils.children.supervisor import PR_SET_DUMPABLE, drop_capabilities, end_descendants, set_process

_EXIT = os._exit  # before any code could replace it


def run_code(code: str) -> dict[str, Any]:
    """Runs code in a fork and returns the reply of `run_program`."""
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
    return read_reply(data)


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
        write_reply(write_end, run_program(code))
    finally:
        _EXIT(0)
