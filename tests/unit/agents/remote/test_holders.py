"""Tokens of finished episodes that stay in the processes that ran them: trained once, lost and made again, saved and resumed."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhub.agents.remote.holders import lost_holder
from rlhub.agents.remote.trajectory_store import TrajectoryStore
from rlhub.agents.trajectory import Trajectory, TrajectoryRef
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow
from rlhub.algorithms.estimation import token_rewards
from rlhub.algorithms.statistics import HERE
from rlhub.config.sections.algorithm import AlgorithmConfig
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.rewards import RewardResult
from rlhub.rollout_service.executor.episode_groups import Group
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.single_controller import ClassWithInitArgs, LaunchOptions, WorkerGroup, launch
from rlhub.trainer.ppo.scoring import Scorer
from rlhub.utils.timing import PhaseTimer
from tests.support.episodes import executing, parts, prompts, trajectory
from tests.support.kept_streams import BATCH, BRANCHES, FAILING, SAMPLES, TOOLS, Stream, streaming, trained_rows
from tests.support.row_workers import RowWorker

STEPS = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[WorkerGroup]:
    with launch({"actor": ClassWithInitArgs(RowWorker)}, LaunchOptions(backend="local")) as run:
        yield run.groups["actor"]


@pytest.mark.parametrize("num_actors", [0, 2], ids=["in the driver", "in actors"])
def test_ranks_get_what_the_driver_would_have(tmp_path: Path, ranks: WorkerGroup, num_actors: int) -> None:
    """And after each step only rows of finished groups that are not trained are left."""
    expected = trained_rows(tmp_path / "driver", STEPS)
    with streaming(tmp_path, ranks, num_actors=num_actors) as stream:
        for step, rows in enumerate(expected, 1):
            assert stream.step(step) == rows
            assert stream.kept() == (BATCH * SAMPLES,) * 2
            assert stream.holders is not None and stream.holders.num_dropped == step * BATCH * SAMPLES
            assert stream.source.metrics["rollout/dropped_rows"] == (step - 1) * BATCH * SAMPLES
            assert stream.source.metrics["rollout/kept_bytes"] > 0
    assert ranks.stored_bytes() == [0]


@pytest.mark.parametrize("num_actors", [0, 2], ids=["in the driver", "in actors"])
def test_episodes_of_several_rows_are_the_same_by_reference(tmp_path: Path, ranks: WorkerGroup, num_actors: int) -> None:
    """Also after a process is lost and after a resume, and no row of an episode is left behind."""
    expected = trained_rows(tmp_path / "driver", STEPS, name=BRANCHES)
    assert any(len(rows) > BATCH * SAMPLES for rows in expected)
    with streaming(tmp_path, ranks, num_actors=num_actors, name=BRANCHES) as stream:
        assert stream.step(1) == expected[0]
        if num_actors:
            stream.settle()
            lose(stream)
        assert stream.step(2) == expected[1]
        kept, untrained = stream.kept()
        assert kept == untrained
        stream.source.save(tmp_path)
        state = json.loads(json.dumps(stream.source.state()))
    for number, by_reference in enumerate((ranks, None)):
        folder = tmp_path / f"resumed {number}"
        shutil.copytree(tmp_path / "rollouts", folder / "rollouts")
        shutil.copy(tmp_path / "rollouts.json", folder)
        with streaming(folder, by_reference, num_actors=num_actors, name=BRANCHES) as stream:
            stream.source.load_state(state, folder)
            assert [stream.step(step) for step in (3, 4)] == expected[2:]


@pytest.mark.parametrize("num_actors", [0, 2], ids=["in the driver", "in actors"])
def test_groups_that_lost_samples_are_the_same_by_reference(tmp_path: Path, ranks: WorkerGroup, num_actors: int) -> None:
    """Also after a process is lost and after a resume; what has failed for good is never tried again."""
    limits = {"group_size": 4, "episode_retries": 1, "min_samples": 2, "max_failed_batches": 99}
    expected = trained_rows(tmp_path / "driver", STEPS, name=FAILING, **limits)
    with streaming(tmp_path, ranks, num_actors=num_actors, name=FAILING, **limits) as stream:
        assert stream.step(1) == expected[0]
        if num_actors:
            stream.settle()
            lose(stream)
        assert stream.step(2) == expected[1]
        kept, untrained = stream.kept()
        assert kept == untrained
        assert any(group.failed for group in stream.source.executor.delivery.untrained())
        stream.source.save(tmp_path)
        state = json.loads(json.dumps(stream.source.state()))
    for number, by_reference in enumerate((ranks, None)):
        folder = tmp_path / f"resumed {number}"
        shutil.copytree(tmp_path / "rollouts", folder / "rollouts")
        shutil.copy(tmp_path / "rollouts.json", folder)
        with streaming(folder, by_reference, num_actors=num_actors, name=FAILING, **limits) as stream:
            stream.source.load_state(state, folder)
            assert [stream.step(step) for step in (3, 4)] == expected[2:]


def test_columns_of_episodes_are_the_same_by_reference(tmp_path: Path, ranks: WorkerGroup) -> None:
    found = []
    for number, by_reference in enumerate((None, ranks)):
        (tmp_path / f"{number}").mkdir()
        with streaming(tmp_path / f"{number}", by_reference, name=BRANCHES) as stream:
            stream.settle()
            stream.source.publish()
            batch = stream.source.sample(stream.prompts, 1).batch
            rows = batch.fetch_all() if isinstance(batch, BatchRef) else batch
            names = ("uid", "episode_id", "ordinal", "scores", "valid", "response_length")
            found.append({name: rows.batch[name].tolist() for name in names})
            found[-1]["rewards"] = rows.batch["given_rewards"].sum(1).tolist()
            assert stream.source.metrics["episode/branches"] == len(rows) / (BATCH * SAMPLES)
            if isinstance(batch, BatchRef):
                batch.drop()
    assert found[0] == found[1] and found[0]["rewards"] == found[0]["scores"]
    assert sorted(set(found[0]["episode_id"])) == list(range(BATCH * SAMPLES))
    compared = set(zip(found[0]["uid"], found[0]["ordinal"], [score > 0 for score in found[0]["scores"]], strict=True))
    assert len(compared) == len(set(found[0]["uid"])), "one group a prompt and name"


def test_rewards_of_tools_are_the_same_by_reference(tmp_path: Path, ranks: WorkerGroup) -> None:
    """Their tokens stay where they are: what is here is a number a row, and the ranks add the rewards to the score."""
    found = []
    for number, by_reference in enumerate((None, ranks)):
        (tmp_path / f"{number}").mkdir()
        with streaming(tmp_path / f"{number}", by_reference, name=TOOLS) as stream:
            stream.settle()
            stream.source.publish()
            batch = stream.source.sample(stream.prompts, 1).batch
            assert isinstance(batch, DataProto) or {"added_rewards"} <= batch.columns.keys()
            Scorer(reward=Graded(), timers=PhaseTimer()).score_rows(batch)
            columns = batch.fetch_all().batch if isinstance(batch, BatchRef) else batch.batch
            rewards, _ = token_rewards(dict(columns.items()), columns["response_mask"], HERE, AlgorithmConfig(), 0.0)
            found.append((rewards.tolist(), columns["scores"].tolist(), columns["tool_rewards"].tolist()))
            if isinstance(batch, BatchRef):
                batch.drop()
    assert found[0] == found[1] and max(found[0][2]) > 1.0
    for row, (rewards, score, tools) in enumerate(zip(*found[0], strict=True)):
        assert sum(rewards) == pytest.approx(score) == pytest.approx(row + tools)


class Graded:
    """A reward that reads no column of tokens: each row's number."""

    def __call__(self, batch: DataProto) -> RewardResult:
        raise AssertionError("it is started")

    def start(self, batch: Batch) -> Callable[[], RewardResult]:
        scores = torch.arange(float(len(batch)))
        return lambda: RewardResult(scores=scores, valid=torch.ones(len(batch), dtype=torch.bool), extra={}, metrics={})

    def close(self) -> None: ...


def test_what_comes_to_the_driver_does_not_grow_with_an_episode() -> None:
    """The control is the episode itself."""
    sizes = []
    for length in (10, 10_000):
        made = Trajectory(
            prompt_ids=[5] * length,
            response_ids=[7] * length,
            response_mask=[1] * length,
            rollout_log_probs=[-0.5] * length,
            versions=[0] * (length // 2) + [1] * (length // 2),
            metrics={"turns": 1.0},
        )
        sizes.append([len(pickle.dumps(one)) for one in (TrajectoryStore("").keep("17-3/42", made), made)])
    (few, short), (many, long) = sizes
    assert many <= few + 8 and many < 512 and long > short + 100_000


def test_lost_rows_are_generated_again_once(tmp_path: Path, ranks: WorkerGroup) -> None:
    expected = trained_rows(tmp_path / "driver", STEPS)
    with streaming(tmp_path, ranks) as stream:
        assert stream.step(1) == expected[0]
        stream.settle()
        lose(stream)
        assert stream.step(2) == expected[1]
        assert stream.source.metrics["rollout/lost_groups"] > 0
        assert stream.step(3) == expected[2]
        assert stream.kept() == (BATCH * SAMPLES,) * 2
        assert stream.source.executor.ledger.counts["trained"] == 3 * BATCH
    ends = [json.loads(line)["ordinal"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert sorted(ends) == list(range(3 * BATCH))


def test_rows_that_are_lost_on_their_way_to_the_ranks_are_generated_again(
    tmp_path: Path, ranks: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies between the choice of the groups and their transfer."""
    expected = trained_rows(tmp_path / "driver", 2, max_staleness=0)
    with streaming(tmp_path, ranks, max_staleness=0) as stream:
        collect, calls = ranks.collect, []

        def dies(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 1:
                assert stream.pool is not None
                stream.pool.members[0].actor.kill()
            return collect(*arguments)

        monkeypatch.setattr(ranks, "collect", dies)
        assert [stream.step(step) for step in (1, 2)] == expected
        assert len(calls) >= 3


def test_samples_that_are_lost_while_they_are_scored_are_generated_again() -> None:
    """Only these, and the group is scored once more.  The control is another error, which ends the run."""
    stores = {home: TrajectoryStore(home) for home in ("first", "second")}
    begun, scored = list[str](), list[list[str]]()

    class Kept(RolloutWorkflow):
        async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> TrajectoryRef:
            home = "second" if data.sample or begun.count(data.session) else "first"
            begun.append(data.session)
            return stores[home].keep(f"{data.session}/{len(begun)}", trajectory(0))

    async def score(group: Group) -> None:
        homes = [sample.home for sample in group.trajectories if isinstance(sample, TrajectoryRef)]
        scored.append(homes)
        if "first" in homes and group.ordinal == 0:
            raise lost_holder("first")
        if "first" in homes and group.ordinal == 1:
            raise ValueError("a broken reward")

    with executing(Kept(parts()), staleness=StalenessManager(1, 0), group_size=2, on_group=score) as executor:
        executor.start(prompts())
        (group,) = executor.next_groups(1, 60)
        assert group.ordinal == 0 and [sample.home for sample in group.trajectories] == ["second", "second"]  # type: ignore[union-attr]
        assert begun == ["0-0", "0-1", "0-0"] and scored == [["first", "second"], ["second", "second"]]
        executor.trained(1)
        executor.set_version(1)
        with pytest.raises(ValueError, match="a broken reward"):
            executor.next_groups(1, 60)


def lose(stream: Stream) -> None:
    """Ends one of the processes that keep rows."""
    assert stream.pool is not None
    member = stream.pool.members[0]
    stream.source.executor.runner.ask(stream.pool.lost, member, "the test ends it").result(30)


@pytest.mark.parametrize("by_reference", [True, False], ids=["by reference", "into the driver"])
@pytest.mark.parametrize("num_actors", [0, 2], ids=["in the driver", "in actors"])
def test_a_run_goes_on_from_rows_that_their_processes_saved(
    tmp_path: Path, ranks: WorkerGroup, num_actors: int, by_reference: bool
) -> None:
    expected = trained_rows(tmp_path / "driver", STEPS)
    with streaming(tmp_path, ranks, num_actors=num_actors) as stream:
        assert [stream.step(step) for step in (1, 2)] == expected[:2]
        stream.settle()
        entries = stream.source.save(tmp_path)
        state = json.loads(json.dumps(stream.source.state()))
        assert stream.kept() == (BATCH * SAMPLES,) * 2
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("rollouts/*"))
    assert files == [f"rollouts/{number}.safetensors" for number in range(max(num_actors, 1))]
    assert {Path(entry.path).relative_to(tmp_path).as_posix() for entry in entries} == {"rollouts.json", *files}
    assert "response_ids" not in (tmp_path / "rollouts.json").read_text()
    with streaming(tmp_path, ranks if by_reference else None, num_actors=1) as stream:
        stream.source.load_state(state, tmp_path)
        assert [stream.step(step) for step in (3, 4)] == expected[2:]
        assert not by_reference or stream.kept() == (BATCH * SAMPLES,) * 2


def test_a_checkpoint_of_the_driver_goes_on_by_reference(tmp_path: Path, ranks: WorkerGroup) -> None:
    expected = trained_rows(tmp_path / "driver", STEPS)
    with streaming(tmp_path, None) as stream:
        assert [stream.step(step) for step in (1, 2)] == expected[:2]
        stream.settle()
        stream.source.save(tmp_path)
        state = json.loads(json.dumps(stream.source.state()))
    with streaming(tmp_path, ranks) as stream:
        stream.source.load_state(state, tmp_path)
        assert [stream.step(step) for step in (3, 4)] == expected[2:]
