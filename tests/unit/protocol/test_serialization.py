"""Transport of batches: exact, out of band, and safe against writes into memory that others read."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict

from rlhub.protocol import DataProto
from rlhub.protocol.readonly_tensor import ReadOnlyTensor

COLUMNS = {
    "float32": torch.rand(6, 3),
    "int64": torch.arange(6),
    "bool": torch.tensor([True, False] * 3),
    "bfloat16": torch.rand(6, 2).bfloat16(),
    "float16": torch.rand(6).half(),
    "float8_e4m3": torch.rand(6, 4).to(torch.float8_e4m3fn),
    "float8_e5m2": torch.rand(6, 4).to(torch.float8_e5m2),
    "complex_conj": torch.rand(6, dtype=torch.complex64).conj(),
    "transposed": torch.rand(3, 6).T,
    "expanded": torch.rand(1, 3).expand(6, 3),
    "strided": torch.rand(12, 2)[::2],
    "no_width": torch.rand(6, 0),
}


def received(data: DataProto) -> tuple[DataProto, bytearray]:
    """What a reader of shared memory gets, and the memory (read-only for the reader)."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    store = bytearray()
    cuts = []
    for buffer in buffers:
        raw = buffer.raw()
        cuts.append((len(store), len(store) + raw.nbytes))
        store += raw.tobytes() + b"\0" * (-raw.nbytes % 64)
    views = [memoryview(store).toreadonly()[start:stop] for start, stop in cuts]
    return pickle.loads(stream, buffers=views), store


@pytest.mark.parametrize("name", sorted(COLUMNS))
@pytest.mark.parametrize("way", ["out of band", 4, 5, "deepcopy"])
def test_round_trip(name: str, way: object) -> None:
    data = DataProto.from_dict({"x": COLUMNS[name]}, {"o": [[1], "a", None, {}, 2, (3,)]}, {"k": [1]})
    if way == "out of band":
        back = received(data)[0]
    else:
        back = copy.deepcopy(data) if way == "deepcopy" else pickle.loads(pickle.dumps(data, protocol=way))
    as_bytes = lambda tensor: tensor.resolve_conj().contiguous().clone().view(torch.uint8) if tensor.numel() else tensor  # noqa: E731
    assert back.batch["x"].dtype == COLUMNS[name].dtype and back.batch["x"].shape == COLUMNS[name].shape
    assert torch.equal(as_bytes(back.batch["x"]), as_bytes(COLUMNS[name]))
    assert back.non_tensor_batch["o"].tolist() == [[1], "a", None, {}, 2, (3,)] and back.meta_info == {"k": [1]}


def test_scalar_rows_empty_batches_gradients_and_jagged() -> None:
    empty = received(DataProto.from_dict({"x": torch.zeros(0, 3)}))[0]
    assert len(empty) == 0 and empty.batch["x"].shape == (0, 3)
    assert received(DataProto(meta_info={"a": 1}))[0].meta_info == {"a": 1}
    leaf = received(DataProto.from_dict({"x": torch.ones(2, requires_grad=True)}))[0].batch["x"]
    assert not leaf.requires_grad
    jagged = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    back = received(DataProto(batch=TensorDict({"x": jagged}, batch_size=[2])))[0].batch["x"]
    assert [row.tolist() for row in back.unbind()] == [[0, 1], [0, 1, 2]]


def test_tensor_bytes_travel_out_of_band_and_a_slice_costs_its_rows() -> None:
    data = DataProto.from_dict({"x": torch.rand(1000, 100)}, {"score": np.random.rand(1000)})
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data[:10], protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 2000 and sum(buffer.raw().nbytes for buffer in buffers) == 10 * 100 * 4 + 10 * 8
    assert len(pickle.dumps(data.batch["x"][:10], protocol=5)) > 400_000  # the control: torch alone sends the whole storage


def test_reading_copies_nothing() -> None:
    back, store = received(DataProto.from_dict({"x": torch.zeros(4)}))
    np.frombuffer(store, dtype=np.float32, count=4)[:] = 7
    assert back.batch["x"].tolist() == [7, 7, 7, 7]


WRITES = {
    "setitem": lambda t: t.__setitem__(0, 5.0),
    "slice setitem": lambda t: t.__setitem__(slice(1, 3), 5.0),
    "mask setitem": lambda t: t.__setitem__(t < 9, 5.0),
    "method": lambda t: t.add_(1),
    "augmented": lambda t: t.__imul__(2),
    "class function": lambda t: torch.Tensor.zero_(t),
    "out": lambda t: torch.add(t, 1, out=t),
    "functional": lambda t: F.relu(t, inplace=True),
    "dropout": lambda t: F.dropout(t, 0.5, training=True, inplace=True),
    "view": lambda t: t.view(-1).fill_(1),
    "slice": lambda t: t[1:].clamp_(0, 0),
    "row": lambda t: t[0].copy_(torch.ones(3)),
    "iteration": lambda t: [row.zero_() for row in t],
    "unbind": lambda t: t.unbind(0)[0].zero_(),
    "detach": lambda t: t.detach().zero_(),
    "data": lambda t: t.data.zero_(),
    "transpose": lambda t: t.T.zero_(),
    "chunk": lambda t: t.chunk(2)[0].zero_(),
    "same device": lambda t: t.to("cpu").zero_(),
    "contiguous": lambda t: t.contiguous().zero_(),
    "reshape": lambda t: t.reshape(2, -1).zero_(),
    "as_strided": lambda t: t.as_strided((2,), (1,)).zero_(),
    "masked_fill": lambda t: t.masked_fill_(t < 9, 0),
    "scatter": lambda t: t.scatter_(1, torch.zeros(4, 1, dtype=torch.long), 1.0),
    "index_put": lambda t: t.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "foreach": lambda t: torch._foreach_add_([t], 1.0),
    "copy": lambda t: t.copy_(torch.ones(4, 3)),
    "random": lambda t: t.uniform_(),
    "init": lambda t: torch.nn.init.zeros_(t),
    "numpy": lambda t: t.numpy().__setitem__(0, 1),
    "asarray": lambda t: np.asarray(t).__setitem__(0, 1),
    "inference": lambda t: torch.inference_mode()(lambda: t.zero_())(),
    "dlpack": lambda t: torch.from_dlpack(t).zero_(),
    "no_grad": lambda t: torch.no_grad()(lambda: t.zero_())(),
    "set": lambda t: t.set_(torch.ones(4, 3)),
}


@pytest.mark.parametrize("write", sorted(WRITES))
def test_every_write_to_received_memory_is_refused(write: str) -> None:
    back, store = received(DataProto.from_dict({"x": torch.full((4, 3), 0.5)}))
    before = bytes(store)
    with pytest.raises((RuntimeError, ValueError, BufferError), match="read-only"):
        WRITES[write](back.batch["x"])
    assert bytes(store) == before


def test_writes_through_batches_are_refused() -> None:
    back, store = received(DataProto.from_dict({"x": torch.zeros(4, 3)}, {"score": np.zeros(4)}))
    before = bytes(store)
    for write in (
        lambda: back[1:3].batch["x"].add_(1),
        lambda: back.chunk(2)[1].batch["x"].add_(1),
        lambda: back[0].batch["x"].add_(1),
        lambda: DataProto.concat([back]).batch["x"].add_(1),
        lambda: back.select(["x"]).batch["x"].add_(1),
        lambda: back.to("cpu").batch["x"].add_(1),
        lambda: back.batch.apply(lambda t: t.add_(1)),
        lambda: back.non_tensor_batch["score"].__setitem__(0, 1),
    ):
        with pytest.raises((RuntimeError, ValueError), match="read-only"):
            write()
    assert bytes(store) == before


def test_control_without_the_guard_torch_writes_shared_memory() -> None:
    store = np.zeros(4, dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(memoryview(store).toreadonly(), dtype=torch.float32).add_(1)
    assert store.tolist() == [1, 1, 1, 1]


def test_results_and_copies_are_plain_and_writable() -> None:
    back, store = received(DataProto.from_dict({"x": torch.ones(4, 3), "i": torch.arange(4)}, {"score": np.zeros(4)}))
    before = bytes(store)
    x = back.batch["x"]
    for result in (x.clone(), x + 1, x[torch.tensor([0])], torch.cat([x, x]), x.double(), torch.ones(4, 3).add_(x), x.sum()):
        assert type(result) is torch.Tensor
        result.zero_()
    assert type(back[[0, 1]].batch["x"]) is torch.Tensor and type(copy.deepcopy(back).batch["x"]) is torch.Tensor
    private = back.select().materialize()
    private.batch["x"].zero_()
    private.non_tensor_batch["score"][0] = 1
    assert bytes(store) == before and type(back.batch["x"]) is ReadOnlyTensor


def test_received_tensors_work_in_a_training_step() -> None:
    ids, weights = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[1.0, 0.0], [2.0, 1.0]])
    model = torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4))

    def gradient(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        log_probs = model(ids).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        (log_probs * weights * (ids > 0)).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    back = received(DataProto.from_dict({"ids": ids, "weights": weights}))[0].batch
    assert torch.equal(gradient(back["ids"], back["weights"]), gradient(ids, weights))


def test_a_received_batch_can_be_sent_on() -> None:
    data = DataProto.from_dict({"x": torch.rand(4, 3), "h": torch.rand(4).bfloat16()})
    once = received(data)[0]
    twice = received(once)[0]
    assert torch.equal(twice.batch["x"], data.batch["x"]) and torch.equal(twice.batch["h"], data.batch["h"])
    assert pickle.loads(pickle.dumps(once.batch["x"])).tolist() == data.batch["x"].tolist()
    assert repr(once.batch["x"]).startswith("read-only")
