"""Weights through a folder: reading in two halves, so that an engine need stop for the second only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.base import RolloutEngine
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.errors import DeadlineError, EngineError, WeightMismatchError
from rlhub.sharding_manager.files import WeightWriter
from rlhub.sharding_manager.reader import WeightReader
from tests.support.plain_train_engine import PlainTrainEngine

BUCKET = 64  # bytes: several files, blocks of several weights in each


@pytest.fixture
def train() -> PlainTrainEngine:
    return PlainTrainEngine(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)))


@pytest.fixture
def engine() -> RolloutEngine:
    return build_rollout_engine(
        RolloutSetup(
            config=RolloutConfig(name="fake"),
            model=ModelConfig(),
            device=torch.device("cpu"),
            seed=0,
            max_prompt_length=8,
            max_response_length=8,
        )
    )


def held(engine: RolloutEngine) -> dict[str, torch.Tensor]:
    return {piece.name: piece.tensor.clone() for piece in engine.live_weights()}


def agree(engine: RolloutEngine, train: PlainTrainEngine) -> bool:
    return all(torch.equal(value, held(engine)[name]) for name, value in train.model.state_dict().items())


def test_the_engine_holds_what_was_written_and_says_so(train: PlainTrainEngine, engine: RolloutEngine, tmp_path: Path) -> None:
    writer, reader = (kind(part, tmp_path, bucket_bytes=BUCKET) for kind, part in ((WeightWriter, train), (WeightReader, engine)))
    fingerprints = set()
    for version in range(3):
        train.perturb(version)
        written, read = writer.write(version), reader.read(version)
        assert agree(engine, train) and engine.version == version
        assert written.fingerprint == read.fingerprint and written.bytes == read.bytes
        fingerprints.add(read.fingerprint)
    assert len(fingerprints) == 3
    fresh = WeightReader(engine, tmp_path, bucket_bytes=BUCKET)
    assert fresh.read(2).fingerprint == written.fingerprint, "also by the engine's own loader, as a joiner's first read"


def test_a_prepared_version_outlives_its_files(train: PlainTrainEngine, engine: RolloutEngine, tmp_path: Path) -> None:
    writer, reader = WeightWriter(train, tmp_path, bucket_bytes=BUCKET), WeightReader(engine, tmp_path, bucket_bytes=BUCKET)
    writer.write(0)
    reader.read(0)
    train.perturb(1)
    writer.write(1)
    before = held(engine)
    mapped = reader.prepare(1)
    assert all(torch.equal(value, before[name]) for name, value in held(engine).items()), "preparing touches nothing"
    shutil.rmtree(tmp_path)
    reader.place(mapped)
    assert agree(engine, train)


def test_versions_that_went_or_never_come(train: PlainTrainEngine, engine: RolloutEngine, tmp_path: Path) -> None:
    writer = WeightWriter(train, tmp_path, bucket_bytes=BUCKET)
    reader = WeightReader(engine, tmp_path, bucket_bytes=BUCKET, timeout_s=0.1)
    for version in range(4):
        writer.write(version)
    with pytest.raises(EngineError, match="version 1 of the weights is no longer in .*; the newest is 3"):
        reader.prepare(1)
    with pytest.raises(DeadlineError, match="version 9"):
        reader.prepare(9)
    next((tmp_path / "version-3").glob("*.safetensors")).unlink()
    with pytest.raises(EngineError, match="was removed or is damaged .*; the newest is 3"):
        reader.read(3)


def test_a_resumed_trainer_replaces_what_came_after_it(train: PlainTrainEngine, engine: RolloutEngine, tmp_path: Path) -> None:
    writer = WeightWriter(train, tmp_path, bucket_bytes=BUCKET)
    for version in (4, 5, 6):
        writer.write(version)
    train.perturb(1)
    writer.write(5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-5"], "6 was never trained in this run, 4 had gone"
    reader = WeightReader(engine, tmp_path, bucket_bytes=BUCKET)
    reader.read(5)
    assert reader.newest() == 5 and agree(engine, train)


def test_damage_is_found_before_the_engine_is_touched(train: PlainTrainEngine, engine: RolloutEngine, tmp_path: Path) -> None:
    writer, reader = WeightWriter(train, tmp_path, bucket_bytes=BUCKET), WeightReader(engine, tmp_path, bucket_bytes=BUCKET)
    writer.write(0)
    reader.read(0)
    writer.write(1)
    file = next((tmp_path / "version-1").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightMismatchError, match="checksum"):
        reader.prepare(1)
    assert engine.version == 0 and agree(engine, train)


def test_weights_that_are_not_finite_are_found_before_the_engine_is_touched(
    train: PlainTrainEngine, engine: RolloutEngine, tmp_path: Path
) -> None:
    """NaN has the same checksum in the file and in the engine."""
    writer, reader = WeightWriter(train, tmp_path, bucket_bytes=BUCKET), WeightReader(engine, tmp_path, bucket_bytes=BUCKET)
    writer.write(0)
    reader.read(0)
    pieces = {piece.name: piece for piece in train.local_weights() or ()}
    name = sorted(pieces)[0]
    value = pieces[name].tensor.view(-1)[0].clone()
    pieces[name].tensor.view(-1)[0] = float("nan")
    writer.write(1)
    with pytest.raises(WeightMismatchError, match=f"{name} .*not finite"):
        reader.prepare(1)
    pieces[name].tensor.view(-1)[0] = value
    assert engine.version == 0 and agree(engine, train)
