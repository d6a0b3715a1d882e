"""`trainer.faults` as typed rows, and their rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhub.config.load import build
from rlhub.config.rules.parallel import all_ranks
from rlhub.config.schema import NonNegativeInt, PositiveFloat
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.registry import suggest
from rlhub.utils.faults import PLACES, Fault, FaultKind

KEY = "trainer.faults"
_EXAMPLE = "{kind: kill, place: actor.update_actor, rank: 1, step: 2}"


@dataclass(slots=True, kw_only=True)
class FaultRow:
    """One row of trainer.faults."""

    kind: FaultKind = "kill"
    """Kind of the fault."""
    place: str = ""
    """Place in the code that the fault strikes."""
    rank: NonNegativeInt = 0
    """Process that the fault strikes, where several pass the place: a rank of its group, or the number of a replica."""
    step: NonNegativeInt = 1
    """Training step in which the fault strikes; 0: before the first step."""
    seconds: PositiveFloat = 60.0
    """Length of a delay, or time after which a stopped process continues."""


def planned_faults(trainer: TrainerConfig) -> tuple[Fault, ...]:
    """Returns the faults of a checked configuration."""
    return tuple(Fault(**dataclasses.asdict(build(FaultRow, row, []))) for row in trainer.faults)


def problems(trainer: TrainerConfig) -> Iterator[str]:
    """Yields all problems of the rows, each with the row's number."""
    names = [field.name for field in dataclasses.fields(FaultRow)]
    for number, row in enumerate(trainer.faults):
        where, wrong = f"{KEY}[{number}]", list[str]()
        built = build(FaultRow, row, wrong, prefix=f"{where}.")
        yield from wrong
        yield from (
            f"{where}.{key}: no such key{suggest(str(key), names)}; known: {', '.join(names)}" for key in row if key not in names
        )
        if missing := [name for name in ("kind", "place") if name not in row]:
            yield f"{where}: {' and '.join(missing)} must be given, for example {_EXAMPLE}"
        elif not wrong:
            yield from _misplaced(where, built, row, trainer)
        if row in trainer.faults[:number]:
            yield f"{where}: the same fault stands in row {trainer.faults.index(row)}; each strikes once"


def _misplaced(where: str, built: FaultRow, row: Mapping[str, Any], trainer: TrainerConfig) -> Iterator[str]:
    """Yields the reasons why a fault cannot strike at its place, rank or step."""
    place, steps, ranks = PLACES.get(built.place), trainer.total_training_steps, all_ranks(trainer)
    if place is None:
        yield f"{where}.place={built.place}: no such place{suggest(built.place, PLACES)}; known: {', '.join(PLACES)}"
    elif built.kind not in place.kinds:
        yield f"{where}: {built.kind} cannot happen at {built.place} ({place.doc}); there can be {', '.join(place.kinds)}"
    elif built.place.startswith("actor.") and built.rank >= ranks.count:
        yield f"{where}.rank={built.rank}, but the actor has {ranks.text}, counted from 0"
    if steps is not None and built.step > steps:
        yield f"{where}.step={built.step} never comes: trainer.total_training_steps={steps}"
    if "seconds" in row and built.kind not in ("stop", "delay"):
        yield f"{where}.seconds={built.seconds:g} has no meaning for {built.kind}, only for stop and delay"
