"""Replicas that are added and removed by calls and by the queue, over replicas that are coroutines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.errors import EngineError, RequestError, ResourceError, WorkerDiedError
from rlhub.rollout_service.elastic import ReplicaBounds
from rlhub.rollout_service.fleet import Fleet, FleetLimits
from rlhub.rollout_service.replica import Replica
from rlhub.rollout_service.replica_control import ReplicaControl
from rlhub.rollout_service.router import Router
from tests.unit.rollout_service.fleet_actors import Actor, Actors, play, token

PLACES = 4


class Setting:
    """A control over replicas that serve version 0."""

    def __init__(self, bounds: ReplicaBounds, before: Callable[[int], Awaitable[None]] | None) -> None:
        self.actors = Actors(before=before)
        self.spans: list[tuple[str, dict[str, Any]]] = []
        self.freed: list[int] = []
        self.router = Router(self.actors, FleetLimits(ping_s=1e4, restarts=0))
        self.control = ReplicaControl(self.router, bounds, places=PLACES, record=self.record, freed=self.freed.append)
        self.fleet = self.router.fleet

    def record(self, lane: str, name: str, start: float, end: float, /, **args: Any) -> None:
        self.spans.append((f"{lane}: {name}", args))

    def ask(self, count: int, length: int = 20) -> list[asyncio.Task[Completion]]:
        params = SamplingParams(max_new_tokens=length)
        requests = [GenerationRequest(prompt_ids=[1], seed=seed) for seed in range(count)]
        return [asyncio.create_task(self.router.agenerate(request, params)) for request in requests]


def run(
    scenario: Callable[[Setting], Awaitable[None]],
    bounds: ReplicaBounds,
    *,
    first: int = 1,
    before: Callable[[int], Awaitable[None]] | None = None,
) -> None:
    async def main() -> None:
        setting = Setting(bounds, before)
        await setting.control.start(first)
        await setting.router.update("folder", 0)
        try:
            await scenario(setting)
        finally:
            await setting.control.close()
        assert not setting.actors.alive

    play(main())


def test_calls_add_and_remove_within_the_bounds_and_leave_their_reasons() -> None:
    async def scenario(at: Setting) -> None:
        assert await at.control.add("more prompts") == "rollout-1"
        assert at.fleet.replicas["rollout-1"].version == 0, "it has the newest weights"
        with pytest.raises(ResourceError, match=r"there are 2 replicas, of at most 2 \(rollout.max_replicas\): remove one first"):
            at.control.begin_add("still more")
        await at.control.remove("rollout-0", "its machine is needed")
        assert at.freed == [0]
        with pytest.raises(ResourceError, match="rollout-1 is the last replica"):
            at.control.begin_remove("rollout-1", "")
        with pytest.raises(RequestError, match="no replica 'rolout-1'; did you mean 'rollout-1'"):
            at.control.begin_remove("rolout-1", "")
        told = at.control.describe()
        assert told["replicas"] == [{"name": "rollout-1", "state": "serving", "version": 0, "requests": 0}]
        changes = [(change["action"], change["replica"], change["reason"], change["state"]) for change in told["changes"]]
        assert changes == [
            ("add", "rollout-1", "more prompts", "done"),
            ("remove", "rollout-0", "its machine is needed", "done"),
        ]
        assert json.dumps(told)
        metrics = at.control.metrics()
        assert [metrics[f"rollout/replicas{kind}"] for kind in ("", "_added", "_removed", "_failed")] == [1, 1, 1, 0]
        assert at.spans[0] == ("replicas: add rollout-1", {"reason": "more prompts", "state": "done"})

    run(scenario, ReplicaBounds(least=1, most=2))


def test_the_smallest_number_is_kept() -> None:
    async def scenario(at: Setting) -> None:
        with pytest.raises(ResourceError, match=r"1 replicas would be left, of at least 2 \(rollout.min_replicas\)"):
            at.control.begin_remove("rollout-0", "")

    run(scenario, ReplicaBounds(least=2, most=2), first=2)


def test_two_calls_at_once_get_different_names_and_count_together() -> None:
    async def scenario(at: Setting) -> None:
        one, other = at.control.begin_add("a"), at.control.begin_add("b")
        assert {one.replica, other.replica} == {"rollout-1", "rollout-2"}
        with pytest.raises(ResourceError, match="there are 3 replicas"):
            at.control.begin_add("c")
        with pytest.raises(ResourceError, match="rollout-1 starts: wait until it serves"):
            at.control.begin_remove("rollout-1", "")
        assert [replica["state"] for replica in at.control.describe()["replicas"]] == ["serving", "starting", "starting"]
        assert one.task is not None and other.task is not None
        await asyncio.gather(one.task, other.task)
        assert len(at.fleet.serving()) == 3

    run(scenario, ReplicaBounds(most=3))


def test_a_removal_waits_for_requests_and_loses_none() -> None:
    async def scenario(at: Setting) -> None:
        asked = at.ask(8, length=50)
        await asyncio.sleep(1.0)
        change = at.control.begin_remove("rollout-0", "")
        await asyncio.sleep(1.0)
        assert change.state == "running" and at.fleet.replicas["rollout-0"].state == "leaving"
        with pytest.raises(ResourceError, match="being removed already"):
            at.control.begin_remove("rollout-0", "")
        with pytest.raises(ResourceError, match="rollout-0 still ends, and frees a place"):
            at.control.begin_add("")
        late = at.ask(4, length=5)
        answers = await asyncio.gather(*asked, *late)
        assert [answer.token_ids for answer in answers[:8]] == [[token(seed, i) for i in range(50)] for seed in range(8)]
        assert change.task is not None
        await change.task
        assert change.state == "done" and at.router.counts["retries"] == 0
        assert at.router.counts["completed"] == at.router.counts["requests"] == 12

    run(scenario, ReplicaBounds(most=2), first=2)


def test_a_removal_waits_for_the_validation_that_pins_its_replica() -> None:
    async def scenario(at: Setting) -> None:
        pin = await at.router.pin(0)
        pinned = pin._replica.name
        change = at.control.begin_remove(pinned, "")
        await at.router.update("folder", 1)
        await asyncio.sleep(50.0)
        assert change.state == "running"
        answer = await pin.agenerate(GenerationRequest(prompt_ids=[1], seed=1), SamplingParams(max_new_tokens=5))
        assert answer.versions == [0] * 5
        pin.release()
        assert change.task is not None
        await change.task
        assert change.state == "done"

    run(scenario, ReplicaBounds(most=2), first=2)


def test_a_removal_in_the_middle_of_a_weight_update_is_no_error_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that was shut down refuses to pause, and has not failed."""
    gone: set[Actor] = set()

    async def shutdown(actor: Actor) -> None:
        gone.add(actor)
        await asyncio.sleep(5.0)

    def refuse(actor: Actor) -> None:
        if actor in gone:
            raise EngineError("the replica has no engine yet")

    monkeypatch.setattr(Actor, "shutdown", shutdown)
    monkeypatch.setattr(Actor, "_refuse_failed", refuse)

    async def scenario(at: Setting) -> None:
        for version in range(1, 6):
            update = asyncio.create_task(at.router.update("folder", version))
            await asyncio.sleep(0.1)
            await at.control.remove("rollout-1", "")
            assert [name for name, _ in await update][:1] == ["rollout-0"]
            await at.control.add("")
        assert at.fleet.failure is None and at.fleet.counts["deaths"] == 0

    run(scenario, ReplicaBounds(most=2), first=2)


class Dies:
    """The starts with these numbers fail."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    async def __call__(self, number: int) -> None:
        if number in self.numbers:
            raise WorkerDiedError("it was killed", role="rollout-1", rank=0)


def test_one_that_dies_while_it_starts_frees_its_place_and_is_reported() -> None:
    async def scenario(at: Setting) -> None:
        with pytest.raises(WorkerDiedError, match="it was killed"):
            await at.control.add("more")
        told = at.control.describe()
        assert [replica["name"] for replica in told["replicas"]] == ["rollout-0"]
        assert told["changes"][-1]["state"] == "failed" and "it was killed" in told["changes"][-1]["error"]
        assert at.freed == [1] and at.control.metrics()["rollout/replicas_failed"] == 1
        assert await at.control.add("again") == "rollout-1"

    run(scenario, ReplicaBounds(most=2), before=Dies(1))


def patient(at: Setting, replicas: int) -> Awaitable[None]:
    async def wait() -> None:
        while len(at.fleet.serving()) != replicas or at.control._running:
            await asyncio.sleep(1.0)

    return wait()


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control reads the clock of the loop, whose time jumps."""

    class Clock:
        monotonic = staticmethod(lambda: asyncio.get_running_loop().time())
        perf_counter = monotonic
        time = monotonic

    monkeypatch.setattr("rlhub.rollout_service.replica_control.time", Clock)


def test_replicas_follow_the_queue_up_and_down(virtual: None) -> None:
    """One request occupies its place for about 100 s, so that 40 of them wait long on one replica with four places."""

    async def scenario(at: Setting) -> None:
        asked = at.ask(40, length=200)
        await patient(at, 3)
        assert all(change["reason"].startswith(("3", "2")) for change in at.control.describe()["changes"])
        at.router.fleet.newest = None  # an evaluation: nothing is published
        await asyncio.gather(*asked)
        await patient(at, 1)
        await asyncio.sleep(1000.0)
        assert len(at.fleet.serving()) == 1
        actions = [change.action for change in at.control.changes]
        assert actions == ["add", "add", "remove", "remove"]

    run(scenario, ReplicaBounds(least=1, most=3, by_queue=True))


def test_a_start_that_fails_is_tried_again_by_the_rule(virtual: None) -> None:
    async def scenario(at: Setting) -> None:
        asked = at.ask(40, length=200)
        await patient(at, 2)
        states = [change.state for change in at.control.changes]
        assert states[:3] == ["failed", "failed", "done"]
        for request in asked:
            request.cancel()

    run(scenario, ReplicaBounds(least=1, most=2, by_queue=True), before=Dies(1, 2))


def test_one_that_was_given_up_is_replaced_where_fewer_than_the_smallest_number_are_left(virtual: None) -> None:
    async def scenario(at: Setting) -> None:
        at.actors.started[0].kill()  # without restarts
        while not at.control.changes:
            await asyncio.sleep(1.0)
        await patient(at, 2)
        assert "1 replicas, and min_replicas=2" in at.control.changes[-1].reason

    run(scenario, ReplicaBounds(least=2, most=3, by_queue=True), first=2)


def test_without_bounds_from_the_settings_nothing_follows_the_queue(virtual: None) -> None:
    async def scenario(at: Setting) -> None:
        await asyncio.gather(*at.ask(40, length=200))
        assert not at.control.changes and "rollout/waiting_requests" not in at.control.metrics()

    run(scenario, ReplicaBounds(least=1, most=3))


def test_closing_ends_a_change_that_runs() -> None:
    async def scenario(at: Setting) -> None:
        change = at.control.begin_add("late")
        await asyncio.sleep(0.0)
        await at.control.close()
        assert change.state == "failed" and len(at.actors.started) == 2
        with pytest.raises(EngineError, match="was closed"):
            at.control.begin_add("later")

    run(scenario, ReplicaBounds(most=2))


def test_a_joiner_misses_no_publication() -> None:
    """Weights are published in every phase of a start; the control is a fleet whose joiner serves what it took first."""

    async def stale(fleet: Fleet, replica: Replica) -> None:
        goal = fleet.newest
        if replica.state == "fresh" and goal is not None:
            await fleet._take(replica, goal)
            await asyncio.sleep(3.0)
            replica.publication, replica.state = fleet.newest.number, "serving"  # type: ignore[union-attr]
        fleet._notify()

    async def older(at: Setting) -> int:
        found = 0
        for version in range(1, 12):
            change = at.control.begin_add("")
            for _ in range(3):
                await asyncio.sleep(0.4)
                await at.router.update("folder", version)
            assert change.task is not None
            await change.task
            found += sum(replica.actor.version < version for replica in at.fleet.serving())  # type: ignore[attr-defined]
            await at.control.remove(change.replica, "")
        return found

    async def scenario(at: Setting) -> None:
        assert await older(at) == 0

    async def control(at: Setting) -> None:
        with pytest.MonkeyPatch.context() as patch:
            take = Fleet._take_newest
            patch.setattr(
                Fleet, "_take_newest", lambda fleet, one: stale(fleet, one) if one.state == "fresh" else take(fleet, one)
            )
            assert await older(at) > 0

    run(scenario, ReplicaBounds(most=2))
    run(control, ReplicaBounds(most=2))
