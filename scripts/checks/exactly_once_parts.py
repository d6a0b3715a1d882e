"""What the jobs of exactly_once.py load: an agent that writes down what it did, and faults that the audit must find.

The agent talks in two conversations at once, of two answers each, through OpenAI's client, so each episode has two trajectories;
those of the first `busy` prompts have sixteen long ones.  One attempt in ten fails after its first answers.  The file `log` gets
a line of JSON for each attempt that failed or completed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import string
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import openai

from rlhub.agents.trajectory import Sampled
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, WorkflowParts
from rlhub.agents.workflows.knobs import EndpointKnobs
from rlhub.agents.workflows.openai_agent import AgentEpisodes, AgentResult, EndpointWorkflow, Reward
from rlhub.agents.workflows.registry import fill_knobs
from rlhub.algorithms.advantages.grpo import GRPOKnobs, grpo
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS
from rlhub.rollout_service.executor.ledger import Phase, PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager

FAILING = 0.1
BROKEN = "RLHUB_CHECK_BROKEN"
EXTRA_VERSIONS = 4
TRAINING_S = 8.0
"""What a step of the estimator slow_grpo sleeps if no episode is long."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Shape:
    """An episode: the number of its conversations and of the answers in each, and the most tokens of an answer."""

    conversations: int
    turns: int
    tokens: int


USUAL, BUSY = Shape(conversations=2, turns=2, tokens=8), Shape(conversations=16, turns=1, tokens=256)


@dataclass(slots=True, kw_only=True)
class AuditKnobs(EndpointKnobs):
    """The settings of the agent."""

    max_agents: int = 64
    """Maximum number of agents that run at the same time."""
    log: str = ""
    """File that gets the lines."""
    tool_s: float = 0.1
    """Mean time in seconds of what the agent does between two answers."""
    busy: int = 0
    """Number of prompts whose episodes are long."""


class Conversations(AgentEpisodes):
    """Runs the agent."""

    def __init__(self, parts: WorkflowParts) -> None:
        self.knobs = fill_knobs(AuditKnobs, parts.kwargs)
        super().__init__(parts, self.knobs, "the audited agent")  # type: ignore[arg-type]

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
        attempt = {"ordinal": data.ordinal, "sample": data.sample, "seed": data.seed}
        return await super().arun_episode(engine, replace(data, row={**data.row, "attempt": attempt}))

    async def run_agent(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> AgentResult:
        chance, http = random.Random(row["attempt"]["seed"]), openai.DefaultAsyncHttpxClient(verify=False)
        fails = chance.random() < FAILING
        shape = BUSY if row["attempt"]["ordinal"] < self.knobs.busy else USUAL
        seeds = [chance.random() for _ in range(shape.conversations)]
        try:
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http, max_retries=0) as client:
                talks = [self.talk(client, shape, f"Write {number}.", seed, fails) for number, seed in enumerate(seeds)]
                answers = [answer for talk in await asyncio.gather(*talks) for answer in talk]
        except Exception as error:
            self.note(row, event="failed", why=repr(error)[:200])
            raise
        text = "".join(choice.message.content or "" for choice in answers)
        reward = sum(letter in string.ascii_letters for letter in text) / max(len(text), 1)
        log_probs = [token.logprob for choice in answers for token in choice.logprobs.content]
        self.note(row, event="completed", conversations=shape.conversations, reward=reward, log_probs=log_probs)
        return AgentResult(reward=reward)

    async def talk(self, client: openai.AsyncOpenAI, shape: Shape, begin: str, seed: float, fails: bool) -> list[Any]:
        """Returns the answers of one conversation."""
        chance, messages, answers = random.Random(seed), [{"role": "user", "content": begin}], []
        for _ in range(shape.turns):
            await asyncio.sleep(chance.expovariate(1 / self.knobs.tool_s))
            told = await client.chat.completions.create(
                model="policy",
                messages=messages,  # type: ignore[arg-type]
                max_tokens=shape.tokens,
                logprobs=True,
            )
            answers.append(told.choices[0])
            if fails:
                raise OSError("the tool fell over")
            messages += [
                {"role": "assistant", "content": told.choices[0].message.content or ""},
                {"role": "user", "content": "On."},
            ]
        return answers

    def note(self, row: Mapping[str, Any], **more: Any) -> None:
        """Appends a line with one write, so that a kill leaves whole lines."""
        line = json.dumps({**row["attempt"], **more}) + "\n"
        file = os.open(self.knobs.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


@ADVANTAGE_ESTIMATORS.register("slow_grpo", requires={"groups"}, knobs=GRPOKnobs)
def slow_grpo(inputs: Any, knobs: Any) -> Any:
    """Is grpo for a long training step, once the long episodes are over."""
    if inputs.response_mask.sum(-1).max() < BUSY.tokens / 2:
        time.sleep(TRAINING_S)
    return grpo(inputs, knobs)


# Faults.


def forget_one() -> None:
    """Makes a ledger forget that the first prompt it saw trained has ended: a checkpoint has it as open, and it trains again."""
    train, forgotten = PromptLedger.train, list[int]()

    def all_but_one(self: PromptLedger, *ordinals: int) -> None:
        train(self, *ordinals)
        if ordinals and not forgotten:
            forgotten.append(ordinals[-1])
            self._open = dict(sorted({**self._open, ordinals[-1]: Phase.ISSUED}.items()))

    PromptLedger.train = all_but_one  # type: ignore[method-assign]


def lose_one() -> None:
    """Makes a ledger that is read from a checkpoint forget the last prompt that has not ended."""
    load = PromptLedger.load_state

    def load_state(self: PromptLedger, *state: Any) -> None:
        load(self, *state)
        if self._open:
            self._open.popitem()

    PromptLedger.load_state = load_state  # type: ignore[method-assign,assignment]


def double_rewards() -> None:
    """Counts the reward of each episode twice."""
    sampled = EndpointWorkflow.sampled

    def twice(self: EndpointWorkflow, session: Any, reward: Reward | None) -> Sampled | None:
        return sampled(self, session, 2 * reward if isinstance(reward, float) else reward)

    EndpointWorkflow.sampled = twice  # type: ignore[method-assign]


def lift_bound() -> None:
    """Lets generation run further ahead than the bound on staleness."""
    check = StalenessManager.__post_init__

    def lifted(self: StalenessManager) -> None:
        check(self)
        self.max_staleness += EXTRA_VERSIONS

    StalenessManager.__post_init__ = lifted  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "forget": forget_one,
    "lose": lose_one,
    "twice": double_rewards,
    "stale": lift_bound,
}
if os.environ.get(BROKEN):
    FAULTS[os.environ[BROKEN]]()
