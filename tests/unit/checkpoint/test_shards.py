"""Sharded tensors: any cut to any other, bit for bit, and a clear error for everything that does not fit or is not there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from rlhub.checkpoint import files
from rlhub.checkpoint.files import entry_of, write_safetensors
from rlhub.checkpoint.shard_reader import ShardReader
from rlhub.checkpoint.shards import DTYPE_CODES, raw_tensor, write_shards
from rlhub.errors import CheckpointError
from rlhub.protocol.weights.pieces import Piece, Region, flat_regions, take, whole


def part(name: str, full: Tensor, region: Region) -> Piece:
    return Piece(name=name, tensor=take(full, region), shape=tuple(full.shape), region=region)


def blank(piece: Piece) -> Piece:
    return Piece(name=piece.name, tensor=piece.tensor.to("meta"), shape=piece.shape, region=piece.region)


def cut(length: int, parts: int) -> list[tuple[int, int]]:
    """Row ranges as torch.chunk makes them: equal, the last ones shorter or empty."""
    size = -(-length // parts)
    return [(min(length, rank * size), min(length, (rank + 1) * size)) for rank in range(parts)]


def boxes(shape: tuple[int, ...], how: str, rank: int, world: int) -> list[Region]:
    """What `rank` holds: rows, columns, a block of both, or a range of the flattened tensor; scalars on the first rank."""
    if not shape:
        return [()] if rank == 0 else []
    if how == "flat":
        size = torch.Size(shape).numel()
        return flat_regions(shape, *cut(size, world)[rank])
    dim = {"rows": 0, "columns": len(shape) - 1, "blocks": len(shape) - 1}[how]
    regions: list[Region] = [tuple(cut(shape[dim], world)[rank] if d == dim else (0, n) for d, n in enumerate(shape))]
    if how == "blocks" and len(shape) > 1:  # several pieces of one tensor on a rank
        regions = [(rows, *box[1:]) for box in regions for rows in cut(shape[0], 2)]
    return regions


def pieces(tensors: dict[str, Tensor], rank: int, world: int, how: str = "rows") -> list[Piece]:
    return [part(name, full, box) for name, full in tensors.items() for box in boxes(tuple(full.shape), how, rank, world)]


def save(folder: Path, tensors: dict[str, Tensor], world: int, how: str = "rows") -> None:
    for rank in range(world):
        write_shards(folder, rank, world, pieces(tensors, rank, world, how))


def same(a: Tensor, b: Tensor) -> bool:
    flat_a, flat_b = (one.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for one in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(flat_a, flat_b)


LAYOUTS = st.sampled_from(["rows", "columns", "blocks", "flat"])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writers=st.integers(1, 5),
    readers=st.integers(1, 5),
    layouts=st.tuples(LAYOUTS, LAYOUTS),
    rows=st.integers(0, 9),
    width=st.integers(1, 5),
    limit=st.sampled_from([1, 40, 1 << 30]),
)
def test_any_layout_to_any_other(
    tmp_path_factory: pytest.TempPathFactory,
    writers: int,
    readers: int,
    layouts: tuple[str, str],
    rows: int,
    width: int,
    limit: int,
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensors = {
        "model.w": torch.randn(rows, width),
        "model.experts": torch.randn(rows, 2, width),
        "model.b": torch.randn(rows).to(torch.bfloat16),
        "optim.step": torch.tensor(7.0),
        "ids": torch.arange(rows),
    }
    for rank in range(writers):
        held = pieces(tensors, rank, writers, layouts[0])
        entries = write_shards(folder, rank, writers, held, max_file_bytes=limit)
        assert all(entry_of(Path(entry.path)) == entry for entry in entries)
    with ShardReader(folder) as reader:
        for rank in range(readers):
            for piece in pieces(tensors, rank, readers, layouts[1]):
                if piece.tensor.numel():
                    assert same(reader.read(blank(piece)), piece.tensor)
        if rows:
            assert reader.names() == sorted(tensors)
            assert all(same(reader.whole(name), full) for name, full in tensors.items())
            assert reader.dtype("model.b") == torch.bfloat16


def test_all_dtypes_and_odd_memory(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPE_CODES}
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    tensors["nan"] = torch.tensor([float("nan"), -0.0, float("inf")])
    save(tmp_path, tensors, 1)
    with ShardReader(tmp_path) as reader:
        for how in ("rows", "columns", "blocks"):
            for piece in pieces(tensors, 1, 2, how):
                assert same(reader.read(piece), piece.tensor)


def test_contiguous_memory_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that reach the file are the live tensor's own: no copy was made of them."""
    full, addresses = torch.randn(8, 16), set()

    def watched(descriptor: int, data: memoryview) -> None:
        addresses.add(np.frombuffer(data, dtype=np.uint8).ctypes.data)

    monkeypatch.setattr(files, "write_all", watched)
    rows, columns = part("rows", full, ((2, 5), (0, 16))), part("columns", full, ((0, 8), (4, 8)))
    write_shards(tmp_path, 0, 1, [rows, columns])
    assert rows.tensor.data_ptr() in addresses
    assert columns.tensor.data_ptr() not in addresses  # the control: what has gaps cannot be written as it lies


def test_the_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4, 2), "half": torch.randn(3).half(), "flag": torch.tensor([True])}
    save(tmp_path, tensors, 1)
    loaded = load_file(tmp_path / "shards-rank00000-00000.safetensors")
    assert loaded.keys() == tensors.keys() and all(same(loaded[name], tensors[name]) for name in tensors)


def test_overlapping_replicas_are_read(tmp_path: Path) -> None:
    full = torch.randn(6, 4)
    for rank, region in enumerate([((0, 4), (0, 4)), ((2, 3), (1, 2)), ((2, 6), (0, 3)), ((3, 6), (3, 4))]):
        write_shards(tmp_path, rank, 4, [part("w", full, region)])
    with ShardReader(tmp_path) as reader:
        assert same(reader.region("w", ((1, 6), (1, 4))), full[1:6, 1:4])


def test_files_stay_under_the_limit(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.zeros(100) for i in range(10)}
    entries = write_shards(tmp_path, 0, 1, pieces(tensors, 0, 1), max_file_bytes=1000)
    assert len([entry for entry in entries if entry.path.endswith(".safetensors")]) == 5


def test_the_format_before_regions_is_read(tmp_path: Path) -> None:
    full, scalar = torch.randn(5, 3), torch.tensor(2.0)
    for rank, (start, stop) in enumerate([(0, 3), (3, 5)]):
        held = {"w": full[start:stop]} | ({"s": scalar} if rank == 0 else {})
        file = f"shards-rank{rank:05d}-00000.safetensors"
        write_safetensors(tmp_path / file, [raw_tensor(name, tensor) for name, tensor in held.items()])
        rows = {"w": {"file": file, "dtype": "F32", "shape": [5, 3], "start": start, "stop": stop}}
        rows |= {"s": {"file": file, "dtype": "F32", "shape": [], "start": 0, "stop": 1}} if rank == 0 else {}
        text = json.dumps({"version": 1, "rank": rank, "pieces": rows})
        (tmp_path / f"shards-rank{rank:05d}.json").write_text(text)
    with ShardReader(tmp_path) as reader:
        assert same(reader.whole("w"), full) and same(reader.whole("s"), scalar)
        assert same(reader.region("w", ((2, 4), (1, 2))), full[2:4, 1:2])
    (tmp_path / "shards-rank00001.json").unlink()
    with pytest.raises(CheckpointError, match=r"w: \[\(3, 5\), \(0, 3\)\] .* is in no file"):
        ShardReader(tmp_path).whole("w")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    save(tmp_path, {"model.weight": torch.randn(4, 2)}, 2)
    return tmp_path


def wanted(name: str = "model.weight", shape: tuple[int, ...] = (4, 2), dtype: torch.dtype = torch.float32) -> Piece:
    return Piece(name=name, tensor=torch.empty(shape, dtype=dtype, device="meta"), shape=shape, region=whole(shape))


def test_errors_name_the_trouble(small: Path) -> None:
    reader = ShardReader(small)
    with pytest.raises(CheckpointError, match=r"'model.weigth' is not in .*did you mean 'model.weight'"):
        reader.read(wanted("model.weigth"))
    with pytest.raises(CheckpointError, match=r"model.weight: .*shape \(4, 2\), expected \(8, 2\)"):
        reader.read(wanted(shape=(8, 2)))
    with pytest.raises(CheckpointError, match=r"holds F32, expected BF16"):
        reader.read(wanted(dtype=torch.bfloat16))


def test_a_missing_rank_is_named(small: Path) -> None:
    (small / "shards-rank00001.json").unlink()
    with pytest.raises(CheckpointError, match=r"written by 2 ranks, but shards-rank00001.json of them is missing"):
        ShardReader(small)


def test_a_region_nobody_wrote_is_named(tmp_path: Path) -> None:
    full = torch.randn(4, 6)
    write_shards(tmp_path, 0, 2, [part("w", full, ((0, 2), (0, 6)))])
    write_shards(tmp_path, 1, 2, [part("w", full, ((2, 4), (0, 3)))])
    with ShardReader(tmp_path) as reader:
        assert same(reader.region("w", ((1, 4), (0, 3))), full[1:4, :3])
        with pytest.raises(CheckpointError, match=r"w: \[\(2, 3\), \(3, 4\)\] of its shape \(4, 6\) is in no file .* missing"):
            reader.region("w", ((1, 3), (2, 4)))


def test_files_of_two_saves_are_noticed(small: Path) -> None:
    write_shards(small, 0, 1, [part("model.weight", torch.randn(4, 2), whole((4, 2)))])
    with pytest.raises(CheckpointError, match=r"files of several saves, by \[1, 2\] ranks"):
        ShardReader(small)


def test_damaged_files(small: Path) -> None:
    path = small / "shards-rank00001-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    with pytest.raises(CheckpointError, match=r"shards-rank00001-00000.safetensors: cannot be read"):
        ShardReader(small).read(wanted())
    path.unlink()
    with pytest.raises(CheckpointError, match=r"shards-rank00001-00000.safetensors: cannot be read"):
        ShardReader(small).read(wanted())
    write_safetensors(path, [raw_tensor("model.weight", torch.zeros(1, 2))])
    with pytest.raises(CheckpointError, match=r"shards-rank00001-00000.safetensors: model.weight is not \[2, 2\]"):
        ShardReader(small).read(wanted())
    write_safetensors(path, [raw_tensor("another", torch.zeros(2, 2))])
    with pytest.raises(CheckpointError, match=r"shards-rank00001-00000.safetensors: model.weight cannot be read"):
        ShardReader(small).read(wanted())
    (small / "shards-rank00001.json").write_text('{"version": 2')
    with pytest.raises(CheckpointError, match=r"shards-rank00001.json: not a shard index"):
        ShardReader(small)
    (small / "shards-rank00001.json").write_text('{"version": 3}')
    with pytest.raises(CheckpointError, match=r"written in format 3, this rlhub reads up to format 2"):
        ShardReader(small)
    with pytest.raises(CheckpointError, match="no shard index"):
        ShardReader(small / "nowhere")


def test_pieces_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    w = torch.zeros(2, 3)
    for shape, region in (((4, 2), ((0, 2), (0, 3))), ((3, 3), ((2, 4), (0, 3))), ((2,), ((0, 2), (0, 3)))):
        with pytest.raises(CheckpointError, match="w: the piece .* does not fit in a tensor of shape"):
            write_shards(tmp_path, 0, 1, [Piece(name="w", tensor=w, shape=shape, region=region)])
    full = torch.zeros(4, 4)
    overlapping = [part("w", full, ((0, 3), (0, 2))), part("w", full, ((2, 4), (1, 3)))]
    with pytest.raises(CheckpointError, match=r"w: the piece .* covers elements of .* another piece of this rank"):
        write_shards(tmp_path, 0, 1, overlapping)
    with pytest.raises(CheckpointError, match=r"w: a piece of BF16 \[4, 4\] after one of F32 \[4, 4\]"):
        write_shards(tmp_path, 0, 1, [part("w", full, ((0, 1), (0, 4))), part("w", full.bfloat16(), ((1, 2), (0, 4)))])
    with pytest.raises(CheckpointError, match="complex64 has no form"):
        write_shards(tmp_path, 0, 1, [part("w", torch.zeros(1, dtype=torch.complex64), whole((1,)))])
