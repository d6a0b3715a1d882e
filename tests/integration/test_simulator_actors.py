"""Simulators in actors: the same rows as one manager gives, and what the loss of an actor costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from rlhub.envs.base import EnvError
from rlhub.envs.vector.base import ChunkResult
from rlhub.envs.vector.manager import EnvManager, EnvManagerOptions
from rlhub.errors import EngineError, WorkerError
from rlhub.single_controller import AsyncActorOptions
from rlhub.workers.simulators import RemoteSimulators

OPTIONS = EnvManagerOptions(
    name="tests.support.vector_simulators:Drift", settings={"max_steps": 5}, num_envs=5, processes=2, chunk=2, auto_reset=False
)


def places(count: int) -> list[AsyncActorOptions]:
    return [AsyncActorOptions(name=f"simulators-{number}") for number in range(count)]


def killed(env: RemoteSimulators, number: int) -> None:
    """Ends an actor, as the end of its process would; the processes of its environments go on in this one."""
    actor = env._parts[number].actor
    assert actor is not None
    actor.kill()


@pytest.fixture
def remote() -> Iterator[RemoteSimulators]:
    env = RemoteSimulators(OPTIONS, places(2), backend="local")
    yield env
    env.close()


def actions(number: int) -> np.ndarray:
    return np.random.default_rng(number).uniform(-1, 1, (5, 2, 2)).astype(np.float32)


def test_several_actors_give_the_rows_of_one_manager(remote: RemoteSimulators) -> None:
    """The first has the environments 0 and 1, the second 2 to 4; ids come in any order, and episodes end within the chunks."""
    with ExitStack() as stack:
        one = EnvManager(OPTIONS)
        stack.callback(one.close)
        assert remote.spec == one.spec and [part.options.num_envs for part in remote._parts] == [2, 3]
        for ids, seeds in (([3, 0, 4], [1, 2, 3]), ([1, 2], [4, 5])):
            expected, got = (env.submit_reset(ids, seeds=seeds, initial=None).result() for env in (one, remote))
            assert np.array_equal(got.images, expected.images) and np.array_equal(got.seed, expected.seed)
            assert got.instruction == expected.instruction and got.images.flags.writeable
        ended = 0
        for number in range(4):
            first, second = (env.submit_chunk(actions(number)).result() for env in (one, remote))
            assert_same(second, first)
            ended += int(first.ended.sum())
        assert ended == 5


def assert_same(got: ChunkResult, expected: ChunkResult) -> None:
    for name in ("reward", "terminated", "truncated", "valid", "success", "lost"):
        assert np.array_equal(getattr(got, name), getattr(expected, name)), name
    for one, other in ((got.obs, expected.obs), (got.final_obs, expected.final_obs)):
        assert np.array_equal(one.images, other.images) and np.array_equal(one.state, other.state)
        assert one.instruction == other.instruction and np.array_equal(one.seed, other.seed)
    assert got.info == expected.info and got.num_rendered == expected.num_rendered


def test_initial_states_reach_their_environments(remote: RemoteSimulators) -> None:
    obs = remote.submit_reset([4, 0], seeds=[1, 1], initial=[5, 2]).result()
    assert obs.instruction == ["leave from [0.5, 0.5]", "leave from [0.2, 0.2]"]


def test_the_loss_of_an_actor_in_a_chunk_costs_its_own_episodes(remote: RemoteSimulators) -> None:
    remote.submit_reset(range(5), seeds=[1] * 5, initial=None).result()
    killed(remote, 1)
    result = remote.submit_chunk(actions(0)).result()
    assert result.lost.tolist() == [False, False, True, True, True]
    assert result.valid.any(axis=1).tolist() == [True, True, False, False, False]
    obs = remote.submit_reset([2], seeds=[9], initial=None).result()
    assert obs.seed.tolist() == [9]
    result = remote.submit_chunk(actions(1)).result()
    assert not result.lost.any() and result.valid.any(axis=1).tolist() == [True, True, True, False, False]


def test_the_loss_of_an_actor_in_a_reset_is_reported_by_the_next_chunk(remote: RemoteSimulators) -> None:
    """The episode that was begun anew is not lost, nor executed by actions that were chosen for others."""
    remote.submit_reset(range(5), seeds=[1] * 5, initial=None).result()
    killed(remote, 0)
    assert remote.submit_reset([1], seeds=[7], initial=None).result().seed.tolist() == [7]
    result = remote.submit_chunk(actions(0)).result()
    assert result.lost.tolist() == [True, False, False, False, False]
    assert result.valid.any(axis=1).tolist() == [False, False, True, True, True]
    assert remote.submit_chunk(actions(1)).result().valid.any(axis=1).tolist() == [False, True, True, True, True]


def test_an_actor_that_dies_again_and_again_ends_the_run(remote: RemoteSimulators) -> None:
    remote.submit_reset(range(5), seeds=[1] * 5, initial=None).result()
    with pytest.raises(EnvError, match="the simulators simulators-1 failed 4 times in a row"):
        for number in range(9):
            killed(remote, 1)
            remote.submit_chunk(actions(number)).result()


def test_a_simulator_that_cannot_be_built_is_a_typed_error() -> None:
    env = RemoteSimulators(replace(OPTIONS, settings={"colour": 1}), places(1), backend="local")
    try:
        with pytest.raises((WorkerError, EnvError), match="colour"):
            _ = env.spec
    finally:
        env.close()


def test_fewer_environments_than_actors_are_refused() -> None:
    with pytest.raises(EngineError, match="5 environments of a stage cannot be spread over 6 actors"):
        RemoteSimulators(OPTIONS, places(6), backend="local")
