"""Shared by the end-to-end tests: a tiny model with data, and a way to run the mains as processes with deadlines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.order import longest_first

ROOT = Path(__file__).resolve().parents[2]
MAIN = "rlhub.trainer.main_ppo"
MARK = "RLHUB_E2E_RUN"
TIMEOUT_S = 300.0
"""Of one wait: far above what it takes, so that a loaded machine fails nothing and a hang does not last."""
LEFTOVERS_S = 60.0
"""For what a run has started to end after it: seconds, but for a machine on which these processes do not get a turn."""
HOLD = "RLHUB_E2E_HOLD"
HOLDING = ("trainer.plugins=[holding]", "trainer.logger=[console,holding]")
HOLDING_MODULE = f"""
import math, os, time
from pathlib import Path

from rlhub.tracking.recorder import TRACKERS
from rlhub.tracking.tracker import Tracker


@TRACKERS.register("holding")
class Holding(Tracker):
    def start(self, run):
        self.file = Path(os.environ["{HOLD}"])

    def log(self, step, metrics):
        while step >= self.last():
            time.sleep(0.02)

    def last(self):
        try:
            return int(self.file.read_text())
        except FileNotFoundError:
            return math.inf

    def finish(self, status, message=""):
        pass
"""
"""A run stands still after the step that the file names, when its line is written: however fast it is, it is not over before a
test has done to it what the test is about.  A tracker holds up training and nothing else."""

LONGEST = (
    "test_main_job.py",
    "test_async_combinations.py",
    "test_kill_and_resume.py",
    "test_elastic_job.py",
    "test_recipes_algorithms.py",
    "test_bad_inputs.py",
    "test_recipes_serving.py",
    "test_async_job.py",
    "test_planned_faults.py",
    "test_recipes_async.py",
    "test_quantized_job.py",
    "test_recipes.py",
    "test_lost_places.py",
)
"""Files that take longest: one to four minutes."""

VOCABULARY = 64
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    words = solution_str.split()
    return sum(word[-1:] in "02468" for word in words) / max(len(words), 1)
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items, LONGEST)


@dataclass(slots=True, kw_only=True)
class Result:
    """code: exit status, negative for a signal.  output: standard output and error as they came."""

    code: int
    output: str
    seconds: float


@dataclass(slots=True, kw_only=True)
class Running:
    """A main that was started.  pid: its process, the leader of its session.  log: its output so far.
    operations: its changes of the watched folder so far.  All waits count from when they are begun."""

    pid: int
    mark: str
    log: Path
    poll: Callable[[], int | None]
    since: float = field(default_factory=time.monotonic)

    def wait(self, timeout_s: float = TIMEOUT_S) -> Result:
        """Its end; one that takes longer is killed and fails the test."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.end()
                pytest.fail(f"no end after {timeout_s} s:\n{self.output()}")
            time.sleep(0.02)
        return Result(code=code, output=self.output(), seconds=time.monotonic() - self.since)

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def operations(self) -> list[str]:
        return Path(f"{self.log}.operations").read_text().splitlines()

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Wait until `condition()` is true and return its value; the process must not end before."""
        deadline = time.monotonic() + timeout_s
        while True:
            over = self.poll() is not None or time.monotonic() > deadline  # before the look at what it may have done last
            if value := condition():
                return value
            if over:
                self.end()
                pytest.fail(f"the run ended, or {timeout_s} s passed, before {what}:\n{self.output()}")
            time.sleep(0.005)

    def hold(self, after: int) -> None:
        """Of a run that was started with `hold`: let it go on, but not beyond this step."""
        part = Path(f"{self.log}.hold.part")
        part.write_text(str(after))
        part.rename(f"{self.log}.hold")

    def let_go(self) -> None:
        """Let it go on to its end."""
        Path(f"{self.log}.hold").unlink()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def processes(self) -> list[psutil.Process]:
        """Everything alive that it started, itself included, whoever its parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get(MARK) == self.mark or process.pid == self.pid
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def leftovers(self) -> list[str]:
        """What is still alive some time after its end."""
        deadline = time.monotonic() + LEFTOVERS_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [command for process in left if (command := command_of(process))]

    def writer(self, log: str) -> psutil.Process:
        """The process whose output goes to the file of this name."""
        for process in self.processes():
            with contextlib.suppress(OSError):
                if any(Path(f"/proc/{process.pid}/fd/{fd}").resolve().name == log for fd in (1, 2)):
                    return process
        raise AssertionError(f"no process writes {log}")

    def end(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def command_of(process: psutil.Process) -> str:
    """Empty when it has ended since."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE:
            return " ".join(process.cmdline()) or process.name()
    return ""


class Preloaded:
    """See preloaded.py."""

    def __init__(self, env: dict[str, str], interpreter: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("preloaded.py")), str(interpreter)]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the preloaded process ended"
        return dict(json.loads(answer))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=120)


def _with_this_tree(env: dict[str, str] | None) -> dict[str, str]:
    """A run that is given modules of a test's own still is a run of this tree, not of the one that is installed."""
    env = dict(env or {})
    return env | ({"PYTHONPATH": f"{env['PYTHONPATH']}{os.pathsep}{ROOT}"} if "PYTHONPATH" in env else {})


class Mains:
    """Starts mains: `start`/`run` from the preloaded process, `start_fresh`/`run_fresh` as from a shell.  `interpreter` is
    called like Python and runs scripts from the preloaded process, and what these start with their `sys.executable` too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "holding.py").write_text(HOLDING_MODULE)
        self.env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        self._preloaded: Preloaded | None = None
        self._started: list[Running] = []

    def start(
        self,
        arguments: Sequence[str],
        *,
        module: str = MAIN,
        env: dict[str, str] | None = None,
        watch: Path | None = None,
        die: dict[str, Any] | None = None,
        hold: int | None = None,
    ) -> Running:
        """watch, die: see preloaded.py.  hold: it stands still after this step, see Running.hold."""
        preloaded, mark = self._preload(), uuid.uuid4().hex
        log = self.folder / f"{mark}.log"
        held = self._held(log, hold)
        pid = preloaded.ask(
            module=module,
            arguments=[*arguments, *(HOLDING if held else ())],
            env={**held, **_with_this_tree(env), MARK: mark},
            cwd=str(self.folder),
            log=str(log),
            watch=str(watch) if watch is not None else None,
            die=die,
        )["pid"]
        codes: list[int] = []

        def poll() -> int | None:
            if not codes and (code := preloaded.ask(poll=pid)["code"]) is not None:
                codes.append(code)
            return codes[0] if codes else None

        return self._kept(Running(pid=pid, mark=mark, log=log, poll=poll))

    def start_fresh(
        self, arguments: Sequence[str], *, module: str = MAIN, env: dict[str, str] | None = None, hold: int | None = None
    ) -> Running:
        mark = uuid.uuid4().hex
        log = self.folder / f"{mark}.log"
        held = self._held(log, hold)
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, *(HOLDING if held else ())],
                env={**self.env, **held, **_with_this_tree(env), MARK: mark},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._kept(Running(pid=process.pid, mark=mark, log=log, poll=process.poll))

    @property
    def interpreter(self) -> str:
        self._preload().ask(poll=None)  # it answers when the program is there
        return str(self.folder / "python")

    def _preload(self) -> Preloaded:
        if self._preloaded is None:
            self._preloaded = Preloaded(self.env, self.folder / "python")
        return self._preloaded

    def run(self, arguments: Sequence[str], **options: Any) -> Result:
        return self.start(arguments, **options).wait()

    def run_fresh(self, arguments: Sequence[str], **options: Any) -> Result:
        return self.start_fresh(arguments, **options).wait()

    def _held(self, log: Path, after: int | None) -> dict[str, str]:
        """The environment of a run that is to stand still after this step."""
        if after is None:
            return {}
        Path(f"{log}.hold").write_text(str(after))
        paths = os.pathsep.join(filter(None, (str(self.folder), self.env.get("PYTHONPATH"))))
        return {"PYTHONPATH": paths, HOLD: f"{log}.hold"}

    def _kept(self, running: Running) -> Running:
        self._started.append(running)
        return running

    def close(self) -> None:
        for running in self._started:
            if running.poll() is None:
                running.end()
        if self._preloaded is not None:
            self._preloaded.close()


@dataclass(slots=True, kw_only=True)
class Task:
    """A tiny model, data and a reward on disk.  rows: the training rows."""

    folder: Path
    rows: list[dict[str, Any]]

    def arguments(self, run_folder: Path, *more: str) -> list[str]:
        """A GRPO run of 4 steps on it, in process, with the hf engine; later settings win."""
        return [
            f"data.train_files={self.folder / 'train.parquet'}",
            "data.train_batch_size=8",
            "data.max_prompt_length=8",
            "data.max_response_length=6",
            f"actor_rollout_ref.model.path={self.folder / 'model'}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.name=hf",
            "algorithm.adv_estimator=grpo",
            f"custom_reward_function.path={self.folder / 'reward.py'}",
            "reward_model.num_workers=1",
            "trainer.device=cpu",
            "trainer.backend=local",
            "trainer.total_training_steps=4",
            f"trainer.default_local_dir={run_folder}",
            *more,
        ]


def prompt_rows(count: int, words: int = 4) -> list[dict[str, Any]]:
    """Prompts of `words` words that differ from each other."""
    return [
        {
            "prompt": " ".join(f"w{2 + (7 * row + 5 * word + row * word) % (VOCABULARY - 2)}" for word in range(words)),
            "data_source": "words",
            "reward_model": {"style": "rule", "ground_truth": str(row)},
            "extra_info": {"index": row},
        }
        for row in range(count)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    from scripts.bench.tiny_model import build

    folder = tmp_path_factory.mktemp("task")
    build(folder / "model", hidden=32, layers=2, vocab_size=VOCABULARY)
    rows = prompt_rows(24)
    write_rows(folder / "train.parquet", rows)
    write_rows(folder / "val.parquet", prompt_rows(4, words=3))
    (folder / "reward.py").write_text(REWARD)
    return Task(folder=folder, rows=rows)


@pytest.fixture(scope="session")
def mains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mains]:
    started = Mains(tmp_path_factory.mktemp("mains"))
    yield started
    started.close()
