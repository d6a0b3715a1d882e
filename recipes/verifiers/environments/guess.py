"""guess: several turns.  The policy guesses a number from 1 to 9 and hears `higher` or `lower`, three times at most."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Guess", "GuessEnv"]

NUMBER = re.compile(r"\d+")
LARGEST = 9


class GuessData(vf.TaskData):
    """secret: the number."""

    secret: int


class GuessTask(vf.Task[GuessData]):
    """Its reward comes from the environment, which has seen the game."""


class GuessConfig(vf.TasksetConfig):
    """num_tasks: secrets, drawn with replacement."""

    num_tasks: int = 64
    seed: int = 1


class Guess(vf.Taskset[GuessTask, GuessConfig]):
    """Secrets in random order."""

    def load(self) -> Iterator[GuessTask]:
        chance = random.Random(self.config.seed)
        for number in range(self.config.num_tasks):
            data = GuessData(name=f"guess {number}", prompt="Guess my number.", secret=chance.randint(1, LARGEST))
            yield GuessTask(data, self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    """guesses: at most so many."""

    player: vf.AgentConfig = vf.AgentConfig()
    guesses: int = 3


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Answers the guesses."""

    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        reward = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for left in range(self.config.guesses - 1, -1, -1):
                numbers = NUMBER.findall(segment.last_reply)
                guess = int(numbers[-1]) if numbers else 0
                if guess == task.data.secret:
                    reward = (left + 1) / self.config.guesses
                if segment.terminated or reward or not left:
                    break
                segment = await interaction.turn("higher" if guess < task.data.secret else "lower")
        interaction.trace.record_reward("found", reward)
