"""WorkflowExecutor: keeps so many groups of episodes in work as the bound on staleness allows, and hands them to training.

Everything happens on the runner's event loop: whatever any thread asks is posted there, so there is one order of events and no
lock.  Admission follows events (a group ends, the version changes); nothing is polled.

    executor.start(source)
    groups = executor.next_groups(batch)      # as they finish; fewer than a batch may be asked for
    ...train step s, publish the weights...
    executor.set_version(s)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.errors import DeadlineError, WorkflowError
from rlhub.utils.outcomes import Accepted, Cancelled, Failed, Outcome, Reject, Rejected, TimedOut
from rlhub.utils.seeding import sample_seed
from rlhub.utils.task_runner import AsyncTaskRunner
from rlhub.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow
from rlhub.workflows.groups import Group, PromptItem, mask_older
from rlhub.workflows.ledger import Phase, PromptLedger
from rlhub.workflows.staleness import StalenessManager
from rlhub.workflows.statistics import RolloutStatistics
from rlhub.workflows.trajectory import Trajectory

logger = logging.getLogger(__name__)

StalePolicy = Literal["drop", "mask", "correct"]
CALL_DEADLINE_S = 60.0
"""For the event loop to answer; it only ever runs short pieces of work."""


@dataclass(slots=True, kw_only=True)
class ExecutorOptions:
    """group_size: samples of a prompt.  seed: the run's.  stale_policy: what becomes of groups beyond the bound.

    episode_timeout_s: after which an episode is given up.  max_failed_batches: stop after so many batches' worth of failed
    groups in a row.
    """

    group_size: int = 1
    seed: int = 0
    stale_policy: StalePolicy = "drop"
    episode_timeout_s: float | None = None
    max_failed_batches: int = 10


@dataclass(slots=True)
class _Work:
    """A group of which episodes run."""

    item: PromptItem
    workflow: RolloutWorkflow
    trajectories: list[Trajectory | None]
    missing: int


@dataclass(slots=True)
class _Request:
    """Training waits for so many groups, to be trained at `step` (None: the one after the present version)."""

    count: int
    step: int | None
    answer: Future[list[Group]] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class WorkflowExecutor:
    """engine: what generates.  workflow_for: the workflow of a prompt's row.

    on_group: awaited once for each complete group, before the filter: scoring.  Its errors end the run (the reward has a policy
    for its failures), except Reject.  keep: the group filter; a group turned down is rejected and another prompt drawn.
    """

    def __init__(
        self,
        *,
        runner: AsyncTaskRunner,
        engine: EpisodeEngine,
        workflow_for: Callable[[Mapping[str, Any]], RolloutWorkflow],
        staleness: StalenessManager,
        ledger: PromptLedger,
        options: ExecutorOptions,
        on_group: Callable[[Group], Awaitable[None]] | None = None,
        keep: Callable[[Group], bool] | None = None,
    ) -> None:
        self.runner, self.engine, self.workflow_for = runner, engine, workflow_for
        self.staleness, self.ledger, self.options = staleness, ledger, options
        self.on_group, self.keep = on_group, keep
        self.statistics = RolloutStatistics()
        self._source: Iterator[PromptItem] = iter(())
        self._exhausted = self._paused = self._closed = False
        self._error: BaseException | None = None
        self._again: deque[PromptItem] = deque()
        self._restored: dict[int, Mapping[str, Any]] = {}
        self._work: dict[int, _Work] = {}
        self._episodes: dict[str, tuple[_Work, int]] = {}
        self._scoring: set[asyncio.Task[None]] = set()
        self._ready: list[Group] = []
        self._taken: dict[int, tuple[int, Group]] = {}
        self._requests: deque[_Request] = deque()
        self._masked: set[int] = set()
        self._checked_step = 0
        self._failed_in_a_row = 0
        runner.on_outcome = self._on_outcome

    # What training calls, from its own thread.

    @property
    def first_ordinal(self) -> int:
        """Where the prompts given to `start` must begin: everything before has ended."""
        return self.ledger.frontier

    def start(self, source: Iterator[PromptItem]) -> None:
        """Begin to draw prompts, in the order of their ordinals from `first_ordinal` on.  They are drawn on the event loop."""
        self._call(self._start, source)

    def next_groups(self, count: int, timeout: float | None = None, *, step: int | None = None) -> list[Group]:
        """`count` groups to train at `step` (from 1; None: the one after the present version), sorted by ordinal.

        Blocks until there are so many; fewer come only when the prompts have run out.  DeadlineError after `timeout` seconds:
        nothing is lost.  Raises the error that ended the run.
        """
        request = _Request(count, step)
        self._call(self._ask, request)
        try:
            return request.answer.result(timeout)
        except TimeoutError:
            if not request.answer.done() and self._call(self._withdraw, request):
                hint = self._call(self._situation)
                raise DeadlineError(f"{count} groups of episodes to train on", timeout or 0.0, hint) from None
            return request.answer.result()

    def trained(self, step: int) -> None:
        """Step `step` is over: what was taken for it, or before, is trained."""
        self._call(self._trained, step)

    def set_version(self, version: int) -> None:
        """Step `version` is over and its weights are those that generate from now on."""
        self._call(self._set_version, version)

    def pause(self) -> None:
        """Start no more groups; those in work go on and are delivered."""
        self._call(self._pause)

    def resume(self) -> None:
        """Start groups again."""
        self._call(self._resume)

    def metrics(self) -> dict[str, float]:
        """Since the last call; see statistics.py."""
        return self._call(self._metrics)

    def state(self) -> dict[str, Any]:
        """JSON-able.  With finished groups that were not trained; what was taken for a step that is not over is among them."""
        ledger, staleness, groups = self._call(self._snapshot)
        return {"ledger": ledger, "staleness": staleness, "finished": [group.to_json() for group in groups]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; before `start`."""
        self._restored = {group["ordinal"]: group for group in state["finished"]}
        self.ledger.load_state(state["ledger"], self._restored)
        self.staleness.load_state(state["staleness"], finished=len(self._restored), running=0)

    def close(self) -> None:
        """End all episodes.  The runner stays open: it belongs to whoever made it."""
        if not self._closed:
            self._call(self._close)

    # On the event loop.

    def _call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn` on the event loop and wait for what it returns."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(fn(*args))
            except BaseException as error:  # noqa: BLE001  handed to the thread that asked
                answer.set_exception(error)

        self.runner.loop.call_soon_threadsafe(run)
        return answer.result(CALL_DEADLINE_S)

    def _start(self, source: Iterator[PromptItem]) -> None:
        self._source = iter(source)
        for ordinal in range(self.ledger.frontier, self.ledger.next_ordinal):
            self._restore(self._seek(ordinal))
        self._restored = {}
        self._react()

    def _seek(self, ordinal: int) -> PromptItem:
        """The prompt of that ordinal, from a source that begins at or before it."""
        for item in self._source:
            if item.ordinal == ordinal:
                return item
            if item.ordinal > ordinal:
                raise ValueError(f"prompts begin at ordinal {item.ordinal}, but {ordinal} has not ended: begin at first_ordinal")
        raise ValueError(f"there is no prompt of ordinal {ordinal}, which was drawn before: the prompts have changed")

    def _restore(self, item: PromptItem) -> None:
        match self.ledger.phase(item.ordinal):
            case Phase.FINISHED:
                self._ready.append(Group.from_json(self._restored[item.ordinal], item))
            case Phase.ISSUED:
                self._again.append(item)

    def _react(self) -> None:
        """Something has changed: start what may be started, deliver what may be delivered."""
        if self._error is None and not self._closed:
            try:
                self._serve()
                self._admit()
                self._serve()  # the prompts may just have run out
            except Exception as error:  # noqa: BLE001  the loop's boundary: training gets the error
                self._fail(error)

    def _admit(self) -> None:
        while not self._paused and not self._exhausted and self.staleness.capacity > 0:
            item = self._next_item()
            if item is None:
                self._exhausted = True
            else:
                self.staleness.on_submit()
                self._launch(item)
        self.statistics.work(self.staleness.running)

    def _next_item(self) -> PromptItem | None:
        if self._again:
            return self._again.popleft()
        item = next(self._source, None)
        if item is not None:
            self.ledger.issue(item.ordinal)
        return item

    def _launch(self, item: PromptItem) -> None:
        self.ledger.run(item.ordinal)
        size = self.options.group_size
        work = _Work(item, self.workflow_for(item.row), [None] * size, size)
        self._work[item.ordinal] = work
        for sample in range(size):
            task_id = f"{item.ordinal}-{sample}"
            self._episodes[task_id] = (work, sample)
            self.runner.submit(self._episode, work, sample, task_id=task_id, deadline=self.options.episode_timeout_s)

    async def _episode(self, work: _Work, sample: int) -> Trajectory | None:
        item = work.item
        data = EpisodeData(
            prompt_ids=item.prompt_ids,
            ordinal=item.ordinal,
            sample=sample,
            seed=sample_seed(self.options.seed, item.ordinal, sample),
            row=item.row,
        )
        trajectory = await work.workflow.arun_episode(self.engine, data)
        if trajectory is not None:
            trajectory.check()
        return trajectory

    def _on_outcome(self, outcome: Outcome) -> None:
        """An episode has ended."""
        work, sample = self._episodes.pop(outcome.task_id)
        if self._work.get(work.item.ordinal) is not work:  # its group has ended before
            if isinstance(outcome, Accepted):
                self.statistics.wasted_tokens += sum(outcome.value.response_mask)
            return
        try:
            self._settle(work, sample, outcome)
        except Exception as error:  # noqa: BLE001  the loop's boundary: training gets the error
            self._fail(error)

    def _settle(self, work: _Work, sample: int, outcome: Outcome) -> None:
        match outcome:
            case Accepted(value=trajectory):
                work.trajectories[sample] = trajectory
                work.missing -= 1
                if work.missing == 0:
                    self._complete(work)
            case Rejected(reason=reason):
                self._reject(work, "rejected_groups", reason)
            case TimedOut(deadline_s=deadline):
                self.statistics.counts["timed_out_episodes"] += 1
                self._failed(work, DeadlineError(f"episode {outcome.task_id}", deadline))
            case Failed(error=error):
                self._failed(work, error)
            case Cancelled():
                self._failed(work, WorkflowError(f"episode {outcome.task_id} was cancelled by its own code"))

    def _complete(self, work: _Work) -> None:
        group = Group(item=work.item, trajectories=[t for t in work.trajectories if t is not None])
        if self.on_group is None:
            self._filter(work, group)
        else:
            task = self.runner.loop.create_task(self._score(self.on_group, work, group))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)

    async def _score(self, on_group: Callable[[Group], Awaitable[None]], work: _Work, group: Group) -> None:
        try:
            await on_group(group)
            if not self._closed:
                self._filter(work, group)
        except Reject as reason:
            self._reject(work, "rejected_groups", str(reason))
        except Exception as error:  # noqa: BLE001  the task's boundary: training gets the error
            self._fail(error)

    def _filter(self, work: _Work, group: Group) -> None:
        self._failed_in_a_row = 0
        if self.keep is not None and not self.keep(group):
            return self._reject(work, "filtered_groups", "filtered out")
        del self._work[group.ordinal]
        self.ledger.finish(group.ordinal)
        self.staleness.on_accept()
        self.statistics.counts["accepted_groups"] += 1
        if self._fresh(group, self._checked_step):
            self._ready.append(group)
        self._react()

    def _failed(self, work: _Work, error: BaseException) -> None:
        self._failed_in_a_row += 1
        limit = self.options.max_failed_batches * self.staleness.batch
        logger.warning("an episode of prompt %d failed: %r", work.item.ordinal, error)
        if self._failed_in_a_row >= limit:
            message = f"{self._failed_in_a_row} groups of episodes failed in a row, the last with {type(error).__name__}: {error}"
            stop = WorkflowError(f"{message}. Correct the workflow, or raise rollout.agent.max_failed_batches")
            stop.__cause__ = error
            return self._fail(stop)
        self._reject(work, "failed_groups", f"failed: {type(error).__name__}: {error}")

    def _reject(self, work: _Work, count: str, reason: str) -> None:
        """The group gives nothing to train; what still runs of it is cancelled."""
        ordinal = work.item.ordinal
        del self._work[ordinal]
        if work.missing:
            for sample, trajectory in enumerate(work.trajectories):
                if trajectory is None:
                    self.runner.cancel(f"{ordinal}-{sample}")
        self.statistics.wasted_tokens += sum(sum(t.response_mask) for t in work.trajectories if t is not None)
        self.statistics.counts[count] += 1
        self.ledger.reject(ordinal, reason)
        self.staleness.on_reject()
        self._react()

    def _fail(self, error: BaseException) -> None:
        """The run cannot go on: whoever asks for groups gets the error."""
        if self._error is None:
            self._error = error
        while self._requests:
            self._requests.popleft().answer.set_exception(self._error)

    # Consumption.

    def _ask(self, request: _Request) -> None:
        self._requests.append(request)
        if self._error is not None:
            self._fail(self._error)
        elif self._closed:
            self._fail(WorkflowError("the executor is closed"))
        self._react()

    def _withdraw(self, request: _Request) -> bool:
        """Whether the request was still waiting."""
        if request in self._requests:
            self._requests.remove(request)
            self.statistics.wait_s += time.monotonic() - request.since
            return True
        return False

    def _serve(self) -> None:
        while self._requests:
            request = self._requests[0]
            step = self.staleness.version + 1 if request.step is None else request.step
            self._age(step)
            ended = self._exhausted and not self._work and not self._again
            if len(self._ready) < request.count and not ended:
                return
            self._requests.popleft()
            self.statistics.wait_s += time.monotonic() - request.since
            request.answer.set_result(self._take(request.count, step))

    def _age(self, step: int) -> None:
        """Apply the bound as of this step to what waits."""
        if step > self._checked_step:
            self._checked_step = step
            self._ready = [group for group in self._ready if self._fresh(group, step)]

    def _fresh(self, group: Group, step: int) -> bool:
        """Whether the group may train at this step, by the policy for what is older than the bound."""
        policy = self.options.stale_policy
        if policy == "correct" or not self.staleness.is_stale(group.first_version, step):
            return True
        if policy == "mask":
            self.statistics.masked_tokens += mask_older(group, step - 1 - self.staleness.max_staleness)
            self._masked.add(group.ordinal)
            if group.num_tokens:
                return True
        self._drop(group, step)
        return False

    def _drop(self, group: Group, step: int) -> None:
        self.ledger.drop(group.ordinal, f"too old at step {step}")
        self.staleness.on_drop()
        self._masked.discard(group.ordinal)
        self.statistics.drop(group)

    def _take(self, count: int, step: int) -> list[Group]:
        self._ready.sort(key=lambda group: group.ordinal)
        taken, self._ready = self._ready[:count], self._ready[count:]
        for group in taken:
            self._taken[group.ordinal] = (step, group)
            beyond = group.ordinal in self._masked or self.staleness.is_stale(group.first_version, step)
            self._masked.discard(group.ordinal)
            self.statistics.take(group, step, beyond=beyond)
        return taken

    def _trained(self, step: int) -> None:
        for ordinal in [ordinal for ordinal, (taken_for, _) in self._taken.items() if taken_for <= step]:
            del self._taken[ordinal]
            self.ledger.train(ordinal)

    def _set_version(self, version: int) -> None:
        self._trained(version)
        self.staleness.set_version(version)
        self._age(version + 1)
        self._react()

    # The rest.

    def _pause(self) -> None:
        self._paused = True

    def _resume(self) -> None:
        self._paused = False
        self._react()

    def _metrics(self) -> dict[str, float]:
        staleness = self.staleness
        return self.statistics.metrics(running=staleness.running, ready=len(self._ready), capacity=staleness.capacity)

    def _situation(self) -> str:
        """For the message of a wait that took too long."""
        return (
            f"{len(self._ready)} groups are ready, {self.staleness.running} in work, {self.staleness.capacity} more may be "
            f"started at version {self.staleness.version}{'; paused' if self._paused else ''}"
        )

    def _snapshot(self) -> tuple[dict[str, Any], dict[str, int], list[Group]]:
        groups = [*self._ready, *(group for _, group in self._taken.values())]
        return self.ledger.state(), self.staleness.state(), sorted(groups, key=lambda group: group.ordinal)

    def _close(self) -> None:
        self._closed = True
        self._work.clear()
        for task_id in list(self._episodes):
            self.runner.cancel(task_id)
        for task in list(self._scoring):
            task.cancel()
        while self._requests:
            self._requests.popleft().answer.set_exception(WorkflowError("the executor is closed"))
