"""Episodes ahead of training: how old a batch is, when weights are published, and that each scene trains once after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import CheckpointError
from rlhub.protocol import DataProto
from rlhub.trainer.ppo.embodied import scene_loader
from rlhub.trainer.ppo.episode_stream import EpisodeStream
from rlhub.trainer.ppo.stream_source import PromptLog

SCENES, LAST = 4, 6


class FakeRun:
    """The driver's groups and generator: notes what is asked for, in order."""

    def __init__(self, folder: Path, max_staleness: int, depth: int | None = None) -> None:
        config = PPOConfig()
        config.data.train_batch_size, config.env.num_scenes = SCENES, 10 * SCENES
        config.trainer.max_staleness = max_staleness
        config.trainer.pipeline_depth = max_staleness if depth is None else depth
        self.asked: list[tuple[Any, ...]] = []
        self.rewards: list[int] = []
        self.weights = self.generator = self
        self.stream = EpisodeStream(
            config=config,
            loader=scene_loader(config),
            generator=self,  # type: ignore[arg-type]
            groups=self,  # type: ignore[arg-type]
            log=PromptLog(folder / "prompts.jsonl"),
            last_step=LAST,
        )
        self.scenes = self.stream.loader.endless()

    def sync(self, version: int) -> None:
        self.asked.append(("publish", version))

    def submit(self, scenes: DataProto, version: int | None) -> Callable[[], DataProto]:
        first = int(scenes.batch["ordinal"][0])
        self.asked.append(("begin", first // SCENES, version))

        def wait() -> DataProto:
            self.asked.append(("over", first // SCENES))
            return DataProto.from_dict({"ordinal": scenes.batch["ordinal"]})

        return wait

    def rewarded(self, calls: DataProto) -> DataProto:
        self.rewards.append(int(calls.batch["ordinal"][0]) // SCENES)
        return calls

    def save(self, folder: Path) -> list[FileEntry]:
        return []

    def load(self, folder: Path) -> None:
        self.loaded = folder

    def metrics(self, batch: DataProto) -> dict[str, float]:
        return {"rollout/success": 1.0}

    def step(self, number: int) -> list[int]:
        """Trains a step; returns the ordinals of its scenes."""
        self.stream.publish()
        batch = self.stream.select(self.stream.sample(self.scenes, number))
        self.asked.append(("train", number))
        self.stream.trained(number)
        ordinals: list[int] = batch.batch["ordinal"].tolist()
        return ordinals

    def staleness(self, number: int) -> int:
        self.step(number)
        return int(self.stream.metrics["rollout/staleness"])


def test_the_next_batch_runs_while_this_one_trains(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 1)
    for number in (1, 2):
        run.step(number)
    first = [("publish", 0), ("begin", 0, 0), ("over", 0), ("begin", 1, 0), ("train", 1)]
    assert run.asked == [*first, ("over", 1), ("publish", 1), ("over", 1), ("begin", 2, 1), ("train", 2)]


@pytest.mark.parametrize(
    ("bound", "depth", "expected"),
    [
        (0, 0, [0, 0, 0, 0, 0, 0]),
        (1, 1, [0, 1, 1, 1, 1, 1]),
        (2, 2, [0, 1, 2, 1, 2, 1]),
        (3, 3, [0, 1, 2, 3, 1, 2]),
        (3, 1, [0, 1, 1, 1, 1, 1]),
        (2, 0, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_no_batch_is_older_than_the_bound(tmp_path: Path, bound: int, depth: int, expected: list[int]) -> None:
    run = FakeRun(tmp_path, bound, depth)
    assert [run.staleness(number) for number in range(1, LAST + 1)] == expected
    versions = {name: version for name, *_, version in run.asked if name == "begin"}
    assert bool(min(bound, depth)) == (versions["begin"] is not None), "only batches that may be old say how old they are"


def test_without_staleness_it_is_the_synchronous_schedule(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 0)
    run.step(1)
    run.step(2)
    assert run.asked == [
        *[("publish", 0), ("begin", 0, None), ("over", 0), ("train", 1)],
        *[("publish", 1), ("begin", 1, None), ("over", 1), ("train", 2)],
    ]


def test_no_batch_is_begun_after_the_last_step(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 1)
    for number in range(1, LAST + 1):
        run.step(number)
    assert [batch for name, batch, *_ in run.asked if name == "begin"] == list(range(LAST))


def test_validation_gets_the_newest_weights_when_publications_wait(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 3)
    run.step(1)
    run.stream.publish()
    assert [entry for entry in run.asked if entry[0] == "publish"] == [("publish", 0)]
    run.stream.refresh()
    run.stream.refresh()
    assert run.asked[-2:] == [("over", 1), ("publish", 1)]
    assert run.staleness(2) == 1, "the batch in work is as old as it was"


def test_a_batch_is_rewarded_when_it_trains_and_not_when_its_episodes_are_over(tmp_path: Path) -> None:
    """Otherwise a checkpoint would have its successes, and the run that resumes from it would have them twice."""
    run = FakeRun(tmp_path, 3)
    run.step(1)
    run.stream.refresh()
    assert run.asked[-2:] == [("over", 1), ("publish", 1)] and run.rewards == [0]
    run.step(2)
    assert run.rewards == [0, 1]
    run.stream.load_state(run.stream.state(), tmp_path)
    assert run.loaded == tmp_path


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("saved_at", [1, 2, 3])
def test_each_scene_trains_once_over_a_kill(tmp_path: Path, bound: int, saved_at: int) -> None:
    """The run is killed a step after its checkpoint, with a batch in work."""
    run = FakeRun(tmp_path, bound)
    trained = [run.step(number) for number in range(1, saved_at + 1)]
    state = json.loads(json.dumps(run.stream.state()))
    run.step(saved_at + 1)
    resumed = FakeRun(tmp_path, bound)
    resumed.stream.load_state(state, tmp_path)
    assert resumed.stream.policy_version == saved_at
    trained += [resumed.step(number) for number in range(saved_at + 1, LAST + 1)]
    assert sum(trained, []) == list(range(LAST * SCENES))
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [row["ordinal"] for row in rows] == list(range(LAST * SCENES))
    assert [row["step"] for row in rows] == [number for number in range(1, LAST + 1) for _ in range(SCENES)]
    assert {row["end"] for row in rows} == {"trained"}


def test_a_checkpoint_with_prompts_in_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds prompts in work"):
        FakeRun(tmp_path, 1).stream.load_state({"rollouts": {}, "loader": {}}, tmp_path)


def test_rows_name_the_version_that_acted(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 1)
    run.step(1)
    run.stream.publish()
    batch = run.stream.sample(run.scenes, 2).batch
    assert batch.meta_info["policy_version"] == 1 and run.stream.metrics["rollout/success"] == 1.0
    assert torch.equal(batch.batch["ordinal"], torch.arange(SCENES, 2 * SCENES))
