"""Holders: the processes that keep the tokens of finished episodes, as the driver reaches them: the episode actors, and for
episodes that run there the driver itself.

Rows are dropped when they are trained or rejected.  All methods run on the event loop of the episodes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhub.agents.remote.actor_pool import PooledActor, own_error
from rlhub.agents.remote.trajectory_store import RowRequest, TrajectoryStore, trajectories_of, wide_names
from rlhub.agents.remote.workflow import EpisodeActors, RemoteWorkflow
from rlhub.agents.trajectory import Episode, Sampled, Trajectory, TrajectoryRef, rows_of
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow
from rlhub.checkpoint.files import FileEntry
from rlhub.errors import ConfigError, HolderLostError, RegistryError, WorkerDiedError, WorkerError
from rlhub.protocol import DataProto
from rlhub.protocol.exchange import RowSource
from rlhub.rewards import RewardOutcome
from rlhub.rewards.rows import REWARD_FIELDS, PackedOutcomes, RowScorer, unpack_outcomes
from rlhub.single_controller.async_actor import ActorAddress

logger = logging.getLogger(__name__)
DRIVER = "driver"
"""The home of rows that the driver keeps."""
FOLDER = "rollouts"
"""Folder of the rows in a checkpoint's folder, one file a process."""
_RESUMED = "resumed/"


class Holders:
    """See the module docstring.  actors: None where all episodes run in the driver.  scorer: scores the driver's own rows."""

    def __init__(self, actors: EpisodeActors | None, *, vocab_size: int | None = None, scorer: RowScorer | None = None) -> None:
        self.actors, self._scorer = actors, scorer
        self.own = TrajectoryStore(DRIVER, vocab_size=vocab_size)
        self.num_dropped = 0
        self._dropping: defaultdict[str, list[str]] = defaultdict(list)
        self._saving = False
        self._adopted = itertools.count()

    async def read(self, rows: Sequence[TrajectoryRef]) -> list[Trajectory]:
        """Brings these rows to the driver, in their order.  Raises HolderLostError."""
        found: dict[int, Trajectory] = {}
        for home, numbers in by_home(rows).items():
            chosen = [rows[number] for number in numbers]
            data = await self._call(home, "read", RowRequest.of(chosen, wide_names(chosen)))
            found |= zip(numbers, trajectories_of(chosen, data), strict=True)
        return [found[number] for number in range(len(rows))]

    async def sources(self, rows: Sequence[TrajectoryRef], names: tuple[str, ...]) -> list[tuple[RowSource, np.ndarray]]:
        """Returns for each process that has some of these rows what another process gets these columns of them by, and their
        places among the rows.  Raises HolderLostError."""
        found: list[tuple[RowSource, np.ndarray]] = []
        for home, numbers in by_home(rows).items():
            request = RowRequest.of([rows[number] for number in numbers], names)
            places = np.array(numbers)
            if home == DRIVER:
                found.append((GivenRows(self.own.read(request)), places))
            else:
                found.append((ActorRows(home, self._member(home).actor.address, request), places))
        return found

    async def score(self, rows: Sequence[TrajectoryRef], prompt: Mapping[str, Any]) -> list[RewardOutcome]:
        """Lets each process score its rows, which are samples of one prompt; returns their outcomes in order.

        prompt: its columns of the data.  Raises HolderLostError, and what the scoring raises.
        """
        fields, parts = {name: prompt[name] for name in REWARD_FIELDS}, by_home(rows)
        scoring = (self._score(home, [rows[number].key for number in numbers], fields) for home, numbers in parts.items())
        found: dict[int, RewardOutcome] = {}
        for numbers, outcomes in zip(parts.values(), await asyncio.gather(*scoring), strict=True):
            found |= zip(numbers, outcomes, strict=True)
        return [found[number] for number in range(len(rows))]

    async def _score(self, home: str, keys: list[str], fields: Mapping[str, Any]) -> list[RewardOutcome]:
        if home == DRIVER:
            assert self._scorer is not None, "built with one, where a function scores rows"
            return await self._scorer.score(fields, self.own.responses(keys))
        try:
            return unpack_outcomes(PackedOutcomes(*await self._call_actor(home, "score", keys, fields)))
        except WorkerError as error:
            own = own_error(error)
            if own is error:
                raise
            raise own from error

    def release(self, results: Sequence[Sampled | None]) -> None:
        """Lets the processes forget results that are trained, or will not be."""
        for row in itertools.chain.from_iterable(rows_of(result) for result in results if result is not None):
            if isinstance(row, TrajectoryRef):
                self._dropping[row.home].append(row.key)
        self._drop()

    def hold(self, saving: bool) -> None:
        """Postpones that while a checkpoint is written."""
        self._saving = saving
        self._drop()

    def _drop(self) -> None:
        if self._saving:
            return
        dropping, self._dropping = self._dropping, defaultdict(list)
        for home, keys in dropping.items():
            self.num_dropped += len(keys)
            if home == DRIVER:
                self.own.drop(keys)
            elif self.actors is not None:
                self.actors.background(self._drop_in(home, keys))

    async def _drop_in(self, home: str, keys: Sequence[str]) -> None:
        with suppress(HolderLostError):
            await self._call(home, "drop", keys)

    async def save(self, folder: Path, rows: Sequence[TrajectoryRef]) -> tuple[list[FileEntry], list[dict[str, Any]]]:
        """Lets each process write its rows to a file below a checkpoint's folder; returns the files' entries, and which rows are
        in which file, JSON-able.  Raises HolderLostError."""
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        parts = by_home(rows)
        names = {home: f"{FOLDER}/{number}.safetensors" for number, home in enumerate(parts)}
        keys = {home: [rows[number].key for number in numbers] for home, numbers in parts.items()}
        saving = (self._call(home, "save", folder / names[home], keys[home]) for home in parts)
        entries: list[FileEntry] = await asyncio.gather(*saving)
        return entries, [{"file": names[home], "home": home, "keys": keys[home]} for home in parts]

    async def load(self, folder: Path, files: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], tuple[str, str]]:
        """Lets the processes take the rows that `save` wrote, a file each in turn; returns each row's new home and key by its old
        ones."""
        homes = self.homes()
        moved: dict[tuple[str, str], tuple[str, str]] = {}
        for file, home in zip(files, itertools.cycle(homes), strict=False):
            keys = [_RESUMED + key for key in file["keys"]]  # the new run gives names of its own
            await self._call(home, "load", folder / file["file"], keys)
            moved |= {(file["home"], old): (home, new) for old, new in zip(file["keys"], keys, strict=True)}
        return moved

    def adopt(self, trajectory: Trajectory) -> TrajectoryRef:
        """Keeps the tokens of a trajectory of a checkpoint, which the driver has read."""
        return self.own.keep(f"{_RESUMED}{next(self._adopted)}", trajectory)

    def homes(self) -> list[str]:
        """Returns the processes that live."""
        actors = [] if self.actors is None else [member.home for member in self.actors.members]
        return actors or [DRIVER]

    async def sizes(self) -> dict[str, tuple[int, int]]:
        """Returns the number of rows that each process keeps, and their bytes.  Raises HolderLostError."""
        homes = list({DRIVER, *self.homes()})
        return dict(zip(homes, await asyncio.gather(*(self._call(home, "size") for home in homes)), strict=True))

    async def _call(self, home: str, method: str, *args: Any) -> Any:
        if home == DRIVER:
            return getattr(self.own, method)(*args)
        return await self._call_actor(home, "rows", method, *args)

    async def _call_actor(self, home: str, method: str, *args: Any) -> Any:
        member = self._member(home)
        try:
            return await member.actor.call(method, *args)
        except WorkerDiedError as error:
            assert self.actors is not None, "its member was found"
            self.actors.lost(member, error)
            raise lost_holder(home) from error

    def _member(self, home: str) -> PooledActor:
        member = None if self.actors is None else self.actors.at(home)
        if member is None:
            raise lost_holder(home)
        return member


@dataclass(slots=True, frozen=True)
class ActorRows:
    """Is the RowSource of rows that an episode actor has."""

    home: str
    address: ActorAddress
    request: RowRequest

    def begin(self) -> Callable[[], DataProto]:
        try:
            waiting = self.address.begin("rows", "read", self.request)
        except WorkerDiedError as error:
            raise lost_holder(self.home) from error

        def wait() -> DataProto:
            try:
                rows: DataProto = waiting()
            except WorkerDiedError as error:
                raise lost_holder(self.home) from error
            return rows

        return wait


@dataclass(slots=True, frozen=True)
class GivenRows:
    """Is the RowSource of rows that the driver has, and sends along."""

    rows: DataProto

    def begin(self) -> Callable[[], DataProto]:
        return lambda: self.rows


def lost_holder(home: str) -> HolderLostError:
    """Returns the error for rows of a process that has ended."""
    return HolderLostError("it kept tokens of finished episodes, and has ended", role=home, rank=0, node="")


class KeepingWorkflow(RolloutWorkflow):
    """Runs episodes whose tokens stay where they run: in the episode actors, or where these cannot build the workflow, or there
    are none, in the driver.

    name: the workflow's, for the log.  remote: runs them in the actors; None: there are none.  build: builds the workflow here.
    """

    def __init__(
        self, name: str, store: TrajectoryStore, remote: RemoteWorkflow | None, build: Callable[[], RolloutWorkflow]
    ) -> None:
        self._name, self._store, self._remote, self._build = name, store, remote, build
        self._inner: RolloutWorkflow | None = None
        self._runs = itertools.count()
        if remote is None:
            self._run_here("actor_rollout_ref.rollout.agent.num_workers=0")

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
        """Runs the episode; returns its numbers."""
        if self._inner is None:
            assert self._remote is not None, "else there is an inner one"
            try:
                return await self._remote.arun_episode(engine, data)
            except (ConfigError, RegistryError) as error:
                if self._inner is None:
                    self._run_here(f"no episode actor can build it ({error})")
        assert self._inner is not None, "built a moment ago"
        result = await self._inner.arun_episode(engine, data)
        key = f"{data.session}/{next(self._runs)}"
        if isinstance(result, Episode):
            return self._store.keep_episode(key, result)
        return self._store.keep(key, result) if isinstance(result, Trajectory) else result

    def _run_here(self, why: str) -> None:
        self._inner = self._build()
        logger.info("workflow %s runs in the driver's process, which keeps the tokens of its episodes: %s", self._name, why)

    async def aclose(self) -> None:
        for workflow in (self._inner, self._remote):
            if workflow is not None:
                await workflow.aclose()


def by_home(rows: Sequence[TrajectoryRef]) -> dict[str, list[int]]:
    """Returns the numbers of the rows that each process keeps."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        found[row.home].append(number)
    return dict(found)
