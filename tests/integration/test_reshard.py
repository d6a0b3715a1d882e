"""Weights between real processes: FSDP2 on two ranks to rollout engines of the same ranks, of other processes, and by file."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlhub.utils.ports import free_port
from tests.integration import reshard_checks as checks
from tests.integration.fsdp_ranks import Ranks
from tests.support.dense_and_moe import save_dense_and_moe


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With sizes that two ranks do not divide."""
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save_dense_and_moe(tmp_path_factory.mktemp("models"), head_dim=6, **sizes)


@pytest.fixture(scope="module")
def trainers() -> Iterator[Ranks]:
    group = Ranks(2)
    yield group
    group.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Ranks]]:
    """Two processes without a process group of their own."""
    groups = [Ranks(1), Ranks(1)]
    yield groups
    for group in groups:
        group.close()


def together(*calls: Any) -> list[Any]:
    """Results of (group, function, arguments...) that run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(group.call, function, *arguments) for group, function, *arguments in calls]
        return [future.result() for future in futures]


@pytest.mark.parametrize(
    ("model", "dtype", "part_bytes"),
    [("dense", "float32", 1), ("dense", "float32", 1 << 20), ("dense", "bfloat16", 100), ("moe", "float32", 1000)],
)
def test_colocated_engines_hold_the_trainers_weights_after_every_step(
    trainers: Ranks, models: dict[str, str], model: str, dtype: str, part_bytes: int
) -> None:
    for seen in trainers.call(checks.colocated, models[model], dtype, part_bytes):
        assert seen["wrong"] == []
        assert (seen["version"], seen["healed"]) == (3, 9)
        assert seen["wire_bytes"] == [None] + [seen["bound"]] * 3, "each rank receives what it does not hold, once"
        name, refused = seen["lost"]
        assert name and refused, "a part that did not arrive is noticed, and the engine does not serve"
        assert seen["flipped"] == "model.norm.weight"


@pytest.mark.parametrize("receivers", [1, 2])
def test_separate_pools(trainers: Ranks, engines: list[Ranks], models: dict[str, str], tmp_path: Path, receivers: int) -> None:
    port, world, folder = free_port(), 2 + receivers, str(tmp_path)
    versions = [3, 4, 5]
    sent, *received = together(
        (trainers, checks.send, models["dense"], port, receivers, versions, folder),
        *(
            (group, checks.receive, models["dense"], port, 2 + rank, world, versions, folder)
            for rank, group in enumerate(engines[:receivers])
        ),
    )
    assert sent == [[("", "")] * 3] * 2
    for (seen,) in received:
        assert seen["errors"] == [("", "")] * 3
        assert (seen["wrong"], seen["version"], seen["refuses"]) == ([], 5, False)
        assert seen["wire_bytes"][0] is None and seen["wire_bytes"][1] == seen["wire_bytes"][2] > 0


def test_pools_at_different_versions_refuse(
    trainers: Ranks, engines: list[Ranks], models: dict[str, str], tmp_path: Path
) -> None:
    port, folder = free_port(), str(tmp_path)
    sent, ((seen),) = together(
        (trainers, checks.send, models["dense"], port, 1, [1, 2], folder),
        (engines[0], checks.receive, models["dense"], port, 2, 3, [1, 7], folder),
    )
    for errors in [*sent, seen["errors"]]:
        assert errors[0] == ("", "")
        assert errors[1][0] == "EngineError" and "(2, 1), (7, 1)" in errors[1][1]
    assert seen["version"] == 1


def test_a_killed_sender_is_named_and_half_an_update_never_serves(engines: list[Ranks], models: dict[str, str]) -> None:
    doomed, port = Ranks(2), free_port()
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(doomed.call, checks.send_and_die, models["dense"], port, 3)
        (seen,) = engines[1].call(checks.receive, models["dense"], port, 2, 3, [0, 1, 2], "")
        assert sending.exception() is not None
    doomed.close()
    assert seen["errors"][:2] == [("", "")] * 2
    kind, message = seen["errors"][2]
    assert kind == "WorkerDiedError" and "[weight sender rank 1" in message
    assert seen["refuses"] and seen["version"] == 1


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_separate_jobs_through_a_folder(
    trainers: Ranks, engines: list[Ranks], models: dict[str, str], tmp_path: Path, model: str
) -> None:
    folder, versions = str(tmp_path), [4, 5, 6]
    first = trainers.call(checks.write_versions, models[model], folder, versions[:2])
    for group, dtype in zip(engines, ("float32", "bfloat16"), strict=True):
        (seen,) = group.call(checks.read_versions, models[model], folder, versions[:2], dtype)
        assert (seen["wrong"], seen["version"], seen["serving"], seen["newest"]) == ([], 5, True, 5)
        assert seen["late"][0] == "DeadlineError" and "version 99" in seen["late"][1]
    one, other = first
    assert one[0] > 0 and other[0] > 0, "both ranks write their part"
    trainers.call(checks.write_versions, models[model], folder, versions[2:])
    assert sorted(path.name for path in tmp_path.glob("version-*")) == ["version-5", "version-6"]
    ((kind, message), refused) = engines[0].call(checks.read_damaged, models[model], folder, 6)[0]
    assert kind == "WeightMismatchError" and "checksum" in message
    assert not refused, "found before the engine was touched: it still has the version before"


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_a_replica_mirrors_the_folders_of_all_ranks(trainers: Ranks, models: dict[str, str], tmp_path: Path, model: str) -> None:
    found = trainers.call(checks.mirror_versions, models[model], str(tmp_path), [1, 2, 3, 4])
    assert found[0] == [(True, [])] * 4
    parts = [set((tmp_path / f"rank-{rank}" / "version-4").glob("rank-*.json")) for rank in range(2)]
    assert [[path.name for path in part] for part in parts] == [["rank-0.json"], ["rank-1.json"]]
