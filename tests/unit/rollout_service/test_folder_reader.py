"""Weights of a folder for an engine whose workers hold them: all prepare, all place, and the first error of any is raised."""

from __future__ import annotations

import importlib
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
from rlhub.errors import DeadlineError, EngineError, WeightMismatchError
from rlhub.rollout_service.weights_folder import WorkerReader, WorkersReader
from tests.support.rollout_service import Weights


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
