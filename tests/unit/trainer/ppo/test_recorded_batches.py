"""Batches that the ranks which have their rows write to files, and that ranks read again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhub.config.sections.ppo import PPOConfig
from rlhub.protocol import BatchRef, DataProto
from rlhub.single_controller import ClassWithInitArgs, LaunchOptions, WorkerGroup, launch
from rlhub.trainer.ppo.dealing import Dealing
from rlhub.trainer.ppo.offline_source import Recorded, ReplaySource, batch_file, num_recorded, record
from tests.support.kept_streams import rows_of, streaming
from tests.support.row_workers import RowWorker


@pytest.fixture(scope="module")
def ranks() -> Iterator[WorkerGroup]:
    with launch({"actor": ClassWithInitArgs(RowWorker)}, LaunchOptions(backend="local")) as run:
        yield run.groups["actor"]


@pytest.mark.parametrize("read_by_ranks", [True, False], ids=["ranks", "driver"])
@pytest.mark.parametrize("written_by_ranks", [True, False], ids=["from ranks", "from the driver"])
def test_a_recorded_batch_is_read_again(tmp_path: Path, ranks: WorkerGroup, written_by_ranks: bool, read_by_ranks: bool) -> None:
    """Its rows lie on the ranks in another order than in the batch."""
    with streaming(tmp_path, ranks if written_by_ranks else None) as stream:
        stream.source.publish()
        batch = stream.source.sample(stream.prompts, 1).batch
        batch.reorder(torch.arange(len(batch)).flip(0))
        expected = rows_of(batch)
        record(batch, batch_file(tmp_path, 1))
        if isinstance(batch, BatchRef):
            batch.drop()
    loader: Any = SimpleNamespace(state=dict)
    dealing = Dealing(config=PPOConfig(), num_ranks=1)
    replayed = ReplaySource(tmp_path, loader, ranks if read_by_ranks else None, dealing).sample(iter(()), 1).batch
    assert isinstance(replayed, BatchRef) == (written_by_ranks and read_by_ranks)
    assert rows_of(replayed) == expected
    assert replayed.meta_info["policy_version"] == 0
    assert num_recorded(tmp_path) == 1
    if isinstance(replayed, BatchRef):
        replayed.drop()
        names = {str(name) for name in DataProto.load_from_disk(batch_file(tmp_path, 1)).batch.keys()}
        assert not names & {"prompts", "responses", "input_ids", "rollout_log_probs", "response_mask"}
    assert rows_of(Recorded.read(batch_file(tmp_path, 1)).whole()) == expected
