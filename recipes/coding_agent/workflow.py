"""An episode of the coding agent: the policy writes a function, its tests run in a sandbox, and after a failure it tries again.

The sandbox gets the function and the arguments of the tests, never the results that they should have: these are compared
outside.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes.coding_agent.generate import feedback
from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts
from rlhub.agents.workflows.registry import fill_knobs
from rlhub.agents.workflows.turns import Transcript, TurnTemplate
from rlhub.sandboxes.registry import load_sandbox

HARNESS = """
import json, sys
task = json.load(sys.stdin)
def result(f, argument):
    try:
        return repr(f(argument))
    except Exception as error:
        return type(error).__name__
names = {}
try:
    exec("def f(x):\\n    " + task["body"] + "\\n    return x\\n", names)
    f = names["f"]
except Exception as error:
    def f(x, error=error):
        raise error
print(json.dumps([result(f, argument) for argument in task["inputs"]]))
"""
CHANCE = 0.4
"""Share of rewarded episodes in the control with a coin: about the share that passes at the start."""


@dataclass(slots=True, kw_only=True)
class CodingKnobs:
    """The settings of the episodes."""

    sandbox: Any = "bwrap"
    """The sandbox of the tests: a name, or a mapping with `name` and settings."""
    num_sandboxes: int = 4
    """Maximum number of tests that run at the same time."""
    second_try: float = 0.8
    """The reward of a function that passes at the second try; one that passes at once has 1."""
    tests: Literal["real", "always", "coin"] = "real"
    """real: tests run in training.  Controls, of training only: every function passes, or a coin decides the reward."""


class CodingAgent(RolloutWorkflow):
    """Asks for a function up to two times."""

    def __init__(self, parts: WorkflowParts) -> None:
        super().__init__(parts)
        self.knobs = fill_knobs(CodingKnobs, parts.kwargs)
        self.template = TurnTemplate(parts.tokenizer, roles=["user"])
        self.sandboxes = load_sandbox(self.knobs.sandbox, where="rollout.agent.kwargs.sandbox", memory_gb=0.25, disk_mb=8)
        self.places = asyncio.Semaphore(self.knobs.num_sandboxes)
        self.tested: dict[tuple[str, str], asyncio.Task[str | None]] = {}

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        trains = data.row["extra_info"]["split"] == "train"
        talk = Transcript(prompt_ids=list(data.prompt_ids), budget=self.parts.max_response_length, scored=True)
        said = await self._try(talk, engine, data, trains, most=talk.remaining // 3)
        at_once = said is None
        if said is not None and talk.add_context(self._between(talk, said)):
            said = await self._try(talk, engine, data, trains)
        passed = float(said is None)
        reward = passed * (self.knobs.second_try if trains and not at_once else 1.0)
        if trains and self.knobs.tests == "coin":
            reward = float(random.Random(f"{data.seed} {data.session}").random() < CHANCE)
        talk.add_reward(reward)
        return talk.trajectory({"passed": passed, "passed_at_once": float(at_once)})

    async def _try(
        self, talk: Transcript, engine: EpisodeEngine, data: EpisodeData, trains: bool, *, most: int | None = None
    ) -> str | None:
        """Lets the policy write, and returns what it reads of the first test that fails; None if all pass."""
        written = await talk.generate(engine, data, self.parts.sampling, most=most)
        if trains and self.knobs.tests == "always":
            return None
        return await self.failure(self.template.text(written.token_ids), data.row["ground_truth"])

    def _between(self, talk: Transcript, said: str) -> list[int]:
        message = {"role": "user", "content": self.template.neutral(said)}
        return self.template.between([message], turn_ended=self.template.ended(talk.response_ids))

    async def failure(self, body: str, tests: str) -> str | None:
        """Returns what to say of the first test that fails.  Samples of a prompt often are the same function: it is run once."""
        if (body, tests) not in self.tested:
            self.tested[body, tests] = asyncio.create_task(self._run(body, json.loads(tests)))
        return await asyncio.shield(self.tested[body, tests])

    async def _run(self, body: str, tests: Mapping[str, Any]) -> str | None:
        """Runs the tests of a function in a sandbox of its own."""
        task = json.dumps({"body": body, "inputs": tests["inputs"]}).encode()
        async with self.places, await self.sandboxes.open() as sandbox:
            found = await sandbox.exec([self.sandboxes.python, "-I", "-S", "-c", HARNESS], stdin=task)
        results = _results(found.stdout, len(tests["inputs"]), found.ended or "no result")
        for argument, got, want in zip(tests["inputs"], results, tests["wants"], strict=True):
            if got != want:
                return feedback(argument, got, want)
        return None


def _results(printed: bytes, count: int, otherwise: str) -> list[str]:
    """The results that the harness printed; the function may have printed something else."""
    try:
        found = json.loads(printed)
    except ValueError:
        found = None
    return [str(item) for item in found] if isinstance(found, list) and len(found) == count else [otherwise] * count
