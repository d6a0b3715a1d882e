"""Streams the tokens of one request through the rollout service: from the replica, through the router, to the follower."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rlhub.agents.partials import join
from rlhub.engines.rollout.base import Completion, FinishReason, Follow, GenerationRequest, Progress, SamplingParams


class TokenStream:
    """Collects the tokens of one running request at the replica, for a caller in another process.  Lives on one event loop."""

    def __init__(self) -> None:
        self._so_far = Progress(token_ids=[], log_probs=[], versions=[])
        self._changed = asyncio.Event()
        self._ended = False

    def follow(self, progress: Progress) -> None:
        """Appends the tokens that the engine has just sampled."""
        extend(self._so_far, progress)
        self._changed.set()

    def end(self) -> None:
        """Ends the stream: the request has completed or failed."""
        self._ended = True
        self._changed.set()

    async def after(self, have: int) -> Progress | None:
        """Returns the tokens after the first `have` as soon as there are any, or None when no more will come."""
        while len(self._so_far.token_ids) <= have:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._so_far.between(have)


class TokenStreams:
    """The token streams of a replica, by the names under which requests are followed."""

    def __init__(self) -> None:
        self._begun: dict[str, TokenStream] = {}
        self._awaited: dict[str, TokenStream] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[TokenStream]:
        """Yields the stream of a request while the request runs."""
        stream = self._begun[name] = self._awaited.get(name) or TokenStream()
        try:
            yield stream
        finally:
            del self._begun[name]
            stream.end()

    async def after(self, name: str, have: int) -> Progress | None:
        """Returns the tokens of a named stream as TokenStream.after does.

        The call may arrive before its request, because a call with a long prompt travels longer.  For a request that has already
        ended it waits until the caller, who has the completion by then, cancels it.
        """
        stream = self._begun.get(name)
        if stream is None and have:
            return None
        try:
            return await (stream or self._awaited.setdefault(name, TokenStream())).after(have)
        finally:
            self._awaited.pop(name, None)


class StreamedRequest:
    """A request at the router whose tokens are streamed, over all replicas that serve it one after the other.

    Tokens that were streamed stay valid.  When a replica dies, the next one continues after them under its own weights; a new
    start could sample other tokens.
    """

    def __init__(self, request: GenerationRequest, params: SamplingParams, follow: Follow) -> None:
        self._first, self._params, self._follow = request, params, follow
        self._sent = Progress(token_ids=[], log_probs=[], versions=[])
        self._before: Completion | None = None  # the tokens of earlier attempts

    def send_on(self, progress: Progress) -> None:
        """Passes more tokens of the current attempt to the follower."""
        extend(self._sent, progress)
        self._follow(progress)

    def whole(self, completion: Completion) -> Completion:
        """Returns the completion of the current attempt, joined to the tokens of earlier attempts."""
        return join(self._before, completion)

    def finished(self) -> Completion | None:
        """Returns the completion if the streamed tokens are already all of it, so that only the reply of the replica was lost;
        otherwise None."""
        sent, params = self._sent, self._params
        reason = sent.finish_reason
        if reason is None and len(sent.token_ids) >= params.max_new_tokens - self._first.start:
            reason = "length"
        if sent.token_ids and sent.token_ids[-1] in params.stop_token_ids and not params.ignore_eos:
            reason = "stop"
        return None if reason is None else self._as_completion(reason)

    def again(self) -> GenerationRequest:
        """Returns the request for the next attempt, which continues after the streamed tokens."""
        if not self._sent.token_ids:
            return self._first
        self._before = self._as_completion("abort")
        sent = self._sent.token_ids
        return replace(self._first, prompt_ids=[*self._first.prompt_ids, *sent], start=self._first.start + len(sent))

    def _as_completion(self, reason: FinishReason) -> Completion:
        made = Completion(token_ids=[], log_probs=[], finish_reason=reason)
        made.extend(self._sent)
        return made


def extend(so_far: Progress, more: Progress) -> None:
    """Appends the tokens of `more` to `so_far`, and takes over its finish reason."""
    so_far.extend(more)
    so_far.finish_reason = more.finish_reason
