"""The run's worker groups by what they do, wherever they live, and the way of the weights from the actor to the rollout.

Roles that share processes are one group under several names, so the code that calls them is the same for every placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhub.checkpoint.files import FileEntry
from rlhub.config.rules.placement import is_separate
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.single_controller import WorkerGroup, wait_all
from rlhub.trainer.ppo.dealing import Dealing

ACTOR_ROLE, ROLLOUT_ROLE, REFERENCE_ROLE, CRITIC_ROLE = "actor", "rollout", "reference", "critic"
COLOCATED_ROLE = "actor_rollout_ref"


def actor_role(config: TrainerConfig) -> str:
    """Returns what the actor's processes are called, which says whether the rollout engine is in them too."""
    return ACTOR_ROLE if is_separate(config, ROLLOUT_ROLE) else COLOCATED_ROLE


@dataclass(slots=True, kw_only=True)
class WeightSync:
    """Publishes the actor's weights to the rollout engines.

    groups: all that take part.  They are called at the same time, because their ranks wait for each other.
    """

    groups: Sequence[WorkerGroup]

    def sync(self, version: int) -> None:
        """Gives every engine the actor's present weights, as `version`, checked weight by weight."""
        wait_all(group.sync_weights.submit(version) for group in self.groups)


@dataclass(slots=True, kw_only=True)
class WorkerGroups:
    """The group of each role.  reference: the actor's where it has no pool of its own.  critic: None where none is trained.
    others: those of roles of a pipeline's own that it trains.  shards: the data-parallel sizes of the calls that train these."""

    actor: WorkerGroup
    rollout: WorkerGroup
    reference: WorkerGroup
    critic: WorkerGroup | None
    weights: WeightSync
    others: Mapping[str, WorkerGroup] = field(default_factory=dict)
    shards: Sequence[int] = ()

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        """Returns the groups whose state a checkpoint holds, by its folder."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic}) | dict(self.others)

    def dealing(self, config: PPOConfig) -> Dealing:
        """Returns what deals the rows of a training batch to these groups."""
        return Dealing.between(config, self.actor, self.critic, self.shards)

    def save(self, folder: Path) -> list[FileEntry]:
        """Writes every model that is trained, each rank its part, below `folder`; returns what was written."""
        saved = wait_all(group.save_checkpoint.submit(str(folder / name)) for name, group in self.trained.items())
        return [entry for ranks in saved for entries in ranks for entry in entries]

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, whatever the placement and the number of ranks were then."""
        wait_all(group.load_checkpoint.submit(str(folder / name)) for name, group in self.trained.items())


def groups_of(launched: Mapping[str, WorkerGroup], others: Iterable[str] = (), shards: Sequence[int] = ()) -> WorkerGroups:
    """Returns what was launched by role, with the actor connected to a rollout in processes of its own.

    others: roles beside the usual ones that are trained.  shards: see WorkerGroups.
    """
    actor = launched[COLOCATED_ROLE] if COLOCATED_ROLE in launched else launched[ACTOR_ROLE]
    rollout = launched.get(ROLLOUT_ROLE, actor)
    return WorkerGroups(
        actor=actor,
        rollout=rollout,
        reference=launched.get(REFERENCE_ROLE, actor),
        critic=launched.get(CRITIC_ROLE),
        weights=WeightSync(groups=[actor]) if rollout is actor else connect(actor, rollout),
        others={role: launched[role] for role in others},
        shards=shards,
    )


def connect(actor: WorkerGroup, rollout: WorkerGroup) -> WeightSync:
    """Returns the way of the weights between two groups, whose ranks meet at an address that the actor's first rank opens and
    agree on who sends what."""
    meeting = actor.open_transfer(rollout.world_size)
    wait_all(group.join_transfer.submit(meeting) for group in (actor, rollout))
    return WeightSync(groups=[actor, rollout])
