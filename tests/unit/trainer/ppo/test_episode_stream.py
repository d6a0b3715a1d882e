"""Episodes ahead of training: how old a batch is, when weights are published, and that each scene trains once after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
import torch

from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import CheckpointError, WorkerDiedError
from rlhub.protocol import DataProto
from rlhub.trainer.ppo.embodied import scene_loader
from rlhub.trainer.ppo.episode_stream import EpisodeStream
from rlhub.trainer.ppo.stream_source import PromptLog
from rlhub.utils.timing import PhaseTimer

SCENES, LAST = 4, 6


class FakeRun:
    """The driver's groups and generator: notes what is asked for, in order.

    slow: episodes go on until the driver waits for them, as where training is faster than the simulators; else they are over at
    once, and `step` begins when the ranks stand still.
    """

    def __init__(self, folder: Path, max_staleness: int, depth: int | None = None, *, slow: bool = False) -> None:
        config = PPOConfig()
        config.data.train_batch_size, config.env.num_scenes = SCENES, 10 * SCENES
        config.trainer.max_staleness = max_staleness
        config.trainer.pipeline_depth = max_staleness if depth is None else depth
        self.asked: list[tuple[Any, ...]] = []
        self.rewards: list[int] = []
        self.weights = self.generator = self
        self.slow, self.over = slow, Semaphore(0)
        self.broken: Exception | None = None
        self.stream = EpisodeStream(
            config=config,
            loader=scene_loader(config),
            generator=self,  # type: ignore[arg-type]
            groups=self,  # type: ignore[arg-type]
            log=PromptLog(folder / "prompts.jsonl"),
            timers=PhaseTimer(),
            last_step=LAST,
        )
        self.scenes = self.stream.loader.endless()

    def sync(self, version: int) -> None:
        assert not self.stream._is_busy, "a rank takes weights between two batches"
        self.asked.append(("publish", version))

    def submit(self, scenes: DataProto, version: int | None) -> Callable[[], DataProto]:
        first = int(scenes.batch["ordinal"][0])
        self.asked.append(("begin", first // SCENES, version))

        def wait() -> DataProto:
            if self.slow:
                self.over.acquire()
            if self.broken is not None:
                raise self.broken
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

    def stand_still(self) -> None:
        """Waits until the ranks have no batch that they may run."""
        stream = self.stream
        with stream._changed:
            done = stream._changed.wait_for(
                lambda: stream._generating.done() or (not stream._is_busy and stream._is_too_old), timeout=60
            )
        assert done

    def step(self, number: int) -> list[int]:
        """Trains a step; returns the ordinals of its scenes."""
        with self.stream._changed:  # no batch is over, and none begins, before the driver waits
            self.over.release() if self.slow and number > 1 else None
            self.stream.publish()
        self.over.release() if self.slow and number == 1 else None
        batch = self.stream.select(self.stream.sample(self.scenes, number))
        if not self.slow:
            self.stand_still()
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
    first = [("publish", 0), ("begin", 0, 0), ("over", 0), ("begin", 1, 0), ("over", 1), ("train", 1)]
    assert run.asked == [*first, ("publish", 1), ("begin", 2, 1), ("over", 2), ("train", 2)]


@pytest.mark.parametrize(
    ("bound", "depth", "expected"),
    [
        (0, 0, [0, 0, 0, 0, 0, 0]),
        (1, 1, [0, 1, 1, 1, 1, 1]),
        (2, 2, [0, 1, 2, 2, 2, 2]),
        (3, 3, [0, 1, 2, 3, 3, 3]),
        (3, 1, [0, 1, 1, 1, 1, 1]),
        (2, 0, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_fast_simulators_are_ahead_by_the_bound_and_no_further(
    tmp_path: Path, bound: int, depth: int, expected: list[int]
) -> None:
    run, ahead = FakeRun(tmp_path, bound, depth), min(bound, depth)
    for number in range(1, LAST + 1):
        assert run.staleness(number) == expected[number - 1]
        begun = [batch for name, batch, *_ in run.asked if name == "begin"]
        assert len(begun) == min(number + ahead, LAST), "so many batches ahead, none after the last step"
    versions = {name: version for name, *_, version in run.asked if name == "begin"}
    assert bool(ahead) == (versions["begin"] is not None), "only batches that may be old say how old they are"


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_slow_simulators_have_the_newest_weights(tmp_path: Path, bound: int) -> None:
    """Training waits for each batch, so that nothing is gained by older ones."""
    run = FakeRun(tmp_path, bound, slow=True)
    assert [run.staleness(number) for number in range(1, LAST + 1)] == [0, 1, 1, 1, 1, 1]


def test_training_does_not_wait_for_a_batch_that_it_does_not_need(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 2, slow=True)
    run.over.release(1)
    run.step(1)  # batch 1 is over too, batch 2 goes on
    with run.stream._changed:
        assert run.stream._changed.wait_for(lambda: len(run.stream._ahead) == 2, timeout=60)
    run.stream.publish()
    assert run.stream.sample(run.scenes, 2).batch.batch["ordinal"][0] == SCENES
    assert [entry for entry in run.asked if entry[0] == "publish"] == [("publish", 0)]
    run.over.release(LAST)


def test_without_staleness_it_is_the_synchronous_schedule(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 0)
    run.step(1)
    run.step(2)
    assert run.asked == [
        *[("publish", 0), ("begin", 0, None), ("over", 0), ("train", 1)],
        *[("publish", 1), ("begin", 1, None), ("over", 1), ("train", 2)],
    ]


def test_validation_gets_the_newest_weights_and_the_ranks(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 3)
    run.step(1)
    run.stream.refresh()
    run.stream.refresh()
    assert run.asked[-1] == ("publish", 1)
    assert len(run.stream._ahead) == 3, "no further batch begins before the next publication"
    assert run.staleness(2) == 1, "the batches ahead are as old as they were"
    assert len(run.stream._ahead) == 3


def test_a_batch_is_rewarded_when_it_trains_and_not_when_its_episodes_are_over(tmp_path: Path) -> None:
    """Otherwise a checkpoint would have its successes, and the run that resumes from it would have them twice."""
    run = FakeRun(tmp_path, 3)
    run.step(1)
    run.stream.refresh()
    assert [entry for entry in run.asked if entry[0] == "over"] == [("over", number) for number in range(4)] and run.rewards == [
        0
    ]
    run.step(2)
    assert run.rewards == [0, 1]
    run.stream.load_state(run.stream.state(), tmp_path)
    assert run.loaded == tmp_path


def test_what_episodes_fail_with_is_raised_where_they_are_waited_for(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 2)
    run.step(1)
    run.broken = WorkerDiedError("process 7 died", role="rollout", rank=1)
    run.stream.publish()  # ranks may begin batch 4 now
    with pytest.raises(WorkerDiedError, match="process 7 died"):
        for number in (2, 3, 4):
            run.step(number)


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
@pytest.mark.parametrize("saved_at", [1, 2, 3])
def test_each_scene_trains_once_over_a_kill(tmp_path: Path, bound: int, saved_at: int) -> None:
    """The run is killed a step after its checkpoint, with batches in work and ahead."""
    run = FakeRun(tmp_path, bound)
    trained = [run.step(number) for number in range(1, saved_at + 1)]
    state = json.loads(json.dumps(run.stream.state()))
    assert run.stream.loader.state()["consumed"] - state["loader"]["consumed"] == SCENES * min(bound, LAST - saved_at)
    run.step(saved_at + 1)
    run.stream.close()
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
