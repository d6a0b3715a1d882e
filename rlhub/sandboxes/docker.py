"""docker: a container for each command, started by docker's command line; the sandbox's folder is bound into it.

A container starts in some tenths of a second, where bwrap takes hundredths, and brings the programs of its image.  The daemon
bounds memory and processes by cgroups; this process bounds time, output and the sum of the files.  A command that the kernel ends
for its memory has the exit status 137 and no other mark.

Written against the documented command line (https://docs.docker.com/reference/cli/docker/container/run/).  The tests read the
command line that is built and the refusals; no test here has had a daemon.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlhub.errors import ConfigError
from rlhub.sandboxes.base import WORKSPACE, Cause, ExecResult, Given, Sandbox, SandboxError, SandboxProvider
from rlhub.sandboxes.process import Launcher, RunningCommand
from rlhub.sandboxes.tunnel import tunnel
from rlhub.sandboxes.workspace import Workspace, clean_up

KIND = "docker"
NOBODY = 65534  # the user inside where root starts the container
DAEMON_FAILED = 125  # exit status of `docker run` where no command was started
ANSWER_S = 30.0
_numbers = itertools.count()


@dataclass(slots=True, kw_only=True)
class DockerProvider(SandboxProvider):
    """Opens sandboxes with docker.  image: the image, which must be there.  runtime: docker's runtime, such as runsc (gVisor); ""
    for its default."""

    image: str = "python:3.11-slim"
    runtime: str = ""

    @property
    def python(self) -> str:
        return "python3"

    def check(self) -> None:
        problems = self.missing_paths()
        if problems:
            raise ConfigError(problems)
        self.variables()
        if shutil.which("docker") is None:
            raise ConfigError("docker's client is not installed; install docker, or use sandbox=bwrap")
        if why := _failure(["docker", "version", "--format", "{{.Server.Version}}"]):
            raise ConfigError(
                f"docker has no daemon that answers ({why}); start it, give this user access to its socket, set DOCKER_HOST, or "
                "use sandbox=bwrap"
            )
        if why := _failure(["docker", "image", "inspect", "--format", "{{.Id}}", self.image]):
            raise ConfigError(f"docker has no image {self.image} ({why}); run: docker pull {self.image}")

    async def open(self) -> Sandbox:
        clean_up(KIND, end_containers)
        return DockerSandbox(self)


class DockerSandbox(Sandbox):
    """A folder on the host, and a container for each command."""

    def __init__(self, provider: DockerProvider) -> None:
        self._provider, self._limits = provider, provider.limits
        self._user = NOBODY if os.geteuid() == 0 else os.geteuid()
        self._files = Workspace(KIND, self._user if os.geteuid() == 0 else None)
        self._one = asyncio.Lock()

    async def exec(self, command: Sequence[str], stdin: bytes = b"", *, given: Given | None = None) -> ExecResult:
        given, name, finished = given or Given(), f"{self._files.name}-{next(_numbers)}", False
        async with self._one, tunnel(given.reach, self._files.work, self._provider.python) as through:
            launcher = self._launcher([*through, *command], name, given.env)
            try:
                result = await RunningCommand(launcher, self._limits).run(stdin, given.seconds(self._limits))
                finished = not result.ended
            finally:
                if not finished:  # the client was killed, not the container
                    await asyncio.to_thread(_failure, ["docker", "kill", name])
        if finished and result.code == DAEMON_FAILED:
            raise SandboxError(f"docker started no command: {result.stderr.decode(errors='replace').strip()[-500:]}")
        return result

    async def write(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(self._files.write, path, data, self._limits.disk_bytes)

    async def read(self, path: str) -> bytes:
        return await asyncio.to_thread(self._files.read, path, self._limits.disk_bytes)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._files.remove)

    def _launcher(self, command: Sequence[str], name: str, env: Mapping[str, str]) -> Launcher:
        folders = [str(self._files.work), str(self._files.tmp)]
        words = docker_arguments(self._provider, name, self._user, folders, env)
        return Launcher(
            argv=[*words, command[0], self._provider.image, *command[1:]],
            env={**os.environ, **self._provider.variables(), **env},
            watch=self._overused,
        )

    def _overused(self, process: int) -> Cause:
        return "disk" if self._files.used_bytes(self._limits.disk_bytes) > self._limits.disk_bytes else ""


def end_containers(name: str) -> bool:
    """Ends the containers of a sandbox.  Returns False if one may be left."""
    listed = ["docker", "ps", "--quiet", "--filter", f"name={name}-"]
    try:
        found = subprocess.run(listed, capture_output=True, text=True, timeout=ANSWER_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return False
    left = found.stdout.split()
    return not left or not _failure(["docker", "kill", *left])  # started with --rm


def docker_arguments(
    provider: DockerProvider, name: str, user: int, folders: Sequence[str], env: Iterable[str] = ()
) -> list[str]:
    """Returns the command line up to the program's name.  folders: the host's folders for WORKSPACE and /tmp.  env: names of
    further variables.

    Values of environment variables are not in it, since every user can read a command line.
    """
    limits = provider.limits
    bounds = {
        "--memory": f"{limits.memory_bytes}b",
        "--memory-swap": f"{limits.memory_bytes}b",
        "--pids-limit": str(limits.processes),
    }
    mounts = [f"type=bind,src={folder},dst={place}" for folder, place in zip(folders, (WORKSPACE, "/tmp"), strict=True)]
    mounts += [f"type=bind,src={path},dst={path},readonly" for path in map(os.path.abspath, provider.read_only)]
    named = [f"HOME={WORKSPACE}", "LANG=C.UTF-8", "TMPDIR=/tmp", *provider.env, *env]
    return [
        *("docker", "run", "--rm", "--interactive", "--init", "--name", name, "--pull", "never", "--network", "none"),
        *(["--runtime", provider.runtime] if provider.runtime else []),
        *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{user}:{user}"),
        *(word for pair in bounds.items() for word in pair),
        *("--ulimit", f"fsize={limits.disk_bytes}", "--ulimit", "core=0", "--log-driver", "none"),
        *(word for mount in mounts for word in ("--mount", mount)),
        *(word for variable in named for word in ("--env", variable)),
        *("--workdir", WORKSPACE, "--entrypoint"),
    ]


def _failure(command: Sequence[str]) -> str:
    """Returns what a command of docker's client says where it fails, otherwise ""."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=ANSWER_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return "" if done.returncode == 0 else (said[-1] if said else f"exit status {done.returncode}")
