"""OpenAIServer: the HTTP endpoint, on the event loop of the episodes, over any episode engine.

    http://host:port/s/<session>/v1   the base_url of an agent's client, with the session's token as its api_key
    http://host:port/v1               requests outside of sessions, without a record, with the server's own key

An agent written with OpenAI's client needs nothing else.  A session's key opens only that session.  The server listens on
loopback unless it is given another host.
"""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from rlhub.agents.openai_server.admin import Administration, admin_routes
from rlhub.agents.openai_server.answers import ID_BYTES, Answer, Writer, send_stream, send_whole
from rlhub.agents.openai_server.bodies import ChatBody, CompletionBody, RequestBody, read_chat, read_completion
from rlhub.agents.openai_server.errors import ApiError, bad_field, errors, read_json, unavailable, unsupported
from rlhub.agents.openai_server.rendering import Renderer, as_answer, ending_token, gathered, in_time, sample
from rlhub.agents.openai_server.sessions import Session, SessionLimits, SessionTurn, carries, has_answers, history_of, tools_key
from rlhub.agents.openai_server.streaming import Choice, FindCalls, Rules, RunningAnswer
from rlhub.agents.openai_server.tool_choice import ToolUse
from rlhub.agents.workflows.base import EpisodeEngine
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams, check_ids
from rlhub.errors import ConfigError, EngineError, RequestError, WorkerError
from rlhub.tools.call_streams import opening

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 64 << 20
RETRY_AFTER_S = 1.0
SEED_BITS = 31
SHUTDOWN_S = 1.0  # for answers that are being written when the server closes


@dataclass(slots=True, kw_only=True)
class ServerOptions:
    """The settings of an OpenAIServer.

    model: the name that clients see.  max_model_len: maximum number of tokens of prompt plus answer outside of sessions.

    port: 0 for any free port; otherwise the first free one of `num_ports` ports from there on.

    key: the key of requests outside of sessions; None forbids them.  admin_key: the key of administration; None forbids it.
    fixed_sampling: temperature, top_p and top_k are always the server's, because a trainer computes log-probs of that
    distribution.

    max_concurrent: maximum number of requests served at once; further ones get status 429.  max_samples: maximum number of
    answers to one request, its prompts times n.  vocab_size: of the model; None if only the engine knows it.  find_calls: finds
    tool calls in answers; None if answers are only text.

    connection_s: time limit in seconds for a client to send a request's head, to send its body, to read each part of a stream,
    and to send the next request.  request_s: time limit of an answer including its waiting time; then the status is 504.
    """

    model: str
    max_model_len: int
    host: str = LOOPBACK
    port: int = 0
    num_ports: int = 1
    key: str | None = None
    admin_key: str | None = None
    fixed_sampling: bool = True
    max_concurrent: int = 4096
    max_samples: int = 512
    connection_s: float = 60.0
    request_s: float = 7200.0
    vocab_size: int | None = None
    find_calls: FindCalls | None = None
    template_kwargs: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """A request and its running answers.  session: None outside of sessions.  number: the number of the request in its
    session.  request_id: the part after the dash of the response's id."""

    body: RequestBody
    session: Session | None
    number: int = 0
    request_id: str = field(default_factory=lambda: secrets.token_hex(ID_BYTES))
    running: RunningAnswer = field(default_factory=RunningAnswer)


class OpenAIServer:
    """Serves OpenAI's interface.  It lives on one event loop, on which all methods are called."""

    def __init__(
        self,
        engine: EpisodeEngine,
        tokenizer: Any,
        sampling: SamplingParams,
        options: ServerOptions,
        *,
        admin: Administration | None = None,
    ) -> None:
        self._engine, self._options, self._admin = engine, options, admin
        self._sampling = replace(sampling, log_probs=True)
        self._renderer = Renderer(tokenizer, options.template_kwargs)
        self._sessions: dict[str, Session] = {}
        self._active = 0
        self._runner: web.AppRunner | None = None
        self._origin = ""

    # --- life ----------------------------------------------------------------------------------------------------------

    def app(self) -> web.Application:
        """Returns the application with its routes, without a socket."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors])
        app.router.add_get("/health", self._health)
        if self._admin is not None:
            app.router.add_routes(admin_routes(self._admin, self._admit_admin, self._json))
        for prefix in ("/v1", "/s/{session}/v1"):
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_get(f"{prefix}/models/{{model:.+}}", self._model)
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/completions", self._completions)
        return app

    async def start(self) -> str:
        """Starts to listen; returns the server's address, http://host:port."""
        # Cancelling the handler when its client goes away cancels the generation, which aborts the request in the engine.
        # The time to keep a connection alive holds for one that has sent no whole head yet, too.
        self._runner = web.AppRunner(
            self.app(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
            keepalive_timeout=self._options.connection_s,
        )
        await self._runner.setup()
        await self._listen(self._runner)
        host, port = self._runner.addresses[0][:2]
        self._origin = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return self._origin

    async def _listen(self, runner: web.AppRunner) -> None:
        host, first = self._options.host, self._options.port
        for port in range(first, first + self._options.num_ports):
            try:
                await web.TCPSite(runner, host, port).start()
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        tried = f"{first}" if self._options.num_ports == 1 else f"{first} to {first + self._options.num_ports - 1}"
        raise ConfigError(f"no free port on {host}: tried {tried}; set another port, or 0 for any free one")

    async def aclose(self) -> None:
        """Stops listening and cancels running requests.  Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # --- sessions ------------------------------------------------------------------------------------------------------

    def open_session(
        self,
        name: str,
        *,
        seed: int,
        limits: SessionLimits,
        engine: EpisodeEngine | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> Session:
        """Opens a session.  engine: generates for it; None for the server's engine.  roles: see Session.  Raises ValueError if
        the name is in use."""
        if name in self._sessions:
            raise ValueError(f"the session {name!r} is open already")
        session = Session(name=name, seed=seed, limits=limits, engine=engine or self._engine, roles=roles or {})
        self._sessions[name] = session
        return session

    def base_url(self, session: Session) -> str:
        """Returns the base_url for the session's client."""
        return f"{self._origin}/s/{session.name}/v1"

    def close_session(self, session: Session) -> None:
        """Refuses further requests of the session; the caller keeps the record."""
        self._sessions.pop(session.name, None)

    # --- requests ------------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        if self._admin is not None and self._admin.failure:
            raise unavailable(self._admin.failure)
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        self._admit(request)
        return web.json_response({"object": "list", "data": [self._described]})

    async def _model(self, request: web.Request) -> web.Response:
        self._admit(request)
        if (wanted := request.match_info["model"]) != self._options.model:
            message = f"model: no model {wanted!r}; this server has {self._options.model!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")
        return web.json_response(self._described)

    @property
    def _described(self) -> dict[str, Any]:
        return {"id": self._options.model, "object": "model", "created": 0, "owned_by": "rlhub"}

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._admit(request)
        body = read_chat(await self._json(request), self._sampling)
        self._bound("n", 1, body.n)
        with self._place(session) as number:
            exchange = _Exchange(body=body, session=session, number=number)
            return await self._respond(request, exchange, self._answer_chat(exchange, body), chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        session = self._admit(request)
        body = read_completion(await self._json(request), self._sampling)
        self._bound("prompt", len(body.prompts), body.n)
        with self._place(session) as number:
            exchange = _Exchange(body=body, session=session, number=number)
            return await self._respond(request, exchange, self._answer_prompts(exchange, body), chat=False)

    async def _json(self, request: web.Request) -> dict[str, Any]:
        return await read_json(request, seconds=self._options.connection_s, setting="server.connection_s")

    def _bound(self, param: str, prompts: int, n: int) -> None:
        if prompts * n > (most := self._options.max_samples):
            told = f"{prompts} prompts x {n} = {prompts * n} answers, and a request has at most {most} (server.max_samples)"
            raise ApiError(f"{told}: send several", param=param)

    def _admit_admin(self, request: web.Request) -> None:
        """Raises ApiError 401 for a key that is not the administration's."""
        if not carries(request.headers.get("Authorization", ""), self._options.admin_key):
            told = (
                "administration has a key of its own (server.admin_key_file; a trainer names it in rollout.remote.admin_key_file)"
            )
            raise ApiError(f"wrong key: {told}", status=401, code="invalid_api_key", kind="authentication_error")

    def _admit(self, request: web.Request) -> Session | None:
        """Returns the session of a request, or None outside of sessions.  Raises ApiError 401 for a wrong key or an unknown
        session."""
        name = request.match_info.get("session")
        session = self._sessions.get(name) if name is not None else None
        right = session.token if session is not None else self._options.key if name is None else None
        if not carries(request.headers.get("Authorization", ""), right):
            raise ApiError("wrong API key, or no such session", status=401, code="invalid_api_key", kind="authentication_error")
        return session

    @contextmanager
    def _place(self, session: Session | None) -> Iterator[int]:
        """Occupies one of the places for requests, and yields the request's number.  Raises ApiError 429 if no place is free."""
        if self._active >= self._options.max_concurrent:
            raise ApiError(
                f"{self._active} requests are being answered, as many as this server takes; try again",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=RETRY_AFTER_S,
            )
        self._active += 1
        try:
            yield 0 if session is None else session.begin_request()
        finally:
            self._active -= 1

    async def _answer_chat(self, exchange: _Exchange, body: ChatBody) -> list[Answer]:
        session = exchange.session
        use = body.tool_use
        history, tools = history_of(body.messages), tools_key(use.tools)
        role = session.role_of(body.model) if session is not None else ""
        parent = session.find(body.messages, use.tools, role) if session is not None else None
        added: list[int] | None = None
        if parent is not None:
            ended = ending_token(parent.completion, body.sampling.stop_token_ids) is not None
            added = self._renderer.added(body.messages[len(parent.history) :], turn_ended=ended)
        if added is None:
            parent, added = None, self._renderer.prompt(body.messages, use.tools)
            if session is not None and has_answers(body.messages):
                session.num_mismatches += 1
        begun = self._opening(use)
        if begun:
            added = [*added, *self._renderer.text_ids(begun, special=False)]
        answers = await self._sample(exchange, parent, added, self._params(body, session, parent, added), use, begun)
        if session is not None:
            told = [(*history, *history_of([answer.recorded])) for answer in answers]
            turns = [
                SessionTurn(parent=parent, added=added, completion=answer.completion, history=known, tools=tools)
                for answer, known in zip(answers, told, strict=True)
            ]
            session.record(turns, role, exchange.request_id)
        return answers

    async def _answer_prompts(self, exchange: _Exchange, body: CompletionBody) -> list[Answer]:
        session, prompts = exchange.session, [self._prompt_ids(prompt) for prompt in body.prompts]
        role = session.role_of(body.model) if session is not None else ""
        parents = [session.find_ids(ids, role) if session is not None else None for ids in prompts]
        new = [ids[len(parent.ids) :] if parent is not None else ids for ids, parent in zip(prompts, parents, strict=True)]
        # Before any of them is sampled: what is wrong with one is an answer with its status, not an event of a stream.
        params = [self._params(body, session, parent, added) for parent, added in zip(parents, new, strict=True)]
        found = await gathered(
            self._sample(exchange, parent, added, sampling, before=index * body.n)
            for index, (parent, added, sampling) in enumerate(zip(parents, new, params, strict=True))
        )
        if session is not None:
            for parent, added, answers in zip(parents, new, found, strict=True):
                turns = [SessionTurn(parent=parent, added=added, completion=answer.completion) for answer in answers]
                session.record(turns, role, exchange.request_id)
        return [answer for answers in found for answer in answers]

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        ids = self._renderer.text_ids(prompt, special=True) if isinstance(prompt, str) else prompt
        if not ids:
            raise bad_field("prompt", prompt, "at least one token")
        return ids

    def _opening(self, use: ToolUse) -> str:
        """Returns the text with which the answer is begun, so that it is a call if it must be one."""
        begun = opening(self._options.find_calls, use.name)
        if begun is None and (use.must or (use.one and use.look)):
            field, other = ("tool_choice", "'auto'") if use.must else ("parallel_tool_calls", "true")
            raise unsupported(field, f"calls in this server's tool format are found in whole answers only: use {other}")
        return begun if begun is not None and use.must else ""

    async def _sample(
        self,
        exchange: _Exchange,
        parent: SessionTurn | None,
        added: list[int],
        params: SamplingParams,
        use: ToolUse | None = None,
        begun: str = "",
        *,
        before: int = 0,
    ) -> list[Answer]:
        """Samples the answers to one prompt.  use: None outside of chats.  before: the number of answers to the request's earlier
        prompts."""
        body = exchange.body
        prompt_ids = [*parent.ids, *added] if parent is not None else added
        rules = Rules(
            decode=self._renderer.decode,
            stop=body.stop,
            stop_token_ids=params.stop_token_ids,
            find_calls=self._options.find_calls if use is not None and use.look else None,
            opening=begun,
            one_call=use is not None and use.look and use.one,
        )
        completions, choices = await self._generate(exchange, prompt_ids, params, rules, before)
        return [
            as_answer(prompt_ids, completion, self._renderer, rules, choice)
            for completion, choice in zip(completions, choices, strict=True)
        ]

    async def _generate(
        self, exchange: _Exchange, prompt_ids: list[int], params: SamplingParams, rules: Rules, before: int
    ) -> tuple[list[Completion], Sequence[Choice | None]]:
        session = exchange.session
        engine, name = (self._engine, "") if session is None else (session.engine, session.name)
        start = _start(exchange.body, session)
        requests = [
            GenerationRequest(prompt_ids=prompt_ids, seed=seed, session=name, start=start) for seed in _seeds(exchange, before)
        ]
        followed = exchange.body.stream or rules.may_end
        choices: Sequence[Choice | None] = [None] * len(requests)
        if followed:
            choices = exchange.running.begin(prompt_ids, rules, len(requests))
        try:
            return await sample(engine, requests, params, choices), choices
        except (EngineError, WorkerError) as error:
            raise self._failed(error, exchange.body) from error

    def _failed(self, error: EngineError | WorkerError, body: RequestBody) -> ApiError:
        """Returns the error to send: 400 if the request is at fault, in whichever process that was found."""
        told = error.__cause__ if isinstance(error, WorkerError) else error
        if isinstance(told, RequestError):
            param = "messages" if told.param == "prompt" and isinstance(body, ChatBody) else told.param
            return ApiError(str(told), param=param or None)
        if self._admin is not None and self._admin.failure:
            return unavailable(self._admin.failure)
        return ApiError(f"the engine: {error}", status=500, kind="server_error")

    def _params(self, body: RequestBody, session: Session | None, parent: SessionTurn | None, added: list[int]) -> SamplingParams:
        """Returns the sampling parameters of this request, limited to the tokens that still fit.  Raises ApiError or RequestError
        if they or the prompt are not valid."""
        params, param = body.sampling, "messages" if isinstance(body, ChatBody) else "prompt"
        check_ids(added, param, "the prompt", self._options.vocab_size)
        check_ids(params.stop_token_ids, "stop_token_ids", "a stop token", self._options.vocab_size)
        if session is not None and self._options.fixed_sampling:
            session.num_overruled += bool(body.differing)
            params = replace(self._sampling, stop_token_ids=params.stop_token_ids)
        remaining = self._remaining(session, parent, added)
        if remaining < 1:
            if session is not None:
                session.full = True
            raise ApiError(
                "the conversation has no room left for an answer: it is at its limit of tokens",
                param=param,
                code="context_length_exceeded",
            )
        most = remaining + _start(body, session)
        return replace(params, max_new_tokens=min(body.max_tokens or most, most))

    def _remaining(self, session: Session | None, parent: SessionTurn | None, added: list[int]) -> int:
        if session is None:
            return self._options.max_model_len - len(added)
        if parent is None:
            return session.limits.response if len(added) <= session.limits.prompt else 0
        used = len(parent.ids) - len(parent.path[0].added) + len(added)
        return session.limits.response - used

    # --- responses -----------------------------------------------------------------------------------------------------

    async def _respond(
        self, request: web.Request, exchange: _Exchange, answering: Awaitable[list[Answer]], *, chat: bool
    ) -> web.StreamResponse:
        body = exchange.body
        writer = Writer(
            model=self._options.model,
            chat=chat,
            token=self._renderer.token,
            log_probs=body.log_probs,
            token_ids=body.token_ids,
            usage_chunk=body.usage_chunk,
            n=body.n,
            request_id=exchange.request_id,
        )
        answering = in_time(answering, self._options.request_s)
        if body.stream:
            return await send_stream(request, writer, answering, exchange.running, self._options.connection_s)
        return await send_whole(request, writer.whole(await answering), self._options.connection_s)


def _start(body: RequestBody, session: Session | None) -> int:
    """Returns the number of tokens of the completion that the prompt already contains; a session knows them by itself."""
    return body.start if isinstance(body, CompletionBody) and session is None else 0


def _seeds(exchange: _Exchange, before: int) -> list[int]:
    """Returns the seeds of a prompt's answers.  before: the number of answers to the request's earlier prompts."""
    body, session = exchange.body, exchange.session
    named = [None if body.seed is None else body.seed + choice for choice in range(body.n)]
    if session is not None:
        return [session.answer_seed(exchange.number, before + choice, seed) for choice, seed in enumerate(named)]
    return [secrets.randbits(SEED_BITS) if seed is None else seed % (1 << SEED_BITS) for seed in named]
