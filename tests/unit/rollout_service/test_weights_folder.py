"""The folder through which weights are published, and the readers in an engine's workers.

All readers prepare, all place, and the first error of any is raised.
"""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.base import ExternalWeights
from rlhub.engines.rollout.fake import FakeEngine
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.errors import DeadlineError, EngineError, ResourceError, WeightMismatchError
from rlhub.rollout_service.weights_folder import (
    WorkerReader,
    WorkersReader,
    files_bytes,
    open_weights_folder,
)
from rlhub.sharding_manager.files import PREFIX, WeightsFolder, remove_abandoned
from tests.support.rollout_service import Weights

HOLD = """
import sys, time
from pathlib import Path
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.rollout_service.weights_folder import open_weights_folder
memory = Path(sys.argv[1])
folder = open_weights_folder(RolloutConfig(), one_machine=True, run_folder=memory, model_bytes=0, memory=memory)
print(folder.path, flush=True)
time.sleep(60)
"""


def opened(tmp_path: Path, *, one_machine: bool = True, model_bytes: int = 0, **settings: Any) -> WeightsFolder:
    memory = tmp_path / "memory"
    memory.mkdir(exist_ok=True)
    config = RolloutConfig(**settings)
    return open_weights_folder(
        config, one_machine=one_machine, run_folder=tmp_path / "run", model_bytes=model_bytes, memory=memory
    )


def test_on_one_machine_it_is_in_memory_and_goes_with_the_run(tmp_path: Path) -> None:
    folder, other = opened(tmp_path), opened(tmp_path)
    assert folder.path.parent == other.path.parent == tmp_path / "memory" and folder.path.is_dir() and other.path.is_dir()
    (folder.path / "version-0").mkdir()
    folder.close()
    folder.close()
    assert other.path.is_dir()
    other.close()
    assert not list((tmp_path / "memory").iterdir())


@pytest.mark.parametrize(("one_machine", "model_bytes"), [(False, 0), (True, 1 << 60)])
def test_elsewhere_it_is_below_the_run_folder(tmp_path: Path, one_machine: bool, model_bytes: int) -> None:
    folder = opened(tmp_path, one_machine=one_machine, model_bytes=model_bytes)
    assert folder.path == tmp_path / "run" / "rlhub-weights-in-flight" and folder.path.is_dir()
    folder.close()
    assert not folder.path.exists()


def test_a_folder_is_taken_where_it_is_asked_for_and_memory_only_where_it_serves(tmp_path: Path) -> None:
    folder = opened(tmp_path, weights="folder")
    assert folder.path.parent == tmp_path / "run" and not folder.in_memory
    folder.close()
    in_memory = opened(tmp_path, weights="memory")
    assert in_memory.path.parent == tmp_path / "memory" and in_memory.in_memory
    in_memory.close()
    with pytest.raises(ResourceError, match=r"weights=memory: .*replicas run on several; .*weights=folder"):
        opened(tmp_path, weights="memory", one_machine=False)
    with pytest.raises(ResourceError, match=r"weights=memory: .*has no space"):
        opened(tmp_path, weights="memory", model_bytes=1 << 60)


def test_memory_that_cannot_be_written_is_said_and_the_run_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container whose /dev/shm is read-only; the tests' user may write everywhere."""
    real = os.open

    def refuse(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if str(path).startswith(str(tmp_path / "memory")) and flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    folder = opened(tmp_path)
    assert folder.path.parent == tmp_path / "run" and folder.path.is_dir()
    assert f"{tmp_path}/memory cannot be used (Read-only file system): weights are published through" in caplog.text
    folder.close()


def test_a_users_folder_called_weights_is_not_removed(tmp_path: Path) -> None:
    """Below the run folder, where someone may keep some."""
    (tmp_path / "run" / "weights").mkdir(parents=True)
    opened(tmp_path, one_machine=False).close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["weights"]


def test_a_configured_folder_stays(tmp_path: Path) -> None:
    folder = opened(tmp_path, weights_folder=str(tmp_path / "mine"))
    folder.close()
    assert folder.path == tmp_path / "mine" and folder.path.is_dir()


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    path = Path(child.stdout.readline().strip())
    try:
        remove_abandoned(tmp_path)
        assert path.is_dir() and path.name.startswith(PREFIX), "it is in use"
    finally:
        child.kill()
        child.wait()
    remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())


def test_bytes_of_a_models_files(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_text("{}")
    assert files_bytes(str(tmp_path)) == 5 and files_bytes(None) == 0


class Workers(ExternalWeights):
    """Fake engines in the place of worker processes."""

    def __init__(self, count: int) -> None:
        setup = RolloutSetup(
            config=RolloutConfig(),
            model=ModelConfig(),
            device=torch.device("cpu"),
            seed=0,
            max_prompt_length=8,
            max_response_length=8,
        )
        self.engines = [FakeEngine(setup) for _ in range(count)]
        self.objects: list[Any] = []
        self.calls: list[str] = []

    def call_workers(self, target: str, method: str, *arguments: Any) -> Sequence[Any]:
        module, _, name = target.partition(":")
        self.objects = self.objects or [getattr(importlib.import_module(module), name)(engine) for engine in self.engines]
        self.calls.append(method)
        return [getattr(one, method)(*arguments) for one in self.objects]

    @contextmanager
    def overwriting(self, version: int) -> Iterator[None]:
        self.calls.append("overwriting")
        yield
        self.calls.append("written")


def reader(workers: Workers, folder: Path, *, timeout_s: float = 60.0) -> WorkersReader:
    return WorkersReader(workers, folder, bucket_bytes=1 << 20, timeout_s=timeout_s)


def test_every_worker_takes_the_version_in_two_halves(tmp_path: Path) -> None:
    weights, workers = Weights(tmp_path), Workers(2)
    ours = reader(workers, tmp_path)
    written = [weights.write(version) for version in (1, 2)]
    for version in (1, 2):
        prepared = ours.prepare(version)
        assert "overwriting" not in workers.calls, "the engine is not touched before the pause"
        report = ours.place(prepared)
        assert workers.calls[-3:] == ["overwriting", "place", "written"]
        workers.calls.clear()
        assert report.version == version and report.fingerprint not in written, "of both workers' parts"
    held = [{piece.name: piece.tensor for piece in engine.live_weights()} for engine in workers.engines]
    for name, parameter in weights.engine.model.named_parameters():
        assert all(torch.equal(one[name], parameter) for one in held)


def test_one_worker_has_the_writers_fingerprint(tmp_path: Path) -> None:
    weights, workers = Weights(tmp_path), Workers(1)
    ours = reader(workers, tmp_path)
    fingerprint = weights.write(1)
    assert ours.place(ours.prepare(1)).fingerprint == fingerprint


def test_what_a_worker_finds_is_raised_before_the_pause(tmp_path: Path) -> None:
    weights, workers = Weights(tmp_path), Workers(2)
    with pytest.raises(DeadlineError):
        reader(workers, tmp_path, timeout_s=0.05).prepare(1)
    weights.write(1)
    file = next((tmp_path / "version-1").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    ours = reader(workers, tmp_path)
    ours.place(ours.prepare(weights.write(2) and 2))
    with pytest.raises(WeightMismatchError, match="another checksum"):
        ours.prepare(1)
    assert workers.calls.count("overwriting") == 1


def test_a_version_that_was_not_prepared_is_not_placed(tmp_path: Path) -> None:
    Weights(tmp_path).write(1)
    worker = WorkerReader(Workers(1).engines[0])
    with pytest.raises(EngineError, match="has not been prepared"):
        worker.place(1)
