"""Running somebody's agent: a coroutine, a plain function in a thread, or a program; none of them knows of rlhub.

    async def run(base_url: str, api_key: str, row: dict) -> float | None: ...

A program finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment, which OpenAI's client reads by itself, and the row as
JSON on its standard input.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhub.errors import ConfigError, LoadError, WorkflowError
from rlhub.utils.user_code import load_target

SHOWN = 2000  # characters of a failed program's error output in the message


class Agent(Protocol):
    """What an episode runs."""

    async def __call__(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> float | None:
        """Do the task; the reward, where the agent gives one."""
        ...


@dataclass(slots=True, kw_only=True)
class FunctionAgent:
    """function: called with base_url, api_key and row by name; a plain one runs in a thread of `threads`."""

    function: Callable[..., Any]
    threads: ThreadPoolExecutor

    async def __call__(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> float | None:
        arguments = {"base_url": base_url, "api_key": api_key, "row": dict(row)}
        if inspect.iscoroutinefunction(self.function):
            found = await self.function(**arguments)
        else:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self.threads, lambda: self.function(**arguments))
        return as_reward(found)


@dataclass(slots=True, kw_only=True)
class ProgramAgent:
    """command: without the row.  The program and all that it starts are ended with the episode."""

    command: Sequence[str]
    reads_reward: bool

    async def __call__(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> float | None:
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
            start_new_session=True,
        )
        try:
            out, err = await process.communicate(json.dumps(dict(row), default=_plain).encode())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            told = err.decode(errors="replace")[-SHOWN:]
            raise WorkflowError(f"the agent {self.command[1]} ended with status {process.returncode}: {told}")
        lines = out.decode(errors="replace").strip().splitlines()
        return as_reward(lines[-1] if lines else None) if self.reads_reward else None


def load_agent(target: str, args: Sequence[str], threads: ThreadPoolExecutor, *, reads_reward: bool) -> Agent:
    """`path/to/script.py`, or a function by `path/to/file.py:name` or `module:name`.  ConfigError if there is none."""
    if target.endswith(".py"):
        script = Path(target).expanduser().resolve()
        if not script.is_file():
            raise ConfigError(f"agent: no such file: {script}")
        return ProgramAgent(command=[sys.executable, str(script), *args], reads_reward=reads_reward)
    try:
        function = load_target(target)
    except LoadError as error:
        raise ConfigError(f"agent: {error}") from error
    if not callable(function):
        raise ConfigError(f"agent: {target} is a {type(function).__name__}; expected a function run(base_url, api_key, row)")
    return FunctionAgent(function=function, threads=threads)


def as_reward(value: Any) -> float | None:
    """A number, text that is one, or {"reward": number}; None for None.  WorkflowError for anything else."""
    given = value.get("reward") if isinstance(value, Mapping) else value
    if given is None:
        return None
    try:
        return float(given)
    except (TypeError, ValueError):
        raise WorkflowError(f"the agent returned {value!r:.200}; expected a number, or nothing") from None


def _plain(value: Any) -> Any:
    """What JSON has no form for: numpy's values, then anything as text."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)
