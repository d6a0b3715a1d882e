"""OpenAIServer: the HTTP endpoint, on the event loop of the episodes, over any episode engine.

    http://host:port/s/<session>/v1   the base_url of an agent's client, with the session's token as its api_key
    http://host:port/v1               requests outside of sessions, without a record, with the server's own key

An agent written with OpenAI's client needs nothing else.  A session's key opens only that session.  The server listens on
loopback unless it is given another host.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from aiohttp import web

from rlhub.agents.openai_server.admin import Administration, ServerMetrics, admin_routes
from rlhub.agents.openai_server.answering import Answering, Exchange, ServerOptions
from rlhub.agents.openai_server.answers import Answer, AnswerWriter, Writer, WriterParts, send_stream, send_whole
from rlhub.agents.openai_server.bodies import Message, RequestBody, read_chat, read_completion, renamed
from rlhub.agents.openai_server.errors import ApiError, errors, read_json, unavailable
from rlhub.agents.openai_server.messages import MessagesWriter, read_messages
from rlhub.agents.openai_server.online import OnlineSessions, online_routes
from rlhub.agents.openai_server.rendering import Renderer, in_time
from rlhub.agents.openai_server.repeats import ClientCall
from rlhub.agents.openai_server.replicas import OneEngine, replica_routes
from rlhub.agents.openai_server.responses import ResponsesWriter, read_responses
from rlhub.agents.openai_server.sessions import (
    Session,
    SessionLimits,
    carries,
    request_id_of,
)
from rlhub.agents.workflows.base import EpisodeEngine
from rlhub.engines.rollout.base import SamplingParams
from rlhub.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
RETRY_AFTER_S = 1.0
Body = TypeVar("Body", bound=RequestBody)
SHUTDOWN_S = 1.0  # for answers that are being written when the server closes


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
        online: OnlineSessions | None = None,
    ) -> None:
        self._engine, self._options, self._admin, self._online = engine, options, admin, online
        self._sampling = replace(sampling, log_probs=True)
        self._renderer = Renderer(tokenizer, options.template_kwargs)
        self._answering = Answering(engine, self._renderer, self._sampling, options, admin)
        self._sessions: dict[str, Session] = {}
        self._active = 0
        self._metrics = ServerMetrics()
        self._runner: web.AppRunner | None = None
        self._origin = ""

    # --- life ----------------------------------------------------------------------------------------------------------

    def app(self) -> web.Application:
        """Returns the application with its routes, without a socket."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._metrics.middleware, errors])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        if self._admin is not None:
            admin = self._admin
            app.router.add_routes(admin_routes(admin, self._admit_admin, self._json))
            app.router.add_routes(replica_routes(OneEngine(lambda: admin.failure), self._admit_admin))
        if self._online is not None:
            self._online.host = self
            app.router.add_routes(online_routes(self._online, self._json))
        for prefix in ("/v1", "/s/{session}/v1"):
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_get(f"{prefix}/models/{{model:.+}}", self._model)
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/completions", self._completions)
            app.router.add_post(f"{prefix}/responses", self._responses)
            app.router.add_post(f"{prefix}/messages", self._messages)
            app.router.add_post(f"{prefix}/messages/count_tokens", self._count_tokens)
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
        token: str | None = None,
    ) -> Session:
        """Opens a session.  engine: generates for it; None for the server's engine.  roles: see Session.  token: its API key;
        None for a random one.  Raises ValueError if the name is in use."""
        if name in self._sessions:
            raise ValueError(f"the session {name!r} is open already")
        session = Session(name=name, seed=seed, limits=limits, engine=engine or self._engine, roles=roles or {})
        session.token = token or session.token
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

    async def _show_metrics(self, request: web.Request) -> web.Response:
        """Answers a scraper with the administration's key, or with that of requests outside of sessions."""
        if not carries(_authorization(request), self._options.key):
            self._admit_admin(request)
        status = await self._admin.status() if self._admin is not None else {}
        return self._metrics.text(self._active, len(self._sessions), status)

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
        return await self._respond(request, session, body, self._answering.chat, Writer)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        session = self._admit(request)
        body = read_responses(await self._json(request), self._sampling, _earlier(session))
        return await self._respond(request, session, body, self._answering.response, ResponsesWriter)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        session = self._admit(request)
        body = read_messages(await self._json(request), self._sampling)
        return await self._respond(request, session, body, self._answering.chat, MessagesWriter)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._admit(request)
        body = read_messages(await self._json(request), self._sampling)
        parent, added = self._answering.continued(session, body)
        return web.json_response({"input_tokens": len(added) + (len(parent.ids) if parent is not None else 0)})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        session = self._admit(request)
        body = read_completion(await self._json(request), self._sampling)
        self._bound("prompt", len(body.prompts), body.n)
        return await self._respond(request, session, body, self._answering.prompts, Writer)

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
        if name is not None and session is None and self._online is not None:
            self._online.check_gone(name, request.headers.get("Authorization", ""))
        right = session.token if session is not None else self._options.key if name is None else None
        if not carries(_authorization(request), right):
            raise ApiError("wrong API key, or no such session", status=401, code="invalid_api_key", kind="authentication_error")
        return session

    @contextmanager
    def _place(self, session: Session | None, call: ClientCall) -> Iterator[None]:
        """Occupies one of the places for requests.  Raises ApiError 429 if no place is free."""
        if self._active >= self._options.max_concurrent:
            raise ApiError(
                f"{self._active} requests are being answered, as many as this server takes; try again",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=RETRY_AFTER_S,
            )
        self._active += 1
        if session is not None:
            session.begin_request(call)
        try:
            yield
        finally:
            self._active -= 1
            if session is not None:
                session.end_request()

    # --- responses -----------------------------------------------------------------------------------------------------

    async def _respond(
        self,
        request: web.Request,
        session: Session | None,
        body: Body,
        answer: Callable[[Exchange, Body], Coroutine[Any, Any, list[Answer]]],
        writer: Callable[[WriterParts, Body], AnswerWriter],
    ) -> web.StreamResponse:
        """Answers a request.  answer: samples and records; writer: writes in the form of one interface."""
        call = ClientCall() if session is None else session.call_of(request.path, request.headers, await request.read())
        exchange = Exchange(body=body, session=session, call=call)
        decode, token = self._renderer.decode_all, self._renderer.token
        parts = WriterParts(model=self._options.model, token=token, text=decode, request_id=call.request_id, created=call.created)
        write_s, writing = self._options.connection_s, writer(parts, body)
        with (
            self._place(session, call),
            call.joined(request.transport, lambda: self._counted(exchange, answer(exchange, body))) as (answers, running),
        ):
            answering = in_time(answers, self._options.request_s)
            if body.stream:
                return await send_stream(request, writing, answering, running, write_s)
            return await send_whole(request, writing.whole(await answering), write_s)

    async def _counted(self, exchange: Exchange, answering: Awaitable[list[Answer]]) -> list[Answer]:
        with renamed(exchange.body.names):
            answers = await answering
        self._metrics.add_answers(answers, exchange.body.n)
        return answers


def _authorization(request: web.Request) -> str:
    """Returns the request's Authorization header, or its x-api-key as one, which Anthropic's client sends."""
    key = request.headers.get("x-api-key")
    return request.headers.get("Authorization", "" if key is None else f"Bearer {key}")


def _earlier(session: Session | None) -> Callable[[str], Sequence[Message]]:
    """Returns the conversations of earlier responses, by their ids."""

    def found(name: str) -> Sequence[Message]:
        kept = session.conversations.get(request_id_of(name)) if session is not None else None
        if kept is None:
            told = f"got {name!r:.100}, but responses are kept within sessions alone: send the whole input"
            raise ApiError(f"previous_response_id: {told}", status=404, param="previous_response_id", code="not_found")
        return kept

    return found
