"""DataProto through a real Ray object store: no copies, no way to corrupt it, chunks that fetch their own parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
import torch.distributed as dist

from rlhub.protocol import DataProto, DataProtoFuture
from rlhub.protocol.columns import jagged, same_tensor
from rlhub.protocol.data_proto import all_gather_data_proto
from rlhub.utils.ports import free_port

MIB = 2**20


pytestmark = pytest.mark.usefixtures("ray_cluster")


def batch_of(rows: int, width: int = 1) -> DataProto:
    ids = torch.arange(rows)
    lengths = ids % 3
    values = torch.arange(int(lengths.sum()), dtype=torch.int32)
    tensors = {
        "ids": ids,
        "wide": ids.float().unsqueeze(1).repeat(1, width),
        "half": ids.bfloat16(),
        "narrow": ids.to(torch.int32),
        "odd": ids % 2 == 1,
        "tokens": jagged(values, lengths),
        "token_mask": jagged(values % 2 == 0, lengths),
    }
    return DataProto.from_dict(
        tensors, {"text": [f"row {i}" for i in range(rows)], "score": np.arange(rows) / 2}, {"k": {"a": 1}}
    )


def equal(left: DataProto, right: DataProto) -> bool:
    tensors = all(same_tensor(column, right.batch[key]) for key, column in left.tensors().items())
    arrays = all(column.tolist() == right.non_tensor_batch[key].tolist() for key, column in left.non_tensor_batch.items())
    return tensors and arrays and left.meta_info == right.meta_info and list(left.tensors()) == list(right.tensors())


@ray.remote(num_cpus=0)
class Reader:
    """Does things to batches in another process."""

    def echo(self, data: DataProto) -> DataProto:
        return data

    def write(self, data: DataProto, own: bool) -> str:
        """Try to change the argument in place, or a private copy of it."""
        data = data.materialize() if own else data
        try:
            data.batch["wide"].fill_(7)
            return "written"
        except RuntimeError as error:
            return str(error)

    def rss_gained(self, box: list[ray.ObjectRef]) -> float:
        """MiB that reading the object adds to this process."""
        before = psutil.Process().memory_info().rss
        data = ray.get(box[0])
        return (psutil.Process().memory_info().rss - before) / MIB + 0.0 * len(data)

    def ids_of(self, future: DataProtoFuture) -> list[int]:
        return future.get().batch["ids"].tolist()

    def gather(self, rank: int, port: int, sizes: list[int], drop: bool = False) -> DataProto:
        """The ranks' parts of one batch, gathered; with `drop` rank 1 lacks a column."""
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=len(sizes), rank=rank)
        start = sum(sizes[:rank])
        data = batch_of(sum(sizes))[start : start + sizes[rank]]
        if drop and rank == 1:
            data.pop(["wide"])
        try:
            return all_gather_data_proto(data)
        finally:
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def readers(ray_cluster: None) -> Iterator[list[Any]]:
    started = [Reader.remote() for _ in range(2)]
    yield started
    for reader in started:
        ray.kill(reader)


def test_echo_is_exact(readers: list[Any]) -> None:
    for data in (batch_of(5), batch_of(0), batch_of(4096, 256), DataProto(meta_info={"a": [1]})):
        assert equal(ray.get(readers[0].echo.remote(data)), data)
        assert equal(ray.get(ray.put(data)), data)


@pytest.mark.parametrize("rows", [4, 100_000])
def test_a_workers_write_never_reaches_the_sender(rows: int, readers: list[Any]) -> None:
    data = batch_of(rows)  # small arguments travel inline, large ones through shared memory
    reference = ray.put(data)
    assert "read-only" in ray.get(readers[0].write.remote(reference, own=False))
    assert ray.get(readers[0].write.remote(reference, own=True)) == "written"
    assert equal(ray.get(reference), data)


def test_control_a_plain_tensor_over_the_store_can_be_corrupted() -> None:
    """What the guard is for: without it one reader's write is every reader's."""
    reference = ray.put(np.zeros(100_000, dtype=np.float32))
    view = memoryview(ray.get(reference))
    torch.frombuffer(view, dtype=torch.float32).fill_(7)
    assert ray.get(reference)[0] == 7


def test_reading_costs_no_memory(readers: list[Any]) -> None:
    data = batch_of(1024, 16 * 1024)  # 64 MiB
    ray.get(readers[0].echo.remote(batch_of(2)))  # imports
    gained = ray.get(readers[0].rss_gained.remote([ray.put(data)]))
    as_lists = ray.put(list(range(2_000_000)))
    assert gained < 5 < ray.get(readers[0].rss_gained.remote([as_lists]))  # the control: an object that must be copied


def fetch(references: list[ray.ObjectRef]) -> list[DataProto]:
    return ray.get(references)


def test_a_chunked_future_resolves_on_the_worker(readers: list[Any]) -> None:
    data = batch_of(9)
    references = [ray.put(part) for part in data.split(4)]
    chunks = DataProtoFuture(references, fetch).chunk(2)
    found = ray.get([reader.ids_of.remote(chunk) for reader, chunk in zip(readers, chunks, strict=True)])
    assert found == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]


def gather(readers: list[Any], sizes: list[int], **options: bool) -> list[DataProto]:
    port = free_port()
    return ray.get([reader.gather.remote(rank, port, sizes, **options) for rank, reader in enumerate(readers)], timeout=120)


@pytest.mark.parametrize("sizes", [[3, 3], [4, 1], [2, 0], [1, 0], [0, 0]])
def test_all_gather_of_unequal_parts(sizes: list[int], readers: list[Any]) -> None:
    assert all(equal(result, batch_of(sum(sizes))) for result in gather(readers, sizes))


def test_all_gather_of_different_columns_is_an_error_and_does_not_hang(readers: list[Any]) -> None:
    with pytest.raises(ValueError, match="tensor columns differ.*wide"):
        gather(readers, [2, 2], drop=True)
