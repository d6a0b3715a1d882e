"""The processes of a run in which every rank runs the loop; here each is a thread with a connection of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from rlhub.errors import ConfigError, DeadlineError, WorkerDiedError, WorkerError
from rlhub.single_controller import world as world_module
from rlhub.single_controller.calls import Deadline
from rlhub.single_controller.world import FRAME_BYTES, ProcessPlace, World, current_world, joined, place_of
from rlhub.utils.ports import free_port


def on_ranks(size: int, function: Callable[[World], Any]) -> list[Future[Any]]:
    """What the function returned or raised on each rank of a new world, when all have ended."""
    port, results = free_port("127.0.0.1"), [Future[Any]() for _ in range(size)]

    def run(rank: int) -> None:
        try:
            with joined(ProcessPlace(rank=rank, size=size, port=port), 60.0) as world:
                assert current_world() is world
                results[rank].set_result(function(world))
        except BaseException as error:  # noqa: BLE001 - read by the test
            results[rank].set_exception(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    return results


def values(results: list[Future[Any]]) -> list[Any]:
    return [result.result(0) for result in results]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_gets_the_value_of_each(size: int) -> None:
    """Short values, values around the size of a frame, and long ones of a single rank."""

    def gather(world: World) -> list[Any]:
        widths = (0, FRAME_BYTES - 40, FRAME_BYTES, 100_000 * (world.rank == size - 1))
        return [world.gather((world.rank, b"x" * width), "values") for width in widths]

    expected = [[(rank, b"x" * width) for rank in range(size)] for width in (0, FRAME_BYTES - 40, FRAME_BYTES)] + [
        [(rank, b"x" * (100_000 * (rank == size - 1))) for rank in range(size)]
    ]
    assert values(on_ranks(size, gather)) == [expected] * size


def test_a_function_of_rank_0_gives_all_its_result_or_its_error() -> None:
    calls: list[int] = []

    def decide(world: World) -> str:
        def function() -> str:
            calls.append(world.rank)
            return "first"

        def fails() -> str:
            raise ConfigError("no such setting")

        assert world.first(function, "choice") == "first"
        return world.first(fails, "failing choice")

    results = on_ranks(3, decide)
    assert calls == [0]
    assert [str(result.exception(0)) for result in results] == ["no such setting"] * 3


def test_pieces_go_from_one_process_to_another() -> None:
    def move(world: World) -> list[list[int]]:
        following, before = (world.rank + 1) % 3, (world.rank - 1) % 3
        out = [(following, tag, torch.full((tag,), world.rank, dtype=torch.uint8)) for tag in (3, 1)]
        return [piece.tolist() for piece in world.move(out, [(before, 1, 1), (before, 3, 3)], "rows")]

    assert values(on_ranks(3, move)) == [[[rank], [rank] * 3] for rank in (2, 0, 1)]


def test_an_error_of_one_rank_is_raised_by_all() -> None:
    def one_fails(world: World) -> None:
        if world.rank == 1:
            raise OSError("the disk is full")
        world.gather(world.rank, "actor.update_actor")

    started = time.monotonic()
    errors = [result.exception(0) for result in on_ranks(3, one_fails)]
    assert isinstance(errors[1], OSError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, WorkerError) and error.rank == 1 and "the disk is full" in str(error)
    assert time.monotonic() - started < 30.0


def test_a_rank_that_is_late_is_named() -> None:
    released = threading.Event()

    def one_is_late(world: World) -> None:
        world.gather(0, "actor.init_model")
        if world.rank == 2:
            released.wait(60.0)
            return
        try:
            world.gather(0, "actor.update_actor", Deadline(seconds=2.0, setting="trainer.deadline_s.update"))
        finally:
            released.set()

    errors = [result.exception(0) for result in on_ranks(3, one_is_late)]
    late = [error for error in errors if isinstance(error, DeadlineError)]
    assert late and "actor.update_actor: not done after 2 s" in str(late[0])
    assert "rank 2 on 127.0.0.1" in str(late[0]) and "after actor.init_model" in str(late[0])
    assert "trainer.deadline_s.update" in str(late[0])


def test_a_process_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has left without a word: its connections are closed, and its process does not live."""
    gone: list[int] = []
    monkeypatch.setattr(world_module, "lives", lambda pid: pid not in gone)

    def one_dies(world: World) -> None:
        beat = world._beat
        world._beat = type(beat)(node=beat.node, pid=1000 + world.rank)
        world._report()
        world.gather(0, "actor.init_model")
        if world.rank == 1:
            gone.append(1001)
            world._over.set()
            world._group.abort()
            return
        world.gather(0, "actor.update_actor")

    results = on_ranks(3, one_dies)
    for error in (results[0].exception(0), results[2].exception(0)):
        assert isinstance(error, WorkerDiedError) and error.rank == 1 and "process 1001 died" in str(error)


def test_a_rank_that_never_comes_is_an_error() -> None:
    with pytest.raises(DeadlineError, match="the start of all ranks: not done after 1 s"):
        World(ProcessPlace(rank=0, size=2, port=free_port("127.0.0.1")), 1.0)


def test_the_place_is_read_from_the_launchers_variables() -> None:
    assert place_of({"RANK": "1", "WORLD_SIZE": "4"}) is None
    place = place_of(
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )
    assert place == ProcessPlace(rank=3, size=4, local_rank=1, local_size=2, port=29500, store_is_up=True)
