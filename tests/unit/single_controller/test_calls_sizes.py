"""The bytes of calls that observers learn are those of the pickles that would carry them, each value once, in its direction."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rlhub.protocol import DataProto, DataProtoFuture
from rlhub.single_controller import ClassWithInitArgs, Dispatch, LaunchOptions, Worker, launch, register
from rlhub.single_controller.calls import SHARE_BYTES, ObservedCall, RankRequest, Watch, column_bytes, pickled_bytes
from rlhub.tracking.spans import CallTiming
from rlhub.utils.timing import PhaseTimer

OUT, IN, CALLS, PROMPTS = (f"perf/driver_{name}" for name in ("bytes_out", "bytes_in", "calls", "bytes_prompts"))


def batch(rows: int, width: int, *, objects: bool = False) -> DataProto:
    tensors = {"input_ids": torch.zeros(rows, width, dtype=torch.int32), "mask": torch.ones(rows, width, dtype=torch.bool)}
    arrays = {"uid": [f"row {row}" for row in range(rows)], "score": np.arange(rows) / 2} if objects else {}
    return DataProto.from_dict(tensors, arrays, {"step": 3})


def moved(data: DataProto) -> tuple[int, int]:
    """Bytes of the pickle's head and of its out-of-band buffers, from a real pickle."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return len(head), sum(buffer.raw().nbytes for buffer in buffers)


class Role(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, data: DataProto) -> DataProto:
        return batch(len(data), 7)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def ids(self, data: DataProto) -> DataProto:
        return data.select(["input_ids"])

    @register(Dispatch.DP_COMPUTE_PROTO)
    async def ids_of_a_future(self, data: DataProto) -> DataProto:
        return data.select(["input_ids"])

    @register(Dispatch.DP_COMPUTE_PROTO, materialize_futures=False)
    async def read(self, data: DataProtoFuture) -> DataProto:
        return data.get().select(["mask"])

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, data: DataProto) -> None:
        raise ValueError


@pytest.fixture
def timing() -> CallTiming:
    return CallTiming(PhaseTimer())


@pytest.fixture
def actor(timing: CallTiming) -> Iterator[Any]:
    with launch({"actor": ClassWithInitArgs(Role)}, LaunchOptions(backend="local", observers=[timing])) as launched:
        yield launched.groups["actor"]


SHAPES = [(4, 4096), (1024, 16)]


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_sizes_are_those_of_pickles(rows: int, width: int, objects: bool) -> None:
    data = batch(rows, width, objects=objects)
    for part in (data, *data.chunk(3)):
        head, buffers = moved(part)
        assert 0 <= head + buffers - pickled_bytes(part) < 600, "only the columns' dtypes and shapes go uncounted"
        pointers = 8 * len(part) if objects else 0
        assert column_bytes(part) == buffers + pointers


def test_columns_without_padding_count_their_own_rows() -> None:
    rows = [torch.arange(length, dtype=torch.int32) for length in (900, 0, 3, 50)]
    part = DataProto.from_dict({"x": torch.nested.nested_tensor(rows, layout=torch.jagged)})[2:]
    assert column_bytes(part) == moved(part)[1] == 53 * 4 + 2 * 8


def test_other_values_count_by_their_arrays_and_texts() -> None:
    value = {"a": [torch.zeros(3), np.zeros(2)], "b": ("four", b"xy"), "c": 7, "d": DataProtoFuture([], lambda references: [])}
    assert pickled_bytes(value) == column_bytes(value) == 12 + 16 + 6


def test_a_batch_that_does_not_pickle_counts_by_its_columns() -> None:
    data = DataProto.from_dict({"x": torch.zeros(4)}, meta_info={"function": lambda: None})
    assert pickled_bytes(data) == 16


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_a_call_counts_its_arguments_and_its_result(actor: Any, timing: CallTiming, rows: int, width: int) -> None:
    assert timing.traffic() == {OUT: 0, IN: 0, CALLS: 0}
    data = batch(rows, width)
    out = actor.ids(data)
    assert timing.traffic() == {OUT: moved(data)[1], IN: moved(out)[1], CALLS: 1}
    generated = actor.generate_sequences(data=data)
    assert timing.traffic() == {
        OUT: 2 * moved(data)[1],
        IN: moved(out)[1] + moved(generated)[1],
        CALLS: 2,
        PROMPTS: moved(data)[1],
    }
    timing.reset_traffic()
    assert timing.traffic() == {OUT: 0, IN: 0, CALLS: 0}


def test_control_a_call_that_is_not_counted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("send", "receive"):
        timing = CallTiming(PhaseTimer())
        with monkeypatch.context() as broken, pytest.raises(AssertionError):
            broken.setattr(Watch, method, lambda self, values: None)
            with launch({"actor": ClassWithInitArgs(Role)}, LaunchOptions(backend="local", observers=[timing])) as launched:
                test_a_call_counts_its_arguments_and_its_result(launched.groups["actor"], timing, *SHAPES[0])


def test_a_future_counts_when_the_driver_fetches_it_and_not_when_a_worker_does(actor: Any, timing: CallTiming) -> None:
    data = batch(6, 5)
    future = actor.ids.submit(data)
    sent = moved(data)[1]
    masks = actor.read(actor.generate_sequences.submit(data)).batch["mask"]
    ids = actor.ids_of_a_future(future).batch["input_ids"]
    assert timing.traffic() == {OUT: 2 * sent, IN: masks.nbytes + ids.nbytes, CALLS: 4, PROMPTS: sent}
    assert future.num_rows() == 6 and timing.traffic()[IN] == masks.nbytes + ids.nbytes
    fetched = future.get()
    assert timing.traffic()[IN] == masks.nbytes + ids.nbytes + moved(fetched)[1]


def test_a_result_that_is_read_twice_came_once_and_a_failure_brings_nothing(actor: Any, timing: CallTiming) -> None:
    call = actor.execute_all_async("ids", batch(3, 5))
    call.get()
    call.get()
    assert timing.traffic() == {OUT: 3 * 5 * 5, IN: 3 * 5 * 4, CALLS: 1}
    with pytest.raises(Exception, match="fail"):
        actor.fail(batch(3, 5))
    assert timing.traffic() == {OUT: 2 * 3 * 5 * 5, IN: 3 * 5 * 4, CALLS: 2}


def test_a_value_that_is_stored_once_for_several_ranks_counts_once(timing: CallTiming) -> None:
    watch = Watch(ObservedCall(role="actor", method="m", blocking=True, workers=()), [timing], column_bytes)
    shared, small = torch.zeros(SHARE_BYTES, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)
    watch.send([RankRequest(rank=rank, args=(shared,), kwargs={"small": small}) for rank in range(4)])
    assert timing.traffic()[OUT] == SHARE_BYTES + 4 * 10
    watch.send([RankRequest(rank=rank, args=(shared.clone(),)) for rank in range(4)])
    assert timing.traffic()[OUT] == 5 * SHARE_BYTES + 4 * 10
