"""Training on what another job collects: batches in the order of the files, weights for the collector, and going on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhub.agents.trajectory import Trajectory
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import DataError, WorkerError, WorkflowError
from rlhub.models.tokenizer import Vocabulary
from rlhub.protocol import BatchRef
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
from rlhub.rollout_service.trajectory_files import TrajectoryReader, TrajectoryWriter
from rlhub.single_controller import ClassWithInitArgs, LaunchOptions, WorkerGroup, launch
from rlhub.trainer.ppo.offline_source import OfflineSource
from rlhub.utils.timing import PhaseTimer
from tests.support.row_workers import RowWorker


def group(ordinal: int) -> Group:
    made = Trajectory(
        prompt_ids=[1, 2],
        response_ids=[ordinal, 4],
        response_mask=[1, 1],
        rollout_log_probs=[-0.1, -0.3],
        versions=[0, 0],
        metrics={"num_turns": 1.0},
    )
    return Group(item=PromptItem(prompt_ids=(1, 2), ordinal=ordinal, row={"ground_truth": "4"}), trajectories=[made])


def settings(folder: Path) -> PPOConfig:
    config = PPOConfig()
    config.data.train_batch_size = 2
    config.trainer.stale_policy = "correct"
    config.actor_rollout_ref.rollout.trajectories_folder = str(folder / "trajectories")
    config.actor_rollout_ref.rollout.weights_folder = str(folder / "weights")
    return config


def source(folder: Path, written: list[int], ranks: WorkerGroup | None = None) -> OfflineSource:
    config = settings(folder)
    loader: Any = SimpleNamespace(state=lambda: {"consumed": 0}, load_state=lambda state: None)
    return OfflineSource(
        config=config,
        loader=loader,
        reader=TrajectoryReader(str(folder / "trajectories")),
        vocabulary=Vocabulary(size=10, stop_token_ids=(2,), pad_id=0),
        write=lambda where, version: written.append(version),
        timers=PhaseTimer(),
        ranks=ranks,
    )


@pytest.fixture(scope="module")
def ranks() -> Iterator[WorkerGroup]:
    with launch({"actor": ClassWithInitArgs(RowWorker)}, LaunchOptions(backend="local")) as run:
        yield run.groups["actor"]


@pytest.mark.parametrize("by_reference", [False, True])
def test_batches_come_in_the_order_of_the_files_and_a_stopped_run_goes_on(
    tmp_path: Path, ranks: WorkerGroup, by_reference: bool
) -> None:
    readers = ranks if by_reference else None
    writer = TrajectoryWriter(str(tmp_path / "trajectories"))
    for start in (0, 3):
        writer.write([group(start + index) for index in range(3)])
    writer.end()
    written: list[int] = []
    first = source(tmp_path, written, readers)
    assert first_tokens(first, 1) == [0, 1]
    state = first.state()
    first.publish()
    lost = first.sample(iter(()), 2).batch  # with the process and its ranks
    if isinstance(lost, BatchRef):
        lost.drop()
    again = source(tmp_path, written, readers)
    again.load_state(state, tmp_path)
    assert first_tokens(again, 2) == [2, 3]
    assert first_tokens(again, 3) == [4, 5]
    assert written == [0, 1, 1, 2]
    with pytest.raises(WorkflowError, match="the job that collects has ended"):
        again.sample(iter(()), 4)


def first_tokens(source: OfflineSource, step: int) -> list[int]:
    """Takes a step, as the trainer does; returns what it trained on."""
    source.publish()
    source.publish()  # the weights are there: nothing is written
    samples = source.sample(iter(()), step)
    batch = source.select(samples)
    source.trained(step)
    if isinstance(batch, BatchRef):
        found = batch.fetch(["responses"]).batch["responses"]
        batch.drop()
        return [int(token) for token in found[:, 0]]
    return [int(token) for token in batch.batch["responses"][:, 0]]


def long_group(ordinal: int, length: int) -> Group:
    """Two samples of which one has rewards of tools; the tokens follow from the ordinal."""
    samples = [
        Trajectory(
            prompt_ids=[ordinal % 7 + 1] * (1 + sample),
            response_ids=[(ordinal + place) % 9 for place in range(length + sample)],
            response_mask=[1] * (length + sample),
            rollout_log_probs=[-0.1 * sample] * (length + sample),
            versions=[place % 2 for place in range(length + sample)],
            added_rewards=[0.5] * length if not sample else None,
        )
        for sample in range(2)
    ]
    return Group(item=PromptItem(prompt_ids=(1,), ordinal=ordinal, row={"ground_truth": str(ordinal)}), trajectories=samples)


def test_by_reference_rows_are_the_same_and_numbers_alone_are_read_here(tmp_path: Path, ranks: WorkerGroup) -> None:
    """What this process keeps and reads does not grow with the tokens; the control is the mode in which it has them all."""
    here: dict[tuple[bool, int], float] = {}
    for length in (10, 2000):
        folder = tmp_path / str(length)
        writer = TrajectoryWriter(str(folder / "trajectories"))
        for start in (0, 1):
            writer.write([long_group(2 * start + index, length) for index in range(2)])
        batches = []
        for group_of_ranks in (None, ranks):
            reads = source(folder, [], group_of_ranks)
            batch = reads.sample(iter(()), 1).batch
            by_reference = isinstance(batch, BatchRef)
            columns = sum(column.nbytes for column in batch.batch.values())
            here[by_reference, length] = reads.metrics["rollout/index_bytes"] + columns
            batches.append(batch.fetch_all() if isinstance(batch, BatchRef) else batch)
            if isinstance(batch, BatchRef):
                assert {"responses", "added_rewards"} <= batch.columns.keys()
                batch.drop()
        driver, fetched = batches
        assert set(driver.batch.keys()) == set(fetched.batch.keys())
        for name, column in driver.batch.items():
            inside = column if name != "policy_version" else column.clamp(min=0)  # -1 or 0 behind the response
            assert torch.equal(inside.double(), fetched.batch[name].double()), name
        assert driver.non_tensor_batch["ground_truth"].tolist() == fetched.non_tensor_batch["ground_truth"].tolist()
    assert ranks.stored_bytes() == [0]
    assert here[True, 2000] <= here[True, 10] * 10 and here[False, 2000] > here[True, 2000] + 100_000


@pytest.mark.parametrize("by_reference", [False, True])
def test_a_damaged_or_missing_file_of_rows_is_named(tmp_path: Path, ranks: WorkerGroup, by_reference: bool) -> None:
    TrajectoryWriter(str(tmp_path / "trajectories")).write([long_group(0, 50), long_group(1, 50)])
    path = tmp_path / "trajectories" / "collector-00000000.rows"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    for damage in (r"bytes \d+ to \d+ are not those that were", r".*name a folder that all"):
        with pytest.raises((DataError, WorkerError), match=r"collector-00000000\.rows: " + damage):
            source(tmp_path, [], ranks if by_reference else None).sample(iter(()), 1)
        path.unlink(missing_ok=True)
