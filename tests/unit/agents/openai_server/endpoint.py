"""A policy that says what it is told to, behind the endpoint, and OpenAI's own client in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from rlhub.agents.openai_server.answering import ServerOptions
from rlhub.agents.openai_server.server import OpenAIServer
from rlhub.agents.openai_server.sessions import Session, SessionLimits
from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, Progress, SamplingParams, TopLogProbs
from rlhub.tools.formats import parse_hermes
from tests.unit.data.templates import CHATML, byte_tokenizer

END = "<|im_end|>"
LIMITS = SessionLimits(prompt=2000, response=2000)


def tokenizer(template: str = CHATML) -> Any:
    return byte_tokenizer(template, eos=END, specials=(END, "<|im_start|>"))


def likeliest(token: int, count: int) -> TopLogProbs:
    """The tokens after this one, each less likely than the one before."""
    return [(token + 1 + rank, -1.0 - rank) for rank in range(count)]


@dataclass
class Told:
    """An engine whose answers are given; keeps every request.  Log-probs count the tokens, so that none can be swapped.

    given: how many tokens of each answer are sampled until now; None: all.  A follower is told each alone.  fails: how the
    answers end once all that is given was told.
    """

    tokenizer: Any
    answers: list[str] = field(default_factory=list)
    version: int = 7
    delay_s: float = 0.0
    given: int | None = None
    fails: Exception | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    ended: int = 0
    cancelled: int = 0

    def ids(self, text: str) -> list[int]:
        return self.tokenizer([text], add_special_tokens=False)["input_ids"][0]

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        self.requests.append(request)
        self.params.append(params)
        ids = self.ids(self.answers[min(len(self.requests), len(self.answers)) - 1])[request.start :]
        cut = ids[: params.max_new_tokens - request.start]
        whole = Completion(
            token_ids=cut,
            log_probs=[-0.01 * (request.start + index + 1) for index in range(len(cut))],
            finish_reason="stop" if cut[-1] in params.stop_token_ids else "length",
            versions=[self.version] * len(cut),
            top_log_probs=[likeliest(token, params.top_log_probs) for token in cut] if params.top_log_probs else [],
        )
        if params.prompt_log_probs:
            read = enumerate(request.prompt_ids[1:], 1)
            whole.prompt_log_probs = [(-0.1 * place, likeliest(token, params.top_log_probs)) for place, token in read]
        try:
            await asyncio.sleep(self.delay_s)
            await self._sample(whole, follow)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.ended += 1
        return whole

    async def _sample(self, whole: Completion, follow: Follow | None) -> None:
        for index in range(len(whole.token_ids)):
            while self.given is not None and index >= self.given:
                if self.fails is not None:
                    raise self.fails
                await asyncio.sleep(0.001)
            if follow is not None:
                last = index + 1 == len(whole.token_ids)
                progress = Progress(token_ids=[], log_probs=[], finish_reason=whole.finish_reason if last else None)
                progress.extend(whole.between(index, index + 1))
                follow(progress)


@dataclass
class Endpoint:
    server: OpenAIServer
    engine: Told
    origin: str
    http: DefaultAsyncHttpxClient

    def client(self, session: Session) -> AsyncOpenAI:
        return self.raw_client(self.server.base_url(session), session.token)

    def raw_client(self, base_url: str, key: str) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, http_client=self.http)


@asynccontextmanager
async def endpoint(answers: Sequence[str] = ("hi" + END,), *, template: str = CHATML, **options: Any) -> AsyncIterator[Endpoint]:
    made = tokenizer(template)
    engine = Told(made, list(answers), delay_s=options.pop("delay_s", 0.0))
    chosen = replace(ServerOptions(model="policy", max_model_len=4000, key="master", find_calls=parse_hermes), **options)
    sampling = SamplingParams(max_new_tokens=4000, stop_token_ids=(made.eos_token_id,))
    server = OpenAIServer(engine, made, sampling, chosen)
    try:
        async with DefaultAsyncHttpxClient(verify=False) as http:  # no certificates to read: that would be most of a test's time
            yield Endpoint(server=server, engine=engine, origin=await server.start(), http=http)
    finally:
        await server.aclose()
