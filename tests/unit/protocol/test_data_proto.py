"""DataProto against plain Python lists of rows, and every rule of its contract."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlhub.errors import ProtocolError
from rlhub.protocol import (
    DataProto,
    DataProtoItem,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)

TEXTS = ["a", {"b": [1]}, None, [1, 2], ("t", 1.5), "é\U0001f600", [3, 4]]


def make(rows: int = 5, offset: int = 0, meta: dict | None = None) -> DataProto:
    ids = torch.arange(rows) + offset
    return DataProto.from_dict(
        tensors={"ids": ids, "wide": torch.stack([ids, -ids], dim=1).float()},
        non_tensors={
            "text": [TEXTS[i % len(TEXTS)] for i in range(offset, offset + rows)],
            "score": np.arange(rows) + offset + 0.5,
        },
        meta_info=meta,
    )


def ids_of(data: DataProto) -> list[int]:
    """The rows' identities, after checking that all columns moved together."""
    ids = data.batch["ids"].tolist()
    assert data.batch["wide"].tolist() == [[float(i), float(-i)] for i in ids]
    assert data.non_tensor_batch["score"].tolist() == [i + 0.5 for i in ids]
    assert data.non_tensor_batch["text"].tolist() == [TEXTS[i % len(TEXTS)] for i in ids]
    return ids


def same(left: DataProto, right: DataProto) -> bool:
    """Exactly equal: columns, dtypes, order of names, meta."""
    if left.batch.batch_size != right.batch.batch_size or list(left.tensors()) != list(right.tensors()):
        return False
    if list(left.non_tensor_batch) != list(right.non_tensor_batch) or left.meta_info != right.meta_info:
        return False
    for key, tensor in left.tensors().items():
        if right.batch[key].dtype != tensor.dtype or not torch.equal(right.batch[key], tensor):
            return False
    pairs = [(array, right.non_tensor_batch[key]) for key, array in left.non_tensor_batch.items()]
    return all(a.dtype == b.dtype and a.shape == b.shape and repr(a.tolist()) == repr(b.tolist()) for a, b in pairs)


# -- construction and consistency ------------------------------------------------------------------------------------------


def test_construction_names_the_column_that_does_not_fit() -> None:
    with pytest.raises(ProtocolError, match="'short'"):
        DataProto.from_dict({"ids": torch.zeros(3), "short": torch.zeros(2)})
    with pytest.raises(ProtocolError, match="'text'.*2 rows.*3"):
        DataProto.from_dict({"ids": torch.zeros(3)}, {"text": ["a", "b"]})
    with pytest.raises(ProtocolError, match="'second'"):
        DataProto(non_tensor_batch={"first": np.zeros(2), "second": np.zeros(3)})
    with pytest.raises(ProtocolError, match="'text'.*list"):
        DataProto(non_tensor_batch={"text": ["a"]})
    with pytest.raises(ProtocolError, match="'nested'"):
        DataProto(batch=TensorDict({"nested": TensorDict({}, batch_size=[2])}, batch_size=[2]))
    with pytest.raises(ProtocolError, match="from_dict"):
        DataProto(batch={"ids": torch.zeros(3)})


def test_from_single_dict_sorts_by_type_and_refuses_others() -> None:
    data = DataProto.from_single_dict({"a": torch.zeros(2), "b": np.zeros(2)}, meta_info={"k": 1})
    assert list(data.tensors()) == ["a"] and list(data.non_tensor_batch) == ["b"] and data.meta_info == {"k": 1}
    with pytest.raises(ValueError, match="'c'.*list"):
        DataProto.from_single_dict({"c": [1, 2]})


def test_from_dict_leaves_the_callers_dictionaries_alone() -> None:
    tensors, arrays, meta = {"a": torch.zeros(2)}, {"b": [[1, 2], [3, 4]]}, {"k": 1}
    data = DataProto.from_dict(tensors, arrays, meta, auto_padding=True)
    assert arrays == {"b": [[1, 2], [3, 4]]} and meta == {"k": 1} and list(tensors) == ["a"]
    assert data.non_tensor_batch["b"].shape == (2,) and data.non_tensor_batch["b"][1] == [3, 4]
    data.pop(["a"])
    data.non_tensor_batch["c"] = np.zeros(2)
    assert list(tensors) == ["a"] and list(arrays) == ["b"]


def test_num_batch_dims() -> None:
    data = DataProto.from_dict({"a": torch.zeros(2, 3, 4), "b": torch.zeros(2, 3)}, num_batch_dims=2)
    assert len(data) == 2
    with pytest.raises(ProtocolError, match="'b'"):
        DataProto.from_dict({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}, num_batch_dims=2)
    with pytest.raises(ProtocolError, match="num_batch_dims"):
        DataProto.from_dict({"a": torch.zeros(2, 3)}, {"t": [1, 2]}, num_batch_dims=2)


def test_length() -> None:
    assert len(make(4)) == 4
    assert len(DataProto(non_tensor_batch={"a": np.zeros(3)})) == 3
    assert len(DataProto(meta_info={"a": 1})) == 0


# -- rows: everything against a list of row identities ---------------------------------------------------------------------


@given(st.integers(0, 9), st.integers(1, 12))
@settings(deadline=None, max_examples=30)
def test_chunk_split_and_concat(rows: int, parts: int) -> None:
    data = make(rows)
    chunks = data.chunk(parts)
    sizes = list(map(len, chunks))
    assert len(chunks) == parts and sum(sizes) == rows and max(sizes) - min(sizes) <= 1
    assert ids_of(DataProto.concat(chunks)) == list(range(rows))
    pieces = data.split(parts)
    assert all(len(piece) == parts for piece in pieces[:-1])
    assert [i for piece in pieces for i in ids_of(piece)] == list(range(rows))


@given(st.integers(1, 8), st.data())
@settings(deadline=None, max_examples=30)
def test_indexing_follows_lists(rows: int, data: st.DataObject) -> None:
    batch, expected = make(rows), list(range(rows))
    start, stop = data.draw(st.integers(-9, 9)), data.draw(st.integers(-9, 9))
    step = data.draw(st.integers(1, 3))
    assert ids_of(batch[start:stop:step]) == expected[start:stop:step]
    picks = data.draw(st.lists(st.integers(-rows, rows - 1), max_size=6))
    for form in (picks, np.array(picks, dtype=np.int64), torch.tensor(picks, dtype=torch.long)):
        assert ids_of(batch[form]) == [expected[i] for i in picks]
    mask = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    for form in (mask, np.array(mask), torch.tensor(mask)):
        assert ids_of(batch.select_idxs(form)) == [i for i in expected if mask[i]]


def test_items_and_wrong_indices() -> None:
    data = make(3, meta={"k": 1})
    item = data[-1]
    assert isinstance(item, DataProtoItem) and item.batch["ids"] == 2 and item.non_tensor_batch["score"] == 2.5
    assert item.meta_info == {"k": 1}
    with pytest.raises(IndexError):
        data[3]
    with pytest.raises(IndexError, match="3 rows"):
        data[[0, 3]]
    with pytest.raises(ProtocolError, match="mask"):
        data[np.array([True, False])]
    with pytest.raises(TypeError, match="str"):
        data["ids"]


def test_slice_is_a_view_and_select_idxs_a_copy() -> None:
    data = make(4)
    data[1:3].batch["wide"][0] = 9
    assert data.batch["wide"][1].tolist() == [9, 9]
    data.select_idxs([0]).batch["wide"][0] = 7
    assert data.batch["wide"][0].tolist() == [0, 0]


def test_parts_share_no_meta() -> None:
    data = make(4, meta={"metrics": {"a": [1]}, "k": 1})
    first, second = data.chunk(2)
    first.meta_info["k"] = 2
    first.meta_info["metrics"]["a"].append(2)
    assert second.meta_info == data.meta_info == {"metrics": {"a": [1]}, "k": 1}


def test_repeat_and_reorder() -> None:
    assert ids_of(make(2).repeat(2)) == [0, 0, 1, 1]
    assert ids_of(make(2).repeat(2, interleave=False)) == [0, 1, 0, 1]
    assert ids_of(make(3).sample_level_repeat([2, 0, 1])) == [0, 0, 2]
    assert ids_of(make(3).sample_level_repeat(torch.tensor([0, 1, 3]))) == [1, 2, 2, 2]
    with pytest.raises(ProtocolError, match="3 counts"):
        make(3).sample_level_repeat([1, 1])
    data = make(3)
    data.reorder(torch.tensor([2, 0, 1]))
    assert ids_of(data) == [2, 0, 1]


def test_unfold_column_chunks() -> None:
    data = DataProto.from_dict({"a": torch.arange(8).view(2, 4), "b": torch.tensor([10, 20])}, {"t": ["x", "y"]})
    cut = data.unfold_column_chunks(2, split_keys=["a"])
    assert cut.batch["a"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cut.batch["b"].tolist() == [10, 10, 20, 20] and cut.non_tensor_batch["t"].tolist() == ["x", "x", "y", "y"]
    with pytest.raises(ProtocolError, match="'a'"):
        data.unfold_column_chunks(3, split_keys=["a"])


def test_padding() -> None:
    data = make(2)
    data.padding(2)
    assert ids_of(data) == [0, 1, 1, 1]
    data.padding(1, "first")
    assert ids_of(data) == [0, 1, 1, 1, 0]
    with pytest.raises(ProtocolError, match="without rows"):
        make(0).padding(1)


@given(st.integers(0, 7), st.integers(1, 20))
@settings(deadline=None, max_examples=30)
def test_pad_to_divisor_wraps_round(rows: int, divisor: int) -> None:
    padded, pad = pad_dataproto_to_divisor(make(rows), divisor)
    assert len(padded) % divisor == 0 and 0 <= pad < divisor and len(padded) == rows + pad
    assert ids_of(padded) == [i % rows for i in range(rows + pad)]
    assert ids_of(unpad_dataproto(padded, pad)) == list(range(rows))


def test_fold_and_unfold() -> None:
    data = make(6, meta={"k": 1})
    folded = fold_batch_dim(data, 2)
    assert len(folded) == 2 and folded.batch["wide"].shape == (2, 3, 2) and folded.non_tensor_batch["text"].shape == (2, 3)
    assert same(unfold_batch_dim(folded), data)
    with pytest.raises(ProtocolError, match="6 rows"):
        fold_batch_dim(data, 4)


def test_collate_is_the_inverse_of_iteration() -> None:
    data = make(4, meta={"k": 1})
    assert same(collate_fn([data[i] for i in range(4)]), data)


def test_make_iterator() -> None:
    data = make(5, meta={"k": 1})
    batches = list(data.make_iterator(2, epochs=2))
    assert [ids_of(batch) for batch in batches] == [[0, 1], [2, 3], [4]] * 2
    assert all(batch.meta_info == {"k": 1} for batch in batches)
    shuffled = [ids_of(batch) for batch in data.make_iterator(2, 3, seed=1, dataloader_kwargs={"shuffle": True})]
    epochs = [sum(shuffled[i : i + 3], []) for i in (0, 3, 6)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs) and len(set(map(tuple, epochs))) > 1
    again = [ids_of(batch) for batch in data.make_iterator(2, 3, seed=1, dataloader_kwargs={"shuffle": True})]
    assert again == shuffled
    assert len(list(data.make_iterator(2, 1, dataloader_kwargs={"drop_last": True}))) == 2
    with pytest.raises(ProtocolError, match="num_workers"):
        data.make_iterator(2, 1, dataloader_kwargs={"num_workers": 2})


# -- columns ---------------------------------------------------------------------------------------------------------------


def test_select_and_pop() -> None:
    data = make(3, meta={"k": 1, "l": 2})
    picked = data.select(["ids"], ["text"], ["k"])
    assert (list(picked.tensors()), list(picked.non_tensor_batch), picked.meta_info) == (["ids"], ["text"], {"k": 1})
    assert same(data.select(), data)
    copied = data.select(deepcopy=True)
    copied.batch["ids"][0] = 9
    assert ids_of(data) == [0, 1, 2]
    taken = data.pop(["ids"], meta_info_keys=["l"])
    assert list(taken.tensors()) == ["ids"] and taken.meta_info == {"l": 2} and not taken.non_tensor_batch
    assert list(data.tensors()) == ["wide"] and data.meta_info == {"k": 1} and len(data.non_tensor_batch) == 2
    with pytest.raises(ProtocolError, match="'ids'.*wide"):
        data.pop(["ids"])
    with pytest.raises(ProtocolError, match="'nope'"):
        data.select(non_tensor_batch_keys=["nope"])


def test_failed_pop_removes_nothing() -> None:
    data = make(2)
    with pytest.raises(ProtocolError):
        data.pop(["ids"], ["nope"])
    assert ids_of(data) == [0, 1]


def test_rename() -> None:
    data = make(2)
    assert data.rename("ids", "numbers") is data and sorted(data.tensors()) == ["numbers", "wide"]
    data.rename(["numbers", "wide"], ["wide", "numbers"])
    assert data.batch["wide"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="2 old names"):
        data.rename(["wide", "numbers"], ["a"])
    with pytest.raises(ProtocolError, match="one name"):
        data.rename("wide", "numbers")


def test_union() -> None:
    data = make(2, meta={"k": 1})
    more = DataProto.from_dict({"ids": torch.arange(2), "new": torch.ones(2)}, {"tag": ["x", "y"]}, {"k": 1, "l": 2})
    batch = data.batch
    assert data.union(more) is data and data.batch is batch
    assert data.batch["new"].tolist() == [1, 1] and data.meta_info == {"k": 1, "l": 2} and ids_of(data) == [0, 1]
    with pytest.raises(ProtocolError, match="'ids'"):
        data.union(DataProto.from_dict({"ids": torch.tensor([0, 2])}))
    with pytest.raises(ProtocolError, match="'tag'"):
        data.union(DataProto.from_dict(non_tensors={"tag": ["x", "z"]}))
    with pytest.raises(ProtocolError, match="'l'"):
        data.union(DataProto(meta_info={"l": 3}))
    with pytest.raises(ProtocolError, match="2 and 3 rows"):
        data.union(make(3))


def test_union_with_a_side_without_tensors_and_with_nan() -> None:
    arrays = DataProto.from_dict(
        non_tensors={"score": np.array([np.nan, 1.0]), "obj": [[float("nan")], {"a": np.array([np.nan])}]}
    )
    tensors = DataProto.from_dict({"ids": torch.arange(2)})
    assert list(arrays.select().union(tensors).tensors()) == ["ids"]
    assert list(tensors.select().union(arrays).non_tensor_batch) == ["score", "obj"]
    arrays.union(arrays.select(deepcopy=True))
    with pytest.raises(ProtocolError, match="'ids'"):
        tensors.union(DataProto.from_dict({"ids": torch.arange(2).float()}))


def test_concat_rules() -> None:
    with pytest.raises(ValueError, match="empty list"):
        DataProto.concat([])
    parts = [make(2, meta={"metrics": {"a": 1, "b": 2}, "k": 1}), make(1, 2, {"metrics": {"a": 3, "c": [4, 5]}}), make(0)]
    joined = DataProto.concat(parts)
    assert ids_of(joined) == [0, 1, 2]
    assert joined.meta_info == {"k": 1, "metrics": {"a": [1, 3], "b": [2], "c": [4, 5]}}
    assert DataProto.concat([make(1, meta={"metrics": [{"a": 1}, {"a": 2}]})]).meta_info["metrics"] == {"a": [1, 2]}
    with pytest.raises(ProtocolError, match="'k'"):
        DataProto.concat([make(1, meta={"k": 1}), make(1, meta={"k": 2})])
    with pytest.raises(ProtocolError, match="'wide'"):
        DataProto.concat([make(1), make(1).select(["ids"])])
    with pytest.raises(ProtocolError, match="'ids'.*shape"):
        DataProto.concat([DataProto.from_dict({"ids": torch.zeros(1, 2)}), DataProto.from_dict({"ids": torch.zeros(1, 3)})])
    with pytest.raises(ProtocolError, match="'ids'.*dtype"):
        DataProto.concat([DataProto.from_dict({"ids": torch.zeros(1)}), DataProto.from_dict({"ids": torch.zeros(1).long()})])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.bool, torch.int64, torch.uint8])
def test_concat_of_every_dtype_and_layout(dtype: torch.dtype) -> None:
    parts = [torch.tensor([[0, 1], [1, 0]]).to(dtype), torch.tensor([[1, 1, 0]]).to(dtype).T[:2].expand(2, 2)]
    joined = DataProto.concat([DataProto.from_dict({"x": part}) for part in parts])
    assert torch.equal(joined.batch["x"], torch.cat(parts)) and joined.batch["x"].dtype == dtype


def test_concat_keeps_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    joined = DataProto.concat([DataProto.from_dict({"x": weight * 2}), DataProto.from_dict({"x": torch.zeros(1)})])
    joined.batch["x"].sum().backward()
    assert weight.grad.tolist() == [2, 2]


# -- exchange with TensorDict, files ---------------------------------------------------------------------------------------


def everything() -> DataProto:
    arrays = {
        "objects": [1, "x", None, {"a": [1.5, float("inf")]}],
        "vectors": [np.arange(2), np.arange(2), np.arange(2), np.arange(2)],
        "grid": np.arange(8, dtype=np.int32).reshape(4, 2),
        "flags": np.array([True, False, True, True]),
        "words": np.array(["a", "bcd", "", "é"]),
    }
    return DataProto.from_dict({"x": torch.rand(4, 2), "h": torch.rand(4).bfloat16()}, arrays, {"k": {"l": (1, 2)}, "none": None})


def test_tensordict_round_trip_is_exact() -> None:
    data = everything()
    assert same(DataProto.from_tensordict(data.to_tensordict()), data)
    td = TensorDict({"x": torch.zeros(2), "s": NonTensorStack("a", "b"), "m": NonTensorData(3, batch_size=[2])}, batch_size=[2])
    data = DataProto.from_tensordict(td, {"n": 4})
    assert data.non_tensor_batch["s"].tolist() == ["a", "b"] and data.meta_info == {"m": 3, "n": 4}
    with pytest.raises(ProtocolError, match="'m'"):
        DataProto.from_tensordict(td, {"m": 4})
    with pytest.raises(ProtocolError, match="'x'"):
        DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"x": 1}).to_tensordict()
    assert same(DataProto.from_tensordict(make(0).to_tensordict()), make(0)) is False  # an empty stack has no dtype: objects
    assert len(DataProto.from_tensordict(make(0).to_tensordict())) == 0


@pytest.mark.parametrize(
    "data", [everything(), make(0), DataProto(meta_info={"a": 1}), DataProto.from_dict(non_tensors={"t": ["\ud800"]})]
)
def test_files_round_trip_without_pickle(data: DataProto, tmp_path) -> None:
    data.save_to_disk(tmp_path / "batch")
    assert same(DataProto.load_from_disk(tmp_path / "batch"), data)
    assert b"pickle" not in (tmp_path / "batch").read_bytes() and not (tmp_path / "batch").read_bytes().startswith(b"\x80")


def test_objects_in_files_keep_their_types(tmp_path) -> None:
    values = [(1, 2), {1: "a"}, {"$type": "x"}, b"\x00\xff", np.float32(1.5), np.array([[1, 2]], dtype=np.int8), torch.arange(2)]
    DataProto.from_dict(non_tensors={"v": values}).save_to_disk(tmp_path / "batch")
    loaded = DataProto.load_from_disk(tmp_path / "batch").non_tensor_batch["v"].tolist()
    assert loaded[:4] == values[:4] and loaded[4] == 1.5 and type(loaded[4]) is np.float32
    assert loaded[5].dtype == np.int8 and loaded[5].tolist() == [[1, 2]] and torch.equal(loaded[6], values[6])


def test_files_refuse_what_would_need_code(tmp_path) -> None:
    with pytest.raises(ProtocolError, match=r"column 'v'\[0\].*object"):
        DataProto.from_dict(non_tensors={"v": [object()]}).save_to_disk(tmp_path / "batch")
    assert not (tmp_path / "batch").exists()


def test_info_and_device() -> None:
    data = make(2, meta={"k": 1})
    assert "wide: (2, 2) torch.float32" in data.get_data_info() and json.dumps(data.get_data_info())
    assert data.to("meta") is data and data.batch["ids"].device.type == "meta"


def test_print_size_logs(caplog) -> None:
    with caplog.at_level("INFO"):
        make(2).print_size("step 1")
    assert "step 1: tensors" in caplog.text


@pytest.mark.parametrize("arrays", [{}, {"text": np.array(["a", "b", "c"], dtype=object)}])
def test_batch_without_tensors_is_an_empty_tensordict_of_as_many_rows(arrays: dict[str, np.ndarray]) -> None:
    rows = 3 if arrays else 0
    data = DataProto(non_tensor_batch=dict(arrays), meta_info={"a": 1})
    for same_rows in (data, data[:], data.select_idxs(list(range(rows))), DataProto.from_tensordict(data.to_tensordict())):
        assert list(same_rows.batch.batch_size) == [rows] and not same_rows.tensors() and len(same_rows) == rows
    data.batch["x"] = torch.zeros(rows, 2)
    assert data.batch["x"].shape == (rows, 2) and data[: rows - 1 if rows else 0].batch["x"].shape[0] == max(rows - 1, 0)


def test_rows_of_arrays_that_were_added_later_count() -> None:
    data = DataProto()
    data.non_tensor_batch["text"] = np.array(["a", "b"], dtype=object)
    assert len(data) == 2 and len(data.union(DataProto.from_dict({"x": torch.zeros(2)}))) == 2
