"""Episodes a second of an environment in the process that plays, in a local actor and in Ray actors; all within one run.

    python scripts/bench/environments.py [--rounds 3] [--episodes 200] [--workers 4] [--actors 1] [--no-ray]

`grid_walk` runs in killable processes, the same number in each place, and says what the way to the actors costs an environment
that does next to nothing.  Steps that wait for 10 ms, 50 at once, are an environment whose work is elsewhere.  The places take
turns, and the median over the rounds counts.  No limit: the machine's other load decides.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from rich.console import Console
from rich.table import Table

from rlhub.agents.remote.environment_actors import EnvironmentActorOptions, EnvironmentActors, environment_actor_starter
from rlhub.envs.base import StepEnvironment, StepResult
from rlhub.envs.source import EnvironmentSource, EnvironmentSpec, LocalEnvironmentSource
from rlhub.single_controller.ray import connect
from rlhub.single_controller.resources import Backend
from rlhub.utils.aio.loop_thread import new_event_loop

STEPS = 16
WAIT_S = 0.01
AT_ONCE = 50


class Waiting(StepEnvironment):
    """Steps that wait."""

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "go", {}

    async def step(self, action: Any) -> StepResult:
        await asyncio.sleep(WAIT_S)
        return "on", 0.0, False, False, {}

    async def close(self) -> None:
        """Holds nothing."""


@dataclass(slots=True)
class Place:
    """Where environments run.  actors: how many share the processes."""

    name: str
    source: EnvironmentSource
    actors: int = 1


async def episode(source: EnvironmentSource, spec: EnvironmentSpec, number: int) -> None:
    async with source.lease(spec, str(number)) as environment:
        assert isinstance(environment, StepEnvironment)
        await environment.reset(seed=number)
        for _ in range(STEPS):
            await environment.step("up")


async def rate(source: EnvironmentSource, spec: EnvironmentSpec, number: int, at_once: int) -> float:
    """Episodes a second, with `at_once` of them under way."""
    places = asyncio.Semaphore(at_once)

    async def one(index: int) -> None:
        async with places:
            await episode(source, spec, index)

    began = time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(number)))
    return number / (time.perf_counter() - began)


async def started(backend: Backend, num_actors: int, stack: AsyncExitStack) -> EnvironmentActors:
    pool = EnvironmentActors(environment_actor_starter(EnvironmentActorOptions(backend=backend)), num_actors, idle_s=600.0)
    stack.push_async_callback(pool.close)
    await pool.start()
    return pool


async def measure(arguments: argparse.Namespace) -> Table:
    """Row by row: the environment, the place, and its share of the rate in process."""
    table = Table(title=f"Episodes of {STEPS} steps ({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start)")
    for column in ("environment", "place", "episodes a second", "of in process"):
        table.add_column(column)
    async with AsyncExitStack() as stack:
        own = LocalEnvironmentSource()
        stack.push_async_callback(own.aclose)
        places = [Place("in process", own), Place("local actor", await started("local", 1, stack))]
        if arguments.ray:
            remote = await started("ray", arguments.actors, stack)
            places.append(Place(f"{arguments.actors} Ray actor(s)", remote, arguments.actors))
        waiting = f"waits {WAIT_S * 1e3:.0f} ms a step, {AT_ONCE} at once"
        for load, name, workers, number in (
            (f"grid_walk, {arguments.workers} processes", "grid_walk", arguments.workers, arguments.episodes),
            (waiting, f"{os.path.abspath(__file__)}:Waiting", 0, 4 * AT_ONCE),
        ):
            rates = [await rates_of(places, name, workers, count) for count in (AT_ONCE, *[number] * arguments.rounds)][1:]
            for place, mine in zip(places, zip(*rates, strict=True), strict=True):
                ratio = statistics.median(one / base for one, (base, *_) in zip(mine, rates, strict=True))
                table.add_row(load, place.name, f"{statistics.median(mine):,.0f}", f"{ratio:.2f}")
    return table


async def rates_of(places: Sequence[Place], name: str, workers: int, number: int) -> list[float]:
    """One round: of each place, with the same number of processes altogether."""
    specs = [EnvironmentSpec(name=name, num_workers=workers // place.actors) for place in places]
    return [await rate(place.source, spec, number, AT_ONCE) for place, spec in zip(places, specs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=200, help="of grid_walk, in each place and round")
    parser.add_argument("--workers", type=int, default=4, help="processes that run grid_walk")
    parser.add_argument("--actors", type=int, default=1, help="Ray actors, which share the processes")
    parser.add_argument("--ray", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    connection = connect({"object_store_memory": 200 * 2**20}, device="cpu", num_ranks=1) if arguments.ray else None
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            Console(width=130).print(runner.run(measure(arguments)))
    finally:
        if connection is not None:
            connection.close()


if __name__ == "__main__":
    main()
