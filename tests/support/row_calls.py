"""The life of a batch held by reference on a group of RowWorkers, the same for every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhub.errors import DispatchError, ProtocolError, WorkerError
from rlhub.protocol import BatchRef, DataProto
from rlhub.single_controller import WorkerGroup
from tests.support.batch_refs import same_batch

WIDE = ["padded", "keep", "tokens"]


def prompts(num: int) -> DataProto:
    return DataProto.from_dict({"number": torch.arange(3, 3 + num)})


def sampled(group: WorkerGroup, key: str, num: int = 8) -> tuple[DataProto, BatchRef]:
    """The same samples in one piece and by reference."""
    whole = group.generate(prompts(num))
    ref = group.generate.retain(key=key)(prompts(num))
    assert isinstance(ref, BatchRef) and set(ref.columns) == set(WIDE)
    assert ref.meta_info == whole.meta_info and set(ref.small.batch.keys()) == {"length", "made_by"}
    return whole, ref


def check_life(group: WorkerGroup) -> None:
    """Sampled, put in order, exchanged, read and extended by reference: at each point what the batch in one piece has."""
    whole, ref = sampled(group, "life")
    assert same_batch(ref.fetch(WIDE), whole.select(WIDE, meta_info_keys=[]))
    assert group.fetched_bytes > 0
    order = np.random.default_rng(0).permutation(16)
    ref.reorder(order)
    whole.reorder(order)
    old, ref = ref, group.exchange(ref, "actor")
    assert same_batch(ref.fetch(WIDE, [3, 1, 15]), whole.select_idxs([3, 1, 15]).select(WIDE, meta_info_keys=[]))
    scores = DataProto.from_dict({"scores": torch.arange(16.0)}, {"text": [f"row {row}" for row in range(16)]})
    ref.union(scores), whole.union(scores)
    assert same_batch(group.read(ref.select(meta_info_keys=[])), whole.select(meta_info_keys=[]))
    assert same_batch(group.read(ref.select(["keep", "scores"], [], [])), whole.select(["keep", "scores"], [], []))
    added = group.add_up.retain("wide").submit(ref, factor=3).get()
    assert set(added.columns) == {"wide"} and set(added.small.batch.keys()) == {"sum", "rank"}
    ref.union(added)
    whole.union(group.add_up(whole, factor=3))
    assert same_batch(ref.fetch(["wide", "tokens"]), whole.select(["wide", "tokens"], [], []))
    assert torch.equal(ref.small.batch["sum"], whole.batch["sum"]) and torch.equal(ref.small.batch["rank"], whole.batch["rank"])
    assert group.exchange(ref, "actor") is ref
    with pytest.raises((WorkerError, ProtocolError), match="of batch 'life' no columns; it has life|are on other ranks"):
        group.read(old)
    with pytest.raises(WorkerError, match="no column is written twice"):
        group.add_up.retain("wide")(ref.select(["tokens", "padded"]))
    with pytest.raises(WorkerError, match="read-only"):
        group.spoil(ref)
    assert same_batch(ref.fetch(["padded"]), whole.select(["padded"], [], []))
    assert min(group.stored_bytes()) > 0
    group.drop(ref)
    assert set(group.stored_bytes()) == {0}
    with pytest.raises(WorkerError, match=r"of batch 'life\+\d+' no columns; it has no batch at all"):
        group.read(ref)


def check_joined(group: WorkerGroup) -> None:
    """Two generations, of which some rows are taken, become one batch on the ranks."""
    (first, one), (second, two) = sampled(group, "one"), sampled(group, "two", 5)
    for data in (first, second, one, two):
        data.meta_info.clear()
    whole = DataProto.concat([first.select_idxs([14, 3, 0]), second.select_idxs([9, 9])])
    ref = group.exchange(BatchRef.concat([one.select_idxs([14, 3, 0]), two.select_idxs([9, 9])]), "actor")
    assert same_batch(group.read(ref), whole)
    group.drop(ref)
    assert set(group.stored_bytes()) == {0}


def check_refusals(group: WorkerGroup) -> None:
    with pytest.raises(DispatchError, match="under the key of a BatchRef argument, and there is none"):
        group.generate.retain("padded")(prompts(2))
    with pytest.raises(WorkerError, match="no column 'nothing' to retain"):
        group.generate.retain("nothing", key="k")(prompts(2))
