"""Ranks of one machine whose rollout engines keep one copy of their weights, on real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import shared_weights_checks as checks
from tests.integration.fsdp_ranks import Ranks
from tests.support.dense_and_moe import save_dense_and_moe


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With sizes that two and three ranks do not divide."""
    sizes = {"hidden_size": 28, "num_attention_heads": 2, "num_key_value_heads": 1}
    return save_dense_and_moe(tmp_path_factory.mktemp("models"), head_dim=14, **sizes)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    group = Ranks(request.param)
    yield group
    group.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    group = Ranks(3)
    yield group
    group.close()


def left_behind(group: Ranks) -> list[Path]:
    """Shared memory under names of these processes."""
    pids = {str(process.pid) for process in group.processes}
    return [path for path in Path("/dev/shm").glob("rlhub-*") if path.name.split("-")[1] in pids]


@pytest.mark.parametrize(("model", "dtype"), [("dense", "float32"), ("dense", "bfloat16"), ("moe", "float32")])
def test_one_copy_holds_the_trainers_weights_after_every_update(
    ranks: Ranks, models: dict[str, str], model: str, dtype: str
) -> None:
    seen = ranks.call(checks.updated, models[model], dtype)
    for one in seen:
        assert one["wrong"] == [] and one["version"] == 3
        if model == "dense":  # experts are separate weights, but FSDP2 shards them as one tensor
            assert one["wire_bytes"] == [None, 0, 0, 0], "FSDP2's shards are the parts that ranks answer for"
        assert (one["size"], one["seen"]) == (ranks.world, 123.0), "what one rank writes all read"
        assert one["greedy"] == seen[0]["greedy"]
    assert left_behind(ranks) == []


@pytest.mark.parametrize("index", [0, -1])
def test_a_flipped_element_is_caught_whoever_answers_for_it(ranks: Ranks, models: dict[str, str], index: int) -> None:
    for one in ranks.call(checks.flipped, models["dense"], index):
        assert one["name"] == "model.norm.weight"
        assert one["refuses"] and one["version"] == 0
        assert one["healed"]


def test_nobody_writes_before_every_engine_is_idle(ranks: Ranks, models: dict[str, str]) -> None:
    assert not any(ranks.call(checks.waits, models["dense"], False))
    assert ranks.call(checks.waits, models["dense"], True)[-1], "without the wait this test would have to fail"


def test_without_the_memory_every_rank_keeps_its_own_copy(ranks: Ranks, models: dict[str, str]) -> None:
    first, *others = ranks.call(checks.refused, models["dense"])
    for one in (first, *others):
        assert not one["shared"] and one["wrong"] == []
    assert first["seen"] == 123.0 and all(one["seen"] != 123.0 for one in others)
    assert left_behind(ranks) == []


def test_an_engine_that_leaves_the_shared_memory_is_named_on_every_rank(ranks: Ranks, models: dict[str, str]) -> None:
    for one in ranks.call(checks.moved_out, models["dense"]):
        assert one["name"] == one["first"]
        assert "share_weights=false" in one["message"]
        assert one["refuses"]


def test_a_rank_alone_on_its_machine_keeps_its_own_copy_beside_others_that_share(three: Ranks, models: dict[str, str]) -> None:
    seen = three.call(checks.alone_on_a_machine, models["dense"])
    assert [one["size"] for one in seen] == [2, 2, 1]
    assert all(one["wrong"] == [] for one in seen)


def test_a_killed_rank_leaves_no_memory_behind(models: dict[str, str]) -> None:
    doomed = Ranks(2)
    try:
        with pytest.raises(AssertionError, match=r"WorkerDiedError.*worker rank 1"):
            doomed.call(checks.die_while_sharing, models["dense"])
    finally:
        doomed.close()
    assert left_behind(doomed) == []
