"""Streams the tokens of one request through the rollout service: from the replica, through the router, to the follower."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rlhub.agents.partials import join
from rlhub.engines.rollout.base import Completion, FinishReason, Follow, GenerationRequest, Progress, SamplingParams


class TokenStream:
    """A request's tokens so far, at the replica, for a caller in another process.  It lives on one event loop."""

    def __init__(self) -> None:
        self._so_far = Progress(token_ids=[], log_probs=[], versions=[])
        self._changed = asyncio.Event()
        self._ended = False

    def follow(self, progress: Progress) -> None:
        """Takes the tokens that the engine has added."""
        extend(self._so_far, progress)
        self._changed.set()

    def end(self) -> None:
        """Ends the stream: the request has its answer, or will get none."""
        self._ended = True
        self._changed.set()

    async def after(self, have: int) -> Progress | None:
        """Returns the tokens after the first `have`, as soon as there are any; None where no more will come."""
        while len(self._so_far.token_ids) <= have:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        found = self._so_far
        return Progress(
            token_ids=found.token_ids[have:],
            log_probs=found.log_probs[have:],
            versions=found.versions[have:],
            finish_reason=found.finish_reason,
        )


class TokenStreams:
    """The trails of a replica, by the names under which requests are followed."""

    def __init__(self) -> None:
        self._begun: dict[str, TokenStream] = {}
        self._awaited: dict[str, TokenStream] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[TokenStream]:
        """Gives the stream of a request while it runs."""
        stream = self._begun[name] = self._awaited.get(name) or TokenStream()
        try:
            yield stream
        finally:
            del self._begun[name]
            stream.end()

    async def after(self, name: str, have: int) -> Progress | None:
        """See TokenStream.after.  A request whose first tokens are asked for may not have arrived: a call with a long prompt is
        overtaken.  For one that has ended already this waits until the caller, who has the answer, cancels the call."""
        stream = self._begun.get(name)
        if stream is None and have:
            return None
        try:
            return await (stream or self._awaited.setdefault(name, TokenStream())).after(have)
        finally:
            self._awaited.pop(name, None)


class StreamedRequest:
    """A followed request at the router, through all the replicas that have it one after the other.

    Tokens that were sent on stay valid.  Where a replica dies the next one continues from them, under its weights, and does not
    start again: that could give others.
    """

    def __init__(self, request: GenerationRequest, params: SamplingParams, follow: Follow) -> None:
        self._first, self._params, self._follow = request, params, follow
        self._sent = Progress(token_ids=[], log_probs=[], versions=[])
        self._before: Completion | None = None  # the tokens of earlier attempts

    def send_on(self, progress: Progress) -> None:
        """Sends more tokens of this attempt to the follower."""
        extend(self._sent, progress)
        self._follow(progress)

    def whole(self, completion: Completion) -> Completion:
        """Returns the completion of this attempt, joined to the tokens of earlier ones."""
        return join(self._before, completion)

    def finished(self) -> Completion | None:
        """Returns the completion, if the tokens that were sent on end it: then only the answer itself was lost."""
        sent, params = self._sent, self._params
        reason = sent.finish_reason
        if reason is None and len(sent.token_ids) >= params.max_new_tokens - self._first.start:
            reason = "length"
        if sent.token_ids and sent.token_ids[-1] in params.stop_token_ids and not params.ignore_eos:
            reason = "stop"
        return None if reason is None else self._as_completion(reason)

    def again(self) -> GenerationRequest:
        """Returns the request of the next attempt."""
        if not self._sent.token_ids:
            return self._first
        self._before = self._as_completion("abort")
        sent = self._sent.token_ids
        return replace(self._first, prompt_ids=[*self._first.prompt_ids, *sent], start=self._first.start + len(sent))

    def _as_completion(self, reason: FinishReason) -> Completion:
        sent = self._sent
        return Completion(
            token_ids=list(sent.token_ids), log_probs=list(sent.log_probs), versions=list(sent.versions), finish_reason=reason
        )


def extend(so_far: Progress, more: Progress) -> None:
    """Appends the second to the first."""
    so_far.token_ids += more.token_ids
    so_far.log_probs += more.log_probs
    so_far.versions += more.versions
    so_far.finish_reason = more.finish_reason
