"""A main_serve in a process of its own, and what its answers must be by a model in this one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhub.config.sections.rollout import RemoteConfig, RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.base import Completion, RolloutEngine
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from tests.support.chat_model import save_chat_model
from tests.support.step_limit import ENGINES, VARIABLE, StepLimit
from tests.support.tiny_models import sequence_log_probs

ROOT = Path(__file__).resolve().parents[2]
START_S = 600.0  # of an engine whose processes import vLLM, on a machine that may be busy
END_S = 240.0


@dataclass
class Server:
    """A running main_serve.  admin_key_file: of its administration.  family: its processes.  limit: of its engine's steps."""

    model: Path
    address: str
    key_file: Path
    admin_key_file: Path
    log: Path
    limit: StepLimit
    family: list[int] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.key_file.read_text()

    @property
    def admin_key(self) -> str:
        return self.admin_key_file.read_text()


@contextmanager
def serving(folder: Path, *settings: str, plugins: Sequence[str] = ()) -> Iterator[Server]:
    """Ended by SIGTERM, at which it must end well.  plugins: modules that it imports."""
    model, ready, key, log = save_chat_model(folder / "model"), folder / "ready", folder / "key", folder / "log"
    admin = folder / "admin-key"
    command = [sys.executable, "-m", "rlhub.trainer.main_serve", f"model.path={model}", "server.port=0", "device=cpu"]
    files = [f"server.ready_file={ready}", f"server.api_key_file={key}", f"server.admin_key_file={admin}"]
    files.append(f"plugins=[{','.join((ENGINES, *plugins))}]")
    limit = StepLimit(folder / "limit")
    with log.open("w") as stream:
        path = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, VARIABLE: str(limit.file)}
        process = subprocess.Popen([*command, *files, *settings], stdout=stream, stderr=stream, env=environment)
    deadline = time.monotonic() + START_S
    try:
        while not ready.is_file():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        yield Server(
            model=model,
            address=ready.read_text(),
            key_file=key,
            admin_key_file=admin,
            log=log,
            limit=limit,
            family=family,
        )
    finally:
        process.terminate()
        status = process.wait(END_S)
    assert status == 0, log.read_text()


def build(server: Server, name: str, folder: Path | None = None, address: str | None = None) -> RolloutEngine:
    """The remote engine over this server, or another with the same model here.  address: the way to the server."""
    remote = RemoteConfig(
        urls=[address or server.address],
        api_key_file=str(server.key_file),
        admin_key_file=str(server.admin_key_file),
        weights_folder=str(folder) if folder else None,
        start_s=240.0,
    )
    engine = build_rollout_engine(
        RolloutSetup(
            config=RolloutConfig(name=name, remote=remote),
            model=ModelConfig(path=str(server.model)),
            device=torch.device("cpu"),
            seed=0,
            max_prompt_length=100,
            max_response_length=300,
            load_checkpoint=True,
        )
    )
    engine.initialize()
    return engine


async def started(
    server: Server, ask: Callable[[], Sequence[asyncio.Task[Completion]]], tokens: int
) -> list[asyncio.Task[Completion]]:
    """What `ask` asks for, when each of its requests has so many tokens, and gets none more before it is let go."""
    server.limit.set(0)
    tasks = list(ask())
    await server.limit.reached(0, len(tasks))
    server.limit.set(tokens)
    await server.limit.reached(tokens, len(tasks))
    return tasks


def weights(server: Server, seed: int) -> dict[str, Tensor]:
    """The model's, moved."""
    generator = torch.Generator().manual_seed(seed)
    return {name: p + 0.03 * torch.randn(p.shape, generator=generator) for name, p in _files(server.model).items()}


def expected(server: Server, values: dict[str, Tensor], prompt: list[int], completion: list[int]) -> list[float]:
    """Log-probs by a whole forward pass; values: {} for those of the files."""
    model = _model(server.model)
    model.load_state_dict({**_files(server.model), **values}, strict=False)
    return sequence_log_probs(model, prompt, completion, 1.0)


@cache
def _model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@cache
def _files(folder: Path) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in _model(folder).named_parameters()}


def difference(found: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, right, strict=True))
