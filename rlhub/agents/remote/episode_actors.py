"""EpisodeActors: the processes that run the episodes' own code, from start to end.  It lives on one event loop, the episodes'."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhub.agents.remote.actor_pool import UNLIMITED, ActorPool, StartActor
from rlhub.agents.remote.episode_actor import EpisodeActor, EpisodeActorSettings
from rlhub.single_controller import AsyncActorOptions, ClassWithInitArgs, astart_async_actor
from rlhub.single_controller.placement import is_one_machine, node_at
from rlhub.single_controller.resources import Backend

if TYPE_CHECKING:
    from rlhub.single_controller.async_actor import AsyncActor


class EpisodeActors(ActorPool):
    """See the module docstring and ActorPool.  counts: also episodes_again, the episodes that were repeated in another actor."""

    kind = "episode actor"
    metric = "rollout/episode_host"
    prefix = "episodes"

    def metrics(self) -> dict[str, float]:
        """Returns the counts since the start."""
        return super().metrics() | {f"{self.metric}_episodes_again": float(self.counts["episodes_again"])}


@dataclass(slots=True, kw_only=True)
class EpisodeActorOptions:
    """How the episode actors of a run are started; see AsyncActorOptions."""

    backend: Backend = "ray"
    start_s: float = 1800.0
    log_dir: str | None = None
    plugins: tuple[str, ...] = ()


def episode_actor_starter(settings: EpisodeActorSettings, options: EpisodeActorOptions) -> StartActor:
    """Returns how to start actors on the driver's machine, which has the files that the settings name.  They use no GPU and
    reserve no CPU."""

    async def start(name: str) -> AsyncActor:
        own = AsyncActorOptions(
            name=name,
            num_cpus=0.0,
            log_dir=options.log_dir,
            plugins=options.plugins,
            max_concurrency=UNLIMITED,
            start_deadline_s=options.start_s,
            node_id=await asyncio.to_thread(_own_node) if options.backend == "ray" else "",
        )
        return await astart_async_actor(ClassWithInitArgs(EpisodeActor, settings), own, backend=options.backend)

    return start


def _own_node() -> str:
    """Returns Ray's name of this machine; "" where there is no other."""
    from rlhub.single_controller.ray.nodes import own_address

    return "" if is_one_machine() else node_at(own_address())
