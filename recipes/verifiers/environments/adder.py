"""adder: tools.  The policy is asked for a sum that a tool computes; one tool server serves all episodes of a process."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Adder"]

NUMBER = re.compile(r"\d+")
LARGEST = 9


class AdderTools(vf.Toolset[vf.SharedToolsetConfig]):
    """One tool."""

    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Returns a + b."""
        return a + b


class AdderData(vf.TaskData):
    """total: the sum."""

    total: int


class AdderTask(vf.Task[AdderData]):
    """Scores the answer and counts calls."""

    @vf.reward
    async def right(self, task: AdderData, trace: vf.Trace) -> float:
        """1.0 if the last number of the last answer is the sum."""
        numbers = NUMBER.findall(trace.last_reply)
        return float(bool(numbers) and int(numbers[-1]) == task.total)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        """Tool calls of the policy."""
        return float(sum(len(message.tool_calls or ()) for message in trace.assistant_messages))


class AdderConfig(vf.TasksetConfig):
    """tools: where the tool server runs."""

    num_tasks: int = 64
    seed: int = 1
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class Adder(vf.Taskset[AdderTask, AdderConfig]):
    """Pairs of numbers."""

    def load(self) -> Iterator[AdderTask]:
        chance = random.Random(self.config.seed)
        for _ in range(self.config.num_tasks):
            a, b = chance.randint(1, LARGEST), chance.randint(1, LARGEST)
            prompt = f"What is {a} + {b}?"
            yield AdderTask(AdderData(name=prompt, prompt=prompt, total=a + b), self.config.task)

    @classmethod
    def toolsets(cls, config: AdderConfig) -> list[vf.Toolset]:
        return [AdderTools(config.tools)]


if __name__ == "__main__":
    AdderTools.run()
