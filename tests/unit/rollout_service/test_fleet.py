"""What two things that happen to a fleet at the same time must not do to each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.errors import EngineError, WorkerDiedError, WorkerError
from rlhub.rollout_service.fleet import FleetLimits
from rlhub.rollout_service.router import Router
from tests.unit.rollout_service.fleet_actors import Actor, Actors, play

Scenario = Callable[[Router, Actors], Awaitable[None]]


def with_replicas(
    scenario: Scenario,
    number: int = 1,
    *,
    before: Callable[[int], Awaitable[None]] | None = None,
    limits: FleetLimits | None = None,
) -> None:
    """Over replicas that serve version 0."""

    async def main() -> None:
        actors = Actors(before=before)
        router = Router(actors, limits or FleetLimits(ping_s=1e4))
        for index in range(number):
            await router.add(f"rollout-{index}")
        await router.update("folder", 0)
        try:
            await scenario(router, actors)
        finally:
            await router.close()
        assert not actors.alive

    play(main())


def asking(router: Router) -> asyncio.Task[Completion]:
    return asyncio.create_task(router.agenerate(GenerationRequest(prompt_ids=[1], seed=1), SamplingParams(max_new_tokens=5)))


class Gate:
    """Holds up the start of the processes from `number` on, until it is opened."""

    def __init__(self, number: int) -> None:
        self._number, self.open, self.waiting = number, asyncio.Event(), asyncio.Event()

    async def __call__(self, number: int) -> None:
        if number >= self._number:
            self.waiting.set()
            await self.open.wait()


def test_closing_tells_requests_that_wait_for_a_replica_to_come_again() -> None:
    gate = Gate(1)

    async def scenario(router: Router, actors: Actors) -> None:
        actors.started[0].kill()
        await gate.waiting.wait()
        request = asking(router)
        await asyncio.sleep(1.0)
        closing = asyncio.create_task(router.close())
        await asyncio.sleep(1.0)
        assert request.done(), "it would wait for ever"
        with pytest.raises(EngineError, match="was closed"):
            await request
        gate.open.set()
        await closing

    with_replicas(scenario, before=gate)


@pytest.mark.parametrize("where", ["process", "engine"])
def test_a_replica_that_is_added_while_the_service_closes_is_ended(where: str) -> None:
    gate = Gate(1 if where == "process" else 100)

    async def scenario(router: Router, actors: Actors) -> None:
        adding = asyncio.create_task(router.add("late"))
        while not (gate.waiting.is_set() or len(actors.started) == 2):
            await asyncio.sleep(0.01)
        closing = asyncio.create_task(router.close())
        await asyncio.sleep(0.1)
        gate.open.set()
        await closing
        with pytest.raises((EngineError, WorkerDiedError)):
            await adding
        assert len(actors.started) == 2 and not actors.alive
        with pytest.raises(EngineError, match="was closed"):
            await router.add("later")

    with_replicas(scenario, before=gate)


def test_one_that_dies_while_it_leaves_does_not_take_its_successor_with_it() -> None:
    async def scenario(router: Router, actors: Actors) -> None:
        leaving = router.fleet.replicas["rollout-0"]
        leaving.begin(1)  # a request whose caller learns of the death late
        removal = asyncio.create_task(router.remove("rollout-0"))
        await asyncio.sleep(0.0)
        leaving.actor.kill()
        await asyncio.sleep(0.1)
        await router.add("rollout-0")
        leaving.end(1)
        await removal
        assert [replica.actor for replica in router.fleet.replicas.values()] == actors.alive != []
        assert (await asking(router)).finish_reason == "length"

    with_replicas(scenario)


def test_a_pin_that_is_released_while_it_looks_for_another_replica_holds_none() -> None:
    gate = Gate(1)

    async def scenario(router: Router, actors: Actors) -> None:
        pin = await router.pin(0)
        actors.started[0].kill()
        await gate.waiting.wait()
        request = asyncio.create_task(pin.agenerate(GenerationRequest(prompt_ids=[1], seed=1), SamplingParams()))
        await asyncio.sleep(1.0)
        pin.release()
        gate.open.set()
        with pytest.raises(EngineError, match="was released"):
            await request
        assert [replica.pins for replica in router.fleet.replicas.values()] == [0]
        await asyncio.wait_for(router.update("folder", 1), 100)

    with_replicas(scenario, before=gate)


def test_an_engine_that_has_failed_is_no_error_of_the_update() -> None:
    async def scenario(router: Router, actors: Actors) -> None:
        actors.started[0].failure = "its core has died"
        assert [name for name, _ in await router.update("folder", 1)] == ["rollout-1"]
        while len(router.fleet.serving()) < 2:
            await asyncio.sleep(1.0)
        assert {replica.version for replica in router.fleet.serving()} == {1}
        assert router.fleet.counts["deaths"] == 1

    with_replicas(scenario, 2)


def test_weights_that_a_sound_engine_refuses_are_an_error_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(actor: Actor, folder: str, version: int) -> None:
        raise EngineError("checksum")

    async def scenario(router: Router, actors: Actors) -> None:
        monkeypatch.setattr(Actor, "update_weights", refuse)
        with pytest.raises(WorkerError, match="checksum"):
            await router.update("folder", 1)

    with_replicas(scenario, 2)


def test_when_the_last_leaves_after_another_was_given_up_requests_get_the_reason() -> None:
    async def scenario(router: Router, actors: Actors) -> None:
        router.fleet.replicas["rollout-0"].begin(1)
        removal = asyncio.create_task(router.remove("rollout-0"))
        await asyncio.sleep(0.1)
        actors.started[1].kill()
        request = asking(router)
        await asyncio.sleep(1.0)
        assert not request.done() and router.fleet.failure is None
        router.fleet.replicas["rollout-0"].end(1)
        await removal
        with pytest.raises(WorkerDiedError, match="rollout-1 was lost after 0 restarts"):
            await asyncio.wait_for(request, 100)

    with_replicas(scenario, 2, limits=FleetLimits(restarts=0))


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_restart_that_fails_is_tried_again_or_requests_get_the_reason(restarts: int) -> None:
    class Fails:
        async def __call__(self, number: int) -> None:
            if number == 1:
                raise WorkerDiedError("no memory", role="rollout-0", rank=0)

    async def scenario(router: Router, actors: Actors) -> None:
        with pytest.raises(WorkerDiedError, match="no memory"):
            await router.restart("rollout-0")
        request = asyncio.wait_for(asking(router), 100)
        if restarts:
            assert (await request).finish_reason == "length"
        else:
            with pytest.raises(WorkerDiedError, match="no replica of the rollout service is left"):
                await request

    with_replicas(scenario, before=Fails(), limits=FleetLimits(restarts=restarts))


def test_asleep_they_get_no_request_before_new_weights() -> None:
    """What runs completes first, what comes meanwhile waits; one that dies starts again once the device is free."""

    async def scenario(router: Router, actors: Actors) -> None:
        running = asking(router)
        await asyncio.sleep(1.0)
        await router.fleet.sleep(keep_weights=False)
        assert running.done() and all(actor.asleep for actor in actors.alive) and not router.fleet.serving()
        waiting = asking(router)
        actors.alive[0].kill()
        await asyncio.sleep(100.0)
        assert not waiting.done() and len(actors.alive) == 1 and router.fleet.starting == {"rollout-0"}
        await router.update("folder", 1)
        assert (await waiting).versions == [1] * 5
        await asyncio.sleep(100.0)
        assert [actor.asleep for actor in actors.alive] == [False, False] and len(router.fleet.serving()) == 2

    with_replicas(scenario, 2)


def test_one_that_a_view_pins_sleeps_after_its_release() -> None:
    async def scenario(router: Router, actors: Actors) -> None:
        view = await router.pin(0)
        sleeping = asyncio.create_task(router.fleet.sleep(keep_weights=False))
        await view.agenerate(GenerationRequest(prompt_ids=[1], seed=1), SamplingParams(max_new_tokens=5))
        assert not sleeping.done() and not actors.alive[0].asleep
        view.release()
        await sleeping
        assert actors.alive[0].asleep

    with_replicas(scenario, 1)


def test_of_two_restarts_at_once_the_second_is_refused() -> None:
    async def scenario(router: Router, actors: Actors) -> None:
        first = asyncio.create_task(router.restart("rollout-0"))
        await asyncio.sleep(0.0)
        with pytest.raises(EngineError, match="is being replaced already"):
            await router.restart("rollout-0")
        with pytest.raises(EngineError, match="there is a replica 'rollout-0' already"):
            await router.add("rollout-0")
        await first
        assert len(actors.alive) == 1

    with_replicas(scenario)


def test_one_that_does_not_answer_hides_no_other_that_has_failed() -> None:
    async def scenario(router: Router, actors: Actors) -> None:
        actors.started[0].hangs = True
        await asyncio.sleep(10.0)
        actors.started[1].failure = "its core has died"
        await asyncio.sleep(10.0)
        assert actors.started[1].ended and not actors.started[0].ended

    with_replicas(scenario, 2, limits=FleetLimits(ping_s=3.0, ping_deadline_s=60.0))
