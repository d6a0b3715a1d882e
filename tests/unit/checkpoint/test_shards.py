"""Sharded tensors: any world size to any other, bit for bit, and a clear error for everything that does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from rlhub.checkpoint.files import entry_of
from rlhub.checkpoint.shards import DTYPE_CODES, ShardReader, TensorShard, write_shards
from rlhub.errors import CheckpointError


def cut(length: int, parts: int) -> list[tuple[int, int]]:
    """Row ranges as torch.chunk makes them: equal, the last ones shorter or empty."""
    size = -(-length // parts)
    return [(min(length, rank * size), min(length, (rank + 1) * size)) for rank in range(parts)]


def pieces(tensors: dict[str, Tensor], rank: int, world: int) -> list[TensorShard]:
    found = []
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            found.append(TensorShard(name=name, local=tensor, global_shape=(), replicated=True))
            continue
        start, stop = cut(tensor.shape[0], world)[rank]
        found.append(TensorShard(name=name, local=tensor[start:stop], global_shape=tuple(tensor.shape), offset=start))
    return found


def blank(shard: TensorShard) -> TensorShard:
    return TensorShard(
        name=shard.name,
        local=shard.local.to("meta"),
        global_shape=shard.global_shape,
        offset=shard.offset,
        replicated=shard.replicated,
    )


def same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writers=st.integers(1, 5),
    readers=st.integers(1, 5),
    rows=st.integers(0, 9),
    width=st.integers(1, 3),
    limit=st.sampled_from([1, 40, 1 << 30]),
)
def test_any_world_size_to_any_other(
    tmp_path_factory: pytest.TempPathFactory, writers: int, readers: int, rows: int, width: int, limit: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensors = {
        "model.w": torch.randn(rows, width),
        "model.b": torch.randn(rows).to(torch.bfloat16),
        "optim.step": torch.tensor(7.0),
        "ids": torch.arange(rows),
    }
    for rank in range(writers):
        entries = write_shards(folder, rank, pieces(tensors, rank, writers), max_file_bytes=limit)
        assert all(entry_of(Path(entry.path)) == entry for entry in entries)
    with ShardReader(folder) as reader:
        assert reader.names() == sorted(tensors)
        for rank in range(readers):
            for shard in pieces(tensors, rank, readers):
                assert same(reader.read(blank(shard)), shard.local)


def test_all_dtypes_and_odd_memory(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPE_CODES}
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    tensors["nan"] = torch.tensor([float("nan"), -0.0, float("inf")])
    write_shards(tmp_path, 0, pieces(tensors, 0, 1))
    with ShardReader(tmp_path) as reader:
        for shard in pieces(tensors, 0, 1):
            assert same(reader.read(shard), shard.local)


def test_the_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4, 2), "half": torch.randn(3).half(), "flag": torch.tensor([True])}
    write_shards(tmp_path, 0, pieces(tensors, 0, 1))
    loaded = load_file(tmp_path / "shards-rank00000-00000.safetensors")
    assert loaded.keys() == tensors.keys() and all(same(loaded[name], tensors[name]) for name in tensors)


def test_replicated_pieces_are_written_once(tmp_path: Path) -> None:
    shard = TensorShard(name="norm", local=torch.randn(3), global_shape=(3,), replicated=True)
    for rank in range(3):
        write_shards(tmp_path, rank, [shard])
    holders = [path.name for path in tmp_path.glob("*.json") if "norm" in json.loads(path.read_text())["pieces"]]
    assert holders == ["shards-rank00000.json"]
    with ShardReader(tmp_path) as reader:
        assert same(reader.read(shard), shard.local)


def test_overlapping_replicas_are_read(tmp_path: Path) -> None:
    whole = torch.randn(6, 2)
    for rank, (start, stop) in enumerate([(0, 4), (2, 3), (2, 6)]):
        write_shards(tmp_path, rank, [TensorShard(name="w", local=whole[start:stop], global_shape=(6, 2), offset=start)])
    with ShardReader(tmp_path) as reader:
        assert same(reader.read(TensorShard(name="w", local=whole[1:6], global_shape=(6, 2), offset=1)), whole[1:6])


def test_files_stay_under_the_limit(tmp_path: Path) -> None:
    shards = [TensorShard(name=f"t{i}", local=torch.zeros(100), global_shape=(100,)) for i in range(10)]
    entries = write_shards(tmp_path, 0, shards, max_file_bytes=1000)
    assert len([entry for entry in entries if entry.path.endswith(".safetensors")]) == 5


@pytest.fixture
def small(tmp_path: Path) -> Path:
    for rank in range(2):
        write_shards(tmp_path, rank, pieces({"model.weight": torch.randn(4, 2)}, rank, 2))
    return tmp_path


def wanted(name: str = "model.weight", shape: tuple[int, ...] = (4, 2), dtype: torch.dtype = torch.float32) -> TensorShard:
    return TensorShard(name=name, local=torch.empty(shape, dtype=dtype, device="meta"), global_shape=shape)


def test_errors_name_the_trouble(small: Path) -> None:
    reader = ShardReader(small)
    with pytest.raises(CheckpointError, match=r"'model.weigth' is not in .*did you mean 'model.weight'"):
        reader.read(wanted("model.weigth"))
    with pytest.raises(CheckpointError, match=r"model.weight: .*shape \(4, 2\), expected \(8, 2\)"):
        reader.read(wanted(shape=(8, 2)))
    with pytest.raises(CheckpointError, match=r"holds F32, expected BF16"):
        reader.read(wanted(dtype=torch.bfloat16))


def test_a_missing_rank_is_noticed(small: Path) -> None:
    (small / "shards-rank00001.json").unlink()
    with pytest.raises(CheckpointError, match="row 2 of .* is in no file"):
        ShardReader(small).read(wanted())


def test_damaged_files(small: Path) -> None:
    path = small / "shards-rank00001-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"shards-rank00001-00000.safetensors: cannot be read"):
        ShardReader(small).read(wanted())
    (small / "shards-rank00001.json").write_text('{"version": 1')
    with pytest.raises(CheckpointError, match=r"shards-rank00001.json: not a shard index"):
        ShardReader(small)
    with pytest.raises(CheckpointError, match="no shard index"):
        ShardReader(small / "nowhere")


def test_pieces_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    w = torch.zeros(2, 3)
    for bad in (
        TensorShard(name="w", local=w, global_shape=(4, 4)),
        TensorShard(name="w", local=w, global_shape=(3, 3), offset=2),
        TensorShard(name="w", local=w, global_shape=()),
    ):
        with pytest.raises(CheckpointError, match="w: a piece of shape"):
            write_shards(tmp_path, 0, [bad])
    with pytest.raises(CheckpointError, match="two pieces of 'w'"):
        write_shards(tmp_path, 0, [TensorShard(name="w", local=w, global_shape=(2, 3))] * 2)
    with pytest.raises(CheckpointError, match="complex64 has no form"):
        write_shards(tmp_path, 0, [TensorShard(name="w", local=torch.zeros(1, dtype=torch.complex64), global_shape=(1,))])
