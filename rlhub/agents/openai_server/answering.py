"""Answering: from a request to its sampled answers, which a session records as tokens.

Every wire comes down to these two: a chat, whose prompt continues a recorded turn or is rendered anew, and prompts of text or
token ids.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhub.agents.openai_server.admin import Administration
from rlhub.agents.openai_server.answers import Answer
from rlhub.agents.openai_server.bodies import ChatBody, CompletionBody, RequestBody
from rlhub.agents.openai_server.errors import ApiError, bad_field, unavailable, unsupported
from rlhub.agents.openai_server.rendering import Renderer, as_answer, ending_token, gathered, sample
from rlhub.agents.openai_server.repeats import ClientCall
from rlhub.agents.openai_server.responses import ResponsesBody
from rlhub.agents.openai_server.sessions import Session, SessionTurn, has_answers, history_of, tools_key
from rlhub.agents.openai_server.shaping import refuse_shaping
from rlhub.agents.openai_server.streaming import Choice, FindCalls, Rules
from rlhub.agents.openai_server.tool_choice import ToolUse
from rlhub.agents.workflows.base import EpisodeEngine
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams, check_ids
from rlhub.errors import EngineError, RequestError, WorkerError
from rlhub.tools.call_streams import CallStream, Chained, ReplyParser, call_stream, opening

LOOPBACK = "127.0.0.1"
SEED_BITS = 31


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
    tool calls in answers; None if answers are only text.  parser: reads reasoning, or calls too, in a library's format.

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
    parser: ReplyParser | None = None
    template_kwargs: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A request, and the call that it belongs to.  session: None outside of sessions."""

    body: RequestBody
    session: Session | None
    call: ClientCall


class Answering:
    """Answers requests with one engine.  admin: controls the engine; None if nothing does."""

    def __init__(
        self,
        engine: EpisodeEngine,
        renderer: Renderer,
        sampling: SamplingParams,
        options: ServerOptions,
        admin: Administration | None,
    ) -> None:
        self._engine, self._renderer, self._sampling = engine, renderer, sampling
        self._options, self._admin = options, admin

    async def chat(self, exchange: Exchange, body: ChatBody) -> list[Answer]:
        """Returns the answers to a chat, which its session has recorded then."""
        session, use = exchange.session, body.tool_use
        history, tools = history_of(body.messages), tools_key(use.tools)
        role = session.role_of(body.model) if session is not None else ""
        parent, added = self.continued(session, body)
        if session is not None and parent is None and has_answers(body.messages):
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
            session.record(turns, role, exchange.call.request_id)
        return answers

    def continued(self, session: Session | None, body: ChatBody) -> tuple[SessionTurn | None, list[int]]:
        """Returns the recorded turn that a chat continues, and the tokens after it; without one, None and all tokens."""
        use = body.tool_use
        parent = session.find(body.messages, use.tools, session.role_of(body.model)) if session is not None else None
        if parent is not None:
            ended = ending_token(parent.completion, body.sampling.stop_token_ids) is not None
            added = self._renderer.added(body.messages[len(parent.history) :], turn_ended=ended)
            if added is not None:
                return parent, added
        return None, self._renderer.prompt(body.messages, use.tools)

    async def response(self, exchange: Exchange, body: ResponsesBody) -> list[Answer]:
        """Returns the answer to a chat whose conversation a later response may continue."""
        answers = await self.chat(exchange, body)
        if exchange.session is not None:
            exchange.session.conversations[exchange.call.request_id] = body.conversation(answers[0])
        return answers

    async def prompts(self, exchange: Exchange, body: CompletionBody) -> list[Answer]:
        """Returns the answers to prompts, `body.n` to each in their order."""
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
        if body.scores:  # the token that engines cannot do without is not an answer
            return [replace(answer, content="", completion=answer.completion.between(0, 0)) for one in found for answer in one]
        if session is not None:
            for parent, added, answers in zip(parents, new, found, strict=True):
                turns = [SessionTurn(parent=parent, added=added, completion=answer.completion) for answer in answers]
                session.record(turns, role, exchange.call.request_id)
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
        exchange: Exchange,
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
        parser = self._options.parser if use is not None else None
        rules = Rules(
            decode=self._renderer.decode if parser is None else self._renderer.decode_all,
            stop=body.stop,
            stop_token_ids=params.stop_token_ids,
            make_stream=lambda: self._reply_stream(use, prompt_ids),
            opening=begun,
            one_call=use is not None and use.look and use.one,
        )
        completions, choices = await self._generate(exchange, prompt_ids, params, rules, before)
        return [as_answer(prompt_ids, completion, rules, choice) for completion, choice in zip(completions, choices, strict=True)]

    def _reply_stream(self, use: ToolUse | None, prompt_ids: list[int]) -> CallStream:
        looks = use is not None and use.look
        own = call_stream(self._options.find_calls if looks else None)
        if use is None or self._options.parser is None:
            return own
        read = self._options.parser.stream(use.tools if looks else [], prompt_ids)
        return Chained(read, own) if self._options.find_calls is not None else read

    async def _generate(
        self, exchange: Exchange, prompt_ids: list[int], params: SamplingParams, rules: Rules, before: int
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
            choices = exchange.call.running.begin(prompt_ids, rules, len(requests))
        try:
            return await sample(engine, requests, params, choices), choices
        except (EngineError, WorkerError) as error:
            raise self._failed(error, exchange.body) from error

    def _failed(self, error: EngineError | WorkerError, body: RequestBody) -> ApiError:
        """Returns the error to send: 400 if the request is at fault, in whichever process that was found."""
        told = error.__cause__ if isinstance(error, WorkerError) else error
        if isinstance(told, RequestError):
            param = body.prompt_field if told.param == "prompt" else told.param
            return ApiError(str(told), param=param or None)
        if self._admin is not None and self._admin.failure:
            return unavailable(self._admin.failure)
        return ApiError(f"the engine: {error}", status=500, kind="server_error")

    def _params(self, body: RequestBody, session: Session | None, parent: SessionTurn | None, added: list[int]) -> SamplingParams:
        """Returns the sampling parameters of this request, limited to the tokens that still fit.  Raises ApiError or RequestError
        if they or the prompt are not valid."""
        params, param = body.sampling, body.prompt_field
        check_ids(added, param, "the prompt", self._options.vocab_size)
        check_ids(params.stop_token_ids, "stop_token_ids", "a stop token", self._options.vocab_size)
        if session is not None and body.shaping and session.trains(session.role_of(body.model)):
            raise refuse_shaping(body.shaping)
        if session is not None and self._options.fixed_sampling:
            session.num_overruled += bool(body.differing)
            params = replace(self._sampling, stop_token_ids=params.stop_token_ids, shaping=params.shaping)
        scored = isinstance(body, CompletionBody) and body.echo and body.log_probs
        params = replace(params, top_log_probs=body.top_log_probs, prompt_log_probs=scored)
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


def _start(body: RequestBody, session: Session | None) -> int:
    """Returns the number of tokens of the completion that the prompt already contains; a session knows them by itself."""
    return body.start if isinstance(body, CompletionBody) and session is None else 0


def _seeds(exchange: Exchange, before: int) -> list[int]:
    """Returns the seeds of a prompt's answers.  before: the number of answers to the request's earlier prompts."""
    body, session = exchange.body, exchange.session
    named = [None if body.seed is None else body.seed + choice for choice in range(body.n)]
    if session is not None:
        return [session.answer_seed(exchange.call.number, before + choice, seed) for choice, seed in enumerate(named)]
    return [secrets.randbits(SEED_BITS) if seed is None else seed % (1 << SEED_BITS) for seed in named]
