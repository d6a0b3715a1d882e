"""vowels: one question, one answer.  The share of vowels among the characters of the answer is the reward.

A policy of random weights finds its first vowels by chance, so that the smallest model learns it from nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Vowels"]

VOWELS = frozenset("aeiou")


class VowelsTask(vf.Task[vf.TaskData]):
    """Scores the answer."""

    @vf.reward
    async def vowels(self, trace: vf.Trace) -> float:
        """The share of vowels."""
        answer = trace.last_reply
        return sum(letter in VOWELS for letter in answer) / max(len(answer), 1)

    @vf.metric
    async def different(self, trace: vf.Trace) -> float:
        """Different vowels in the answer."""
        return float(len(VOWELS & set(trace.last_reply)))


class VowelsConfig(vf.TasksetConfig):
    """num_tasks: questions, which differ by their number."""

    num_tasks: int = 64


class Vowels(vf.Taskset[VowelsTask, VowelsConfig]):
    """Numbered questions."""

    def load(self) -> Iterator[VowelsTask]:
        for number in range(self.config.num_tasks):
            data = vf.TaskData(name=f"vowels {number}", prompt=f"Say vowels, {number}.")
            yield VowelsTask(data, self.config.task)
