"""Samplers choose the rows of the data that train next.  They have a state, may learn from what the samples of a row scored, and
go on bit-exactly after a resume.

    uniform       every row once an epoch, in an order that follows from data.seed and the epoch
    curriculum    rows whose measured pass rate lies in a band; the others wait in pools of easy and of hard rows
    mixture       the sources in fixed shares of every batch (data.sources.<name>.weight), each in its own uniform order

A sampler's choices are a function of its seed and of what it has observed.  Observations enter between two steps, in the order of
the prompts' ordinals, so that the order in which groups of episodes finish does not change what is drawn.  No torch here: the
checks before the start read the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from rlhub.config.names import target_problems, unknown
from rlhub.errors import ConfigError, DataError, LoadError
from rlhub.registry import Registry, knobs_for, suggest
from rlhub.utils.seeding import Purpose, permutation, uniforms
from rlhub.utils.user_code import load_target

Indices = NDArray[np.int64]
"""Rows of the data set by number, (n,)."""
WHERE = "data.sampler_kwargs"


@dataclass(slots=True, kw_only=True, frozen=True)
class SamplerData:
    """The data set as a sampler reads it.

    num_rows: its rows.  sources: the data_source of each row.  extra_info: of each row.  seed: data.seed.  shuffle: data.shuffle.
    batch_size: rows of a training batch; an epoch ends when fewer are left.  weights: the share of each source, by name, of those
    that have one (data.sources).
    """

    num_rows: int
    sources: Sequence[str] = ()
    extra_info: Sequence[Mapping[str, Any]] = ()
    seed: int = 1
    shuffle: bool = True
    batch_size: int = 1
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, frozen=True)
class Observation:
    """What the samples of some prompts scored.

    indices: (n,) int64, the row of each prompt, in the order of ordinals; a row may occur twice.  pass_rates: (n,) float64, the
    share of right samples among those with a valid score.  rewards: (n,) float64, their mean reward.  step: the training step
    (from 1) after which it enters.
    """

    indices: Indices
    pass_rates: NDArray[np.float64]
    rewards: NDArray[np.float64]
    step: int


class Sampler(ABC):
    """Chooses rows.  A class of your own (data.sampler=path.py:Class) is built with the data and its knobs, in every process that
    runs the training loop, so it must draw its randomness from `data.seed` alone.

    knobs: the dataclass of its settings in data.sampler_kwargs; None for no settings.  observes: whether it reads scores.
    epoch: the number of complete passes over the data.
    """

    knobs: ClassVar[type[Any] | None] = None
    observes: ClassVar[bool] = False

    def __init__(self, data: SamplerData, knobs: Any = None) -> None:
        self.data = data
        self.epoch = 0

    @abstractmethod
    def next(self, count: int) -> Indices:
        """Returns the rows of the next batch, (count,) int64; fewer only at the end of an epoch of a sampler with such ends."""

    def observe(self, seen: Observation) -> None:  # noqa: B027  most samplers do not observe
        """Learns what samples scored."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns its position and what it has learned as JSON-able values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`.  Raises DataError where settings that fix the order have changed."""

    def metrics(self) -> dict[str, float]:
        """Returns what it reports of itself, as sampler/<name>."""
        return {}


SAMPLERS: Registry[type[Sampler]] = Registry("sampler")


@SAMPLERS.register("uniform")
class UniformSampler(Sampler):
    """Every row once an epoch: a permutation that is a pure function of seed and epoch, or the order of the files."""

    def __init__(self, data: SamplerData, knobs: Any = None) -> None:
        super().__init__(data)
        self.cursor = 0
        self._order: tuple[int, Indices] | None = None

    def next(self, count: int) -> Indices:
        indices = self._rows()[self.cursor : self.cursor + count]
        self.cursor += len(indices)
        self._end_epoch_without_a_batch()
        return indices

    def _rows(self) -> Indices:
        if self._order is None or self._order[0] != self.epoch:
            data = self.data
            rows = permutation(data.seed, self.epoch, data.num_rows) if data.shuffle else np.arange(data.num_rows)
            self._order = self.epoch, rows
        return self._order[1]

    def _end_epoch_without_a_batch(self) -> None:
        if self.data.num_rows - self.cursor < self.data.batch_size:
            self.epoch, self.cursor = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.data.seed, "shuffle": self.data.shuffle, "epoch": self.epoch, "cursor": self.cursor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        refuse_changes(state, {"seed": self.data.seed, "shuffle": self.data.shuffle})
        self.epoch, self.cursor = int(state["epoch"]), int(state["cursor"])
        self._end_epoch_without_a_batch()  # resumed with a larger batch size than what was left of the epoch


@SAMPLERS.register("mixture")
class MixtureSampler(Sampler):
    """Fixed shares of the sources in every batch, as exact as whole rows allow: what a batch rounds off, the next ones make up.

    An epoch is as many rows as the data set has; a source with a large share and few rows comes several times in it.
    """

    def __init__(self, data: SamplerData, knobs: Any = None) -> None:
        super().__init__(data)
        self.names = sorted(set(data.sources))
        self.shares = source_shares(self.names, data.weights)
        rows = np.array(data.sources, dtype=object)
        self._rows = [np.flatnonzero(rows == name) for name in self.names]
        self._drawn = [0] * len(self.names)
        self._orders: dict[int, tuple[int, Indices]] = {}

    def next(self, count: int) -> Indices:
        indices = np.array([self._row_of(self._most_owed()) for _ in range(count)], dtype=np.int64)
        self.epoch = sum(self._drawn) // self.data.num_rows
        return indices

    def _most_owed(self) -> int:
        """Returns the source that is farthest behind its share with the next row."""
        total = sum(self._drawn) + 1
        return max(range(len(self.names)), key=lambda source: (self.shares[source] * total - self._drawn[source], -source))

    def _row_of(self, source: int) -> int:
        rows = self._rows[source]
        epoch, place = divmod(self._drawn[source], len(rows))
        self._drawn[source] += 1
        if not self.data.shuffle:
            return int(rows[place])
        if self._orders.get(source, (-1,))[0] != epoch:
            self._orders[source] = epoch, permutation(self.data.seed, epoch * len(self.names) + source, len(rows))
        return int(rows[self._orders[source][1][place]])

    def state_dict(self) -> dict[str, Any]:
        drawn = dict(zip(self.names, self._drawn, strict=True))
        shares = dict(zip(self.names, self.shares, strict=True))
        return {"seed": self.data.seed, "shuffle": self.data.shuffle, "epoch": self.epoch, "drawn": drawn, "shares": shares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        shares = dict(zip(self.names, self.shares, strict=True))
        refuse_changes(state, {"seed": self.data.seed, "shuffle": self.data.shuffle, "shares": shares})
        self._drawn = [int(state["drawn"][name]) for name in self.names]
        self.epoch = int(state["epoch"])


@dataclass(slots=True, kw_only=True)
class CurriculumKnobs:
    """Settings of the curriculum (data.sampler_kwargs).

    low, high: the band; rows with a pass rate of at most `low` are hard, and of at least `high` easy.  by: the entry of
    extra_info, or data_source, whose equal values share one pass rate; null: each row has its own.  rate: weight of each newly
    scored prompt in the pass rate, the rest is what it was.  revisit: share of the rows that come from the pools of hard and of
    easy rows, half each, since the policy changes.  retire_after: easy observations in a row after which rows come no more; 0:
    none retire.
    """

    low: float = 0.1
    high: float = 0.9
    by: str | None = None
    rate: float = 0.5
    revisit: float = 0.1
    retire_after: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"low={self.low} and high={self.high}: expected 0 <= low < high <= 1")
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate={self.rate}: expected above 0 and at most 1")
        if not 0 <= self.revisit <= 1:
            raise ValueError(f"revisit={self.revisit}: expected 0 to 1")
        if self.retire_after < 0:
            raise ValueError(f"retire_after={self.retire_after}: expected 0 or more")


LEARNING, HARD, EASY, RETIRED = range(4)
POOLS = {"learning": LEARNING, "hard": HARD, "easy": EASY, "retired": RETIRED}


@SAMPLERS.register("curriculum", knobs=CurriculumKnobs)
class CurriculumSampler(Sampler):
    """Rows from which the policy can learn now: those that it solves sometimes.  A group whose samples all pass, or all fail, has
    no advantage to learn from (the reason of dynamic sampling, Yu et al. 2025, arXiv 2503.14476; here they are not generated).

    Rows that were never seen count as learning.  Of a pool the rows that were drawn least come first, in a random order; a row
    comes the more often the larger its learnability p (1 - p) is, the variance of one sample's score (Foster et al. 2025, arXiv
    2502.12272).  With `by`, each unit sends rows in proportion to their number and learnability, however often they were drawn,
    so that rows that enter the band late do not push the others out.  Where the band has too few rows, hard and easy ones fill
    the batch, then retired ones.
    """

    knobs = CurriculumKnobs
    observes = True

    def __init__(self, data: SamplerData, knobs: CurriculumKnobs | None = None) -> None:
        super().__init__(data)
        self.settings = knobs or CurriculumKnobs()
        self.names, self._unit = units_of(data, self.settings.by)
        self.pass_rates = np.full(len(self.names), np.nan)
        self._easy_in_a_row = np.zeros(len(self.names), dtype=np.int64)
        self._draws = np.zeros(data.num_rows, dtype=np.int64)
        self._batches = self._revisited = 0

    def next(self, count: int) -> Indices:
        order = np.argsort(self._turns() / self._learnability()[self._unit])
        pools = self._pools()[self._unit][order]
        rows = {pool: order[pools == pool] for pool in POOLS.values()}
        due = int(self.settings.revisit * (self._draws.sum() + count)) - self._revisited
        indices = self._revisits(rows, max(due, 0))
        self._revisited += len(indices)
        for fill in ([LEARNING], [HARD, EASY], [RETIRED]):
            left = order[np.isin(pools, fill) & ~np.isin(order, indices)]
            indices = np.concatenate([indices, left[: count - len(indices)]])
        self._batches += 1
        self._draws[indices] += 1
        self.epoch = int(self._draws.sum()) // self.data.num_rows
        return indices

    def _turns(self) -> NDArray[np.float64]:
        """Returns the place of each row among those that share its pass rate, (rows,): least drawn first, in a random order."""
        noise = uniforms(self.data.seed, Purpose.CURRICULUM, self._batches, count=self.data.num_rows)
        turns = self._draws + noise
        if self.settings.by is None:
            return turns
        order, sizes = np.lexsort((turns, self._unit)), np.bincount(self._unit)
        ranks = np.arange(self.data.num_rows) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        turns[order] = (ranks + noise) / np.repeat(sizes, sizes)  # the row of the first rank has the least noise itself
        return turns

    def _learnability(self) -> NDArray[np.float64]:
        """Returns 4 p (1 - p) of each unit, at least 0.04, as of a pass rate of 0.01; 1 of one that was never seen; (units,)."""
        rates = np.where(np.isnan(self.pass_rates), 0.5, self.pass_rates)
        learnability: NDArray[np.float64] = np.maximum(4 * rates * (1 - rates), 0.04)
        return learnability

    def _revisits(self, rows: Mapping[int, Indices], most: int) -> Indices:
        """Returns rows of the two pools, in turns where both have so many."""
        before = self._revisited
        num_hard = max((before + most + 1) // 2 - (before + 1) // 2, most - len(rows[EASY]))
        hard = rows[HARD][:num_hard]
        return np.concatenate([hard, rows[EASY][: most - len(hard)]])

    def _pools(self) -> NDArray[np.int64]:
        """Returns the pool of each unit, (units,)."""
        knobs, rates = self.settings, self.pass_rates  # NaN, of what was never seen, is in no pool but the first
        pools = np.where(rates >= knobs.high, EASY, np.where(rates <= knobs.low, HARD, LEARNING))
        retired = (self._easy_in_a_row >= knobs.retire_after) & (knobs.retire_after > 0)
        return np.where(retired, RETIRED, pools)

    def observe(self, seen: Observation) -> None:
        """Moves the pass rates of what was seen, the more the more prompts of a unit it has; their mean counts."""
        units = self._unit[seen.indices]
        for unit, prompts in zip(*np.unique(units, return_counts=True), strict=True):
            found, old = float(seen.pass_rates[units == unit].mean()), self.pass_rates[unit]
            kept = 0.0 if np.isnan(old) else (1 - self.settings.rate) ** int(prompts)
            self.pass_rates[unit] = found if not kept else kept * old + (1 - kept) * found
            self._easy_in_a_row[unit] = self._easy_in_a_row[unit] + 1 if self.pass_rates[unit] >= self.settings.high else 0

    def state_dict(self) -> dict[str, Any]:
        seen = np.flatnonzero(~np.isnan(self.pass_rates)).tolist()
        return {
            "seed": self.data.seed,
            "by": self.settings.by,
            "batches": self._batches,
            "revisited": self._revisited,
            "draws": [[row, int(self._draws[row])] for row in np.flatnonzero(self._draws).tolist()],
            "units": [[self.names[unit], float(self.pass_rates[unit]), int(self._easy_in_a_row[unit])] for unit in seen],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        refuse_changes(state, {"seed": self.data.seed, "by": self.settings.by})
        self._batches, self._revisited = int(state["batches"]), int(state["revisited"])
        for row, draws in state["draws"]:
            self._draws[row] = draws
        numbers = {name: unit for unit, name in enumerate(self.names)}
        for name, pass_rate, in_a_row in state["units"]:
            self.pass_rates[numbers[name]], self._easy_in_a_row[numbers[name]] = pass_rate, in_a_row
        self.epoch = int(self._draws.sum()) // self.data.num_rows

    def metrics(self) -> dict[str, float]:
        """Returns the number of rows in each pool, and of those that were never seen."""
        pools = self._pools()[self._unit]
        found = {f"sampler/{name}": float((pools == pool).sum()) for name, pool in POOLS.items()}
        return found | {"sampler/unseen": float(np.isnan(self.pass_rates[self._unit]).sum())}


def units_of(data: SamplerData, by: str | None) -> tuple[list[str], Indices]:
    """Returns the names of what has a pass rate of its own, and the number of each row's, (rows,) int64.

    Raises DataError where a row has no such entry.
    """
    if by is None:
        return [str(row) for row in range(data.num_rows)], np.arange(data.num_rows)
    infos = [{"data_source": name} for name in data.sources] if by == "data_source" else data.extra_info
    for number, info in enumerate(infos):
        if info.get(by) is None:
            known = ["data_source", *info]
            raise DataError(
                f"{WHERE}.by={by}: usable row {number + 1} of data.train_files has no such entry in extra_info"
                f"{suggest(by, known)}; known: {', '.join(known)}"
            )
    names, units = np.unique([str(info[by]) for info in infos], return_inverse=True)
    return names.tolist(), units.astype(np.int64)


def source_shares(names: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    """Returns the share of each source; one without a weight has the weight 1.  Raises DataError where all weights are 0."""
    given = [float(weights.get(name, 1.0)) for name in names]
    if not sum(given):
        raise DataError(f"data.sources: all sources of data.train_files have the weight 0 ({', '.join(names)}); give one another")
    return [weight / sum(given) for weight in given]


def refuse_changes(state: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises DataError where a setting that fixes the order is not what it was."""
    names = {"by": f"{WHERE}.by", "shares": "the shares of data.sources"}
    for name, value in now.items():
        if state[name] != value:
            shown = names.get(name, f"data.{name}")
            raise DataError(f"{shown} was {state[name]} when the run was started and is {value} now: set it back")


class SamplerSettings(Protocol):
    """The settings that choose a sampler (section `data`)."""

    sampler: str
    sampler_kwargs: dict[str, Any]


def sampler_class(name: str) -> type[Sampler]:
    """Returns the class of a registered name, `module:Class` or `path/to/file.py:Class`.  Raises ConfigError if there is none."""
    if ":" not in name:
        return SAMPLERS.get(name)
    try:
        found = load_target(name)
    except LoadError as error:
        raise ConfigError(f"data.sampler={error}") from error
    if not isinstance(found, type) or not issubclass(found, Sampler):
        raise ConfigError(f"data.sampler={name}: expected a subclass of rlhub.data.samplers.Sampler, got {found!r}")
    return found


def sampler_problems(config: SamplerSettings) -> list[str]:
    """Returns the problems of the configured sampler and its knobs.  The file of a class of the user's own is not run."""
    name = config.sampler
    if ":" in name:
        return target_problems("data.sampler", name)
    if name not in SAMPLERS:
        return unknown("data.sampler", SAMPLERS, name)
    try:
        knobs_for(SAMPLERS.knobs_class(name), config, config.sampler_kwargs, where=WHERE)
    except ConfigError as error:
        return list(error.problems)
    return []


def build_sampler(config: SamplerSettings, data: SamplerData) -> Sampler:
    """Returns the sampler of a configuration.  Raises ConfigError for knobs that it does not have, DataError where a batch has
    all rows, so that one that learns from scores has nothing to choose."""
    cls = sampler_class(config.sampler)
    if cls.observes and data.num_rows <= data.batch_size:
        raise DataError(
            f"data.sampler={config.sampler}: data.train_files have {data.num_rows} usable rows and data.train_batch_size="
            f"{data.batch_size}, so there is nothing to choose; lower it, add rows, or set data.sampler=uniform"
        )
    return cls(data, knobs_for(cls.knobs, config, config.sampler_kwargs, where=WHERE))
