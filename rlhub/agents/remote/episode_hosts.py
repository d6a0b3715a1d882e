"""EpisodeHosts: the processes that run the episodes' own code, from start to end.  Lives on one event loop, the episodes'."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhub.agents.remote.episode_host import EpisodeHost, HostSettings
from rlhub.agents.remote.host_set import UNLIMITED, HostSet, StartHost
from rlhub.single_controller import AsyncActorOptions, ClassWithInitArgs, astart_async_actor
from rlhub.single_controller.placement import is_one_machine, node_at
from rlhub.single_controller.resources import Backend

if TYPE_CHECKING:
    from rlhub.single_controller.async_actor import AsyncActor


class EpisodeHosts(HostSet):
    """See the module docstring and HostSet.  counts: also episodes_again, the episodes that began anew elsewhere."""

    kind = "episode_host"
    prefix = "episodes"

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        return super().metrics() | {f"rollout/{self.kind}_episodes_again": float(self.counts["episodes_again"])}


@dataclass(slots=True, kw_only=True)
class HostOptions:
    """How the hosts of a run are started; see AsyncActorOptions."""

    backend: Backend = "ray"
    start_s: float = 1800.0
    log_dir: str | None = None
    plugins: tuple[str, ...] = ()


def host_starter(settings: HostSettings, options: HostOptions) -> StartHost:
    """Hosts on the driver's machine, where the files are that the settings name.  They use no GPU and reserve no CPU."""

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
        return await astart_async_actor(ClassWithInitArgs(EpisodeHost, settings), own, backend=options.backend)

    return start


def _own_node() -> str:
    """Ray's name of this machine; "" where there is no other."""
    from rlhub.single_controller.ray.nodes import own_address

    return "" if is_one_machine() else node_at(own_address())
