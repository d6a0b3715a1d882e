"""Following a request through the service: its tokens so far at the replica, and what the router has told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rlhub.agents.partials import join
from rlhub.engines.rollout.base import Completion, FinishReason, Follow, GenerationRequest, Progress, SamplingParams


class Trail:
    """At the replica: a request's tokens so far, for one who asks from afar.  On one event loop."""

    def __init__(self) -> None:
        self._so_far = Progress(token_ids=[], log_probs=[], versions=[])
        self._changed = asyncio.Event()
        self._ended = False

    def follow(self, progress: Progress) -> None:
        """Takes the tokens that the engine has added."""
        extend(self._so_far, progress)
        self._changed.set()

    def end(self) -> None:
        """The request has its answer, or will get none."""
        self._ended = True
        self._changed.set()

    async def after(self, have: int) -> Progress | None:
        """The tokens after the first `have`, as soon as there are any; None where no more will come."""
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


class Trails:
    """Those of a replica, by the names under which requests are followed."""

    def __init__(self) -> None:
        self._begun: dict[str, Trail] = {}
        self._awaited: dict[str, Trail] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[Trail]:
        """While the request runs."""
        trail = self._begun[name] = self._awaited.get(name) or Trail()
        try:
            yield trail
        finally:
            del self._begun[name]
            trail.end()

    async def after(self, name: str, have: int) -> Progress | None:
        """See Trail.after.  A request whose first tokens are asked for may not have arrived: a call with a long prompt is
        overtaken.  One that has ended already is waited for in vain, until the asker, who has its answer, cancels the call."""
        trail = self._begun.get(name)
        if trail is None and have:
            return None
        try:
            return await (trail or self._awaited.setdefault(name, Trail())).after(have)
        finally:
            self._awaited.pop(name, None)


class Following:
    """At the router: a request that is followed, through all the replicas that have it one after the other.

    What was told stays true.  Where a replica dies the next one goes on from the tokens that were told, under its weights, and
    does not begin anew: that could give others.
    """

    def __init__(self, request: GenerationRequest, params: SamplingParams, follow: Follow) -> None:
        self._first, self._params, self._follow = request, params, follow
        self._told = Progress(token_ids=[], log_probs=[], versions=[])
        self._before: Completion | None = None  # what was told before this attempt

    def tell(self, progress: Progress) -> None:
        """More tokens of this attempt."""
        extend(self._told, progress)
        self._follow(progress)

    def whole(self, completion: Completion) -> Completion:
        """With what was told before this attempt, which gave the completion."""
        return join(self._before, completion)

    def finished(self) -> Completion | None:
        """The completion, if the last that was told ended it: then only the answer itself was lost."""
        told, params = self._told, self._params
        reason = told.finish_reason
        if reason is None and len(told.token_ids) >= params.max_new_tokens - self._first.start:
            reason = "length"
        if told.token_ids and told.token_ids[-1] in params.stop_token_ids and not params.ignore_eos:
            reason = "stop"
        return None if reason is None else self._as_completion(reason)

    def again(self) -> GenerationRequest:
        """What the next attempt asks for."""
        if not self._told.token_ids:
            return self._first
        self._before = self._as_completion("abort")
        told = self._told.token_ids
        return replace(self._first, prompt_ids=[*self._first.prompt_ids, *told], start=self._first.start + len(told))

    def _as_completion(self, reason: FinishReason) -> Completion:
        told = self._told
        return Completion(
            token_ids=list(told.token_ids), log_probs=list(told.log_probs), versions=list(told.versions), finish_reason=reason
        )


def extend(so_far: Progress, more: Progress) -> None:
    """Both as one."""
    so_far.token_ids += more.token_ids
    so_far.log_probs += more.log_probs
    so_far.versions += more.versions
    so_far.finish_reason = more.finish_reason
