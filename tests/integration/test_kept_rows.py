"""Tokens of finished episodes in episode actors of their own processes, one of which is killed; ranks get them through Ray."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhub.protocol.layout import Layout
from rlhub.single_controller import ClassWithInitArgs, LaunchOptions, WorkerGroup, launch
from rlhub.trainer.ppo.dealing import Dealing
from rlhub.trainer.ppo.offline_source import ReplaySource, batch_file, record
from tests.support.kept_streams import BATCH, SAMPLES, Stream, rows_of, streaming, trained_rows
from tests.support.row_workers import RowWorker

STEPS = 4


@pytest.fixture(scope="module")
def ranks(ray_cluster: None) -> Iterator[WorkerGroup]:
    with launch({"actor": ClassWithInitArgs(RowWorker)}, LaunchOptions(backend="ray", ranks_per_node=2)) as run:
        yield run.groups["actor"]


def test_a_run_goes_on_without_a_killed_process_and_from_a_checkpoint(tmp_path: Path, ranks: WorkerGroup) -> None:
    """Each prompt is trained once, with the rows of a run in which the driver has all tokens, whatever was killed."""
    expected = sorted(row for rows in trained_rows(tmp_path / "driver", STEPS + 2) for row in rows)
    with streaming(tmp_path, ranks, backend="ray") as stream:
        trained = stream.step(1)
        stream.settle()
        kill(stream)
        trained += stream.step(2)
        stream.settle()
        assert stream.source.executor.metrics()["rollout/lost_groups"] + stream.source.metrics["rollout/lost_groups"] > 0
        assert stream.kept() == (BATCH * SAMPLES,) * 2
        assert set(ranks.stored_bytes()) == {0}
        stream.source.save(tmp_path)
        state = json.loads(json.dumps(stream.source.state()))
    assert "response_ids" not in (tmp_path / "rollouts.json").read_text()
    with streaming(tmp_path, ranks, backend="ray", num_actors=1) as stream:
        stream.source.load_state(state, tmp_path)
        trained += [*stream.step(3), *stream.step(4)]
    ended = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len({row["ordinal"] for row in ended}) == len(ended)
    ordinals = {row["ordinal"] for row in ended if row["end"] == "trained"}
    assert len(ordinals) == STEPS * BATCH
    assert sorted(trained) == [row for row in expected if row[0] in ordinals]


@pytest.mark.parametrize("replayed", [False, True], ids=["from episode actors", "from files"])
@pytest.mark.parametrize("dealt", [True, False], ids=["to where they train", "in equal parts"])
def test_rows_go_to_the_ranks_that_train_them_at_once(tmp_path: Path, ranks: WorkerGroup, dealt: bool, replayed: bool) -> None:
    """The step that deals them finds nothing to move; in the order of sampling it would."""
    expected = trained_rows(tmp_path / "driver", 1)[0]
    with streaming(tmp_path, ranks, backend="ray") as stream:
        dealing = stream.source.dealing
        assert dealing is not None
        stream.source.publish()
        if not dealt:
            stream.source.dealing = Dealing(config=dealing.config, num_ranks=1)
        batch = stream.source.sample(stream.prompts, 1).batch
        if replayed:
            record(batch, batch_file(tmp_path, 1))
            loader: Any = SimpleNamespace(state=dict)
            batch.drop()
            batch = ReplaySource(tmp_path, loader, ranks, stream.source.dealing).sample(iter(()), 1).batch
        assert rows_of(batch) == expected
        dealing(batch, 1)
        assert batch.layout.same(Layout.even(len(batch), len(ranks.workers))) == dealt
        if dealt:
            assert ranks.exchange(batch, "actor") is batch
        batch.drop()
    assert set(ranks.stored_bytes()) == {0}


def kill(stream: Stream) -> None:
    """Kills the process that keeps the most rows."""
    assert stream.holders is not None and stream.pool is not None
    sizes = stream.on_loop(stream.holders.sizes())
    home = max((home for home in sizes if home != "driver"), key=lambda home: sizes[home])
    member = stream.pool.at(home)
    assert sizes[home][0] > 0 and member is not None
    os.kill(member.actor.worker.pid, signal.SIGKILL)  # type: ignore[attr-defined]
