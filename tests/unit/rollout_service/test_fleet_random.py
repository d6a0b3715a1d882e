"""A fleet to which anything happens at any time: replicas are killed, fail, hang, are restarted, removed and added, sampling is
paused, weights come, with sleep before them or without, versions are pinned, requests are followed, aborted and cancelled."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

import pytest

from rlhub.engines.rollout.base import Completion, GenerationRequest, Progress, SamplingParams
from rlhub.errors import DeadlineError, EngineError, WorkerError
from rlhub.rollout_service.fleet import FleetLimits
from rlhub.rollout_service.router import Pin, Router
from tests.unit.rollout_service.fleet_actors import Actor, Actors, play, token

LIMITS = FleetLimits(
    restarts=1_000_000, start_s=50, update_s=50, shutdown_s=5, drain_s=40, patience_s=3, ping_s=5, ping_deadline_s=10
)
TURMOIL_S, LONGEST_PAUSE_S = 40.0, 10.0


class Life:
    """What is done to one fleet, and what is known of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.actors = Actors(seed)
        self.router = Router(self.actors, LIMITS, retries=1000, generate_s=200.0)
        self.fleet = self.router.fleet
        self.version = self.settled = 0  # the last that was published, and that all who serve have
        self.operator_starts = 0
        self.tokens = 0
        self.outcomes: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()
        self.names = 0
        self.over = False

    def begin(self, work: object) -> None:
        self.tasks.add(asyncio.ensure_future(work))  # type: ignore[arg-type]

    async def wait_a_little(self, longest: float = 2.0) -> None:
        await asyncio.sleep(self.rng.random() * longest)

    def any_actor(self) -> Actor | None:
        return self.rng.choice(self.actors.alive) if self.actors.alive else None

    # -- what happens --------------------------------------------------------------------------------------------------------

    async def add(self) -> None:
        name, self.names = f"rollout-{self.names}", self.names + 1
        self.operator_starts += 1
        with suppress(WorkerError, DeadlineError):  # harmed on its way
            await self.router.add(name)

    async def remove(self) -> None:
        if len(self.fleet.serving()) > 1:
            with suppress(EngineError):  # it is not there any more
                await self.router.remove(self.rng.choice(self.fleet.serving()).name)

    async def restart(self) -> None:
        if not self.fleet.replicas:
            return
        name = self.rng.choice(list(self.fleet.replicas))
        before = name in self.fleet.names and name not in self.fleet._starting_names
        with suppress(WorkerError, DeadlineError):
            if before:
                self.operator_starts += 1
            try:
                await self.router.restart(name)
            except EngineError as error:
                assert "is being replaced already" in str(error)

    async def harm(self) -> None:
        actor = self.any_actor()
        match self.rng.choice(["kill", "kill", "fail", "hang"]):
            case "kill" if actor is not None:
                actor.kill()
            case "fail" if actor is not None:
                actor.failure = "out of memory"
            case "hang" if actor is not None:
                actor.hangs = True

    async def pause(self) -> None:
        await self.router.pause()
        await self.wait_a_little(LONGEST_PAUSE_S)
        await self.router.resume()

    async def publish(self) -> None:
        """As a trainer does: one after the other."""
        while not self.over:
            await self.wait_a_little(20.0)
            if self.version % 3 == 1:
                await self.fleet.sleep(keep_weights=False)
                await self.wait_a_little(5.0)
            self.version += 1
            version = self.version
            await self.router.update("folder", version)
            self.settled = version

    # -- requests ------------------------------------------------------------------------------------------------------------

    async def ask(self, by: Router | Pin, *, followed: bool, name: str = "") -> None:
        seed, length, settled = self.rng.randrange(10_000), self.rng.randint(1, 12), self.settled
        request = GenerationRequest(prompt_ids=[1], seed=seed, request_id=name, session=f"s{self.rng.randrange(5)}")
        told: list[Progress] = []
        follow = told.append if followed else None
        answer = await by.agenerate(request, SamplingParams(max_new_tokens=length), follow)
        self.tokens += len(answer.token_ids)
        self.check(answer, seed, length, told, aborted=bool(name))
        if isinstance(by, Pin) and by._released:  # what was under way went on to newer weights
            assert all(by.version <= version <= self.version for version in answer.versions)
        elif isinstance(by, Pin):
            assert set(answer.versions) == {by.version}
        else:
            assert all(settled <= version <= self.version for version in answer.versions)
        self.outcomes[answer.finish_reason] += 1

    def check(self, answer: Completion, seed: int, length: int, told: list[Progress], *, aborted: bool) -> None:
        """Every token once and in order, under weights that never grow older while it is one replica's."""
        count = len(answer.token_ids)
        assert answer.token_ids == [token(seed, index) for index in range(count)]
        assert len(answer.log_probs) == len(answer.versions) == count
        assert answer.finish_reason == "length" and count == length or answer.finish_reason == "abort" and aborted
        if told:
            heard = [one for part in told for one in part.token_ids]
            assert heard == answer.token_ids[: len(heard)]
            assert [one for part in told for one in part.versions] == answer.versions[: len(heard)]
        else:
            assert answer.versions == sorted(answer.versions)

    async def ask_and_abort(self) -> None:
        name = f"aborted-{self.names}-{self.rng.random()}"
        asking = asyncio.create_task(self.ask(self.router, followed=self.rng.random() < 0.5, name=name))
        await self.wait_a_little(6.0)
        await self.router.abort([name])
        await asking

    async def ask_and_leave(self) -> None:
        asking = asyncio.create_task(self.ask(self.router, followed=self.rng.random() < 0.5))
        await self.wait_a_little(6.0)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
            self.outcomes["in time"] += 1
            return
        self.outcomes["cancelled"] += 1

    async def ask_by_pin(self) -> None:
        try:
            pin = await self.router.pin(self.version)
        except EngineError:  # another is pinned, or nobody has taken it yet
            return
        asking = [asyncio.create_task(self.ask(pin, followed=False)) for _ in range(3)]
        if self.rng.random() < 0.3:
            await self.wait_a_little(6.0)
            pin.release()
        for error in await asyncio.gather(*asking, return_exceptions=True):
            assert error is None or isinstance(error, EngineError), error
            self.outcomes["pin's" if error is None else "pin lost"] += 1
        pin.release()

    # -- all of it -----------------------------------------------------------------------------------------------------------

    async def turmoil(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + TURMOIL_S
        quiet = [lambda: self.ask(self.router, followed=False), lambda: self.ask(self.router, followed=True)] * 6
        quiet += [self.ask_and_abort, self.ask_and_leave, self.ask_by_pin]  # type: ignore[list-item]
        loud = [self.harm] * 3 + [self.restart, self.remove, self.add]
        pausing: asyncio.Future[None] | None = None
        while loop.time() < end:
            await self.wait_a_little(1.0)
            self.begin(self.rng.choice(quiet)())
            if self.rng.random() < 0.15 and len(self.fleet.replicas) < 6:
                self.begin(self.rng.choice(loud)())
            if self.rng.random() < 0.05 and (pausing is None or pausing.done()):
                pausing = asyncio.ensure_future(self.pause())
        self.over = True
        if pausing is not None:
            await pausing

    async def settle(self) -> None:
        """Everything comes to an end, and the numbers agree."""
        for actor in self.actors.alive:
            if actor.hangs:
                actor.kill()
        await asyncio.gather(*self.tasks)
        self.version += 1
        await self.router.update("folder", self.version)
        while self.fleet._starting_names or len(self.fleet.serving()) < len(self.fleet.replicas):
            await asyncio.sleep(1.0)
        replicas = self.fleet.replicas
        assert {replica.version for replica in replicas.values()} == {self.version}
        assert [(r.requests, r.cost, r.pins, r.idle.is_set()) for r in replicas.values()] == [(0, 0, 0, True)] * len(replicas)
        assert {id(replica.actor) for replica in replicas.values()} == {id(actor) for actor in self.actors.alive}
        assert not any(actor._told_to_pause for actor in self.actors.alive)
        assert {method for actor in self.actors.alive for method in actor.running} <= {"status"}
        metrics = self.router.metrics()
        assert metrics["rollout/requests_under_way"] == 0
        assert metrics["rollout/tokens"] >= self.tokens  # those of the cancelled, too
        assert self.actors.attempts == self.operator_starts + self.fleet.counts["restarts"]

    async def live(self) -> None:
        before = asyncio.all_tasks()
        try:
            await asyncio.gather(*(self.add() for _ in range(3)))
            await self.router.update("folder", 0)
            publishing = asyncio.create_task(self.publish())
            await self.turmoil()
            await publishing
            await self.settle()
        finally:
            await self.router.close()
        assert not self.actors.alive
        await asyncio.sleep(1.0)  # for what was cancelled
        assert asyncio.all_tasks() == before, "tasks are left"


@pytest.mark.parametrize("seed", [7, 14, 19, 32])
def test_every_request_is_answered_once_whatever_happens(seed: int) -> None:
    life: list[Life] = []

    async def scenario() -> None:
        life.append(Life(seed))
        await life[0].live()

    play(scenario())
    assert life[0].outcomes["length"] > 20
    assert life[0].fleet.counts["deaths"] > 1
