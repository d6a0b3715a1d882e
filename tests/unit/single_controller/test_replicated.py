"""Calls of which each process runs its own share; here each process is a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from rlhub.errors import ConfigError, WorkerError
from rlhub.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    Launched,
    LaunchOptions,
    ObservedCall,
    Worker,
    launch,
    register,
    wait_all,
)
from rlhub.single_controller.world import ProcessPlace, joined
from rlhub.utils.ports import free_port


class Adder(Worker):
    """Knows the calls that it has had."""

    def __init__(self, broken: int | None = None) -> None:
        self.calls: list[int] = []
        if self.rank == broken:
            raise ValueError("no such model")

    @register(Dispatch.ALL_TO_ALL)
    def add(self, number: int, failing: int = -1) -> tuple[int, int]:
        self.calls.append(number)
        if self.rank == failing:
            raise ConfigError("learning rate out of bounds")
        return self.rank, number

    @register(Dispatch.RANK_ZERO)
    def first(self, word: str) -> str:
        return f"{word} from rank {self.rank} of {self.world_size}"

    @register(Dispatch.ONE_TO_ALL)
    def seen(self) -> list[int]:
        return self.calls


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks set variables of their process, which is one for all threads."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class Counter:
    """Observes calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.sent = self.received = 0

    def on_start(self, call: ObservedCall) -> None:
        self.calls.append((call.method, len(call.workers)))

    def on_end(self, call: ObservedCall, seconds: float, error: BaseException | None) -> None: ...

    def on_transfer(self, call: ObservedCall, *, sent: int = 0, received: int = 0) -> None:
        self.sent += sent
        self.received += received


def run_everywhere(size: int, work: Any, *, options: dict[str, Any] | None = None, broken: int | None = None) -> list[Any]:
    """Results or errors of the work on each rank; three ranks are two of the main pool and one of another."""
    port, results = free_port("127.0.0.1"), [Future[Any]() for _ in range(size)]
    roles = {"actor": ClassWithInitArgs(Adder, broken), "critic": ClassWithInitArgs(Adder)}
    pools: dict[str, Any] = {"pools": {"values": [1]}, "placement": {"critic": "values"}} if size == 3 else {}

    def run(rank: int) -> None:
        counter = Counter()
        settings = {"ranks_per_node": 2, "observers": [counter], **pools, **(options or {})}
        try:
            given = LaunchOptions(backend="replicated", **settings)
            with joined(ProcessPlace(rank=rank, size=size, port=port), 60.0), launch(roles, given) as run:
                results[rank].set_result(work(run, counter))
        except BaseException as error:  # noqa: BLE001 - read by the test
            results[rank].set_exception(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    return [result.exception(0) or result.result(0) for result in results]


def test_every_process_gets_the_outputs_of_all_ranks_and_runs_its_own_share() -> None:
    def work(run: Launched, counter: Counter) -> Any:
        actor, critic = run.groups["actor"], run.groups["critic"]
        both = wait_all([actor.add.submit([5, 7]), critic.add.submit([9])])
        return both, actor.first("hello"), actor.seen(), critic.seen(), counter.calls

    results = run_everywhere(3, work)
    assert [result[:4] for result in results] == [([[(0, 5), (1, 7)], [(0, 9)]], "hello from rank 0 of 2", [[5], [7]], [[9]])] * 3
    assert results[0][4][:3] == [("add", 1), ("add", 0), ("first", 1)] and results[2][4][:2] == [("add", 0), ("add", 1)]


def test_arguments_do_not_travel() -> None:
    def work(run: Launched, counter: Counter) -> tuple[int, int]:
        run.groups["actor"].first("x" * 1000)
        return counter.sent, counter.received

    assert run_everywhere(2, work) == [(0, len("x" * 1000 + " from rank 0 of 2"))] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_the_error_of_one_rank_is_the_error_of_all(size: int) -> None:
    def work(run: Launched, counter: Counter) -> None:
        run.groups["actor"].add([1, 2], failing=1)

    for error in run_everywhere(size, work):
        assert isinstance(error, WorkerError) and (error.role, error.rank) == ("actor", 1)
        assert "learning rate out of bounds" in str(error) and isinstance(error.__cause__, ConfigError)


def test_a_role_that_cannot_start_on_one_rank_starts_nowhere() -> None:
    for error in run_everywhere(2, lambda run, counter: None, broken=1):
        assert isinstance(error, WorkerError) and error.rank == 1 and "no such model" in str(error)


def test_other_numbers_of_processes_and_ranks_are_refused() -> None:
    for error in run_everywhere(2, lambda run, counter: None, options={"ranks_per_node": 4}):
        assert isinstance(error, ConfigError) and "2 processes were started, but the pools have 4 (main) ranks" in str(error)


def test_without_other_ranks_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="this process has joined no other ranks; start it by main_ppo"):
        launch({"actor": ClassWithInitArgs(Adder)}, LaunchOptions(backend="replicated"))
