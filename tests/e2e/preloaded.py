"""Starts `python -m MODULE ARGUMENTS` in processes of their own without importing torch anew for each.

    python preloaded.py PYTHON  # one JSON request a line on standard input, one JSON answer a line on standard output

{"module": ..., "arguments": [...], "env": {...}, "cwd": ..., "log": FILE, "watch": FOLDER, "die": {...}} -> {"pid": ...}
{"poll": PID} -> {"code": null while it runs, else its exit status, negative for a signal}; of no PID, null

Each run is a fork of a process that has loaded the libraries but started nothing, so it is as separate from the others as
a run from the shell.  With "watch" every change to a file below that folder is counted, and written to LOG.operations;
with "die" the run kills itself with SIGKILL just before one of them (a write: in the middle of it).

PYTHON is a file to be written: a program that is called like the interpreter, for programs that start others.  It passes
`-m rlhub...` and scripts on to here, with its arguments, environment, folder and standard streams, and ends as they do.
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

HEAVY = (
    "torch",
    "hydra",
    "pyarrow.parquet",
    "transformers.models.qwen2.modeling_qwen2",
    "torch.distributed.fsdp",
    "rlhub.trainer.ppo.trainer",
    "rlhub.engines.rollout.hf.engine",
    "rlhub.engines.training.fsdp.engine",
)
ROOT = str(Path(__file__).resolve().parents[2])
AUDITED = {"os.rename": "rename", "os.remove": "remove", "os.mkdir": "mkdir", "os.rmdir": "rmdir"}


class FileOperations:
    """Sees this process's changes below a folder as "<operation> <path in it>", and dies at the chosen one.

    die: {"at": n} the n-th of all (writes to a file in a row count as one), or {"operation": text, "nth": n} the n-th with
    that text.
    """

    def __init__(self, folder: str, log: str, die: dict[str, Any] | None) -> None:
        self.folder, self.die = folder, die or {}
        self.count = self.matches = 0
        self.last = ""
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.os_write, self.os_fsync = os.write, os.fsync
        os.write, os.fsync = self.write, self.fsync
        sys.addaudithook(self.audit)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in AUDITED:
            self.note(AUDITED[event], arguments[0], arguments[-1])
        elif event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            self.note("open", arguments[0], -1)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        half = memoryview(data).cast("B")[: len(data) // 2]
        self.note("write", fd, -1, lambda: self.os_write(fd, half))
        return self.os_write(fd, data)

    def fsync(self, fd: int) -> None:
        self.note("fsync", fd, -1)
        self.os_fsync(fd)

    def note(self, operation: str, target: Any, folder_fd: int, last_words: Callable[[], object] = lambda: None) -> None:
        path = self.inside(target, folder_fd)
        if path is None:
            return
        text = f"{operation} {path}"
        new, chosen = text != self.last, text == self.die.get("operation")
        self.last = text
        self.count += new
        self.matches += chosen
        if new:
            self.os_write(self.log, (text + "\n").encode())
        if (new and self.count == self.die.get("at")) or (chosen and self.matches == self.die["nth"]):
            last_words()
            os.kill(os.getpid(), signal.SIGKILL)

    def inside(self, target: Any, folder_fd: int) -> str | None:
        """The path relative to the folder, or None for one elsewhere."""
        if isinstance(target, int):
            path = os.readlink(f"/proc/self/fd/{target}")
        else:
            path = os.fsdecode(target)
            if not os.path.isabs(path):
                path = os.path.join(os.readlink(f"/proc/self/fd/{folder_fd}") if folder_fd >= 0 else os.getcwd(), path)
        relative = os.path.relpath(path, self.folder)
        return None if relative.startswith("..") else relative


def become(request: dict[str, Any]) -> NoReturn:
    """In the forked child: what `python -m` does."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[:0] = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = [request["module"], *request["arguments"]]
    if request["watch"]:
        FileOperations(request["watch"], request["log"] + ".operations", request["die"])
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    sys.exit(0)


INTERPRETER = """#!{python} -IS
import json, os, socket, sys
if len(sys.argv) < 2 or not (sys.argv[1].endswith(".py") or sys.argv[1:2] == ["-m"] and sys.argv[2].startswith("rlhub.")):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = dict(arguments=sys.argv[1:], env=dict(os.environ), cwd=os.getcwd())
socket.send_fds(server, [b"."], [0, 1, 2])
server.sendall(json.dumps(request).encode() + b"\\n")
code = int(server.makefile().readline() or 1)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def offer_interpreter(path: Path) -> socket.socket:
    """Write the program; returns the socket on which it calls."""
    address = f"{path}.socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    path.write_text(INTERPRETER.format(python=sys.executable, address=address))
    path.chmod(0o755)
    return listener


def answer_call(caller: socket.socket, path: Path) -> None:
    """Fork twice: one child runs what is asked for, the other waits for its end and says how it was."""
    if os.fork():
        return
    _, streams, *_ = socket.recv_fds(caller, 1, 3)
    request = json.loads(caller.makefile().readline())
    pid = os.fork()
    if pid == 0:
        caller.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        interpret(request, path)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    caller.sendall(f"{code}\n".encode())
    os._exit(0)


def interpret(request: dict[str, Any], path: Path) -> NoReturn:
    """In the forked child: what the interpreter does with these arguments."""
    arguments = request["arguments"]
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path.remove(ROOT)  # of which an interpreter would know nothing
    sys.path[:0] = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    if arguments[0] == "-m":
        sys.path.insert(0, request["cwd"])
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        sys.argv, sys.executable = arguments, str(path)
        runpy.run_path(arguments[0], run_name="__main__")
    sys.exit(0)


def poll(pid: int | None) -> int | None:
    """Exit status of a child as subprocess gives it, None while it runs."""
    if pid is None:
        return None
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def main() -> None:
    sys.path.insert(0, ROOT)
    for name in HEAVY:
        importlib.import_module(name)
    interpreter = Path(sys.argv[1])
    listener = offer_interpreter(interpreter)
    while True:
        ready, *_ = select.select([sys.stdin, listener], [], [])
        if listener in ready:
            with listener.accept()[0] as caller:
                answer_call(caller, interpreter)
            continue
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # taking down what was loaded takes long
        request = json.loads(line)
        if "poll" in request:
            answer = {"code": poll(request["poll"])}
        else:
            pid = os.fork()
            if pid == 0:
                become(request)
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
