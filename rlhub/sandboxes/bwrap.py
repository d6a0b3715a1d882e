"""bwrap: sandboxes of Linux namespaces on this machine, by bubblewrap (https://github.com/containers/bubblewrap).

A command has namespaces of its own for files, processes, network, IPC, host name and cgroups.  It sees the system's programs
(/usr and what belongs to it) and this Python with its packages, read-only, and can write only to its folder and /tmp; it has no
capability and gains none.  What bounds it:

    time        this process, by a kill of bwrap, with which the namespace's first process and so all others end; if this one is
                killed, the kernel has a timeout around bwrap kill it and what it is still starting (bwrap itself would leave a
                child that waits for it for ever), and a second timeout inside ends what has just left bwrap's group
    memory      a cgroup where this process may write one (process.py), the sum of all processes; otherwise RLIMIT_AS of each, and
                the private memory of all, looked at ten times a second, which does not count files in memory (memfd)
    processes   the cgroup, and RLIMIT_NPROC for a user id or user namespace that no other sandbox has
    files       RLIMIT_FSIZE of each, and their sum, looked at ten times a second

Started by root, bwrap mounts as root, and the command runs under a user id that nothing else has: it reads only what every user
may read.  Otherwise, and where root lacks the right to mount, bwrap uses a user namespace, and the command has this user's id.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from rlhub.errors import ConfigError
from rlhub.sandboxes.base import WORKSPACE, Cause, ExecResult, Given, Sandbox, SandboxError, SandboxLimits, SandboxProvider
from rlhub.sandboxes.process import (
    END_S,
    Cgroup,
    Launcher,
    Parents,
    RunningCommand,
    find_parents,
    private_bytes,
    remove_groups,
)
from rlhub.sandboxes.tunnel import tunnel
from rlhub.sandboxes.workspace import Workspace, clean_up

logger = logging.getLogger(__name__)
KIND = "bwrap"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives")
NEEDED = {
    "bwrap": "bubblewrap",
    "prlimit": "util-linux",
    "setpriv": "util-linux",
    "timeout": "coreutils",
}  # program: Debian's package
USER_IDS, NUM_USER_IDS = 2_000_000_000, 1 << 21  # far above those that systems give out
NUM_OPEN_FILES = 1024
PROBE_S = 30.0
STATUS_BYTES = 1 << 12
ENTER = '[ $PPID = "$1" ] || exit 125; shift; while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'
"""Ends if this process, whose id comes first, ended before the kernel was asked to say so; then enters groups, runs the rest."""
Mode = Literal["root", "user"]
"""Who mounts: root itself, or a user namespace's root."""
_numbers = itertools.count()


@dataclass(slots=True, kw_only=True)
class BwrapProvider(SandboxProvider):
    """Opens sandboxes with bubblewrap."""

    @property
    def python(self) -> str:
        """Returns this interpreter, with its packages."""
        return sys.executable

    def check(self) -> None:
        problems = self.missing_paths()
        if problems:
            raise ConfigError(problems)
        self.variables()
        usable_mode()

    async def open(self) -> Sandbox:
        clean_up(KIND, remove_own_groups)
        return BwrapSandbox(self, usable_mode())


class BwrapSandbox(Sandbox):
    """A folder on the host, and a bwrap for each command.  mode: as `usable_mode` returns it."""

    def __init__(self, provider: BwrapProvider, mode: Mode) -> None:
        self._provider, self._mode, self._limits = provider, mode, provider.limits
        self._number = next(_numbers)
        own = (os.getpid() << 8 | self._number & 255) % NUM_USER_IDS
        self._user = USER_IDS + own if mode == "root" else None
        self._files = Workspace(KIND, self._user)
        self._one = asyncio.Lock()

    async def exec(self, command: Sequence[str], stdin: bytes = b"", *, given: Given | None = None) -> ExecResult:
        given = given or Given()
        async with self._one, tunnel(given.reach, self._files.work, self._provider.python) as through:
            group = self._group()
            status = os.memfd_create("status")  # a pipe whose reader was killed would end bwrap before what it is starting
            try:
                seconds = given.seconds(self._limits)
                bounded = [_program("timeout"), "--signal=KILL", f"{seconds + END_S}", *through, *command]
                launcher = self._launcher(bounded, seconds, group, status, given.env)
                result = await RunningCommand(launcher, self._limits).run(stdin, seconds)
                return self._judged(result, group, os.pread(status, STATUS_BYTES, 0).decode(errors="replace"))
            finally:
                os.close(status)
                if group is not None:
                    await asyncio.to_thread(group.remove)

    async def write(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(self._files.write, path, data, self._limits.disk_bytes)

    async def read(self, path: str) -> bytes:
        return await asyncio.to_thread(self._files.read, path, self._limits.disk_bytes)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._files.remove)

    def _group(self) -> Cgroup | None:
        parents = cgroup_parents()
        return None if parents is None else Cgroup(parents, f"{self._files.name}-{next(_numbers)}", self._limits)

    def _launcher(
        self, command: Sequence[str], seconds: float, group: Cgroup | None, status: int, env: Mapping[str, str]
    ) -> Launcher:
        argv = [
            *bwrap_arguments(self._mode, self._provider, [str(self._files.work), str(self._files.tmp)]),
            *("--json-status-fd", str(status), "--"),
            *inner_arguments(self._limits, self._user, total_memory=group is not None),
            *("--", *command),
        ]
        entries = [] if group is None else group.entries
        around = [_program("timeout"), "--signal=KILL", f"{seconds + 2 * END_S}"]  # at the signal of its alarm it kills its group
        enter = ["/bin/sh", "-c", ENTER, "sh", str(os.getpid()), *entries, "--"]
        argv = [_program("setpriv"), "--pdeathsig", "ALRM", *enter, *around, *argv]
        sampled = group is None
        env = {**own_variables(self._provider.python), **self._provider.variables(), **env}
        return Launcher(argv=argv, env=env, pass_fds=[status], watch=lambda process: self._overused(process, memory=sampled))

    def _overused(self, process: int, *, memory: bool) -> Cause:
        if memory and private_bytes(process) > self._limits.memory_bytes:
            return "memory"
        return "disk" if self._files.used_bytes(self._limits.disk_bytes) > self._limits.disk_bytes else ""

    def _judged(self, result: ExecResult, group: Cgroup | None, status: str) -> ExecResult:
        """Returns the result with the kernel's reason for a kill.  Raises SandboxError if the command has not been started."""
        if result.ended:
            return result
        if group is not None and group.num_killed:
            return ExecResult(
                code=result.code, stdout=result.stdout, stderr=result.stderr, ended="memory", seconds=result.seconds
            )
        if "exit-code" not in status:
            raise SandboxError(f"bwrap started no command: {result.stderr.decode(errors='replace').strip()[-500:]}")
        return result


def bwrap_arguments(mode: Mode, provider: SandboxProvider, folders: Sequence[str]) -> list[str]:
    """Returns the command line of bwrap without the command.  folders: the host's folders for WORKSPACE and /tmp.

    The command's environment is bwrap's own: in the command line every user could read it.
    """
    work, tmp = folders
    users = ["--unshare-user", "--cap-drop", "ALL"] if mode == "user" else ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if mode == "user" and _nested_namespaces_can_be_refused():
        users.append("--disable-userns")
    return [
        *(_program("bwrap"), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", *users),
        *("--die-with-parent", "--new-session", "--hostname", "sandbox"),
        *("--proc", "/proc", "--dev", "/dev", "--bind", tmp, "/tmp", "--bind", tmp, "/dev/shm", "--bind", work, WORKSPACE),
        *_read_only((*SYSTEM, *_python_folders(), *provider.read_only)),  # after /tmp, which may have some of them
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKSPACE),
    ]


def inner_arguments(limits: SandboxLimits, user: int | None, *, total_memory: bool) -> list[str]:
    """Returns the programs that, inside, set limits and drop rights before the command.  total_memory: a cgroup bounds it."""
    memory = [] if total_memory else [f"--as={limits.memory_bytes}"]
    bounds = [
        f"--nproc={limits.processes + 1}",
        f"--fsize={limits.disk_bytes}",
        f"--nofile={NUM_OPEN_FILES}",
        "--core=0",
        *memory,
    ]
    ids = [] if user is None else [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    drop = ["--inh-caps=-all", *(["--bounding-set=-all"] if user is not None else [])]
    return [_program("setpriv"), *ids, *drop, "--no-new-privs", "--", _program("prlimit"), *bounds]


def own_variables(python: str) -> dict[str, str]:
    """Returns the variables of every command."""
    path = os.pathsep.join(dict.fromkeys([os.path.dirname(python), "/usr/local/bin", "/usr/bin", "/bin"]))
    return {"PATH": path, "HOME": WORKSPACE, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}


def remove_own_groups(name: str) -> bool:
    """Removes the control groups of a sandbox.  Returns False if one has processes that still end."""
    return remove_groups(cgroup_parents(), name)


@functools.cache
def usable_mode() -> Mode:
    """Returns the mode in which bwrap works here.  Raises ConfigError with what it says and a remedy where none does."""
    missing = [f"{name} (apt install {package})" for name, package in NEEDED.items() if not shutil.which(name)]
    if sys.platform != "linux" or missing:
        raise ConfigError(f"needs {', '.join(missing)}" if missing else "only Linux has namespaces; use docker")
    said = []
    for mode in _modes():
        said.append(f"{mode}: {_refusal(mode)}")
        if said[-1] == f"{mode}: ":
            return mode
    raise ConfigError(
        f"bubblewrap cannot make a sandbox here ({'; '.join(said)}). It needs user namespaces (sysctl "
        "user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0), or root with CAP_SYS_ADMIN: for a container, start it with "
        "--cap-add SYS_ADMIN and a seccomp profile that allows mounts, or use sandbox=docker on its host"
    )


@functools.cache
def cgroup_parents() -> Parents | None:
    """Returns where cgroups can be made, once one has been.  None is logged, with what it means."""
    parents = find_parents()
    if parents is not None:
        try:
            Cgroup(parents, f"rlhub-try-{secrets.token_hex(8)}", SandboxLimits()).remove()
            return parents
        except SandboxError as error:
            logger.debug("cgroups cannot be used: %s", error)
    logger.info(
        "sandboxes have no cgroup here, which takes root and a writable /sys/fs/cgroup: memory is bounded for each process, and "
        "for all of a command only by looking at it ten times a second"
    )
    return None


def _modes() -> list[Mode]:
    if os.geteuid() != 0:
        return ["user"]
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    last = USER_IDS + NUM_USER_IDS
    free = any(inside <= USER_IDS and last <= inside + count for inside, _, count in ranges)
    return ["root", "user"] if free else ["user"]


def _refusal(mode: Mode) -> str:
    """Returns what bwrap says where it cannot run a command in this mode, otherwise ""."""
    provider, user = BwrapProvider(), USER_IDS if mode == "root" else None
    files = Workspace(KIND, user)
    argv = [
        *bwrap_arguments(mode, provider, [str(files.work), str(files.tmp)]),
        *("--", *inner_arguments(SandboxLimits(), user, total_memory=True), "--", "/bin/sh", "-c", ": > file"),
    ]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=PROBE_S, env={}, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        files.remove()
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip()[-300:] or f"exit {done.returncode}"


@functools.cache
def _nested_namespaces_can_be_refused() -> bool:
    said = subprocess.run([_program("bwrap"), "--help"], capture_output=True, check=False, timeout=PROBE_S).stdout
    return b"--disable-userns" in said


@functools.cache
def _program(name: str) -> str:
    return shutil.which(name) or name


def _python_folders() -> list[str]:
    """Returns the folders of this Python, its packages included, that are not among the system's."""
    folders = dict.fromkeys([sys.base_prefix, sys.base_exec_prefix, sys.prefix])
    return [folder for folder in folders if not f"{folder}/".startswith("/usr/")]


@functools.cache
def _read_only(paths: tuple[str, ...]) -> list[str]:
    """Returns the arguments that show those of the paths that are there; a link, such as /bin, stays one.

    Folders above them can be entered by all: by itself bwrap makes them for root only.  Found once, because looking takes 2 ms.
    """
    shown = list(filter(os.path.exists, paths))
    above = {str(folder) for path in shown for folder in PurePath(path).parents} - {"/"}
    found = [word for folder in sorted(above) for word in ("--dir", folder)]
    for path in shown:
        link = path in SYSTEM and os.path.islink(path)
        found += ["--symlink", os.readlink(path), path] if link else ["--ro-bind", path, path]
    return found
