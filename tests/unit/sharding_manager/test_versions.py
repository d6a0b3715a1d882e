"""Versions as deltas, in the engine's dtype, and by exchange: the engine has the trainer's weights to the bit, or a full version
comes."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from rlhub.engines.rollout.base import RolloutEngine
from rlhub.engines.rollout.fake import FakeEngine
from rlhub.errors import DeadlineError, EngineError, ReshardError, WeightMismatchError
from rlhub.sharding_manager import reader as reader_module
from rlhub.sharding_manager.files import WeightWriter
from rlhub.sharding_manager.reader import WeightReader
from rlhub.sharding_manager.versions import FolderVersion, ask_for_full, is_full, versions_in
from tests.support.plain_train_engine import PlainTrainEngine
from tests.unit.sharding_manager.test_files import engine as engine

BUCKET = 1 << 14  # bytes: several files


class Job:
    """A trainer in bfloat16 whose steps change few values, and the folder."""

    def __init__(self, folder: Path, *, full_every: int = 4, dtype: torch.dtype = torch.bfloat16) -> None:
        self.folder, self.version = folder, -1
        self.train = PlainTrainEngine(nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64)).to(dtype))
        self.full_every = full_every
        self.writer = self.new_writer()

    def new_writer(self) -> WeightWriter:
        return WeightWriter(self.train, self.folder, bucket_bytes=BUCKET, full_every=self.full_every)

    def step(self, share: float = 0.02) -> float:
        """Changes values and writes them; returns the bytes written, as a share of the bytes of all weights."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.train.model.parameters():
                chosen = torch.rand(parameter.shape, generator=generator) < share
                parameter.copy_(torch.where(chosen, parameter * 1.01, parameter))
        report = self.writer.write(self.version)
        self.fingerprint = report.fingerprint
        assert report.wire_bytes is not None
        return report.wire_bytes / report.bytes

    def reader(self, engine: RolloutEngine, timeout_s: float = 60.0) -> WeightReader:
        return WeightReader(engine, self.folder, bucket_bytes=BUCKET, timeout_s=timeout_s)

    def files(self, version: int) -> list[Path]:
        return sorted((self.folder / f"version-{version}").glob("rank-*.safetensors"))

    def arrived(self, engine: RolloutEngine, reader: WeightReader) -> int:
        """Reads the newest version; returns the reader's count of full versions that replaced deltas."""
        report = reader.read(self.version)
        assert report.fingerprint == self.fingerprint and engine.version == self.version
        live = {piece.name: piece.tensor for piece in engine.live_weights()}
        for name, value in self.train.model.state_dict().items():
            assert torch.equal(live[name].view(torch.uint8), value.to(live[name].dtype).view(torch.uint8)), name
        return report.fallbacks


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.writer.close()


def flip(job: Job) -> None:
    (file,) = job.files(job.version)[:1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncate(job: Job) -> None:
    (file,) = job.files(job.version)[:1]
    file.write_bytes(file.read_bytes()[:-3])


def lose(job: Job) -> None:
    job.files(job.version)[0].unlink()


def lose_list(job: Job) -> None:
    (job.folder / f"version-{job.version}" / "rank-0.json").unlink()


def forge(job: Job) -> None:
    """Other bytes with a fitting checksum of their own: of another version's delta, as if two runs wrote here."""
    rows = json.loads((path := job.folder / f"version-{job.version}" / "rank-0.json").read_text())
    delta = next(row for row in rows["blocks"] if row["base"] is not None)
    delta["base"] += 1
    path.write_text(json.dumps(rows))


def test_deltas_are_small_and_full_versions_come_every_so_often(job: Job, engine: RolloutEngine) -> None:
    reader = job.reader(engine)
    shares = []
    for _ in range(9):
        shares.append(job.step())
        assert job.arrived(engine, reader) == 0
    assert [share == 1 for share in shares] == [True, False, False, False] * 2 + [True]
    assert max(share for share in shares if share < 1) < 0.2, "small blocks have a header each"
    assert versions_in(job.folder) == [4, 5, 6, 7, 8], "the one before the newest builds on 4"
    assert job.step(share=1.0) == 1, "where all values change, a delta is of no use"
    assert job.arrived(engine, reader) == 0


def test_a_late_reader_follows_the_chain_and_then_its_own_weights(job: Job, engine: RolloutEngine) -> None:
    for _ in range(4):
        job.step()
    reader = job.reader(engine)
    assert job.arrived(engine, reader) == 0
    shutil.rmtree(job.folder / "version-0")
    job.full_every = job.writer._full_every = 9
    job.step()
    shutil.rmtree(job.folder / "version-1")
    assert job.arrived(engine, reader) == 0, "its live weights are the base"


@pytest.mark.parametrize("damage", [flip, truncate, lose, lose_list, forge])
@pytest.mark.parametrize("late", [False, True])
def test_a_delta_that_is_of_no_use_is_replaced_by_a_full_version(
    job: Job,
    engine: RolloutEngine,
    damage: Callable[[Job], None],
    late: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = job.reader(engine)
    job.step()
    if not late:
        job.arrived(engine, reader)
    job.step()
    before = {piece.name: piece.tensor.clone() for piece in engine.live_weights()}
    damage(job)
    with caplog.at_level(logging.WARNING):
        mapped = reader.prepare(job.version)
    assert all(torch.equal(piece.tensor, before[piece.name]) for piece in engine.live_weights()), "nothing until it is placed"
    assert reader.place(mapped).fallbacks == 1 and "is read in full" in caplog.text
    assert job.arrived(engine, reader) == 1, "it is there in full now"
    assert job.step() < 1 and job.arrived(engine, reader) == 1, "and the next delta builds on it"


def test_a_chain_that_was_lost_is_a_delta_of_no_use(job: Job, engine: RolloutEngine) -> None:
    for _ in range(3):
        job.step()
    shutil.rmtree(job.folder / "version-1")
    assert job.arrived(engine, job.reader(engine)) == 1


def test_a_reader_whose_weights_were_changed_does_not_build_on_them(job: Job, engine: RolloutEngine) -> None:
    reader = job.reader(engine)
    job.step()
    job.arrived(engine, reader)
    next(engine.live_weights()).tensor.view(-1)[3] += 1
    job.step()
    assert job.arrived(engine, reader) == 0, "the files have the base"
    next(engine.live_weights()).tensor.view(-1)[3] += 1
    shutil.rmtree(job.folder / "version-0")
    job.step()
    assert job.arrived(engine, reader) == 1


def test_without_a_writer_no_stale_version_is_served(job: Job, engine: RolloutEngine) -> None:
    reader = job.reader(engine, timeout_s=0.5)
    job.step()
    job.arrived(engine, reader)
    job.step()
    flip(job)
    job.writer.close()
    with pytest.raises(DeadlineError, match="is the trainer running, and able to write the version in full"):
        reader.prepare(1)
    assert engine.version == 0


def test_a_resumed_trainer_begins_with_a_full_version(job: Job, engine: RolloutEngine) -> None:
    """Killed in mid-publication, it leaves an unfinished folder, and a version that it writes again from other weights."""
    reader = job.reader(engine)
    for _ in range(3):
        job.step()
        job.arrived(engine, reader)
    job.writer.close()
    unfinished = job.folder / "version-3.part"
    unfinished.mkdir()
    (unfinished / "rank-0-0.safetensors").write_bytes(b"half")
    job.writer, job.version = job.new_writer(), 1
    assert job.step() == 1 and is_full(job.folder / "version-2")
    assert job.arrived(engine, reader) == 0
    assert job.step() < 1 and job.arrived(engine, reader) == 0
    job.writer.close()


def test_a_write_that_failed_is_no_base(job: Job, engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = job.reader(engine)
    job.step()
    job.arrived(engine, reader)
    monkeypatch.setattr("rlhub.sharding_manager.files.save_file", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        job.step()
    monkeypatch.undo()
    assert job.step() == 1 and job.arrived(engine, reader) == 0


# The engine's dtype


def in_bfloat16(engine: RolloutEngine, job: Job) -> None:
    assert isinstance(engine, FakeEngine)
    engine._weights = {
        name: torch.zeros_like(value, dtype=torch.bfloat16) for name, value in job.train.model.state_dict().items()
    }


@pytest.mark.parametrize("full_every", [1, 4])
def test_versions_are_in_the_dtype_of_the_engine_that_reads(tmp_path: Path, engine: RolloutEngine, full_every: int) -> None:
    """Half the bytes from the second version on, and the bits of a cast in the engine."""
    job = Job(tmp_path, full_every=full_every, dtype=torch.float32)
    in_bfloat16(engine, job)
    reader = job.reader(engine)
    sizes = []
    for _ in range(3):
        job.step(share=1.0)
        sizes.append(sum(file.stat().st_size for file in job.files(job.version)))
        if job.version:
            job.arrived(engine, reader)
        else:
            reader.read(0)
    assert sizes[1] == sizes[2] < 0.55 * sizes[0]
    job.writer.close()


def test_an_engine_with_more_bits_than_were_written_refuses(tmp_path: Path, engine: RolloutEngine) -> None:
    job = Job(tmp_path, dtype=torch.float32)
    in_bfloat16(engine, job)
    reader = job.reader(engine)
    job.step()
    reader.read(0)
    job.step()
    wide = FakeEngine(engine._setup)  # type: ignore[attr-defined]
    wide._weights = {name: torch.zeros_like(value) for name, value in job.train.model.state_dict().items()}
    with pytest.raises(ReshardError, match="written in torch.bfloat16 .* and is torch.float32 in this one: set .*rollout.dtype"):
        job.reader(wide).read(1)
    job.writer.close()


# The exchange


def test_the_pause_only_exchanges_the_memory(job: Job, engine: RolloutEngine) -> None:
    reader = job.reader(engine)
    job.step()
    job.arrived(engine, reader)
    live = [piece.tensor.data_ptr() for piece in engine.live_weights()]
    job.step()
    mapped = reader.prepare(1)
    standby = [piece.tensor.data_ptr() for piece in engine.standby_weights() or ()]
    assert [piece.tensor.data_ptr() for piece in engine.live_weights()] == live and set(live).isdisjoint(standby)
    shutil.rmtree(job.folder / "version-1")
    reader.place(mapped)
    assert [piece.tensor.data_ptr() for piece in engine.live_weights()] == standby
    with pytest.raises(EngineError, match="version 1 of the weights is not prepared any more"):
        reader.place(mapped)
    assert engine.version == 1


def test_a_version_that_was_prepared_again_takes_the_place_of_the_other(job: Job, engine: RolloutEngine) -> None:
    reader = job.reader(engine)
    job.step()
    job.arrived(engine, reader)
    job.step()
    first = reader.prepare(1)
    job.step()
    second = reader.prepare(2)
    with pytest.raises(EngineError, match="another has been since"):
        reader.place(first)
    reader.place(second)
    job.arrived(engine, reader)


def test_standby_weights_that_are_not_as_sent_are_found_before_the_exchange(
    job: Job,
    engine: RolloutEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = job.reader(engine)
    job.step()
    job.arrived(engine, reader)
    job.step()
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)
    with pytest.raises(WeightMismatchError, match="does not hold the trainer's"):
        reader.prepare(1)
    monkeypatch.undo()
    assert engine.version == 0 and job.arrived(engine, reader) == 0


def test_memory_that_did_not_change_hands_is_found(job: Job, engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = job.reader(engine)
    job.step()
    job.arrived(engine, reader)
    job.step()
    mapped = reader.prepare(1)
    monkeypatch.setattr(FakeEngine, "exchange", lambda self: None)
    with pytest.raises(WeightMismatchError, match="does not hold the trainer's"):
        reader.place(mapped)
    with pytest.raises(EngineError, match="no whole set of weights"):
        engine.generate([], None)  # type: ignore[arg-type]


def test_an_engine_that_cannot_exchange_copies(job: Job, engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "standby_weights", lambda self: None)
    reader = job.reader(engine)
    for _ in range(3):
        job.step()
        assert job.arrived(engine, reader) == 0


def test_readers_ask_at_once_and_the_writer_goes_on(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many readers, damaged versions and a trainer that writes at its own pace.  None asks before all have met the damage."""
    readers, met = [], threading.Barrier(3, timeout=60.0)

    def ask(path: Path) -> None:
        met.wait()
        ask_for_full(path)

    monkeypatch.setattr(reader_module, "ask_for_full", ask)
    job.step()
    from tests.unit.sharding_manager.test_files import engine as make  # the fixture's function

    for _ in range(3):
        one = make.__wrapped__()  # type: ignore[attr-defined]
        readers.append((one, job.reader(one)))
        readers[-1][1].read(0)
    for _ in range(3):
        job.step()
        flip(job)
        threads = [threading.Thread(target=reader.read, args=(job.version,)) for _, reader in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one, reader in readers:
            assert job.arrived(one, reader) >= (job.version % 4 > 0)


def test_a_folder_of_an_older_kind_is_read(job: Job, engine: RolloutEngine) -> None:
    """Of a trainer that wrote neither base nor source."""
    job.step()
    path = job.folder / "version-0"
    (path / "manifest.json").write_text('{"version": 0, "ranks": 1}')
    rows = json.loads((path / "rank-0.json").read_text())
    for row in rows["blocks"]:
        for key in ("source", "base", "stored"):
            del row[key]
    (path / "rank-0.json").write_text(json.dumps(rows))
    assert FolderVersion(job.folder, 0).full and job.arrived(engine, job.reader(engine)) == 0
