"""Continuous batching: a thread that steps an engine, and requests that join and leave between two steps.

Engines differ only in their Stepper.  EngineLoop does what all have in common: callers on any event loop, cancellation, pauses
for new weights, the version of each token, and the answers to waiting requests when a step fails.  `SteppedEngine` is the half
of a RolloutEngine that follows from it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rlhub.engines.rollout.base import (
    Completion,
    FinishReason,
    Follow,
    GenerationRequest,
    Progress,
    RolloutEngine,
    SamplingParams,
    TopLogProbs,
    check_requests,
)
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.errors import EngineError, RequestError
from rlhub.utils import faults


class TokenEvent(NamedTuple):
    """One sampled token of the request `key`.  finish: None if more tokens follow.  A log-prob that was not asked for may be
    0.  top, prompt: as in SampledTokens, where the request asks for them."""

    key: int
    token: int
    log_prob: float
    finish: FinishReason | None
    top: TopLogProbs | None = None
    prompt: list[tuple[float, TopLogProbs]] | None = None


class Stepper(Protocol):
    """An engine's state of a continuous batch.  Calls may come from any thread, but never two at once."""

    def add(self, key: int, request: GenerationRequest, params: SamplingParams) -> None:
        """Adds a checked request, which joins at the next step."""

    def step(self) -> Sequence[TokenEvent]:
        """Computes one step of all requests, of which there is at least one.  A step may yield no token, for example while a
        long prompt is read in parts."""

    def remove(self, keys: Collection[int]) -> None:
        """Removes these requests; unknown keys belong to requests that have ended."""

    def recompute(self) -> None:
        """Computes the running requests' keys and values again before the next step, because the weights have changed."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Live:
    """A request whose caller waits for the completion."""

    key: int
    request: GenerationRequest
    params: SamplingParams
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    follow: Follow | None = None
    written: Completion = field(default_factory=lambda: Completion(token_ids=[], log_probs=[], finish_reason="abort"))

    def add(self, event: TokenEvent, version: int) -> Progress:
        """Appends a token; returns it alone."""
        progress = Progress(
            token_ids=[event.token],
            log_probs=[event.log_prob] if self.params.log_probs else [],
            versions=[version],
            top_log_probs=[] if event.top is None else [event.top],
            prompt_log_probs=event.prompt or [],
            finish_reason=event.finish,
        )
        self.written.extend(progress)
        self.written.finish_reason = event.finish or "abort"
        return progress


Answer = tuple[_Live, Completion | Progress | BaseException]
"""One message to a request's caller: its completion, an error or, if the caller follows the request, its next token."""


class EngineLoop:
    """Steps one engine in a thread, which starts with the first request.

    version: returns the policy version of the live weights.

    All fields are read and written under `_changed`.  The stepper is used only by the thread, or by the holder of `exclusive`.
    """

    def __init__(self, make_stepper: Callable[[], Stepper], version: Callable[[], int], *, name: str = "rollout") -> None:
        self._make_stepper = make_stepper
        self._version = version
        self._name = name
        self._changed = threading.Condition()
        self._keys = itertools.count()
        self._live: dict[int, _Live] = {}
        self._arrived: list[_Live] = []
        self._removed: set[int] = set()
        self._paused = self._stepping = self._stale = self._recompute = self._closed = False
        self._user: str | None = None  # the purpose of the present holder of `exclusive`
        self._failure: BaseException | None = None
        self._stepper: Stepper | None = None
        self._thread: threading.Thread | None = None

    @property
    def load(self) -> int:
        """Returns the number of requests that wait or run."""
        return len(self._live)

    @property
    def failure(self) -> str:
        """Returns the error of the step after which the engine computes none, or "" if no step has failed."""
        return "" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"

    @property
    def paused(self) -> bool:
        """Returns whether the loop is paused."""
        return self._paused

    async def generate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        """Queues one checked request and waits for its completion; cancelling the task ends the request."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        live = _Live(key=next(self._keys), request=request, params=params, loop=loop, future=future, follow=follow)
        with self._changed:
            self._refuse()
            self._start()
            self._live[live.key] = live
            self._arrived.append(live)
            self._changed.notify_all()
        try:
            return await live.future
        finally:
            self._forget(live)

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the rollout engine failed in a step and must be built again: {self._failure}") from self._failure

    def _refuse(self) -> None:
        self._refuse_failed()
        if self._closed:
            raise EngineError("the rollout engine was shut down")
        if self._user is not None and not self._paused:
            raise EngineError(f"the rollout engine is busy with {self._user}: pause() before it lets single requests wait")

    def _start(self) -> None:
        if self._thread is None:
            self._stepper = self._make_stepper()
            self._thread = threading.Thread(target=self._run, name=f"{self._name}-steps", daemon=True)
            self._thread.start()

    def _forget(self, live: _Live) -> None:
        """Removes a request whose caller has cancelled; one that has ended is gone already."""
        with self._changed:
            if self._live.pop(live.key, None) is not None:
                self._removed.add(live.key)
                self._changed.notify_all()

    def pause(self) -> None:
        """Stops between two steps; no step is computing when this returns.  Idempotent."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._stepping)

    def resume(self, *, recompute: bool = True) -> None:
        """Continues stepping.  recompute: the stepper computes keys and values again if `weights_changed` was called."""
        with self._changed:
            if self._user is not None:
                raise EngineError(f"the rollout engine cannot go on before the end of {self._user}")
            self._recompute = self._recompute or (recompute and self._stale)
            self._stale = self._stale and not recompute and bool(self._live)
            self._paused = False
            self._changed.notify_all()

    def weights_changed(self) -> None:
        """Notes that the keys and values of the current requests belong to the old weights."""
        with self._changed:
            self._stale = bool(self._live)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Answers these requests, or all for None, with the tokens that they have."""
        with self._changed:
            chosen = [live for live in self._live.values() if request_ids is None or live.request.request_id in request_ids]
            for live in chosen:
                del self._live[live.key]
                self._removed.add(live.key)
            self._changed.notify_all()
        _deliver([(live, live.written) for live in chosen])

    @contextmanager
    def exclusive(self, purpose: str, *, among_requests: bool = False) -> Iterator[None]:
        """Reserves the engine for the caller inside the context.

        Raises EngineError while requests wait or run; with `among_requests` only if the engine is not paused then.
        """
        with self._changed:
            self._refuse_exclusive(purpose, among_requests)
            self._user = purpose
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._stepping)
                self._apply_removals()
            yield
        finally:
            with self._changed:
                self._user = None
                self._changed.notify_all()

    def _refuse_exclusive(self, purpose: str, among_requests: bool) -> None:
        self._refuse_failed()
        if self._user is not None:
            raise EngineError(f"the rollout engine is busy with {self._user}, so {purpose} must wait")
        if self._live and not (among_requests and self._paused):
            remedy = "pause() first" if among_requests else "await or abort() them first"
            raise EngineError(f"{purpose} while {len(self._live)} single requests wait or run: {remedy}")

    def close(self) -> None:
        """Ends the thread; waiting requests get an EngineError.  Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            answers = self._take_all(EngineError("the rollout engine was shut down while requests waited"))
            thread = self._thread
        _deliver(answers)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        """Runs in the thread: steps while there are requests, and waits otherwise."""
        while self._prepare():
            answers: list[Answer] = []
            try:
                answers = self._advance()
            except BaseException as error:  # noqa: BLE001  a thread's boundary: its error belongs to the waiting callers
                with self._changed:
                    self._failure = error
                    answers = self._take_all(error)
            with self._changed:
                self._stepping = False
                self._changed.notify_all()
            _deliver(answers)

    def _prepare(self) -> bool:
        """Waits until there is work to do; returns False when the thread must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_work())
            self._stepping = not self._closed
            return not self._closed

    def _has_work(self) -> bool:
        idle = self._paused or self._user is not None or self._failure is not None
        return not idle and bool(self._live or self._removed)

    def _advance(self) -> list[Answer]:
        """Lets requests join and leave, then computes one step; returns the messages to their callers."""
        assert self._stepper is not None
        with self._changed:
            recompute, self._recompute = self._recompute, False
            self._apply_removals()
            arrived, self._arrived = self._arrived, []
            arrived = [live for live in arrived if live.key in self._live]
            running = len(self._live)
        if recompute:
            self._stepper.recompute()
        if running == self._refused(arrived):
            return []
        version = self._version()  # no update begins while a step is computing
        faults.at("engine.step")
        events = self._stepper.step()
        with self._changed:
            return self._record(events, version)

    def _refused(self, arrived: Sequence[_Live]) -> int:
        """Adds requests to the stepper; returns the number that it refuses.  A refusal ends only the request that it concerns."""
        assert self._stepper is not None
        refused: list[Answer] = []
        for live in arrived:
            try:
                self._stepper.add(live.key, live.request, live.params)
            except EngineError:
                raise  # the engine can serve no request at all
            except Exception as error:  # noqa: BLE001  any error on this request belongs to its caller
                refusal = RequestError(f"the engine refuses the request: {type(error).__name__}: {error}")
                refusal.__cause__ = error
                refused.append((live, refusal))
        with self._changed:
            for live, _ in refused:
                self._live.pop(live.key, None)
        _deliver(refused)  # at once, because the step may fail
        return len(refused)

    def _apply_removals(self) -> None:
        if self._removed and self._stepper is not None:
            self._stepper.remove(self._removed)
        self._removed = set()

    def _record(self, events: Sequence[TokenEvent], version: int) -> list[Answer]:
        answers: list[Answer] = []
        for event in events:
            live = self._live.get(event.key)
            if live is None:  # left during the step
                continue
            progress = live.add(event, version)
            if live.follow is not None:
                answers.append((live, progress))
            if event.finish is not None:
                del self._live[event.key]
                answers.append((live, live.written))
        return answers

    def _take_all(self, error: BaseException) -> list[Answer]:
        """Removes every request; returns the messages that answer each with `error`."""
        answers: list[Answer] = [(live, error) for live in self._live.values()]
        self._live, self._arrived = {}, []
        return answers


def _deliver(answers: Sequence[Answer]) -> None:
    """Passes messages to the callers' event loops, with one call per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
    for answer in answers:
        by_loop.setdefault(answer[0].loop, []).append(answer)
    for loop, group in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: its callers are gone
            loop.call_soon_threadsafe(_settle, group)


def _settle(answers: Sequence[Answer]) -> None:
    for live, outcome in answers:
        if live.future.done():  # cancelled meanwhile
            continue
        if isinstance(outcome, Progress):
            _stream(live, outcome)
        elif isinstance(outcome, BaseException):
            live.future.set_exception(_as_engine_error(outcome))
        else:
            live.future.set_result(outcome)


def _stream(live: _Live, progress: Progress) -> None:
    assert live.follow is not None
    try:
        live.follow(progress)
    except Exception as error:  # noqa: BLE001  the caller's own code: its error is the caller's, not that of others with tokens in this step
        live.future.set_exception(error)


def _as_engine_error(error: BaseException) -> EngineError:
    if isinstance(error, EngineError):
        return error
    wrapped = EngineError(f"a step of the rollout engine failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


class SteppedEngine(RolloutEngine):
    """A RolloutEngine that is driven step by step.  Subclasses set `_ready`, which is True while the engine has a whole set of
    weights and is awake."""

    def __init__(self, setup: RolloutSetup) -> None:
        self.version = -1
        self._setup = setup
        self._ready = False
        self._loop = EngineLoop(self._make_stepper, lambda: self.version)

    @abstractmethod
    def _make_stepper(self) -> Stepper:
        """Returns the engine's stepper.  Called once, with the first single request."""

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        if not self._loop.paused:  # during a pause the request waits for new weights
            self._refuse_unready("generate")
        self._check([request], params, ranks=self._ranks)
        return await self._loop.generate(request, params, follow)

    @property
    def load(self) -> int:
        return self._loop.load

    @property
    def failure(self) -> str:
        return self._loop.failure

    def pause(self) -> None:
        self._loop.pause()

    def resume(self, *, recompute: bool = True) -> None:
        if self._loop.paused:
            self._refuse_unready("resume")
        self._loop.resume(recompute=recompute)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._loop.abort(request_ids)

    def _refuse_unready(self, action: str) -> None:
        if not self._ready:
            raise EngineError(
                f"the engine has no whole set of weights: initialize, wake_up and update_weights come before {action}"
            )

    @property
    def _reads(self) -> frozenset[str]:
        """Returns which of "images" and "pictures" requests may have."""
        return frozenset()

    @property
    def _shapes(self) -> bool:
        """Returns whether the engine has the settings of Shaping."""
        return False

    @property
    def _ranks(self) -> bool:
        """Returns whether the engine's stepper returns `top_log_probs` and `prompt_log_probs`."""
        return False

    def _check(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, *, ranks: bool = False, routes: bool = False
    ) -> None:
        check_requests(
            requests,
            params,
            max_model_len=self._setup.max_model_len,
            vocab_size=self.vocab_size,
            reads=self._reads,
            shapes=self._shapes,
            ranks=ranks,
            routes=routes,
        )

    def _generating(self) -> AbstractContextManager[None]:
        """Returns a context that excludes single requests from a whole batch."""
        return self._loop.exclusive("generate")

    def _updating(self) -> AbstractContextManager[None]:
        """Returns a context that excludes steps from a weight update."""
        return self._loop.exclusive("the weight update", among_requests=True)
