"""Sessions: what one agent sampled through the endpoint, as tokens with log-probs and versions.

An agent sends its whole history with every request.  A request whose history begins with that of a recorded turn, including the
turn's answer, continues that turn: its prompt begins with the recorded tokens, and only the new messages are tokenized.  Any
other request starts a new segment.  The record is therefore a forest, and each path from a root to a leaf is what a policy read
and wrote.

All paths together are an episode in which every answer trains once: an answer that several paths share is masked in all but the
first.  Requests that name a role as their model belong to that role's conversations; those of frozen roles do not train.
"""

from __future__ import annotations

import hmac
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.agents.openai_server.bodies import Message
from rlhub.agents.openai_server.repeats import ClientCall, ClientCalls
from rlhub.agents.trajectory import NOT_SAMPLED, Episode, Sampled, Trajectory
from rlhub.agents.workflows.base import EpisodeEngine
from rlhub.agents.workflows.turns import turn_seed
from rlhub.engines.rollout.base import Completion
from rlhub.errors import WorkflowError
from rlhub.utils.seeding import sample_seed

Which = Literal["last", "longest", "random"]
TRAINED, FROZEN = "trained", "frozen"
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

    role: the role whose conversation it belongs to, or "".  request_id: the part after the dash of the response's id.
    """

    parent: SessionTurn | None
    added: list[int]
    completion: Completion
    history: tuple[str, ...] = ()
    tools: str = ""
    role: str = ""
    request_id: str = ""

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

    engine: generates for it.  token: the API key of its requests.  seed: the seed of its first answer.  roles: by the name that
    requests give as their model, `trained` or `frozen`.  conversations: the messages that a request to /v1/responses may continue
    by its `previous_response_id`, by `request_id_of` it.

    calls: the requests, with those that repeat others.  num_requests: counts calls.

    num_mismatches: the number of requests whose history contains answers that differ from the recorded ones, so that a new
    segment began.  num_overruled: the number of requests whose sampling settings differed from the run's.  full: a request was
    refused because its segment had reached its token limit.

    num_answering: the number of requests that are being answered.  used_at: when the last one began or ended, by
    time.monotonic.
    """

    name: str
    seed: int
    limits: SessionLimits
    engine: EpisodeEngine
    token: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES))
    roles: Mapping[str, str] = field(default_factory=dict)
    turns: list[SessionTurn] = field(default_factory=list)
    conversations: dict[str, list[Message]] = field(default_factory=dict)
    calls: ClientCalls = field(default_factory=ClientCalls)
    num_requests: int = 0
    num_mismatches: int = 0
    num_overruled: int = 0
    full: bool = False
    num_answering: int = 0
    used_at: float = field(default_factory=time.monotonic)

    def forget(self) -> None:
        """Drops the record, with the answers that were kept for repeated requests."""
        self.turns.clear()
        self.calls = ClientCalls()

    def call_of(self, path: str, headers: Mapping[str, str], body: bytes) -> ClientCall:
        """Returns the call to which a request belongs; see ClientCalls."""
        continued = {turn.parent.request_id for turn in self.turns if turn.parent is not None}
        return self.calls.of(path, headers, body, continued)

    def begin_request(self, call: ClientCall) -> None:
        """Begins to answer a request, and gives its call a number, from 0, unless it repeats another."""
        if call.number < 0:
            call.number = self.num_requests
            self.num_requests += 1
        self.num_answering += 1
        self.used_at = time.monotonic()

    def end_request(self) -> None:
        """Counts a request that was answered, or whose client has left."""
        self.num_answering -= 1
        self.used_at = time.monotonic()

    def answer_seed(self, request: int, answer: int, wanted: int | None) -> int:
        """Returns the seed of an answer.  It depends on the order of requests, so that an agent's run can be repeated.

        wanted: the seed that the client names.  Equal seeds give equal answers only within this session; otherwise the samples of
        a prompt whose agent always names the same seed would be copies of each other.
        """
        if wanted is not None:
            return sample_seed(self.seed, wanted, NAMED)
        first = turn_seed(self.seed, request)
        return first if answer == 0 else sample_seed(first, answer, FURTHER)

    def role_of(self, model: str | None) -> str:
        """Returns the role that a request names as its model, or ""."""
        return model if model is not None and model in self.roles else ""

    def trains(self, role: str) -> bool:
        """Returns whether the answers of a role train."""
        return self.roles.get(role) != FROZEN

    def record(self, turns: Sequence[SessionTurn], role: str, request_id: str) -> None:
        """Takes the answers of a request."""
        for turn in turns:
            turn.role, turn.request_id = role, request_id
        self.turns += turns

    def find(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], role: str = "") -> SessionTurn | None:
        """Returns the turn of this role that these messages continue: of several the one with the longest history, then the
        newest; None if there is none."""
        wanted, told = history_of(messages), tools_key(tools)
        asked = [turn for turn in self.turns if turn.history and turn.tools == told and turn.role == role]
        fitting = [turn for turn in asked if _begins(wanted, turn.history)]
        return max(fitting, key=lambda turn: (len(turn.history), self.turns.index(turn)), default=None)

    def find_ids(self, prompt: Sequence[int], role: str = "") -> SessionTurn | None:
        """Returns the turn of this role whose tokens are the longest beginning of this prompt, or None."""
        asked = [turn for turn in self.turns if turn.role == role]
        fitting = [turn for turn in asked if len(ids := turn.ids) < len(prompt) and list(prompt[: len(ids)]) == ids]
        return max(fitting, key=lambda turn: len(turn.ids), default=None)

    def leaves(self) -> Iterator[SessionTurn]:
        """Returns the last turns of all segments, in the order of their answers."""
        parents = {id(turn.parent) for turn in self.turns}
        return (turn for turn in self.turns if id(turn) not in parents)

    def metrics(self, num_turns: int, num_trained: int) -> dict[str, float]:
        """Returns the numbers of the whole session.  num_turns: the answers that train.  num_trained: their tokens, as the masks
        count them; answers of frozen roles need not train."""
        asked = _num_written(turn for turn in self.turns if self._may_train(turn))
        return {
            "openai/requests": float(self.num_requests),
            "openai/turns": float(num_turns),
            "openai/segments": float(sum(1 for _ in self.leaves())),
            "openai/mismatches": float(self.num_mismatches),
            "openai/overruled_sampling": float(self.num_overruled),
            "openai/untrained_tokens": float(asked - num_trained),
        } | ({"openai/frozen_tokens": float(_num_written(self.turns) - asked)} if self.roles else {})

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
        made.metrics = self.metrics(len(chosen.path), made.num_tokens)
        return made

    def episode(self) -> Sampled | None:
        """Returns all segments, in which every answer of a role that trains is in the mask once, or None if there is none.

        Segments of frozen roles, and such in which nothing trains, are left out.  One segment alone is a Trajectory.
        """
        return self._result([as_trajectory(leaf, turns) for leaf, turns in self._trained()])

    def credited(self, rewards: Mapping[str, float], discount: float) -> Sampled | None:
        """Returns what `episode` does with rewards of its parts, by the name of a role or by the id of a response.

        By role, all segments of a role have its reward, and the episode's are compared with the same role's in other episodes.

        By response, each answer trains in a row of its own whose reward is its return, R_t = r_t + discount R_{t+1} over the
        answers of the roles that train, in the order in which they were sampled; r_t is 0 where none is given.  It is compared
        with the answer of the same number and role in other episodes.  Raises WorkflowError for a name that is neither.
        """
        by_request = {turn.request_id: turn for turn in self.turns}
        unknown = [name for name in rewards if name not in self.roles and request_id_of(name) not in by_request]
        of_roles = [name for name in rewards if name in self.roles]
        if unknown or len(of_roles) not in (0, len(rewards)):
            raise WorkflowError(
                f"the agent gave rewards for {', '.join(map(repr, rewards))}; name either roles "
                f"({', '.join(self.roles) or 'none are set'}) or ids of responses of this session"
            )
        return self._by_role(rewards) if of_roles else self._by_answer(rewards, discount)

    def _by_role(self, rewards: Mapping[str, float]) -> Sampled | None:
        rows = []
        for leaf, turns in self._trained():
            if leaf.role not in rewards:
                raise WorkflowError(f"the agent gave no reward for the role {leaf.role!r}, which trains; give one, or freeze it")
            rows.append(as_trajectory(leaf, turns))
            rows[-1].set_reward(rewards[leaf.role])
            rows[-1].comparison = leaf.role
        return self._result(rows)

    def _by_answer(self, rewards: Mapping[str, float], discount: float) -> Sampled | None:
        given = {request_id_of(name): reward for name, reward in rewards.items()}
        turns = [turn for turn in self.turns if self._may_train(turn)]
        rows, numbers, following = [], Counter(turn.role for turn in turns), 0.0
        for turn in reversed(turns):
            following = given.get(turn.request_id, 0.0) + discount * following
            numbers[turn.role] -= 1
            rows.append(as_trajectory(turn, [turn]))
            rows[-1].set_reward(following)
            rows[-1].comparison = f"{turn.role}/{numbers[turn.role]}"
        return self._result(rows[::-1])

    def _trained(self) -> Iterator[tuple[SessionTurn, list[SessionTurn]]]:
        """Yields each leaf with the answers of its path that train in its row: those that no earlier leaf has."""
        done: set[int] = set()
        for leaf in self.leaves():
            turns = [turn for turn in leaf.path if id(turn) not in done and self._may_train(turn)]
            if turns:
                done |= {id(turn) for turn in turns}
                yield leaf, turns

    def _result(self, rows: list[Trajectory]) -> Sampled | None:
        num_turns = sum(1 for turn in self.turns if self._may_train(turn))
        metrics = self.metrics(num_turns, sum(row.num_tokens for row in rows))
        if len(rows) == 1:
            rows[0].metrics = metrics
            return rows[0]
        return Episode(trajectories=rows, metrics=metrics) if rows else None

    def _may_train(self, turn: SessionTurn) -> bool:
        return bool(turn.completion.token_ids) and self.trains(turn.role)


def as_trajectory(leaf: SessionTurn, trained: Sequence[SessionTurn] | None = None) -> Trajectory:
    """Returns the segment that ends with this turn.  trained: the answers in its mask; None: all."""
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
        trains = trained is None or turn in trained
        made.response_mask += [0] * len(between) + [int(trains)] * len(written.token_ids)
        made.rollout_log_probs += [0.0] * len(between) + (list(written.log_probs) if trains else [0.0] * len(written.token_ids))
        made.versions += [NOT_SAMPLED] * len(between)
        made.versions += written.versions if trains else [NOT_SAMPLED] * len(written.token_ids)
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


def request_id_of(name: str) -> str:
    """Returns the part of a response's id that all wires share."""
    return name.replace("_", "-").rpartition("-")[2]


def has_answers(messages: Sequence[Message]) -> bool:
    """Returns whether the messages contain an answer of the assistant."""
    return any(message["role"] == "assistant" for message in messages)


def _begins(history: tuple[str, ...], beginning: tuple[str, ...]) -> bool:
    return len(beginning) < len(history) and history[: len(beginning)] == beginning


def _num_written(turns: Iterable[SessionTurn]) -> int:
    return sum(len(turn.completion.token_ids) for turn in turns)


def carries(header: str, key: str | None) -> bool:
    """Returns whether an Authorization header contains this key; never for the key None.  The comparison takes constant time."""
    scheme, _, given = header.partition(" ")
    same = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), (key or secrets.token_hex()).encode())
    return key is not None and same and scheme.lower() == "bearer"
