"""The router over replicas in this process: who gets a request, what happens to it when its replica dies, new weights for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlhub.engines.rollout.base import Completion
from rlhub.errors import DeadlineError, EngineError, WeightMismatchError, WorkerDiedError, WorkerError
from rlhub.rollout_service.fleet import FleetLimits
from rlhub.rollout_service.replica import Replica
from rlhub.rollout_service.router import Router
from rlhub.rollout_service.server import ReplicaStatus, RolloutServer, UpdateReport
from rlhub.single_controller.async_actor import AsyncActor
from tests.support.rollout_service import PACE, Replicas, Weights, fake_config, request, sampling

Scenario = Callable[[Router, Weights, Replicas], Awaitable[None]]
LIMIT_S = 60.0
"""Nothing here takes so long, unless it hangs."""


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return Weights(tmp_path)


def play(
    scenario: Scenario,
    weights: Weights,
    *,
    num_replicas: int = 2,
    held: int | None = None,
    server: type = RolloutServer,
    limits: FleetLimits | None = None,
    **options: int,
) -> None:
    """Run it over replicas that serve version 0.  held: requests stop after so many tokens, until the scenario lets them go."""

    async def main() -> None:
        replicas = Replicas(fake_config(limited=held is not None), server)
        router = Router(replicas, limits or FleetLimits(restarts=2), **options)
        try:
            await asyncio.gather(*(router.add(f"rollout-{number}") for number in range(num_replicas)))
            weights.write(0)
            await router.update(weights.folder, 0)
            PACE.set(held)
            await scenario(router, weights, replicas)
        finally:
            PACE.set(None)
            await router.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        await asyncio.sleep(0.002)


def holding(router: Router) -> Replica:
    """The one replica that has requests."""
    (replica,) = [replica for replica in router.fleet.replicas.values() if replica.requests]
    return replica


def test_requests_go_where_the_least_is_under_way(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        tasks = []
        for tokens in (60, 10, 10, 10, 10):
            tasks.append(asyncio.create_task(router.agenerate(request(), sampling(tokens))))
            await asyncio.sleep(0)
        assert sorted(replica.requests for replica in router.fleet.replicas.values()) == [1, 4]
        PACE.set(None)
        await asyncio.gather(*tasks)
        assert [(replica.requests, replica.cost) for replica in router.fleet.replicas.values()] == [(0, 0)] * 2

    play(scenario, weights, held=0)


def test_a_session_stays_with_its_replica_as_long_as_it_is_remembered(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        async def place(session: str) -> str:
            task = asyncio.create_task(router.agenerate(request(session=session), sampling(2)))
            await asyncio.sleep(0)
            name = holding(router).name
            await task
            return name

        first = await place("a")
        router.fleet.replicas[first].cost += 1000  # without the session it would go to the other
        assert await place("b") != first and await place("a") == first
        for other in ("c", "d", "e"):
            await place(other)
        assert len(router._sessions) == 3 and await place("a") != first

    play(scenario, weights, max_sessions=3)


def test_a_request_whose_replica_dies_is_answered_by_another(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        PACE.set(None)
        undisturbed = await router.agenerate(request(), sampling(20))
        PACE.set(8)
        task = asyncio.create_task(router.agenerate(request(), sampling(20)))
        await until(lambda: PACE.furthest == 8)
        victim = holding(router)
        victim.actor.kill()
        PACE.set(None)
        assert (await task).token_ids == undisturbed.token_ids
        metrics = router.metrics()
        assert (metrics["rollout/retries"], metrics["rollout/replica_deaths"]) == (1, 1)
        assert metrics["rollout/lost_tokens"] <= 20
        await until(lambda: router.fleet.replicas.get(victim.name) is not None)
        fresh = router.fleet.replicas[victim.name]
        assert fresh is not victim and (fresh.version, fresh.state) == (0, "serving")
        assert router.metrics()["rollout/replica_restarts"] == 1

    play(scenario, weights, held=8)


def test_lost_tokens_are_estimated_at_the_pace_of_the_attempt_that_came_through() -> None:
    completion = Completion(token_ids=[3] * 20, log_probs=[], finish_reason="length", versions=[0] * 20)
    router = Router(Replicas())
    for wasted_s, lost in ((0.0, 0), (0.5, 10), (9.0, 30)):  # no more than there are
        router._count(completion, wasted_s, 1.0)
        assert router.counts["lost_tokens"] == lost


def test_a_request_that_kills_every_replica_ends(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        task = asyncio.create_task(router.agenerate(request(), sampling(60)))
        for number in range(1, 4):
            await until(lambda: any(replica.requests for replica in router.fleet.replicas.values()))
            holding(router).actor.kill()
            await until(lambda: router.fleet.counts["deaths"] == number)  # noqa: B023  it is called at once
        with pytest.raises(WorkerDiedError):
            await task
        assert router.metrics()["rollout/retries"] == 2
        PACE.set(None)
        await router.agenerate(request(), sampling())

    play(scenario, weights, held=2, retries=2)


def test_an_idle_replica_that_dies_is_replaced_at_once(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        replicas.started[0].kill()
        await until(lambda: len(replicas.started) == 3 and len(router.fleet.serving()) == 2)

    play(scenario, weights)


def test_without_restarts_waiting_requests_get_the_reason(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        tasks = [asyncio.create_task(router.agenerate(request(), sampling(60))) for _ in range(3)]
        await until(lambda: sum(replica.requests for replica in router.fleet.replicas.values()) == 3)
        for actor in replicas.started:
            actor.kill()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, WorkerDiedError) and "no replica of the rollout service is left" in str(error)
            assert "replica_restarts" in str(error)
        with pytest.raises(WorkerDiedError, match="no replica"):
            await router.update(weights.folder, 0)

    play(scenario, weights, held=3, limits=FleetLimits(restarts=0))


def test_a_joiner_has_the_newest_weights_before_it_serves(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        sent = weights.write(1)
        await router.update(weights.folder, 1)
        await router.add("late")
        late = router.fleet.replicas["late"]
        status: ReplicaStatus = await late.actor.call("status")
        assert (late.version, late.state, status.fingerprint) == (1, "serving", sent)

    play(scenario, weights, num_replicas=1)


def test_weights_published_while_a_replica_joins_reach_it(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        reading, go_on = asyncio.Event(), asyncio.Event()
        take = router.fleet._take

        async def held_up(replica: Replica, goal: object) -> None:
            if replica.name == "late" and not go_on.is_set():
                reading.set()
                await go_on.wait()
            await take(replica, goal)  # type: ignore[arg-type]

        monkeypatch.setattr(router.fleet, "_take", held_up)
        joining = asyncio.create_task(router.add("late"))
        await reading.wait()
        weights.write(1)
        await router.update(weights.folder, 1)
        assert "late" not in router.fleet.replicas, "the update does not wait for who is not there yet"
        go_on.set()
        await joining
        assert {replica.version for replica in router.fleet.serving()} == {1} and len(router.fleet.serving()) == 2

    play(scenario, weights, num_replicas=1)


class Skips(RolloutServer):
    """Says that it has taken new weights, and has not."""

    async def update_weights(self, folder: str, version: int) -> UpdateReport:
        report = await super().update_weights(folder, 0)
        return UpdateReport(version=version, paused_at=0.0, pause_s=0.0, read_s=0.0, bytes=0, fingerprint=report.fingerprint)


def test_a_joiner_that_skips_the_read_is_noticed(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        weights.write(1)
        await router.update(weights.folder, 1)
        replicas.server = Skips
        with pytest.raises(WeightMismatchError, match="replica late was to take version 1"):
            await router.add("late")
        assert "late" not in router.fleet.replicas and replicas.started[-1].ended

    play(scenario, weights, num_replicas=1)


def test_a_removed_replica_finishes_its_requests(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        task = asyncio.create_task(router.agenerate(request(session="a"), sampling(20)))
        await until(lambda: PACE.furthest == 3)
        leaving = holding(router)
        removal = asyncio.create_task(router.remove(leaving.name))
        await until(lambda: leaving not in router.fleet.serving())
        assert not removal.done()
        weights.write(1)
        await router.update(weights.folder, 1)
        PACE.set(None)
        assert set((await task).versions) == {0, 1}, "it takes new weights as long as it generates"
        await removal
        assert leaving.actor.ended and router.metrics()["rollout/retries"] == 0
        await router.agenerate(request(session="a"), sampling())
        assert router.metrics()["rollout/replica_deaths"] == 0
        with pytest.raises(EngineError, match=f"there is no replica '{leaving.name}'"):
            await router.remove(leaving.name)

    play(scenario, weights, held=3)


def test_restart_replaces_a_replica(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        await router.restart("rollout-0")
        assert [actor.ended for actor in replicas.started] == [True, False]
        await router.agenerate(request(), sampling())

    play(scenario, weights, num_replicas=1)


class Hangs(RolloutServer):
    """Answers no update of version 1."""

    async def update_weights(self, folder: str, version: int) -> UpdateReport:
        if version == 1:
            await asyncio.sleep(600)
        return await super().update_weights(folder, version)


class Mixed(Replicas):
    """The first replica of each name hangs; its successors do not.  passed: of what hangs, the deadline."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = asyncio.Event()

    async def __call__(self, name: str) -> AsyncActor:
        hangs = name == "bad" and not any(actor.name == "bad" for actor in self.started)
        self.server = Hangs if hangs else RolloutServer
        actor = await super().__call__(name)
        if hangs:
            call = actor.call

            async def until_passed(method: str, *args: Any, deadline_s: float | None = None) -> Any:
                if method != "update_weights" or args[1] != 1:
                    return await call(method, *args, deadline_s=deadline_s)
                calling, passing = asyncio.ensure_future(call(method, *args)), asyncio.ensure_future(self.passed.wait())
                await asyncio.wait([calling, passing], return_when=asyncio.FIRST_COMPLETED)
                passing.cancel()
                if calling.done():
                    return calling.result()
                calling.cancel()
                raise DeadlineError(f"{name}.{method}", float(deadline_s or 0.0))

            actor.call = until_passed  # type: ignore[method-assign]
        return actor


@pytest.mark.parametrize("patience_s", [0.05, 600.0])
def test_a_hanging_replica_holds_up_nobody(weights: Weights, patience_s: float) -> None:
    """update returns when patience ends, or the deadline has ended the replica; it serves again with the newest weights."""

    async def main() -> None:
        replicas = Mixed()
        router = Router(replicas, FleetLimits(update_s=500.0, patience_s=patience_s))
        await asyncio.gather(*(router.add(name) for name in ("good", "bad")))
        weights.write(0)
        await router.update(weights.folder, 0)
        weights.write(1)
        update = asyncio.create_task(router.update(weights.folder, 1))
        await until(lambda: router.fleet.replicas["good"].version == 1)
        assert (await router.agenerate(request(), sampling())).versions[0] in (0, 1)
        if patience_s > 1:
            assert not (await asyncio.wait([update], timeout=0.05))[0]
            replicas.passed.set()
        assert [name for name, _ in await update] == ["good"]
        assert router.fleet.counts["deaths"] == (patience_s > 1)
        assert "good" in [replica.name for replica in router.fleet.serving()]
        if patience_s < 1:
            assert len(router.fleet.serving()) == 1, "one that is late gets no requests"
            replicas.passed.set()
        await until(lambda: len(router.fleet.serving()) == 2)
        assert router.fleet.counts["deaths"] == 1 and router.fleet.replicas["bad"].version == 1
        await router.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


class Deaf(RolloutServer):
    """Stops answering when told."""

    deaf = False

    async def status(self) -> ReplicaStatus:
        if Deaf.deaf:
            await asyncio.sleep(600)
        return await super().status()


def test_a_replica_that_does_not_answer_is_replaced(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        replicas.server, Deaf.deaf = RolloutServer, True
        await until(lambda: router.fleet.counts["restarts"] >= 1 and len(router.fleet.serving()) == 1)
        assert [actor.ended for actor in replicas.started[:1]] == [True]
        assert len((await router.agenerate(request(), sampling())).token_ids) == 8

    Deaf.deaf = False
    limits = FleetLimits(ping_s=0.02, ping_deadline_s=0.2, restarts=1000)  # a slow machine may replace more than the deaf one
    play(scenario, weights, num_replicas=1, server=Deaf, limits=limits, retries=1000)


def test_an_engine_that_fails_is_replaced_and_its_requests_are_not_lost(weights: Weights) -> None:
    class FailsOnce(RolloutServer):
        broken = False

        async def agenerate(self, request, params):  # type: ignore[no-untyped-def]
            if not FailsOnce.broken:
                FailsOnce.broken = True
                self.engine.shutdown()
            return await super().agenerate(request, params)

    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        assert len((await router.agenerate(request(), sampling())).token_ids) == 8
        assert (router.counts["retries"], router.fleet.counts["deaths"]) == (1, 1)
        with pytest.raises(WorkerError, match="max_new_tokens"):
            await router.agenerate(request(), sampling(0))
        assert (router.counts["retries"], router.fleet.counts["deaths"]) == (1, 1), "a wrong request harms nobody"

    play(scenario, weights, num_replicas=1, server=FailsOnce)


def test_damaged_weights_are_an_error_of_the_update(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        weights.write(1)
        file = next((Path(weights.folder) / "version-1").glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(WorkerError, match="checksum"):
            await router.update(weights.folder, 1)

    play(scenario, weights)


def test_a_pinned_version_is_kept_while_training_goes_on(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        pin = await router.pin(0)
        weights.write(1)
        await router.update(weights.folder, 1)
        many = await asyncio.gather(*(pin.agenerate(request(seed=i), sampling()) for i in range(4)))
        assert {version for completion in many for version in completion.versions} == {0}
        rest = await asyncio.gather(*(router.agenerate(request(seed=i), sampling()) for i in range(4)))
        assert {version for completion in rest for version in completion.versions} == {1}
        with pytest.raises(EngineError, match="version 0 is pinned"):
            await router.pin(1)
        pin.release()
        pin.release()
        await until(lambda: len(router.fleet.serving()) == 2)
        with pytest.raises(EngineError, match="was released"):
            await pin.agenerate(request(), sampling())
        with pytest.raises(EngineError, match="no replica has version 0"):
            await router.pin(0)
        async with await router.pin(1) as view:
            assert (await view.agenerate(request(), sampling())).versions == [1] * 8

    play(scenario, weights)


def test_with_one_replica_an_update_waits_for_the_pin(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        pin = await router.pin(0)
        weights.write(1)
        update = asyncio.create_task(router.update(weights.folder, 1))
        assert (await pin.agenerate(request(), sampling())).versions == [0] * 8
        assert not update.done()
        pin.release()
        await update
        assert (await router.agenerate(request(), sampling())).versions == [1] * 8

    play(scenario, weights, num_replicas=1)


@pytest.mark.parametrize("published", [False, True])
def test_a_pin_whose_replica_dies_moves_if_it_can(weights: Weights, published: bool) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        pin = await router.pin(0)
        if published:
            weights.write(1)
            await router.update(weights.folder, 1)
        pin._replica.actor.kill()
        if published:
            await until(lambda: router.fleet.counts["deaths"] == 1)
            with pytest.raises(EngineError, match="no replica has version 0"):
                await pin.agenerate(request(), sampling())
        else:
            assert (await pin.agenerate(request(), sampling())).versions == [0] * 8
        pin.release()

    play(scenario, weights)


def test_a_pin_waits_for_a_replica_that_is_started_again(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        go_on = asyncio.Event()

        async def held_up(name: str) -> AsyncActor:
            await go_on.wait()
            return await replicas(name)

        monkeypatch.setattr(router.fleet, "_start_replica", held_up)
        replicas.started[0].kill()
        await until(lambda: not router.fleet.replicas)
        pinning = asyncio.create_task(router.pin(0))
        await asyncio.sleep(0)
        assert not pinning.done() and len(replicas.started) == 1, "there is none yet"
        go_on.set()
        async with await pinning as view:
            assert (await view.agenerate(request(), sampling())).versions == [0] * 8
            replicas.started[1].kill()
            assert (await view.agenerate(request(), sampling())).versions == [0] * 8, "the newest version is not lost"
        assert [replica.pins for replica in router.fleet.replicas.values()] == [0]

    play(scenario, weights, num_replicas=1)


def test_a_replica_that_dies_while_it_reads_is_replaced(weights: Weights) -> None:
    async def main() -> None:
        replicas = Mixed()
        router = Router(replicas)
        await asyncio.gather(*(router.add(name) for name in ("good", "bad")))
        weights.write(0)
        await router.update(weights.folder, 0)
        weights.write(1)
        update = asyncio.create_task(router.update(weights.folder, 1))
        await until(lambda: router.fleet.replicas["good"].version == 1)
        router.fleet.replicas["bad"].actor.kill()
        assert [name for name, _ in await update] == ["good"]
        await until(lambda: len(router.fleet.serving()) == 2)
        assert {replica.version for replica in router.fleet.serving()} == {1}
        await router.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_pause_holds_up_all_and_those_who_join(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        await router.pause()
        await router.add("late")
        tasks = [asyncio.create_task(router.agenerate(request(seed=i), sampling())) for i in range(6)]
        assert not (await asyncio.wait(tasks, timeout=0.03))[0]
        assert all(replica.requests for replica in router.fleet.replicas.values())
        await router.resume()
        await asyncio.gather(*tasks)

    play(scenario, weights)


def test_a_cancelled_request_leaves_its_replica(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        task = asyncio.create_task(router.agenerate(request(), sampling(60)))
        await until(lambda: PACE.furthest == 4)
        replica = holding(router)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert replica.cost == 0
        while (await replica.actor.call("status")).load:  # until the limit of the whole scenario
            await asyncio.sleep(0.001)

    play(scenario, weights, held=4)


def test_closing_while_a_replica_starts_leaves_none(weights: Weights) -> None:
    go_on = asyncio.Event()

    class Slow(Replicas):
        async def __call__(self, name: str) -> AsyncActor:
            if self.started:
                await go_on.wait()
            return await super().__call__(name)

    async def main() -> None:
        replicas = Slow()
        router = Router(replicas)
        await router.add("one")
        joining = asyncio.create_task(router.add("two"))
        replicas.started[0].kill()
        await until(lambda: router.fleet.counts["restarts"] == 1)
        joining.cancel()
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(router.close())
        await asyncio.sleep(0.01)
        assert len(replicas.started) == 1 and not closing.done()
        go_on.set()
        await closing
        assert len(replicas.started) == 3 and all(actor.ended for actor in replicas.started)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_closing_ends_waiting_requests(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        running = asyncio.create_task(router.agenerate(request(), sampling(60)))
        await until(lambda: PACE.furthest == 2)
        await router.close()
        with pytest.raises((EngineError, WorkerError)):
            await running
        with pytest.raises(EngineError, match="was closed"):
            await router.agenerate(request(), sampling())
        assert all(actor.ended for actor in replicas.started)

    play(scenario, weights, held=2)
