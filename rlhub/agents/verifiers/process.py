"""LibraryProcess: the process with an environment of verifiers as rlhub sees it.

One process runs many episodes at the same time.  If it ends, its episodes fail, and the next one starts another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhub.agents.verifiers.child import LINE_BYTES
from rlhub.agents.workflows.knobs import VerifiersKnobs
from rlhub.errors import ConfigError, LoadError, WorkflowError
from rlhub.utils.children.access import Access
from rlhub.utils.children.launch import Launch
from rlhub.utils.children.process import RLHUB_ROOT, ChildProcess, ChildRequest, spawn
from rlhub.utils.children.wire import decode, encode

logger = logging.getLogger(__name__)
SERVE = "rlhub.agents.verifiers.child:serve"
LIST = (
    "import json,sys; sys.path.append(sys.argv[1]); from rlhub.agents.verifiers.child import main; main(*json.loads(sys.argv[2]))"
)
START_S = LIST_S = 600.0  # data sets may be downloaded, and tool servers started
CANCEL_S = 60.0  # programs of agents are ended meanwhile
MEMORY_GB = 64.0
SETUP = "bash recipes/verifiers/setup_env.sh makes one, and verifiers_python names it"


@dataclass(slots=True, kw_only=True)
class LibraryProcess:
    """Runs episodes of one environment in a process of the other Python.  Used on one event loop."""

    python: str
    environment: Mapping[str, Any]
    access: Access = field(default_factory=Access)
    _child: ChildProcess | None = None
    _writer: asyncio.StreamWriter | None = None
    _waiting: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    _cancelled: dict[int, asyncio.TimerHandle] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reading: asyncio.Task[None] | None = None

    async def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Runs an episode and returns its result; see child.py.

        Raises WorkflowError if the episode failed or the process ended, and LoadError if the environment cannot be loaded.
        """
        async with self._starting:
            if not self.running:
                await self._start()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send({"id": number, **request})
            reply = await answer
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            self._waiting.pop(number, None)
        if "failed" in reply:
            raise WorkflowError(f"environment {self.environment['id']}: {reply['failed']}")
        value: dict[str, Any] = reply["value"]
        return value

    async def aclose(self) -> None:
        """Ends the process with everything that it has started."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._end()

    @property
    def running(self) -> bool:
        """Returns whether the process is there and takes episodes."""
        return self._writer is not None

    def host_pid(self) -> int:
        """Returns the number of the process.  Raises RuntimeError if it is not running."""
        if self._child is None:
            raise RuntimeError(f"the process of environment {self.environment['id']} is not running")
        return self._child.host_pid()

    def _cancel(self, number: int) -> None:
        """Cancels an episode.  A process that does not confirm it in time hangs, with all its episodes, and is ended."""
        child = self._child
        if child is not None and self.running:
            self._send({"cancel": number})
            self._cancelled[number] = asyncio.get_running_loop().call_later(CANCEL_S, self._hangs, child)

    def _hangs(self, child: ChildProcess) -> None:
        logger.warning("environment %s cancelled no episode within %g s; its process is ended", self.environment["id"], CANCEL_S)
        child.process.terminate()

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(encode(message))

    async def _start(self) -> None:
        folder = tempfile.mkdtemp(prefix="rlhub-", dir="/tmp")  # a socket's path has at most 107 characters
        address, connected = str(Path(folder) / "socket"), asyncio.Queue[Any]()
        server = await asyncio.start_unix_server(lambda *streams: connected.put_nowait(streams), address, limit=LINE_BYTES)
        try:
            async with asyncio.timeout(START_S):
                await self._spawn(address)
                reader, writer = await connected.get()
                first = decode(await reader.readline() or b"{}")
        except TimeoutError:
            first = {}
        finally:
            server.close()
            shutil.rmtree(folder, ignore_errors=True)
        if "ready" not in first:
            how = await self._end()
            raise LoadError(f"environment {self.environment['id']}: {first.get('failed') or f'its process {how}'}")
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader))

    async def _spawn(self, address: str) -> None:
        """Starts the child; what it is asked for is one call that lasts as long as the socket."""
        request = ChildRequest.of([{"address": address, "environment": dict(self.environment)}])
        launch = Launch(python=self.python, memory_kind="data")
        parameters = ("address", "environment")
        self._child = child = await asyncio.to_thread(
            spawn, SERVE, parameters, memory_gb=MEMORY_GB, access=self.access, launch=launch
        )
        begun = asyncio.get_running_loop().create_future()

        def readable() -> None:
            child.read()
            if child.finished:
                asyncio.get_running_loop().remove_reader(child.reply_fd)
            if (child.ready or child.finished) and not begun.done():
                begun.set_result(None)

        asyncio.get_running_loop().add_reader(child.reply_fd, readable)
        await begun
        child.give((0,), request)
        while child.wants_write:
            await asyncio.sleep(0.01)
            child.write()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hands the answers out until the process ends."""
        with contextlib.suppress(ConnectionError, ValueError):
            async for line in reader:
                reply = decode(line)
                if cancelled := self._cancelled.pop(reply.get("id"), None):
                    cancelled.cancel()
                waiting = self._waiting.get(reply.get("id"))
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        lost, how = list(self._waiting.values()), await self._end()  # later ones belong to the next process
        for waiting in lost:
            if not waiting.done():
                waiting.set_result({"failed": f"its process {how}"})

    async def _end(self) -> str:
        child, writer, self._child, self._writer = self._child, self._writer, None, None
        while self._cancelled:
            self._cancelled.popitem()[1].cancel()
        if writer is not None:
            writer.close()
        if child is None:
            return "ended before"
        asyncio.get_running_loop().remove_reader(child.reply_fd)
        return await asyncio.to_thread(child.kill)


def library_process(knobs: VerifiersKnobs, environment_id: str) -> LibraryProcess:
    """Returns the process of these settings, which starts with the first episode.  Raises ConfigError for a Python that is
    missing."""
    python = checked_python(knobs.verifiers_python)
    access = Access(setting="rollout.agent.kwargs.env", env=tuple(knobs.env))
    return LibraryProcess(python=python, environment=described(knobs, environment_id), access=access)


def environment_problems(knobs: VerifiersKnobs, environment_id: str) -> list[str]:
    """Returns the reason why the environment cannot be loaded, or []; it is loaded in the other Python, which takes seconds."""
    try:
        list_tasks(knobs.verifiers_python, described(knobs, environment_id), 0)
    except ConfigError as error:
        return list(error.problems)
    return []


def described(knobs: VerifiersKnobs, environment_id: str) -> dict[str, Any]:
    """Returns what child.load takes."""
    path = [str(Path(folder).expanduser().resolve()) for folder in knobs.verifiers_path]
    return {"id": environment_id, "settings": knobs.verifiers_env, "path": path}


def checked_python(python: str) -> str:
    """Returns the interpreter's path.  Raises ConfigError if there is none."""
    if not python:
        raise ConfigError(f"rollout.agent.kwargs.verifiers_python is not set: a Python with verifiers; {SETUP}")
    found = shutil.which(Path(python).expanduser())
    if found is None:
        raise ConfigError(f"rollout.agent.kwargs.verifiers_python={python}: no such program; {SETUP}")
    return str(Path(found).absolute())


def list_tasks(python: str, environment: Mapping[str, Any], limit: int | None) -> Sequence[dict[str, Any]]:
    """Returns the tasks of an environment, at most `limit` (None: all), as child.tasks gives them.

    Raises ConfigError if the Python, the package or the environment is missing, or if the environment cannot be loaded.
    """
    command = [checked_python(python), "-c", LIST, RLHUB_ROOT, json.dumps([environment, limit])]
    variables = Launch(python=python).environment(Access().variables())
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIST_S, check=False, env=variables)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"verifiers:{environment['id']}: its tasks were not listed after {LIST_S:g} s") from error
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or not lines or "failed" in lines[-1]:
        why = lines[-1].get("failed") if lines else done.stderr.decode(errors="replace")[-2000:]
        raise ConfigError(f"verifiers:{environment['id']}: {why}")
    return lines[1:]
