"""Sessions: what one agent sampled through the endpoint, as tokens with log-probs and versions.

An agent sends its whole history with every request.  A request whose history begins with that of a recorded turn, including the
turn's answer, continues that turn: its prompt begins with the recorded tokens, and only the new messages are tokenized.  Any
other request starts a new segment.  The record is therefore a forest, and each path from a root to a leaf is what a policy read
and wrote.
"""

from __future__ import annotations

import hmac
import json
import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.agents.openai_server.bodies import Message
from rlhub.agents.trajectory import NOT_SAMPLED, Trajectory
from rlhub.agents.workflows.base import EpisodeEngine
from rlhub.agents.workflows.turns import turn_seed
from rlhub.engines.rollout.base import Completion
from rlhub.utils.seeding import sample_seed

Which = Literal["last", "longest", "random"]
TOKEN_BYTES = 32
NAMED, FURTHER = 1, 2
"""Purposes that keep the seeds that clients name, and those of a request's further answers, apart from the seeds of
`turn_seed`."""


@dataclass(slots=True, kw_only=True, frozen=True)
class SessionLimits:
    """The token limits of a segment: `prompt` for the tokens before its first answer, `response` for all tokens from there on."""

    prompt: int
    response: int


@dataclass(slots=True, kw_only=True, eq=False)
class SessionTurn:
    """One answer.  added: the tokens before it that its parent does not have.

    history: the conversation up to and including this answer, in a form that can be compared; empty for plain completions.
    """

    parent: SessionTurn | None
    added: list[int]
    completion: Completion
    history: tuple[str, ...] = ()
    tools: str = ""

    @property
    def path(self) -> list[SessionTurn]:
        """Returns the turns from the segment's first one to this one."""
        turns = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]

    @property
    def ids(self) -> list[int]:
        """Returns the tokens of the segment up to this turn: prompt, answers and the tokens between them."""
        return [token for turn in self.path for token in (*turn.added, *turn.completion.token_ids)]


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """The record of one agent's run.

    engine: generates for it.  token: the API key of its requests.  seed: the seed of its first answer.

    num_mismatches: the number of requests whose history contains answers that differ from the recorded ones, so that a new
    segment began.  num_overruled: the number of requests whose sampling settings differed from the run's.  full: a request was
    refused because its segment had reached its token limit.
    """

    name: str
    seed: int
    limits: SessionLimits
    engine: EpisodeEngine
    token: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES))
    turns: list[SessionTurn] = field(default_factory=list)
    num_requests: int = 0
    num_mismatches: int = 0
    num_overruled: int = 0
    full: bool = False

    def begin_request(self) -> int:
        """Returns the number of a new request, from 0."""
        self.num_requests += 1
        return self.num_requests - 1

    def answer_seed(self, request: int, answer: int, wanted: int | None) -> int:
        """Returns the seed of an answer.  It depends on the order of requests, so that an agent's run can be repeated.

        wanted: the seed that the client names.  Equal seeds give equal answers only within this session; otherwise the samples of
        a prompt whose agent always names the same seed would be copies of each other.
        """
        if wanted is not None:
            return sample_seed(self.seed, wanted, NAMED)
        first = turn_seed(self.seed, request)
        return first if answer == 0 else sample_seed(first, answer, FURTHER)

    def find(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> SessionTurn | None:
        """Returns the turn that these messages continue: of several the one with the longest history, then the newest; None if
        there is none."""
        wanted, told = history_of(messages), tools_key(tools)
        fitting = [turn for turn in self.turns if turn.history and turn.tools == told and _begins(wanted, turn.history)]
        return max(fitting, key=lambda turn: (len(turn.history), self.turns.index(turn)), default=None)

    def find_ids(self, prompt: Sequence[int]) -> SessionTurn | None:
        """Returns the turn whose tokens are the longest beginning of this prompt, or None."""
        fitting = [turn for turn in self.turns if len(ids := turn.ids) < len(prompt) and list(prompt[: len(ids)]) == ids]
        return max(fitting, key=lambda turn: len(turn.ids), default=None)

    def leaves(self) -> Iterator[SessionTurn]:
        """Returns the last turns of all segments, in the order of their answers."""
        parents = {id(turn.parent) for turn in self.turns}
        return (turn for turn in self.turns if id(turn) not in parents)

    def metrics(self, chosen: SessionTurn | None = None) -> dict[str, float]:
        """Returns the numbers of the whole session.  chosen: the segment that trains."""
        written = sum(len(turn.completion.token_ids) for turn in self.turns)
        kept = sum(len(turn.completion.token_ids) for turn in chosen.path) if chosen is not None else 0
        return {
            "openai/requests": float(self.num_requests),
            "openai/turns": float(len(chosen.path)) if chosen is not None else 0.0,
            "openai/segments": float(sum(1 for _ in self.leaves())),
            "openai/mismatches": float(self.num_mismatches),
            "openai/overruled_sampling": float(self.num_overruled),
            "openai/untrained_tokens": float(written - kept),
        }

    def trajectory(self, which: Which = "last") -> Trajectory | None:
        """Returns one segment as a trajectory, or None if nothing was sampled: the segment with the last answer, the one with the
        most tokens of the policy, or one drawn with the session's seed."""
        leaves = [leaf for leaf in self.leaves() if any(turn.completion.token_ids for turn in leaf.path)]
        if not leaves:
            return None
        match which:
            case "last":
                chosen = leaves[-1]
            case "longest":
                chosen = max(leaves, key=lambda leaf: _num_written(leaf.path))
            case "random":
                chosen = random.Random(self.seed).choice(leaves)
        made = as_trajectory(chosen)
        made.metrics = self.metrics(chosen)
        return made


def as_trajectory(leaf: SessionTurn) -> Trajectory:
    """Returns the segment that ends with this turn."""
    path = leaf.path
    made = Trajectory(
        prompt_ids=list(path[0].added),
        response_ids=[],
        response_mask=[],
        rollout_log_probs=[],
        versions=[],
        finish_reason=leaf.completion.finish_reason,
    )
    for index, turn in enumerate(path):
        between, written = (turn.added if index else []), turn.completion
        made.response_ids += [*between, *written.token_ids]
        made.response_mask += [0] * len(between) + [1] * len(written.token_ids)
        made.rollout_log_probs += [0.0] * len(between) + list(written.log_probs)
        made.versions += [NOT_SAMPLED] * len(between) + list(written.versions)
    made.check()
    return made


def history_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """Returns each message as a text that can be compared.  Ids of calls in answers do not count, because the model did not write
    them."""
    return tuple(
        json.dumps(
            [
                message["role"],
                message["content"],
                [call["function"] for call in message.get("tool_calls", ())],
                message.get("name", ""),
                message.get("tool_call_id", ""),
            ],
            sort_keys=True,
        )
        for message in messages
    )


def tools_key(tools: Sequence[dict[str, Any]]) -> str:
    """Returns the tools of a request as a text that can be compared."""
    return json.dumps(list(tools), sort_keys=True) if tools else ""


def has_answers(messages: Sequence[Message]) -> bool:
    """Returns whether the messages contain an answer of the assistant."""
    return any(message["role"] == "assistant" for message in messages)


def _begins(history: tuple[str, ...], beginning: tuple[str, ...]) -> bool:
    return len(beginning) < len(history) and history[: len(beginning)] == beginning


def _num_written(path: Sequence[SessionTurn]) -> int:
    return sum(len(turn.completion.token_ids) for turn in path)


def carries(header: str, key: str | None) -> bool:
    """Returns whether an Authorization header contains this key; never for the key None.  The comparison takes constant time."""
    scheme, _, given = header.partition(" ")
    same = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), (key or secrets.token_hex()).encode())
    return key is not None and same and scheme.lower() == "bearer"
