"""WorkflowExecutor: runs as many groups of episodes as the staleness bound allows, and returns them to training.

Everything happens on the runner's event loop: calls of other threads are posted to it, so that events have one order and no lock
is needed.  Admission follows events (a group ends, the version changes); nothing is polled.

    executor.start(source)
    groups = executor.next_groups(batch)      # as they finish; a caller may take less than a batch at a time
    ...train step s, publish the weights...
    executor.set_version(s)
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rlhub.agents.partials import Interrupt, TrackedEngine, collect, completion_of
from rlhub.agents.trajectory import Sampled, sampled_of
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow
from rlhub.errors import ConfigError, DeadlineError, HolderLostError, WorkflowError
from rlhub.rollout_service.executor.batches import Delivery, FailureLimit, GroupRequest, Release, keep_nothing
from rlhub.rollout_service.executor.episode_groups import (
    Group,
    GroupInWork,
    PromptItem,
    StalePolicy,
    episode,
    episode_data,
    lies_in,
)
from rlhub.rollout_service.executor.ledger import Phase, PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.rollout_service.executor.statistics import RolloutStatistics
from rlhub.utils.aio.results import Accepted, Cancelled, Failed, Reject, Rejected, TaskResult, TimedOut
from rlhub.utils.aio.task_runner import AsyncTaskRunner

logger = logging.getLogger(__name__)
R = TypeVar("R")
CALL_DEADLINE_S = 60.0
"""Time limit in seconds for a call on the event loop, which runs only short pieces of work."""


@dataclass(slots=True, kw_only=True)
class ExecutorOptions:
    """The settings of a WorkflowExecutor.

    group_size: the number of samples per prompt.  seed: the run's seed.  stale_policy: how groups beyond the bound are handled.
    episode_timeout_s: time limit of an episode.  episode_retries: further attempts of an episode that failed, each with a seed of
    its own.  min_samples: a group trains without its failed episodes while so many samples are left; None: all must be.
    max_failed_batches: the run stops after so many batches' worth of failed groups in a row.
    """

    group_size: int = 1
    seed: int = 0
    stale_policy: StalePolicy = "drop"
    episode_timeout_s: float | None = None
    episode_retries: int = 0
    min_samples: int | None = None
    max_failed_batches: int = 10


class WorkflowExecutor:
    """Admits prompts, runs their episodes and delivers finished groups.

    engine: generates for the episodes.  workflow_for: returns the workflow of a prompt's row.  baseline_for: returns the workflow
    of its greedy response, one more episode of each group; None for no baseline.

    on_group: awaited once for each complete group before the filter; it scores the group.  Its errors end the run (the reward has
    a policy for its own failures), except Reject, and HolderLostError, after which the lost samples are generated again.  keep:
    the group filter; a group that it refuses is rejected, and another prompt is drawn.  interrupt: makes running generations
    return their tokens for a checkpoint; None: they start again after a resume.  release: called with the results that were
    trained, or will not be.
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
        interrupt: Interrupt | None = None,
        baseline_for: Callable[[Mapping[str, Any]], RolloutWorkflow] | None = None,
        release: Release = keep_nothing,
    ) -> None:
        self.runner, self.engine, self.workflow_for, self.baseline_for = runner, engine, workflow_for, baseline_for
        self.staleness, self.ledger, self.options = staleness, ledger, options
        self.on_group, self.keep, self.interrupt = on_group, keep, interrupt
        self.statistics = RolloutStatistics()
        self.delivery = Delivery(staleness, ledger, self.statistics, options.stale_policy, release)
        self.release = release
        self._lost_homes: set[str] = set()
        self._source: Iterator[PromptItem] = iter(())
        self._exhausted = self._paused = self._closed = False
        self._error: BaseException | None = None
        self._again: deque[PromptItem] = deque()
        self._restored: dict[int, Mapping[str, Any]] = {}
        self._begun: dict[int, list[dict[str, Any]]] = {}
        self._work: dict[int, GroupInWork] = {}
        self._episodes: dict[str, tuple[GroupInWork, int]] = {}
        self._scoring: set[asyncio.Task[None]] = set()
        self._failure_limit = FailureLimit(options.max_failed_batches * staleness.batch)
        runner.on_result = self._on_result

    # Methods for training, from its own thread or on the event loop; `next_groups` and `state` block, so never on the loop.

    @property
    def first_ordinal(self) -> int:
        """Returns the ordinal at which the prompts given to `start` must begin; all earlier ones have ended."""
        return int(self._call(lambda: self.ledger.frontier))

    def start(self, source: Iterator[PromptItem]) -> None:
        """Starts to draw prompts on the event loop, in the order of their ordinals from `first_ordinal` on."""
        self._call(self._start, source)

    def next_groups(self, count: int, timeout: float | None = None, *, step: int | None = None) -> list[Group]:
        """Returns `count` groups to train at `step` (from 1; None: the step after the current version), sorted by ordinal.

        Blocks until there are so many; returns fewer only when the prompts have run out.  Raises DeadlineError after `timeout`
        seconds without losing any group, and the error that ended the run.
        """
        request = GroupRequest(count, step)
        self.runner.loop.call_soon_threadsafe(self._ask, request)
        try:
            return request.answer.result(timeout)
        except TimeoutError:
            if not request.answer.done() and self._call(self.delivery.withdraw, request):
                hint = self._call(self._situation)
                raise DeadlineError(f"{count} groups of episodes to train on", timeout or 0.0, hint) from None
            return request.answer.result()

    def trained(self, step: int) -> None:
        """Marks the groups that were taken for this step or an earlier one as trained."""
        self._call(self.delivery.trained, step)

    def give_back(self, groups: Sequence[Group]) -> None:
        """Lets groups that `next_groups` returned wait again; those whose tokens were lost are generated again."""
        self._call(self._give_back, [group.ordinal for group in groups])

    def set_version(self, version: int) -> None:
        """Ends step `version`, whose weights generate from now on."""
        self._call(self._set_version, version)

    def fail(self, error: BaseException) -> None:
        """Raises this error in training instead of returning groups, because generation cannot continue."""
        self._call(self._fail, error)

    def pause(self) -> None:
        """Starts no more groups; those in progress continue and are delivered."""
        self._call(self._pause)

    def resume(self) -> None:
        """Starts groups again."""
        self._call(self._resume)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call; see statistics.py."""
        return self._call(self._metrics)

    def metrics_soon(self) -> Future[dict[str, float]]:
        """Returns a future of `metrics`, without waiting."""
        return self.runner.ask(self._metrics)

    def state(self) -> dict[str, Any]:
        """Returns the JSON-able state: the phases of all prompts, the finished groups that were not trained, also those taken for
        an unfinished step, and the tokens written for the others.  Generation continues."""
        if self.interrupt is not None:
            collecting = asyncio.run_coroutine_threadsafe(self._collect(self.interrupt), self.runner.loop)
            collecting.result(CALL_DEADLINE_S)
        ledger, staleness, groups, begun = self._call(self._snapshot)
        finished = [group.to_json() for group in groups]
        return {"ledger": ledger, "staleness": staleness, "finished": finished, "begun": begun}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`.  Must come before `start`."""
        self._restored = {group["ordinal"]: group for group in state["finished"]}
        self._begun = {work["ordinal"]: work["samples"] for work in state["begun"]}
        sizes = {len(group["trajectories"]) + len(group.get("failed", ())) + ("baseline" in group) for group in state["finished"]}
        sizes |= {len(samples) for samples in self._begun.values()}
        if sizes - {self._num_episodes}:
            raise ValueError(
                f"the run was stopped with {max(sizes)} samples a prompt and goes on with {self._num_episodes}: set "
                "actor_rollout_ref.rollout.n back, or algorithm.adv_estimator where it has a greedy baseline, which counts"
            )
        self.ledger.load_state(state["ledger"], self._restored)
        self.staleness.load_state(state["staleness"], finished=len(self._restored), running=len(self._begun))

    def close(self) -> None:
        """Ends all episodes.  The runner stays open, because its creator closes it."""
        if not self._closed:
            self._call(self._close)

    # Methods that run on the event loop.

    def _call(self, fn: Callable[..., R], *args: Any) -> R:
        """Calls `fn` on the event loop and returns its result."""
        result: R = self.runner.ask(fn, *args).result(CALL_DEADLINE_S)
        return result

    def _start(self, source: Iterator[PromptItem]) -> None:
        self._source, self._exhausted = iter(source), False  # a version may have been announced before there were prompts
        for ordinal in range(self.ledger.frontier, self.ledger.next_ordinal):
            self._restore(self._seek(ordinal))
        self._restored, self._begun = {}, {}
        self._react()

    def _seek(self, ordinal: int) -> PromptItem:
        """Returns the prompt of that ordinal, from a source that begins at or before it."""
        for item in self._source:
            if item.ordinal == ordinal:
                return item
            if item.ordinal > ordinal:
                raise ValueError(f"prompts begin at ordinal {item.ordinal}, but {ordinal} has not ended: begin at first_ordinal")
        raise ValueError(f"there is no prompt of ordinal {ordinal}, which was drawn before: the prompts have changed")

    def _restore(self, item: PromptItem) -> None:
        match self.ledger.phase(item.ordinal):
            case Phase.FINISHED:
                self.delivery.add(Group.from_json(self._restored[item.ordinal], item))
            case Phase.ISSUED if item.ordinal in self._begun:
                self._launch(item, self._begun[item.ordinal])
            case Phase.ISSUED:
                self._again.append(item)

    def _react(self) -> None:
        """Starts the episodes and delivers the groups that a change permits."""
        if self._error is None and not self._closed:
            try:
                self._serve()
                self._admit()
                if self._exhausted:  # perhaps just now
                    self._serve()
                if too_old := self._failure_limit.dropped(self.delivery.dropped_in_a_row, self.staleness):
                    self._fail(too_old)
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

    @property
    def _num_episodes(self) -> int:
        """Returns the number of episodes of a group: its samples, and the baseline after them."""
        return self.options.group_size + (self.baseline_for is not None)

    def _workflows(self, row: Mapping[str, Any]) -> list[RolloutWorkflow]:
        """Returns the workflow of each of a group's episodes."""
        samples = [self.workflow_for(row)] * self.options.group_size
        return samples if self.baseline_for is None else [*samples, self.baseline_for(row)]

    def _group_in_work(self, item: PromptItem, results: list[Sampled | None], attempts: list[int]) -> GroupInWork:
        retries = self.options.episode_retries
        work = GroupInWork(item, self._workflows(item.row), results, attempts=attempts, retries=retries)
        self._work[item.ordinal] = work
        return work

    def _launch(self, item: PromptItem, begun: Sequence[Mapping[str, Any]] = ()) -> None:
        """Starts the group's episodes; of a group that was `begun` before a resume, only those that are missing."""
        self.ledger.run(item.ordinal)
        work = self._group_in_work(item, [None] * self._num_episodes, [before.get("attempt", 0) for before in begun])
        if not self._survives(work):  # the settings have become stricter
            work.attempts = [min(failures, work.retries) for failures in work.attempts]
        for sample in range(self._num_episodes):
            before = begun[sample] if begun else {"trajectory": None, "written": None}
            data = episode_data(self.options.seed, item, sample, completion_of(before["written"]), work.attempts[sample])
            work.engines.append(TrackedEngine(self.engine, data))
            if before["trajectory"] is not None:
                work.trajectories[sample] = sampled_of(before["trajectory"])
            elif sample in work.missing:
                self._submit(work, data)
        if not work.missing:
            self._complete(work)

    def lost(self, home: str) -> None:
        """Generates again all samples that are not trained and whose tokens were in that process, which has died."""
        self._lost_homes.add(home)
        if self._closed or self._error is not None:
            return
        for group in self.delivery.take_lost(home):
            self.ledger.lose(group.ordinal)
            self.staleness.on_lose()
            self.statistics.counts["lost_groups"] += 1
            failures = [(self.options.episode_retries + 1) * (place in group.failed) for place in range(self._num_episodes)]
            work = self._group_in_work(group.item, group.results, failures)
            fresh = (episode_data(self.options.seed, group.item, sample, None) for sample in range(self._num_episodes))
            work.engines = [TrackedEngine(self.engine, data) for data in fresh]
        for work in list(self._work.values()):
            lost = [n for n, one in enumerate(work.trajectories) if one is not None and lies_in(one, home)]
            for sample in lost:
                self._begin_again(work, sample)
        self.statistics.work(self.staleness.running)

    def _begin_again(self, work: GroupInWork, sample: int) -> None:
        data = episode_data(self.options.seed, work.item, sample, None, work.attempts[sample])
        work.trajectories[sample] = work.group = None
        work.engines[sample] = TrackedEngine(self.engine, data)
        self._submit(work, data)

    def _submit(self, work: GroupInWork, data: EpisodeData) -> None:
        self._episodes[data.session] = (work, data.sample)
        workflow = work.workflows[data.sample]
        deadline = None if workflow.keeps_time else self.options.episode_timeout_s
        self.runner.submit(episode, workflow, work.engines[data.sample], data, task_id=data.session, deadline=deadline)

    def _on_result(self, result: TaskResult) -> None:
        """Takes the result of an episode that has ended."""
        work, sample = self._episodes.pop(result.task_id)
        if self._error is not None:
            return
        if self._work.get(work.item.ordinal) is not work:  # its group has ended before
            if isinstance(result, Accepted):
                self.statistics.wasted_tokens += result.value.num_tokens
                self.release([result.value])
            return
        try:
            self._settle(work, sample, result)
        except Exception as error:  # noqa: BLE001  the loop's boundary: training gets the error
            self._fail(error)

    def _settle(self, work: GroupInWork, sample: int, result: TaskResult) -> None:
        match result:
            case Accepted(value=trajectory):
                work.trajectories[sample] = trajectory
                work.engines[sample].written = None  # a checkpoint needs only its result
                if not work.missing:
                    self._complete(work)
            case Rejected(reason=reason):
                self._reject(work, "rejected_groups", reason)
            case TimedOut(deadline_s=deadline):
                self.statistics.counts["timed_out_episodes"] += 1
                self._failed(work, sample, DeadlineError(f"episode {result.task_id}", deadline))
            case Failed(error=ConfigError() as error):  # what is set wrongly is wrong in every episode
                self._fail(error)
            case Failed(error=error):
                self._failed(work, sample, error)
            case Cancelled():
                self._failed(work, sample, WorkflowError(f"episode {result.task_id} was cancelled by its own code"))

    def _complete(self, work: GroupInWork) -> None:
        group = work.complete(self.options.group_size)
        if self.on_group is None:
            self._filter(work, group)
        else:
            task = self.runner.loop.create_task(self._score(self.on_group, work, group))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)

    async def _score(self, on_group: Callable[[Group], Awaitable[None]], work: GroupInWork, group: Group) -> None:
        try:
            await on_group(group)
            if not self._closed:
                self._filter(work, group)
        except Reject as reason:
            self._reject(work, "rejected_groups", str(reason))
        except HolderLostError as error:  # its samples are generated again, and then scored
            self.lost(error.role)
        except Exception as error:  # noqa: BLE001  the task's boundary: training gets the error
            self._fail(error)

    def _filter(self, work: GroupInWork, group: Group) -> None:
        if work.group is not group:  # samples were lost while it was scored
            return
        self._failure_limit.complete()
        if self.keep is not None and not self.keep(group):
            return self._reject(work, "filtered_groups", "filtered out")
        del self._work[group.ordinal]
        self.ledger.finish(group.ordinal)
        self.staleness.on_accept()
        self.statistics.counts["accepted_groups"] += 1
        self._failure_limit.accepted()
        self.delivery.add(group)
        self._react()

    def _failed(self, work: GroupInWork, sample: int, error: BaseException) -> None:
        """Starts the episode again while it may; else its group goes on without it, or has failed where too few are left."""
        work.attempts[sample] += 1
        again = sample in work.missing
        self.ledger.fail(work.item.ordinal, again=again)
        self.statistics.counts["retried_episodes" if again else "failed_episodes"] += 1
        if again:
            logger.info("episode %d-%d begins again after %r", work.item.ordinal, sample, error)
            self._begin_again(work, sample)
        elif self._survives(work):
            logger.info("prompt %d goes on without sample %d after %r", work.item.ordinal, sample, error)
            if not work.missing:
                self._complete(work)
        elif stop := self._failure_limit.failed(work.item.ordinal, error):
            self._fail(stop)
        else:
            self._reject(work, "failed_groups", f"failed: {type(error).__name__}: {error}")

    def _survives(self, work: GroupInWork) -> bool:
        size, least = self.options.group_size, self.options.min_samples
        return work.survives(size, size if least is None else least)

    def _reject(self, work: GroupInWork, count: str, reason: str) -> None:
        """Rejects the group and cancels its episodes that still run."""
        ordinal = work.item.ordinal
        del self._work[ordinal]
        for sample in work.missing:
            self.runner.cancel(f"{ordinal}-{sample}")
        self.statistics.reject(count, work.trajectories, self.options.group_size)
        self.release(work.trajectories)
        self._failure_limit.rejected(reason)
        self.ledger.reject(ordinal, reason)
        self.staleness.on_reject()
        self._react()

    def _fail(self, error: BaseException) -> None:
        """Ends the run: every request for groups raises the error."""
        if self._error is None:
            self._error = error
        self.delivery.fail(self._error)

    def _serve(self) -> None:
        self.delivery.serve(ended=self._exhausted and not self._work)

    # The event-loop side of the methods for training.

    def _ask(self, request: GroupRequest) -> None:
        self.delivery.ask(request)
        if self._closed:
            self._fail(WorkflowError("the executor is closed"))
        elif self._error is not None:
            self._fail(self._error)
        self._react()

    def _give_back(self, ordinals: list[int]) -> None:
        self.delivery.give_back(ordinals)
        for home in list(self._lost_homes):
            self.lost(home)
        self._react()

    def _set_version(self, version: int) -> None:
        self.staleness.set_version(version)
        self.delivery.age(version + 1)
        self._react()
        self.delivery.trained(version)

    def _pause(self) -> None:
        self._paused = True

    def _resume(self) -> None:
        self._paused = False
        self._react()

    def _metrics(self) -> dict[str, float]:
        running, capacity, lead = self.staleness.running, self.staleness.capacity, self.staleness.lead / self.staleness.batch
        return self.statistics.metrics(running=running, ready=self.delivery.num_ready, capacity=capacity, lead=lead)

    def _situation(self) -> str:
        """Returns the state of the groups, for the message of a wait that took too long."""
        return (
            f"{self.delivery.num_ready} groups are ready, {self.staleness.running} in work, {self.staleness.capacity} more may "
            f"be started at version {self.staleness.version}{'; paused' if self._paused else ''}"
        )

    async def _collect(self, interrupt: Interrupt) -> None:
        await collect([work.engines[sample] for work in self._work.values() for sample in work.missing], interrupt)

    def _snapshot(self) -> tuple[dict[str, Any], dict[str, float], list[Group], list[dict[str, Any]]]:
        begun = [work.state() for work in self._work.values()]
        begun = [state for state in begun if any(any(sample.values()) for sample in state["samples"])]
        return self.ledger.state(), self.staleness.state(), self.delivery.untrained(), begun

    def _close(self) -> None:
        self._closed = True
        self._work.clear()
        for task_id in list(self._episodes):
            self.runner.cancel(task_id)
        for task in list(self._scoring):
            task.cancel()
        self.delivery.fail(WorkflowError("the executor is closed"))
