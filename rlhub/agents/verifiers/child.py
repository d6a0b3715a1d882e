"""The program in the other Python: it serves episodes of one environment of verifiers, or lists its tasks.

Serving, it runs in a killable child on the child's main thread, where the library may set signal handlers.  Each line from
rlhub begins an episode or cancels one; each answer is a line with the number of its episode.  An episode has an address and a key
of its own, which the library reads from an environment variable that no program of an agent inherits.

Only `load` and the functions below it import verifiers, whose version 0.4 has its environments in verifiers.v1.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from rlhub.utils.children.wire import decode, encode

HERE = Path(__file__).resolve().parent
CHAT = "rlhub_chat"
REPLACED = ("bash", "null")
"""The library's fallback, which gives the policy a shell on this machine, and its conversation in a program of its own."""
KEY_VARIABLE = "RLHUB_POLICY_API_KEY_{}"
"""The library keeps variables with API_KEY in their name from the programs that it starts."""
POLICY = "policy"
LINE_BYTES = 1 << 26
MAX_TEXT = 4000
OPENED_BY_USER = "(the environment opens the conversation)"

Settings = dict[str, Any]


def serve(address: str, environment: Settings) -> None:
    """Serves episodes at the Unix socket `address` until it closes.  environment: see `load`."""
    asyncio.run(_serve(address, environment))


async def _serve(address: str, environment: Settings) -> None:
    reader, writer = await asyncio.open_unix_connection(address, limit=LINE_BYTES)
    episodes = Episodes(writer)
    try:
        env = load(environment)
        async with env.serving():
            episodes.open(env)
            async for line in reader:
                episodes.accept(decode(line))
            await episodes.aclose()
    except Exception as error:  # noqa: BLE001  # process boundary: whatever the environment raises becomes rlhub's LoadError
        writer.write(encode({"failed": text_of(error)}))
        await writer.drain()


class Episodes:
    """The episodes that run in this process."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._env: Any = None
        self._running: dict[int, asyncio.Task[None]] = {}

    def open(self, env: Any) -> None:
        """Says that episodes may come.  env: the environment, which is being served."""
        env._interception = None  # a server an episode, with its endpoint's client; a shared one keeps all clients
        self._env = env
        self._writer.write(encode({"ready": metadata.version("verifiers")}))

    def accept(self, request: Settings) -> None:
        """Begins an episode or cancels it."""
        if (number := request.get("cancel")) is not None:
            if running := self._running.get(number):
                running.cancel()
            return
        number = request["id"]
        self._running[number] = asyncio.create_task(self._answer(number, request))

    async def aclose(self) -> None:
        """Cancels what runs, so that programs and tool servers end."""
        for running in self._running.values():
            running.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _answer(self, number: int, request: Settings) -> None:
        try:
            answer: Settings = {"value": await run(self._env, number, request)}
        except Exception as error:  # noqa: BLE001  # process boundary: the error fails the episode
            answer = {"failed": text_of(error)}
        except asyncio.CancelledError:
            answer = {"failed": "cancelled"}
        self._running.pop(number, None)
        self._writer.write(encode({"id": number, **answer}))


async def run(env: Any, number: int, request: Mapping[str, Any]) -> Settings:
    """Returns the rewards and metrics of one episode, as `told` does."""
    from verifiers import v1 as vf

    task_type, variable = type(env.taskset).task_type(), KEY_VARIABLE.format(number)
    task = task_type(task_type.data_type().model_validate_json(request["task"]), env.config.taskset.task)
    os.environ[variable] = request["api_key"]
    try:
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
        episode = await env.run_episode(task, vf.ModelContext(model=POLICY, client=client))
    finally:
        del os.environ[variable]
    return told(episode)


def told(episode: Any) -> Settings:
    """Returns the results of an episode.

    reward: the mean reward of the agents that train; rewards: by agent; metrics: means of metrics and of the parts of the reward;
    num_answers: of the policy, as the library has them.  Raises RuntimeError for an episode that failed.
    """
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors)[-MAX_TEXT:] or "it failed")
    trained = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    by_agent: dict[str, list[float]] = {}
    numbers: dict[str, list[float]] = {}
    for trace in trained:
        by_agent.setdefault(trace.agent.name or "", []).append(trace.reward)
        parts = {f"reward/{name}": part and part.score for name, part in trace.rewards.items()}
        for name, value in {**parts, **trace.metrics}.items():
            if value is not None:
                numbers.setdefault(name, []).append(float(value))
    return {
        "reward": _mean([reward for rewards in by_agent.values() for reward in rewards]),
        "rewards": {name: _mean(rewards) for name, rewards in by_agent.items()},
        "metrics": {name: _mean(values) for name, values in numbers.items()},
        "num_answers": sum(trace.num_turns for trace in episode.traces),
    }


def load(environment: Settings) -> Any:
    """Returns the environment, a verifiers.v1.Env.

    environment: {id: of its taskset, settings: of its [env] block, path: folders with environments}.  Raises LookupError for an
    unknown id, and whatever the environment raises.
    """
    sys.path += [*environment["path"], str(HERE)]
    if environment["path"]:
        os.environ["PYTHONPATH"] = os.pathsep.join(environment["path"])  # for the tool servers that the library starts
    version = installed_version()
    try:
        from verifiers import v1 as vf
    except ImportError as error:
        raise LookupError(f"verifiers {version} has no verifiers.v1 ({error}); install 'verifiers>=0.4,<0.5'") from error
    name = environment["id"]
    try:
        vf.import_taskset(name)
    except ModuleNotFoundError as error:
        known = ", ".join(known_ids(environment["path"])) or "none"
        raise LookupError(f"no environment {name!r} in {sys.executable} ({error.name}); found: {known}") from error
    return vf.load_environment(vf.resolve_env_config(with_defaults(vf, name, environment["settings"])))


def installed_version() -> str:
    """Returns the version of verifiers in this Python.  Raises LookupError if there is none."""
    try:
        return metadata.version("verifiers")
    except metadata.PackageNotFoundError as error:
        raise LookupError(f"verifiers is not installed in {sys.executable}; install 'verifiers>=0.4,<0.5' there") from error


def with_defaults(vf: Any, name: str, settings: Settings) -> Settings:
    """Returns the settings of the environment `name` with what its roles leave open: a conversation in this process, programs as
    subprocesses, and among several roles the role's name as its model, by which the endpoint tells them apart."""
    settings = {**settings, "taskset": {**settings.get("taskset", {}), "id": name}}
    fields = vf.env_config_type(name, settings.get("id", "")).model_fields
    roles = {role: field.default for role, field in fields.items() if isinstance(field.default, vf.AgentConfig)}
    for role, declared in roles.items():
        own = dict(settings.get(role) or {})
        harness = dict(own.get("harness") or {})
        default = declared.harness.id if declared.harness is not None else vf.default_harness_id(name)
        if "id" not in harness and default in REPLACED:
            own["harness"] = {**harness, "id": CHAT}
        if declared.runtime.type == "prime":
            own.setdefault("runtime", {"type": "subprocess"})
        if len(roles) > 1 and "client" not in own:
            own.setdefault("model", role)
        settings[role] = own
    return settings


def known_ids(path: list[str]) -> list[str]:
    """Returns the ids of environments that are installed with verifiers, by packages that need it, or in the folders `path`."""
    from verifiers.v1 import tasksets

    found = {module.name for module in iter_modules([*tasksets.__path__])}
    found |= {module.name for module in iter_modules(path)}
    for package in metadata.distributions():
        if any(need.startswith("verifiers") for need in package.requires or ()):
            found |= set((package.read_text("top_level.txt") or package.name.replace("-", "_")).split())
    return sorted(found)


def tasks(env: Any, limit: int | None) -> Iterator[Settings]:
    """Yields the tasks of an environment: its data as the library's JSON, its key, and the prompt as chat messages.

    Raises ValueError for a taskset without end, where `limit` is None.
    """
    taskset = env.taskset if limit is None else env.taskset.take(limit)
    if not taskset.bounded:
        raise ValueError(f"{type(env.taskset).__name__} has no last task; say how many you want")
    for task in taskset:
        data = task.data
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        prompt = data.prompt_text or data.description or data.name or OPENED_BY_USER
        yield {
            "task": data.model_dump_json(),
            "key": task.key,
            "prompt": [*system, {"role": "user", "content": prompt}],
        }


def main(environment: Settings, limit: int | None) -> None:
    """Prints the tasks of an environment as lines of JSON, the first with its version; `{"failed": text}` if it cannot be
    loaded.  limit: the number of tasks; None: all."""
    lines = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the environment prints is no task
    with lines:
        try:
            env = load(environment)
            lines.write(encode({"version": installed_version()}))
            lines.writelines(encode(task) for task in (tasks(env, limit) if limit != 0 else ()))
        except Exception as error:  # noqa: BLE001  # process boundary
            lines.write(encode({"failed": text_of(error)}))


def text_of(error: BaseException) -> str:
    """Returns the error with its innermost frames; a message alone where the message says it."""
    if isinstance(error, (LookupError, RuntimeError)) and not isinstance(error, (KeyError, IndexError)):
        return str(error)[-MAX_TEXT:]
    with contextlib.suppress(Exception):
        return "".join(traceback.format_exception(error, limit=-4)).strip()[-MAX_TEXT:]
    return type(error).__name__


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
