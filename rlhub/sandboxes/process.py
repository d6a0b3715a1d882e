"""One command on the host, with its bounds on time and output and a watch over what else it uses; and a control group for it.

What it runs is a launcher (bwrap, docker) that takes the sandbox's processes with it when it is killed.

A control group is the kernel's bound on the memory and the number of all its processes together.  Both versions of the interface
are used where this process may write them, which mostly takes root: version 1 below this process's own groups, version 2 below
the nearest group above it that passes memory and pids on (a group with processes of its own cannot).  Source: the kernel's
admin-guide/cgroup-v1 and cgroup-v2.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhub.sandboxes.base import Cause, ExecResult, SandboxError, SandboxLimits

CHUNK = 1 << 16
WATCH_S = 0.1  # between two looks; a look that is slow is taken less often
WATCH_SHARE = 0.1  # maximum share of the time that looks may take
END_S = 10.0  # for the end of a killed sandbox
SIGNAL_BASE = 128
CONTROLLERS = ("memory", "pids")
GONE_S = 2.0  # for the kernel to let go of a group whose last process has ended

Watch = Callable[[int], Cause]
"""Returns the limit that a process, by its id, and its descendants exceed, otherwise ""."""


@dataclass(slots=True, kw_only=True)
class Launcher:
    """How a command is started.  argv, env, pass_fds: as for a subprocess.  watch: called ten times a second."""

    argv: Sequence[str]
    env: dict[str, str]
    pass_fds: Sequence[int] = ()
    watch: Watch | None = None


class RunningCommand:
    """One run of a launcher.  cause: the limit for which it is being ended."""

    def __init__(self, launcher: Launcher, limits: SandboxLimits) -> None:
        self._launcher, self._limits = launcher, limits
        self.cause: Cause = ""
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, stdin: bytes, timeout_s: float) -> ExecResult:
        """Starts the launcher, and returns once it and everything below it has ended.  Raises SandboxError if it cannot start."""
        began = time.monotonic()
        process = self._process = await self._start()
        work = asyncio.gather(
            self._feed(process.stdin, stdin),
            self._collect(process.stdout),
            self._collect(process.stderr),
            process.wait(),
        )
        watch = asyncio.create_task(self._watched(process.pid))
        try:
            done, _ = await asyncio.wait([work], timeout=timeout_s)
            if not done:
                self._end("time")
            _, out, err, code = await asyncio.wait_for(work, END_S)
        except TimeoutError:
            raise SandboxError(f"a sandbox did not end {END_S:g} s after it was killed") from None
        finally:
            watch.cancel()
            if not work.done() or process.returncode is None:  # the call is cancelled, or something does not end
                self._end("")
                await process.wait()
        exit_code = code if code >= 0 else SIGNAL_BASE - code
        return ExecResult(code=exit_code, stdout=out, stderr=err, ended=self.cause, seconds=time.monotonic() - began)

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self._launcher.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._launcher.env,
                pass_fds=tuple(self._launcher.pass_fds),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: a null character in an argument
            raise SandboxError(f"{self._launcher.argv[0]} cannot be started: {error}") from error

    def _end(self, cause: Cause) -> None:
        """Kills the launcher and what it is starting, for `cause` if there is no earlier one.

        Also where the launcher itself has ended: what it was starting when something else killed it is left, in its group.
        """
        self.cause = self.cause or cause
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _feed(self, pipe: asyncio.StreamWriter | None, data: bytes) -> None:
        assert pipe is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            pipe.write(data)
            await pipe.drain()
        with suppress(BrokenPipeError, ConnectionResetError):
            pipe.close()
            await pipe.wait_closed()

    async def _collect(self, pipe: asyncio.StreamReader | None) -> bytes:
        assert pipe is not None
        parts, left = [], self._limits.output_bytes
        while chunk := await pipe.read(CHUNK):
            parts.append(chunk[:left])
            if len(chunk) > left and not self.cause:
                self._end("output")
            left = max(0, left - len(chunk))
        return b"".join(parts)

    async def _watched(self, process: int) -> None:
        wait = WATCH_S
        while self._launcher.watch is not None:
            await asyncio.sleep(wait)
            began = time.monotonic()
            if cause := await asyncio.to_thread(self._launcher.watch, process):
                self._end(cause)
            wait = max(WATCH_S, (time.monotonic() - began) / WATCH_SHARE)


def private_bytes(process: int) -> int:
    """Returns the private resident memory of a process and its descendants in bytes.  Files in memory are not in it."""
    page, total, waiting = os.sysconf("SC_PAGE_SIZE"), 0, [process]
    while waiting:
        number = waiting.pop()
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{number}/statm") as file:
                sizes = file.read().split()
            total += (int(sizes[1]) - int(sizes[2])) * page
            for thread in os.listdir(f"/proc/{number}/task"):
                with open(f"/proc/{number}/task/{thread}/children") as file:
                    waiting += map(int, file.read().split())
    return total


# --- control groups ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Parents:
    """The groups below which new ones are made: one for each controller in version 1, one for both in version 2."""

    version: int
    folders: tuple[Path, ...]


def find_parents(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> Parents | None:
    """Returns where groups can be made, None where they cannot.  own: the text of /proc/self/cgroup."""
    lines = (Path("/proc/self/cgroup").read_text() if own is None else own).splitlines()
    paths = {name: path for line in lines for _, names, path in [line.split(":", 2)] for name in names.split(",")}
    if all(name in paths for name in CONTROLLERS):
        folders = tuple(root / name / paths[name].lstrip("/") for name in CONTROLLERS)
        return Parents(version=1, folders=folders) if all(map(_writable, folders)) else None
    if "" not in paths:
        return None
    mine = root / paths[""].lstrip("/")
    for folder in (mine, *mine.parents):
        if not folder.is_relative_to(root):
            break
        if _passes_on(folder):
            return Parents(version=2, folders=(folder,)) if _writable(folder) else None
    return None


class Cgroup:
    """The group of one command, empty at first.  Raises SandboxError if it cannot be made."""

    def __init__(self, parents: Parents, name: str, limits: SandboxLimits) -> None:
        self.folders: Sequence[Path] = [folder / name for folder in parents.folders]
        try:
            for folder, values in zip(self.folders, _values(parents.version, limits), strict=True):
                folder.mkdir()
                _write(folder, values)
        except OSError as error:
            self.remove()
            raise SandboxError(f"no control group can be made: {error}") from error

    @property
    def entries(self) -> list[str]:
        """Returns the files into which a process writes its number to enter the group."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    @property
    def num_killed(self) -> int:
        """Returns how many processes the kernel has killed for the group's memory."""
        for name in ("memory.oom_control", "memory.events"):
            file = self.folders[0] / name
            if file.is_file():
                found = dict(line.split(" ", 1) for line in file.read_text().splitlines())
                return int(found.get("oom_kill", 0))
        return 0

    def remove(self) -> None:
        """Removes the group, whose processes have ended."""
        end = time.monotonic() + GONE_S
        for folder in self.folders:
            while folder.is_dir():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > end:
                        return
                    time.sleep(0.005)


def remove_groups(parents: Parents | None, name: str) -> bool:
    """Removes the groups whose names begin with `name` and a hyphen.  Returns False if one has processes that still end."""
    groups = [] if parents is None else [group for folder in parents.folders for group in folder.glob(f"{name}-*")]
    for group in groups:
        with suppress(OSError):
            group.rmdir()
    return not any(group.is_dir() for group in groups)


def _values(version: int, limits: SandboxLimits) -> list[Mapping[str, int]]:
    memory, processes = limits.memory_bytes, limits.processes + OWN_PROCESSES
    if version == 1:
        bounds = {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory}
        return [bounds, {"pids.max": processes}]
    return [{"memory.max": memory, "memory.swap.max": 0, "memory.oom.group": 1, "pids.max": processes}]


OWN_PROCESSES = 5
"""bwrap's own processes in the group, its command's timeout and its own."""
OPTIONAL = ("memory.memsw.limit_in_bytes", "memory.swap.max", "memory.oom.group")
"""Files that a kernel without swap accounting, or an older one, has not."""


def _write(folder: Path, values: Mapping[str, int]) -> None:
    for name, value in values.items():
        if name in OPTIONAL and not (folder / name).exists():
            continue
        with open(folder / name, "w") as file:
            file.write(str(value))


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def _passes_on(folder: Path) -> bool:
    try:
        return set(CONTROLLERS) <= set((folder / "cgroup.subtree_control").read_text().split())
    except OSError:
        return False
