"""Tiny main_ppo jobs for the checks: model, data, reward and environment on disk, a job in a process of its own, what it left.

python scripts/checks/jobs.py RESULT key=value ...     # main_ppo itself; the class of the error it ends with goes to RESULT
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "RLHUB_CHECK_JOB"
MAIN = "rlhub.trainer.main_ppo"
STEPS, BATCH, SAMPLES = 6, 4, 2
ROWS = 12
"""Of the data: two epochs in all steps."""
VOCABULARY = 64
DEADLINES = ("resources", "start", "generate", "infer", "update", "sync", "checkpoint", "shutdown")
REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep({seconds})
    words = solution_str.split()
    return sum(word[-1:] in "02468" for word in words) / max(len(words), 1)
"""
LETTERS = """
import time

class Letters:
    def reset(self, *, seed, options):
        self.count = 0
        return f"Say vowels, {{seed}}.", {{}}

    def step(self, action):
        time.sleep({seconds})
        self.count += 1
        share = sum(letter in "aeiou" for letter in str(action)) / max(len(str(action)), 1)
        return f"{{share:.2f}}. Again.", share, self.count == 2, False, {{}}

    def close(self):
        pass
"""


@dataclass(slots=True, kw_only=True)
class Task:
    """What the jobs of a check train on.  seconds: that a reward and a step of the environment take."""

    folder: Path
    seconds: float = 0.05

    def write(self) -> Task:
        """Model, chat model, rows, reward and environment."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from scripts.bench.tiny_model import build
        from tests.support.chat_model import save_chat_model

        self.folder.mkdir(parents=True, exist_ok=True)
        build(self.folder / "model", hidden=32, layers=2, vocab_size=VOCABULARY)
        save_chat_model(self.folder / "chat")
        row = {"data_source": "words", "reward_model": {"style": "rule", "ground_truth": ""}}
        words = [[f"w{2 + (7 * number + 5 * word) % (VOCABULARY - 2)}" for word in range(4)] for number in range(ROWS)]
        plain = [{"prompt": " ".join(prompt), "extra_info": {"index": number}, **row} for number, prompt in enumerate(words)]
        chats = [
            {"prompt": [{"role": "user", "content": "Play."}], "extra_info": {"env_seed": seed}, **row} for seed in range(ROWS)
        ]
        pq.write_table(pa.Table.from_pylist(plain), self.folder / "plain.parquet")
        pq.write_table(pa.Table.from_pylist(chats), self.folder / "chats.parquet")
        (self.folder / "reward.py").write_text(REWARD.format(seconds=self.seconds))
        (self.folder / "letters.py").write_text(LETTERS.format(seconds=self.seconds))
        return self

    def arguments(self, run_folder: Path, *more: str, deadline_s: float = 30.0) -> list[str]:
        """A GRPO run in process, synchronous, with the hf engine on CPU; later settings win."""
        return [
            f"data.train_files={self.folder / 'plain.parquet'}",
            f"data.train_batch_size={BATCH}",
            "data.max_prompt_length=8",
            "data.max_response_length=6",
            f"actor_rollout_ref.model.path={self.folder / 'model'}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            "actor_rollout_ref.rollout.name=hf",
            "algorithm.adv_estimator=grpo",
            f"custom_reward_function.path={self.folder / 'reward.py'}",
            "reward_model.num_workers=1",
            f"reward_model.timeout_s={deadline_s}",
            "trainer.device=cpu",
            "trainer.backend=local",
            "trainer.save_freq=1",
            "trainer.max_actor_ckpt_to_keep=2",
            "trainer.record_batches=True",
            f"trainer.total_training_steps={STEPS}",
            f"trainer.default_local_dir={run_folder}",
            *(f"trainer.deadline_s.{name}={deadline_s}" for name in DEADLINES),
            *more,
        ]


RAY = ("trainer.backend=ray", "trainer.ray_init.num_cpus=4", "trainer.ray_init.object_store_memory=100000000")
ASYNC = (
    "actor_rollout_ref.rollout.mode=async",
    "trainer.max_staleness=1",
    "algorithm.rollout_correction.rollout_is=token",
)


def replicas() -> tuple[str, ...]:
    """Settings of a job with two replicas of the rollout service, in processes of their own."""
    return (*RAY, *ASYNC, "trainer.pools.generation.n_gpus_per_node=2", "trainer.placement.rollout=generation")


def environment(task: Task) -> tuple[str, ...]:
    """Settings of a job whose episodes play in two environment processes."""
    agent = "actor_rollout_ref.rollout.agent"
    return (
        *ASYNC,
        f"data.train_files={task.folder / 'chats.parquet'}",
        "data.max_prompt_length=120",
        "data.max_response_length=80",
        f"actor_rollout_ref.model.path={task.folder / 'chat'}",
        f"{agent}.default_agent_loop=environment",
        f"{agent}.kwargs.environment={task.folder / 'letters.py'}:Letters",
        f"{agent}.kwargs.num_env_workers=2",
        f"{agent}.kwargs.max_turn_tokens=8",
        f"{agent}.kwargs.reset_timeout_s=30",
        f"{agent}.kwargs.step_timeout_s=30",
    )


@dataclass(slots=True, kw_only=True)
class Job:
    """A job that was started.  folder: its run folder; log: its output; result: where it says which error ended it."""

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path
    mark: str
    started: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def error(self) -> str:
        """The class of the error it ended with; "" if it said none."""
        path = self.log.with_suffix(".error")
        return path.read_text() if path.exists() else ""

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def steps(self) -> list[int]:
        """Steps of whole lines in its metrics, so far."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line)["step"] for line in text[: text.rfind("\n") + 1].splitlines()]

    def until(self, condition: Callable[[], Any], timeout_s: float) -> Any:
        """The condition's value once it is true; None when the job ended or the time passed before."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if self.code is not None or time.monotonic() > deadline:
                return condition() or None
            time.sleep(0.05)
        return value

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status; None when it has not ended by then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def descendants(self) -> list[psutil.Process]:
        """Processes below it, as the parents now are."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def rank(self, log: str) -> psutil.Process | None:
        """The process whose output goes to `logs/<log>` of the run folder."""
        return next((process for process in self.descendants() if writes(process, log)), None)

    def child(self, part: str) -> psutil.Process | None:
        """A killable child whose command names `part` (the file of a reward function, what serves environments); its parent, with
        the same command, is its supervisor."""
        for process in self.descendants():
            with contextlib.suppress(psutil.Error):
                command, parent = process.cmdline(), process.parent()
                text = " ".join(command)
                if "rlhub.utils.children" in text and part in text and parent is not None and parent.cmdline() == command:
                    return process
        return None

    def everything(self) -> list[psutil.Process]:
        """All that is alive of it, whoever its parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ends_within(self, timeout_s: float) -> list[str]:
        """Commands of what is still alive of it after so long; what is left is killed."""
        deadline = time.monotonic() + timeout_s
        while (left := self.everything()) and time.monotonic() < deadline:
            time.sleep(0.5)
        names = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                names.append(" ".join(process.cmdline())[:120])
                process.kill()
        return names

    def end(self) -> None:
        """Kill whatever is left."""
        for process in self.everything():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.process.wait()


def writes(process: psutil.Process, log: str) -> bool:
    """Whether its standard output or error goes to a file of this name."""
    with contextlib.suppress(OSError):
        return any(Path(os.readlink(f"/proc/{process.pid}/fd/{number}")).name == log for number in (1, 2))
    return False


def start(arguments: Sequence[str], folder: Path, log: Path) -> Job:
    """`main_ppo` with these settings, in a session of its own.  folder: the run folder among them."""
    mark = uuid.uuid4().hex
    log.parent.mkdir(parents=True, exist_ok=True)
    log.with_suffix(".error").unlink(missing_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(log.with_suffix(".error")), *arguments],
            env=environment_variables() | {MARK: mark},
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Job(process=process, folder=folder, log=log, mark=mark)


def environment_variables() -> dict[str, str]:
    """Of a job's process: one thread, no network, this tree's rlhub."""
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}


def final_weights(run: Path) -> dict[str, bytes]:
    """Every weights file of the last checkpoint, shards and optimizer included."""
    last = run / f"global_step_{STEPS}"
    return {str(path.relative_to(last)): path.read_bytes() for path in sorted(last.rglob("*.safetensors"))}


class ErrorClass(logging.Handler):
    """Notes the class of the error with which the command line says the job stopped."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.DEBUG)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            self.path.write_text(record.exc_info[0].__name__)


def main() -> None:
    """The job's process: the command itself, as from a shell, beside a handler that hears of its end."""
    result, *arguments = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    logger = logging.getLogger("rlhub.config.cli")
    logger.setLevel(logging.DEBUG)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.INFO)
    logger.addHandler(ErrorClass(Path(result)))
    sys.argv = [MAIN, *arguments]
    runpy.run_module(MAIN, run_name="__main__")


if __name__ == "__main__":
    main()
