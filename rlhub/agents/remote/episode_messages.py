"""The messages between the driver and an episode actor: those of many episodes travel together, as tuples of numbers.

A call costs some hundred bytes, whatever it carries, and an episode of one generation sends five messages.  What comes up within
a few turns of an event loop therefore shares a call: `Orders` go to the actor, and the driver has one call pending there that
returns with `Reports`.  Messages that are rare or large (environments, tokens, errors) go by calls of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhub.agents.trajectory import FinishReason, TrajectoryRef
from rlhub.engines.rollout.base import FINISH_CODES, Completion
from rlhub.errors import RlhubError

TURNS = 4
"""Turns of the event loop that a message waits for others: the samples of a prompt start within so many, and an episode ends
within so many after its last generation."""
REASONS: tuple[FinishReason, ...] = tuple(FINISH_CODES)

Start = tuple[int, int, int, int] | tuple[int, int, int, int, Completion]
"""An episode that starts: the number of its run, its prompt, sample and seed, and where it has one its partial completion."""
Placement = tuple[int, int, int] | tuple[int, int, int, str]
"""A replica for a generation: run, request, replica, and the request's id there if it is not the episode's session."""
Orders = tuple[list[Start], list[Placement], list[int]]
"""The episodes that start, the generations that have a replica, and the prompts that have ended."""

PlaceRequest = tuple[int, int, int] | tuple[int, int, int, str]
"""A request for a replica to generate at: run, request, cost (see RemoteGeneration), and its session if not the episode's."""
GeneratedReport = tuple[int, int, int, int] | tuple[int, int, RlhubError]
"""The end of a generation: run, request, number of tokens and FINISH_CODES of its reason, or the error of the replica."""


class Reports(NamedTuple):
    """The messages of an actor's episodes to the driver.

    number: of these reports.  kept: the numbers of finished episodes, see `pack_ref`.  waiting: a run for each message that the
    driver fetches with `next_message`.  The lists are in the order in which those of one run happened.
    """

    number: int
    placing: list[PlaceRequest]
    generated: list[GeneratedReport]
    waiting: list[int]
    kept: list[tuple[Any, ...]]


class ReportBox:
    """Collects reports in the actor until the driver asks for them, and keeps the last ones until it asks for others."""

    def __init__(self) -> None:
        self._given = Reports(0, [], [], [], [])
        self._filled = asyncio.Event()
        self._next = self._empty()

    def _empty(self) -> Reports:
        return Reports(self._given.number + 1, [], [], [], [])

    @property
    def next(self) -> Reports:
        """Returns those that are not given out, to be added to."""
        self.wake()
        return self._next

    def wake(self) -> None:
        """Lets a driver that waits see that nothing is left to wait for."""
        self._filled.set()

    async def take(self, have: int) -> Reports:
        """Returns the reports that follow those of number `have`; waits for the first."""
        if self._given.number <= have:
            await self._filled.wait()
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if self._given.number <= have:  # no other call has taken them
                self._given = self._next
                self._next = self._empty()
                self._filled.clear()
        return self._given


def pack_ref(run: int, ref: TrajectoryRef) -> tuple[Any, ...]:
    """Returns the numbers of a finished episode without home and key; fields at the end that have their defaults are left out."""
    runs = tuple(number for pair in ref.runs for number in pair)
    fields = [run, ref.prompt_length, ref.response_length, runs, FINISH_CODES[ref.finish_reason]]
    more = [ref.rewards, ref.added_rewards, ref.metrics, ref.comparison]
    while more and not more[-1]:
        more.pop()
    return (*fields, *more)


def unpack_ref(packed: Sequence[Any], home: str) -> TrajectoryRef:
    """Returns the numbers of an episode that `pack_ref` packed; the process `home` keeps its tokens under the run's number."""
    run, prompt_length, response_length, runs, code, *more = packed
    rewards, added, metrics, comparison = [*more, None, None, None, None][:4]
    return TrajectoryRef(
        home=home,
        key=str(run),
        prompt_length=prompt_length,
        response_length=response_length,
        runs=list(zip(runs[::2], runs[1::2], strict=True)),
        finish_reason=REASONS[code],
        rewards=rewards,
        added_rewards=added,
        metrics=metrics or {},
        comparison=comparison or "",
    )
