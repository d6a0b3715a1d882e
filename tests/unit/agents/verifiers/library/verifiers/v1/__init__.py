"""Environments `talk`, `dies`, `sleeps`, `repeats`, `fails`, `pair` and `hangs`, by what their episodes do.  `hangs` first makes
the file `mark` of its settings."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace as Record
from urllib.request import Request, urlopen

IDS = ("talk", "dies", "sleeps", "repeats", "fails", "pair", "hangs")


class AgentConfig:
    def __init__(self, harness=None, runtime="prime"):
        self.harness, self.runtime = harness, Record(type=runtime)


class Data:
    def __init__(self, prompt):
        self.prompt_text, self.system_prompt, self.description, self.name = prompt, "Be brief.", None, None

    def model_dump_json(self):
        return json.dumps({"prompt": self.prompt_text})

    @classmethod
    def model_validate_json(cls, text):
        return cls(json.loads(text)["prompt"])


class Task:
    def __init__(self, data, config=None):
        self.data, self.key = data, f"key {data.prompt_text}"

    @staticmethod
    def data_type():
        return Data


class Taskset:
    def __init__(self, tasks, bounded=False):
        self.tasks, self.bounded = tasks, bounded

    def take(self, count):
        return Taskset(self.tasks[:count], bounded=True)

    def __iter__(self):
        return iter(self.tasks)

    @staticmethod
    def task_type():
        return Task


class Env:
    def __init__(self, settings):
        self.settings, self.id = settings, settings["taskset"]["id"]
        self.taskset = Taskset([Task(Data(f"question {number}")) for number in range(5)])
        self.config = Record(taskset=Record(task=None))
        os.write(1, b"environments print")

    @asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        names = ("proposer", "solver") if self.id == "pair" else ("",)
        traces = []
        for number, name in enumerate(names):
            answer = await asyncio.to_thread(ask, context, task.data, name or context.model)
            trace = Record(agent=Record(name=name, trainable=True), metrics={"length": len(answer), "unknown": None}, errors=[])
            trace.reward, trace.rewards, trace.num_turns = 0.5 + number, {"right": Record(score=1.0)}, 1
            traces.append(trace)
        if self.id == "repeats":
            await asyncio.to_thread(ask, context, task.data, context.model)
        if self.id == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.id == "hangs":
            Path(self.settings["mark"]).touch()
            time.sleep(600)
        if self.id == "sleeps":
            await asyncio.sleep(600)
        errors = [Record(type="TaskError", message="no grader")] if self.id == "fails" else []
        return Record(ok=not errors, errors=errors, traces=traces)


def ask(context, data, model):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": data.prompt_text}]}).encode()
    headers = {"Authorization": f"Bearer {os.environ[context.client.api_key_var]}", "Content-Type": "application/json"}
    with urlopen(Request(f"{context.client.base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def EvalClientConfig(base_url, api_key_var):
    return Record(base_url=base_url, api_key_var=api_key_var)


def ModelContext(model, client):
    return Record(model=model, client=client)


def import_taskset(name):
    if name not in IDS:
        raise ModuleNotFoundError(name, name=name)


def env_config_type(name, env_id):
    roles = ("proposer", "solver") if name == "pair" else ("agent",)
    return Record(model_fields={role: Record(default=AgentConfig()) for role in roles} | {"limit": Record(default=3)})


def default_harness_id(name):
    return "bash"


def resolve_env_config(settings):
    return settings


def load_environment(settings):
    return Env(settings)
