"""Sandbox: a folder and commands that run in it, cut off from this machine.  SandboxProvider: opens sandboxes of one kind.

A command has no network, sees no process and no file outside of what the provider names, and only the environment variables that
are named.  All that it has started ends with it: nothing but files stays from one command to the next.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlhub.errors import ConfigError, RlhubError

WORKSPACE = "/workspace"
"""The folder of a sandbox as its commands see it, their working directory and HOME."""
Cause = Literal["", "time", "memory", "output", "disk"]
Address = tuple[str, int]
"""Host and port."""


class SandboxError(RlhubError, RuntimeError):
    """A sandbox cannot start a command, or a path does not lead to a file of the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The limits of one sandbox.  Raises ConfigError for a limit that is not positive."""

    timeout_s: float = 10.0
    """Wall-clock time of a command in seconds; when it has passed, the command ends with everything that it has started."""
    memory_gb: float = 1.0
    """Memory in GiB: of all processes together where cgroups can be written, otherwise the address space of each process and,
    checked ten times a second, the private memory of all."""
    processes: int = 64
    """Maximum number of processes and threads at one time."""
    output_bytes: int = 1 << 20
    """Maximum number of bytes of standard output, and as many of standard error; a command that writes more is ended."""
    disk_mb: float = 256.0
    """MiB of the sandbox's files: a bound on each file, and on their sum, which is checked ten times a second."""

    def __post_init__(self) -> None:
        wrong = [name for name in self.__slots__ if not getattr(self, name) > 0]
        if wrong:
            raise ConfigError([f"sandbox.{name}={getattr(self, name)}: must be above 0" for name in wrong])

    @property
    def memory_bytes(self) -> int:
        """Returns the memory in bytes."""
        return int(self.memory_gb * 2**30)

    @property
    def disk_bytes(self) -> int:
        """Returns the disk space in bytes."""
        return int(self.disk_mb * 2**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """A command that has ended.

    code: its exit status, 128 and the signal's number where a signal ended it.  ended: the limit for which the sandbox ended it,
    "" where it ended by itself.  stdout, stderr: at most `SandboxLimits.output_bytes` each.  seconds: wall-clock time.
    """

    code: int
    stdout: bytes
    stderr: bytes
    ended: Cause = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What one command is given.

    timeout_s: its time limit in seconds, at most that of the limits; None: that one.  env: further environment variables.  reach:
    the one address that it may connect to, inside at 127.0.0.1 and the same port; None: none.
    """

    timeout_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    reach: Address | None = None

    def seconds(self, limits: SandboxLimits) -> float:
        """Returns the time limit in seconds."""
        return limits.timeout_s if self.timeout_s is None else min(self.timeout_s, limits.timeout_s)


class Sandbox(ABC):
    """One sandbox.  Its files stay until it is closed.  All methods run on one event loop; commands run one after the other."""

    @abstractmethod
    async def exec(self, command: Sequence[str], stdin: bytes = b"", *, given: Given | None = None) -> ExecResult:
        """Runs a command with `stdin` as its whole input.  given: what differs from command to command.

        Whatever the command does is a result.  Raises SandboxError only where the sandbox itself fails.  A cancelled call ends
        the command.
        """

    @abstractmethod
    async def write(self, path: str, data: bytes) -> None:
        """Writes a file, and the folders above it.  path: below WORKSPACE, relative or absolute.  Raises SandboxError for any
        other path, also for one that leads outside through a symbolic link."""

    @abstractmethod
    async def read(self, path: str) -> bytes:
        """Returns the content of a regular file.  Raises SandboxError as `write` does, and where there is no such file."""

    @abstractmethod
    async def aclose(self) -> None:
        """Removes the sandbox with its files.  Idempotent."""

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


@dataclass(slots=True, kw_only=True)
class SandboxProvider(ABC):
    """Opens sandboxes with the same limits.  A provider of your own, for a hosted service for example, is a dataclass derived
    from this one; its fields are settings.

    env: names of environment variables that commands receive besides PATH, HOME, LANG and TMPDIR.  read_only: further paths of
    this machine that commands can read, at the same place.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    env: Sequence[str] = ()
    read_only: Sequence[str] = ()

    @property
    @abstractmethod
    def python(self) -> str:
        """Returns the path of a Python interpreter inside."""

    @abstractmethod
    def check(self) -> None:
        """Raises ConfigError with reason and remedy where this machine cannot run such sandboxes."""

    @abstractmethod
    async def open(self) -> Sandbox:
        """Returns a new sandbox with an empty folder."""

    def variables(self) -> dict[str, str]:
        """Returns the named environment variables.  Raises ConfigError for one that is not set here."""
        unset = [name for name in self.env if name not in os.environ]
        if unset:
            raise ConfigError(f"sandbox.env lists {', '.join(unset)}: not set where the run starts; set it, or remove it there")
        return {name: os.environ[name] for name in self.env}

    def missing_paths(self) -> list[str]:
        """Returns a sentence for each path of `read_only` that does not exist."""
        return [f"sandbox.read_only: no such path: {path}" for path in self.read_only if not os.path.exists(path)]
