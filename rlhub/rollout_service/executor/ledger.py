"""PromptLedger: the phase of each prompt, so that no prompt is trained twice or forgotten, whatever process is killed at any
time.

issued -> running -> finished -> trained | rejected | dropped; back to running where a process that kept finished samples has
died.  Ordinals are issued in order and never again.  A prompt that has ended leaves the ledger, with its failed attempts, so the
ledger is as large as the work in progress.  All prompts below the frontier have ended; a resumed run reads prompts from there on,
and skips those that have ended too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """The phase of a prompt; the last three are its possible ends."""

    ISSUED = "issued"
    RUNNING = "running"
    FINISHED = "finished"
    TRAINED = "trained"
    REJECTED = "rejected"
    DROPPED = "dropped"


ENDS = (Phase.TRAINED, Phase.REJECTED, Phase.DROPPED)
_NEXT = {
    Phase.ISSUED: (Phase.RUNNING,),
    Phase.RUNNING: (Phase.FINISHED, Phase.REJECTED),
    Phase.FINISHED: (Phase.TRAINED, Phase.DROPPED),
}

OnEnd = Callable[[Sequence[int], Phase, str], None]
"""`on_end(ordinals, phase, reason)` is called when these prompts reach this end, all at once."""


class PromptLedger:
    """Tracks the phases of all open prompts.  Each transition is checked: ValueError for one that would lose or repeat a prompt.

    It is not thread-safe.  first: the first ordinal of the run.  on_end: called at each end, for audits.

    num_retries: the number of episodes that began again after a failure.  num_failed: that of episodes that failed for good.
    attempts: of each open prompt with failures, how many of its episodes' attempts failed.
    """

    def __init__(self, first: int = 0, on_end: OnEnd | None = None) -> None:
        self.next_ordinal = first
        self.counts = dict.fromkeys(ENDS, 0)
        self.num_retries = self.num_failed = 0
        self.attempts: Counter[int] = Counter()
        self.on_end = on_end
        self._open: dict[int, Phase] = {}

    @property
    def frontier(self) -> int:
        """Returns the lowest ordinal that has not ended."""
        return next(iter(self._open), self.next_ordinal)  # ordinals are issued in order, and dicts keep it

    def phase(self, ordinal: int) -> Phase | None:
        """Returns the phase of an open prompt; None if it has ended or was never issued (from next_ordinal on)."""
        return self._open.get(ordinal)

    def in_phase(self, *phases: Phase) -> list[int]:
        """Returns the ordinals in these phases, in order."""
        return [ordinal for ordinal, phase in self._open.items() if phase in phases]

    def issue(self, ordinal: int) -> None:
        """Records that a prompt was read from the data."""
        if ordinal != self.next_ordinal:
            raise ValueError(f"prompts are issued in order: expected ordinal {self.next_ordinal}, got {ordinal}")
        self._open[ordinal] = Phase.ISSUED
        self.next_ordinal += 1

    def run(self, ordinal: int) -> None:
        """Records that the prompt's episodes run."""
        self._move(ordinal, Phase.RUNNING)

    def finish(self, ordinal: int) -> None:
        """Records that the prompt's group is complete and may be trained."""
        self._move(ordinal, Phase.FINISHED)

    def fail(self, ordinal: int, *, again: bool) -> None:
        """Records that an attempt of one of the prompt's episodes failed, and begins again or was the last."""
        if self._open.get(ordinal) is not Phase.RUNNING:
            raise ValueError(f"prompt {ordinal} has no episode that could fail: it is {self._open.get(ordinal, 'at its end')}")
        self.attempts[ordinal] += 1
        self.num_retries += again
        self.num_failed += not again

    def lose(self, ordinal: int) -> None:
        """Records that samples of the prompt's complete group were lost, and their episodes run again."""
        if self._open.get(ordinal) is not Phase.FINISHED:
            raise ValueError(f"prompt {ordinal} has no complete group to lose: it is {self._open.get(ordinal, 'at its end')}")
        self._open[ordinal] = Phase.RUNNING

    def train(self, *ordinals: int) -> None:
        """Records that the groups of these prompts were trained."""
        self._end(ordinals, Phase.TRAINED, "")

    def reject(self, ordinal: int, reason: str) -> None:
        """Records that the prompt's group gave nothing to train."""
        self._end((ordinal,), Phase.REJECTED, reason)

    def drop(self, ordinal: int, reason: str) -> None:
        """Records that the prompt's group was too old to be trained."""
        self._end((ordinal,), Phase.DROPPED, reason)

    def _move(self, ordinal: int, phase: Phase) -> None:
        now = self._open.get(ordinal)
        if now is None or phase not in _NEXT[now]:
            was = f"is {now}" if now else "has ended" if ordinal < self.next_ordinal else "was never issued"
            raise ValueError(f"prompt {ordinal} cannot become {phase}: it {was}")
        self._open[ordinal] = phase

    def _end(self, ordinals: Sequence[int], phase: Phase, reason: str) -> None:
        for ordinal in ordinals:
            self._move(ordinal, phase)
            del self._open[ordinal]
            self.attempts.pop(ordinal, None)
        self.counts[phase] += len(ordinals)
        if self.on_end is not None and ordinals:
            self.on_end(ordinals, phase, reason)

    def state(self) -> dict[str, Any]:
        """Returns the JSON-able state: every prompt below next_ordinal that is not listed has ended."""
        return {
            "next_ordinal": self.next_ordinal,
            "open": [[ordinal, phase.value] for ordinal, phase in self._open.items()],
            "counts": {phase.value: count for phase, count in self.counts.items()},
            "retries": self.num_retries,
            "failed_episodes": self.num_failed,
            "attempts": [[ordinal, count] for ordinal, count in self.attempts.items()],
        }

    def load_state(self, state: Mapping[str, Any], finished: Iterable[int]) -> None:
        """Continues from `state`.  Open prompts that are not among the `finished`, whose samples were saved, are issued again."""
        kept = set(finished)
        self.next_ordinal = int(state["next_ordinal"])
        self.counts = {phase: int(state["counts"][phase.value]) for phase in ENDS}
        self.num_retries, self.num_failed = int(state.get("retries", 0)), int(state.get("failed_episodes", 0))
        self.attempts = Counter({int(ordinal): int(count) for ordinal, count in state.get("attempts", ())})
        self._open = {int(ordinal): Phase.FINISHED if ordinal in kept else Phase.ISSUED for ordinal, _ in sorted(state["open"])}
        lost = kept.difference(self._open)
        if lost:
            raise ValueError(f"samples were kept of prompts that have ended, such as {min(lost)}: they would train twice")
