"""OnlineSessions: episodes that an application drives over HTTP, which knows nothing of the run that trains on them.

    POST /sessions                takes a place: 201 with the session's id, base_url and api_key, and the row that it stands for
    POST /sessions/<id>/reward    {"reward": 1.0}, or {"rewards": {response id or role: number}}
    POST /sessions/<id>/end       the session is complete and may train; {"failed": "reason"}: it is not
    GET  /sessions/<id>           its state

A place is an episode that the run has started, so there are as many places as the bound on staleness permits; without one the
status is 429 with Retry-After.  Requests may be repeated: a session, a reward and an end count once.  A session that the
application leaves for too long has failed, and its place is given again.

The key of a session is derived from its id and the application's key, so that a run that was started again tells the sessions of
the run before that they are gone (410).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from rlhub.agents.openai_server.errors import ApiError, bad_field
from rlhub.agents.openai_server.sessions import Session, SessionLimits, carries
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine
from rlhub.errors import DeadlineError, WorkflowError

RETRY_S = 1.0  # until another place may be free
ID_BYTES = 8
MOST_ENDED = 16384  # sessions and groups that are remembered after their end, for repeated requests
EPISODE = ""
"""The name under which the reward of a whole episode is kept."""
OPEN, COMPLETED, FAILED = "open", "completed", "failed"


@dataclass(slots=True, kw_only=True, eq=False)
class OnlineSession:
    """A session that an application has opened.  group: the name under which the application compares samples.

    rewards: by role, by the id of a response or under EPISODE, each with the idempotency key of the request that gave it.  ended:
    its result is whether the session is complete; it has an exception where that failed.
    """

    session: Session
    data: EpisodeData
    group: str
    key: str = ""
    rewards: dict[str, tuple[float, str]] = field(default_factory=dict)
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def status(self) -> str:
        """Returns open, completed or failed."""
        if not self.ended.done():
            return OPEN
        return FAILED if self.ended.cancelled() or self.ended.exception() is not None else COMPLETED

    @property
    def given_up(self) -> bool:
        """Returns whether the run cancelled its episode."""
        return self.ended.cancelled()

    @property
    def reward(self) -> float | dict[str, float] | None:
        """Returns the reward of the episode, or those of its parts by name, or None where the application gave none."""
        given = {name: value for name, (value, _) in self.rewards.items()}
        return given.get(EPISODE, given or None)

    def take_rewards(self, rewards: Mapping[str, float], key: str) -> bool:
        """Takes rewards; returns False where all of them are known.  Raises ApiError 409 for one that differs from the known one
        without having its idempotency key, and for new ones of a session that has ended."""
        new = {name: value for name, value in rewards.items() if not self._is_known(name, value, key)}
        if not new:
            return False
        if self.status != OPEN:
            raise conflict(f"the session {self.session.name} has ended ({self.status}) without this reward", "session_ended")
        if (EPISODE in {*new, *self.rewards}) and len({*new, *self.rewards}) > 1:
            raise conflict("the episode has a reward, or its parts have: not both", "reward_conflict")
        self.rewards |= {name: (value, key) for name, value in new.items()}
        return True

    def _is_known(self, name: str, value: float, key: str) -> bool:
        if name not in self.rewards:
            return False
        known, by = self.rewards[name]
        if known != value and not (key and key == by):
            of = f"the reward of {name}" if name else "the reward"
            raise conflict(f"{of} of session {self.session.name} is {known:g} already, got {value:g}", "reward_conflict")
        return True


@dataclass(slots=True, kw_only=True, eq=False)
class OpenPlace:
    """An episode that waits for an application.  taken: its result is the session that took it."""

    engine: EpisodeEngine
    data: EpisodeData
    taken: asyncio.Future[OnlineSession] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def expire(self, timeout_s: float) -> None:
        """Gives up waiting."""
        if not self.taken.done():
            self.taken.set_exception(DeadlineError(f"a session for sample {self.data.session} of a group in use", timeout_s))


class SessionHost(Protocol):
    """Is the server at which the sessions sample."""

    def open_session(
        self,
        name: str,
        *,
        seed: int,
        limits: SessionLimits,
        engine: EpisodeEngine | None = None,
        roles: Mapping[str, str] | None = None,
        token: str | None = None,
    ) -> Session:
        """Opens a session."""
        ...

    def base_url(self, session: Session) -> str:
        """Returns the base_url for the session's client."""
        ...

    def close_session(self, session: Session) -> None:
        """Refuses further requests of the session."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class OnlineOptions:
    """The settings of OnlineSessions.

    key: the applications' key.  model: the name of the policy.  limits, roles: see Session.  timeout_s: a session fails after so
    many seconds without a request.  needs_reward: a session cannot end without one; otherwise the run scores it.
    """

    key: str
    model: str
    limits: SessionLimits
    roles: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 300.0
    needs_reward: bool = True


class OnlineSessions:
    """Gives the run's episodes to applications.  All methods run on the event loop of the episodes.

    host: the server, which sets it.
    """

    host: SessionHost

    def __init__(self, options: OnlineOptions) -> None:
        self.options = options
        self._places: list[OpenPlace] = []
        self._sessions: dict[str, OnlineSession] = {}
        self._by_key: dict[str, OnlineSession] = {}
        self._groups: dict[int, str] = {}

    # --- episodes ------------------------------------------------------------------------------------------------------

    async def run(self, engine: EpisodeEngine, data: EpisodeData) -> OnlineSession:
        """Offers an episode and returns its session once the application has ended it.

        Raises DeadlineError where the application left it, and WorkflowError where it failed.
        """
        place = OpenPlace(engine=engine, data=data)
        self._places.append(place)
        self._places.sort(key=lambda waiting: (waiting.data.ordinal, waiting.data.sample))
        if self._groups.get(data.ordinal):
            self._limit(place)
        try:
            online = await place.taken
            await self._ended(online)
            return online
        finally:
            self._places = [waiting for waiting in self._places if waiting is not place]
            if place.taken.done() and not place.taken.cancelled() and place.taken.exception() is None:
                self._close(place.taken.result())

    def _close(self, online: OnlineSession) -> None:
        self.host.close_session(online.session)
        online.ended.cancel()  # where its episode was cancelled

    async def _ended(self, online: OnlineSession) -> None:
        """Waits for the end of a session that is in use."""
        session = online.session
        while not online.ended.done():
            idle_s = 0.0 if session.num_answering else time.monotonic() - session.used_at
            if idle_s >= self.options.timeout_s:
                online.ended.set_exception(DeadlineError(f"a request of session {session.name}", self.options.timeout_s))
            else:
                await asyncio.wait((online.ended,), timeout=self.options.timeout_s - idle_s)
        online.ended.result()

    def _limit(self, place: OpenPlace) -> None:
        """Limits the wait of a place that only sessions of its group may take."""
        asyncio.get_running_loop().call_later(self.options.timeout_s, place.expire, self.options.timeout_s)

    # --- requests ------------------------------------------------------------------------------------------------------

    def create(self, group: str, idempotency_key: str) -> tuple[OnlineSession, bool]:
        """Returns a session, and whether it is new: a repeated request gets the session of the first, unless that was given up.
        Raises ApiError 429 where no place is free."""
        known = self._by_key.get(idempotency_key) if idempotency_key else None
        if known is not None and not known.given_up:
            return known, False
        place = self._choose(group)
        if place is None:
            told = f"{self.num_open} sessions are open, and no more places are free until samples are trained; try again"
            raise ApiError(told, status=429, kind="rate_limit_error", code="no_capacity", retry_after_s=RETRY_S)
        name = f"{place.data.session}-{secrets.token_hex(ID_BYTES)}"
        session = self.host.open_session(
            name,
            seed=place.data.seed,
            limits=self.options.limits,
            engine=place.engine,
            roles=self.options.roles,
            token=self.token_of(name),
        )
        online = OnlineSession(session=session, data=place.data, group=group, key=idempotency_key)
        self._places.remove(place)
        place.taken.set_result(online)
        self._remember(online)
        return online, True

    def _choose(self, group: str) -> OpenPlace | None:
        """Returns the first place of this group, else the first one of a prompt of which none was taken; without a group, the
        first one of a prompt without a group."""
        free = [place for place in self._places if not place.taken.done()]  # one whose wait is over leaves a moment later
        own = (place for place in free if self._groups.get(place.data.ordinal) == group)
        fresh = (place for place in free if place.data.ordinal not in self._groups)
        if (found := next(own, None)) is None and (found := next(fresh, None)) is not None:
            self._groups[found.data.ordinal] = group
            if group:
                for place in self._places:
                    if place.data.ordinal == found.data.ordinal:
                        self._limit(place)
        return found

    def _remember(self, online: OnlineSession) -> None:
        self._sessions[online.session.name] = online
        if online.key:
            self._by_key[online.key] = online
        for known in (self._sessions, self._by_key, self._groups):
            if len(known) > MOST_ENDED:
                known.pop(next(iter(known)))  # type: ignore[call-overload]

    def reward(self, online: OnlineSession, rewards: Mapping[str, float], idempotency_key: str) -> bool:
        """Takes rewards; returns False for a repeated request.  Raises ApiError for unknown names and different values."""
        if rewards and not self.options.needs_reward:
            raise ApiError("this run scores sessions itself (rollout.agent.kwargs.reward=score)", code="reward_not_taken")
        session = online.session
        answers = {turn.request_id for turn in session.turns}
        for name in rewards:
            known = name == EPISODE or name in session.roles or name in online.rewards
            if not known and name.rpartition("-")[2] not in answers:
                raise bad_field("rewards", name, "the id of a response of this session, or one of its roles")
        return online.take_rewards(rewards, idempotency_key)

    def end(self, online: OnlineSession, failed: str) -> bool:
        """Ends a session; returns False for one that has ended.  Raises ApiError 409 where its reward is missing."""
        if online.status != OPEN:
            return False
        if failed:
            online.ended.set_exception(WorkflowError(f"the application ended session {online.session.name}: {failed}"))
        elif not online.session.turns:
            online.ended.set_exception(WorkflowError(f"session {online.session.name} ended before the policy was asked"))
        elif self.options.needs_reward and online.reward is None:
            raise conflict(f"session {online.session.name} has no reward: give it first, or with the end", "no_reward")
        else:
            online.ended.set_result(None)
        self.host.close_session(online.session)
        return True

    @property
    def num_open(self) -> int:
        """Returns the number of sessions that have not ended."""
        return sum(online.status == OPEN for online in self._sessions.values())

    # --- keys ----------------------------------------------------------------------------------------------------------

    def token_of(self, name: str) -> str:
        """Returns the API key of the session of this name."""
        return hmac.new(self.options.key.encode(), name.encode(), hashlib.sha256).hexdigest()

    def find(self, name: str, header: str) -> OnlineSession:
        """Returns the session of a request.  Raises ApiError 401 for a wrong key, and 410 for a session that is not known or that
        the run has given up."""
        if not (carries(header, self.options.key) or carries(header, self.token_of(name))):
            raise unauthorized()
        online = self._sessions.get(name)
        if online is None or online.given_up:
            raise gone(name)
        return online

    def check_gone(self, name: str, header: str) -> None:
        """Raises ApiError 410 where the key is that of a session that does not take requests any more."""
        if carries(header, self.token_of(name)):
            raise gone(name)

    def check_key(self, header: str) -> None:
        """Raises ApiError 401 for a key that is not the applications'."""
        if not carries(header, self.options.key):
            raise unauthorized()


def gone(name: str) -> ApiError:
    """Returns the error 410 for a session that has ended."""
    return ApiError(
        f"the session {name} is gone: it has ended, it was left for too long, or the run gave it up or was started again since; "
        "open another one with POST /sessions",
        status=410,
        code="session_gone",
    )


def unauthorized() -> ApiError:
    """Returns the error 401."""
    told = "wrong key: sessions are opened with the application's key (rollout.agent.kwargs.key_file)"
    return ApiError(told, status=401, code="invalid_api_key", kind="authentication_error")


def conflict(message: str, code: str) -> ApiError:
    """Returns the error 409."""
    return ApiError(message, status=409, code=code)


ReadBody = Callable[[web.Request], Awaitable[dict[str, Any]]]


def online_routes(online: OnlineSessions, read_json: ReadBody) -> list[web.RouteDef]:
    """Returns the routes of POST /sessions and below."""

    def found(request: web.Request) -> OnlineSession:
        return online.find(request.match_info["id"], _header(request))

    async def create(request: web.Request) -> web.Response:
        online.check_key(_header(request))
        body = await _body(request, read_json)
        made, new = online.create(_text(body, "group"), _key(request))
        return web.json_response(described(online, made), status=201 if new else 200, dumps=partial(json.dumps, default=plain))

    async def show(request: web.Request) -> web.Response:
        return web.json_response(state_of(found(request)))

    async def reward(request: web.Request) -> web.Response:
        body = await _body(request, read_json)
        rewards = read_rewards(body)
        if not rewards:
            raise bad_field("reward", body.get("reward"), "a number, or several by name in rewards")
        counted = online.reward(made := found(request), rewards, _key(request))
        return web.json_response(state_of(made) | {"counted": counted})

    async def end(request: web.Request) -> web.Response:
        body = await _body(request, read_json)
        made = found(request)
        online.reward(made, read_rewards(body), _key(request))
        ended = online.end(made, _text(body, "failed"))
        return web.json_response(state_of(made) | {"ended": ended})

    return [
        web.post("/sessions", create),
        web.get("/sessions/{id}", show),
        web.post("/sessions/{id}/reward", reward),
        web.post("/sessions/{id}/end", end),
    ]


def described(online: OnlineSessions, made: OnlineSession) -> dict[str, Any]:
    """Returns the JSON of an open session for its application."""
    return state_of(made) | {
        "base_url": online.host.base_url(made.session),
        "api_key": made.session.token,
        "model": online.options.model,
        "timeout_s": online.options.timeout_s,
        "row": dict(made.data.row),
    }


def state_of(made: OnlineSession) -> dict[str, Any]:
    """Returns the JSON of a session's state.  prompt, sample: the place that it took, the same after a retry."""
    return {
        "id": made.session.name,
        "status": made.status,
        "group": made.group,
        "prompt": made.data.ordinal,
        "sample": made.data.sample,
        "reward": made.reward,
    }


def read_rewards(body: Mapping[str, Any]) -> dict[str, float]:
    """Returns the rewards of a body by name; that of the whole episode has the name EPISODE."""
    given = body.get("rewards", {})
    if not isinstance(given, Mapping):
        raise bad_field("rewards", given, "numbers by the id of a response or a role")
    if body.get("reward") is not None:
        given = {**given, EPISODE: body["reward"]}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise bad_field(f"rewards.{name}" if name else "reward", value, "a finite number")
    return {name: float(value) for name, value in given.items()}


def plain(value: Any) -> Any:
    """Returns numpy values as lists and numbers, and anything else that JSON cannot represent as text."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)


async def _body(request: web.Request, read_json: ReadBody) -> dict[str, Any]:
    return await read_json(request) if request.can_read_body else {}


def _header(request: web.Request) -> str:
    return request.headers.get("Authorization", "")


def _key(request: web.Request) -> str:
    return request.headers.get("Idempotency-Key", "")


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name) or ""
    if not isinstance(value, str):
        raise bad_field(name, value, "a text")
    return value
