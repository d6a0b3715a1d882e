"""The executor: what it starts when, how groups end, what training gets, and what a checkpoint brings back."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Sequence

import pytest

from rlhub.agents.workflows.base import EpisodeData
from rlhub.errors import ConfigError, DeadlineError, WorkflowError
from rlhub.rollout_service.executor.episode_groups import Group
from rlhub.rollout_service.executor.ledger import Phase, PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.utils.aio.results import Reject
from tests.support.episodes import Held, Immediate, Policy, executing, parts, prompts, trajectory

LIMIT_S = 60.0
"""Nothing here takes so long, unless it hangs."""


def ordinals(groups: list[Group]) -> list[int]:
    return [group.ordinal for group in groups]


def bound(batch: int, max_staleness: int, **kwargs: int) -> StalenessManager:
    return StalenessManager(batch=batch, max_staleness=max_staleness, **kwargs)


def until(condition, timeout: float = LIMIT_S) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.002)


def test_without_staleness_batches_come_in_order_and_one_at_a_time() -> None:
    workflow, policy = Held(), Policy()
    with executing(workflow, staleness=bound(3, 0), engine=policy, group_size=2) as executor:
        executor.start(prompts())
        for step in range(1, 5):
            groups = executor.next_groups(3, LIMIT_S)
            assert ordinals(groups) == list(range(3 * step - 3, 3 * step))
            assert all(t.versions == [step - 1] * 2 for group in groups for t in group.trajectories)
            assert len(workflow.started) == 6 * step, "nothing is started before the version changes"
            policy.version = step
            executor.set_version(step)
        assert executor.ledger.counts[Phase.TRAINED] == 12
        assert executor.metrics()["staleness/max"] == 0


def test_fewer_than_a_batch_may_be_asked_for_as_they_finish() -> None:
    workflow = Held(lambda data: data.ordinal in (0, 2))
    with executing(workflow, staleness=bound(4, 0)) as executor:
        executor.start(prompts())
        assert ordinals(executor.next_groups(2, LIMIT_S)) == [1, 3]
        with pytest.raises(DeadlineError, match="1 groups of episodes.*0 groups are ready, 2 in work, 0 more may be started"):
            executor.next_groups(1, 0.02)
        workflow.release(executor, 2)
        assert ordinals(executor.next_groups(1, LIMIT_S)) == [2]
        workflow.release(executor, 0)
        assert ordinals(executor.next_groups(1, LIMIT_S)) == [0]


def test_a_wait_that_took_too_long_loses_nothing() -> None:
    workflow = Held(lambda data: data.ordinal == 1)
    with executing(workflow, staleness=bound(2, 0)) as executor:
        executor.start(prompts())
        for _ in range(3):
            with pytest.raises(DeadlineError):
                executor.next_groups(2, 0.01)
        workflow.release(executor, 1)
        assert ordinals(executor.next_groups(2, LIMIT_S)) == [0, 1]


def test_when_the_prompts_run_out_what_is_there_comes() -> None:
    with executing(Immediate(parts()), staleness=bound(3, 1)) as executor:
        executor.start(prompts(end=4))
        assert ordinals(executor.next_groups(3, LIMIT_S)) == [0, 1, 2]
        executor.set_version(1)
        assert ordinals(executor.next_groups(3, LIMIT_S)) == [3]
        assert executor.next_groups(3, LIMIT_S) == []


class Various(Immediate):
    """Prompts divisible by 5 are rejected, by 7 fail, by 11 raise Reject."""

    async def arun_episode(self, engine, data: EpisodeData):
        if data.ordinal % 7 == 3 and data.sample == 1:
            raise RuntimeError(f"prompt {data.ordinal}")
        if data.ordinal % 11 == 4:
            raise Reject("by its own will")
        return None if data.ordinal % 5 == 2 and data.sample == 0 else await super().arun_episode(engine, data)


def test_rejected_failed_and_filtered_groups_are_replaced_and_counted() -> None:
    ends: list[tuple[Sequence[int], Phase, str]] = []
    ledger = PromptLedger(on_end=lambda *end: ends.append(end))
    keep = lambda group: group.ordinal % 13 != 6  # noqa: E731
    policy, taken = Policy(), []
    staleness = bound(8, 1)
    with executing(Various(parts()), engine=policy, staleness=staleness, ledger=ledger, group_size=2, keep=keep) as executor:
        executor.start(prompts())
        for step in range(1, 11):
            taken += ordinals(executor.next_groups(8, LIMIT_S))
            policy.version = step
            executor.set_version(step)
        executor.pause()
        until(lambda: executor.staleness.running == 0)
        metrics = executor.metrics()
    bad = [o for o in range(max(taken)) if o % 7 == 3 or o % 11 == 4 or o % 5 == 2 or o % 13 == 6]
    assert len(taken) == 80 and not set(taken) & set(bad)
    rejected = {ordinal: reason for (ordinal, *_), phase, reason in ends if phase is Phase.REJECTED}
    assert set(bad) <= rejected.keys()
    assert "RuntimeError: prompt 3" in rejected[3] and rejected[15] == "by its own will" and rejected[6] == "filtered out"
    counted = [metrics[f"rollout/{name}_groups"] for name in ("rejected", "failed", "filtered")]
    assert sum(counted) == len(rejected) and min(counted) > 0
    assert metrics["rollout/wasted_token_share"] > 0


def test_the_rest_of_a_rejected_group_is_cancelled() -> None:
    cancelled = threading.Event()

    class Halves(Immediate):
        async def arun_episode(self, engine, data):
            if data.ordinal == 0 and data.sample == 0:
                return None
            if data.ordinal == 0:
                try:
                    await asyncio.sleep(60)
                finally:
                    cancelled.set()
            return await super().arun_episode(engine, data)

    with executing(Halves(parts()), staleness=bound(1, 0), group_size=2) as executor:
        executor.start(prompts())
        assert ordinals(executor.next_groups(1, LIMIT_S)) == [1]
        assert cancelled.wait(LIMIT_S)


class Broken(Immediate):
    async def arun_episode(self, engine, data):
        raise KeyError("a bug in the workflow")


def test_failures_in_a_row_stop_the_run_with_the_last_error() -> None:
    with executing(Broken(parts()), staleness=bound(2, 1), max_failed_batches=3) as executor:
        executor.start(prompts())
        with pytest.raises(WorkflowError, match="6 groups of episodes failed in a row.*a bug in the workflow") as raised:
            executor.next_groups(2, LIMIT_S)
        assert isinstance(raised.value.__cause__, KeyError)
        with pytest.raises(WorkflowError):
            executor.next_groups(2, LIMIT_S)


class Flaky(Immediate):
    """An episode fails as often as its prompt's number says, and notes its seeds."""

    def __init__(self) -> None:
        super().__init__(parts())
        self.seeds: dict[str, list[int]] = {}

    async def arun_episode(self, engine, data):
        seeds = self.seeds.setdefault(data.session, [])
        seeds.append(data.seed)
        if data.sample == 1 and len(seeds) <= data.ordinal:
            raise KeyError("the simulator fell over")
        return await super().arun_episode(engine, data)


def test_an_episode_that_failed_begins_again_with_another_seed() -> None:
    """The third failure is one too many."""
    workflow = Flaky()
    with executing(workflow, staleness=bound(4, 0), group_size=2, episode_retries=2, max_failed_batches=9) as executor:
        executor.start(prompts(end=4))
        assert ordinals(executor.next_groups(4, LIMIT_S)) == [0, 1, 2]
        assert executor.ledger.num_retries == 1 + 2 + 2
        metrics = executor.metrics()
        assert (metrics["rollout/retried_episodes"], metrics["rollout/failed_groups"]) == (5, 1)
    assert [len(workflow.seeds[f"{ordinal}-1"]) for ordinal in range(4)] == [1, 2, 3, 3]
    assert all(len(set(seeds)) == len(seeds) for seeds in workflow.seeds.values())
    assert len(workflow.seeds["2-0"]) == 1, "what has ended well stays"


def test_a_resumed_run_counts_the_attempts_before_it() -> None:
    """And the attempt that runs has the seed that it would have had."""
    gate = Held(lambda data: data.sample == 0)
    seeds: list[tuple[int, int]] = []

    class Second(Immediate):
        async def arun_episode(self, engine, data):
            seeds.append((data.sample, data.seed))
            if data.sample == 1 and len([seed for sample, seed in seeds if sample == 1]) < 3:
                raise KeyError("no")
            return await gate.arun_episode(engine, data)

    options = {"group_size": 2, "episode_retries": 2}
    with executing(Second(parts()), staleness=bound(1, 0), **options) as executor:
        executor.start(prompts())
        until(lambda: executor.metrics()["rollout/running_groups"] == 1 and len(seeds) >= 4)
        state = json.loads(json.dumps(executor.state()))
    assert state["ledger"]["retries"] == 2
    assert [sample["attempt"] for sample in state["begun"][0]["samples"]] == [0, 2]
    state["begun"][0]["samples"][1]["trajectory"] = None  # as if it still ran
    again: list[tuple[int, int]] = []

    class Fails(Immediate):
        async def arun_episode(self, engine, data):
            again.append((data.sample, data.seed))
            if data.sample == 1 and data.ordinal == 0:
                raise KeyError("no")
            return await super().arun_episode(engine, data)

    with executing(Fails(parts()), staleness=bound(1, 0), **options) as executor:
        executor.load_state(state)
        executor.start(prompts())
        assert ordinals(executor.next_groups(1, LIMIT_S)) == [1]
        assert executor.ledger.num_retries == 2, "a third failure ends it"
    assert (1, [seed for sample, seed in seeds if sample == 1][2]) in again


def test_failures_lose_few_groups_and_cost_few_episodes() -> None:
    """A tenth of the episodes fails; the control is a run without retries, which loses 57 of 100 groups."""
    lost, extra = {}, {}
    for retries in (0, 2):
        begun: list[str] = []

        class Tenth(Immediate):
            async def arun_episode(self, engine, data, begun=begun):
                begun.append(data.session)
                if random.Random(data.seed).random() < 0.1:
                    raise KeyError("no")
                return await super().arun_episode(engine, data)

        with executing(
            Tenth(parts()), staleness=bound(400, 0), group_size=8, episode_retries=retries, max_failed_batches=9
        ) as executor:
            executor.start(prompts(end=400))
            groups = executor.next_groups(400, LIMIT_S)
            lost[retries], extra[retries] = 1 - len(groups) / 400, len(begun) / 3200 - 1
    assert lost[2] <= 0.02 and extra[2] <= 0.12 and 0.5 < lost[0] < 0.64


def test_a_wrong_setting_stops_the_run_at_the_first_episode() -> None:
    class Misconfigured(Immediate):
        async def arun_episode(self, engine, data):
            raise ConfigError("agent.kwargs.tool: no such knob")

    with executing(Misconfigured(parts()), staleness=bound(2, 1), max_failed_batches=100) as executor:
        executor.start(prompts())
        with pytest.raises(ConfigError, match="no such knob"):
            executor.next_groups(2, LIMIT_S)
        assert executor.metrics()["rollout/failed_groups"] == 0


def test_failures_that_are_not_in_a_row_do_not() -> None:
    class Half(Immediate):
        async def arun_episode(self, engine, data):
            if data.ordinal % 2:
                raise KeyError("a bug in the workflow")
            return await super().arun_episode(engine, data)

    policy = Policy()
    with executing(Half(parts()), engine=policy, staleness=bound(2, 0), max_failed_batches=2) as executor:
        executor.start(prompts())
        for step in range(1, 20):
            executor.next_groups(2, LIMIT_S)
            policy.version = step
            executor.set_version(step)


def test_an_engine_that_gets_no_new_weights_is_an_error_and_no_endless_generation() -> None:
    with executing(Immediate(parts()), engine=Policy(), staleness=bound(2, 0), max_failed_batches=2) as executor:
        executor.start(prompts())
        executor.next_groups(2, LIMIT_S)
        executor.set_version(1)
        with pytest.raises(WorkflowError, match="4 groups in a row were more than 0 versions old.*raise trainer.max_staleness"):
            executor.next_groups(2, LIMIT_S)


def test_a_groups_baseline_is_one_more_episode_that_counts_in_nothing() -> None:
    """It is older than the bound here, and the group is as young as its samples."""

    class Greedy(Immediate):
        async def arun_episode(self, engine, data):
            return trajectory(0, 0, 0, prompt=data.prompt_ids)

    greedy, policy = Greedy(parts()), Policy()
    kwargs = {"group_size": 2, "baseline_for": lambda row: greedy}
    with executing(Immediate(parts()), engine=policy, staleness=bound(2, 1), **kwargs) as executor:
        executor.start(prompts())
        for step in range(1, 5):
            groups = executor.next_groups(2, LIMIT_S)
            policy.version = step
            executor.set_version(step)
        metrics = executor.metrics()
        state = json.loads(json.dumps(executor.state()))
    assert [len(group.trajectories) for group in groups] == [2, 2]
    assert all(group.baseline is not None and len(group.baseline.response_ids) == 3 for group in groups)
    assert metrics["staleness/max"] <= 1 and metrics["staleness/dropped_groups"] == 0
    with executing(Immediate(parts()), staleness=bound(2, 1), **kwargs) as again:
        again.load_state(state)
        again.start(prompts(again.first_ordinal))
        assert all(group.baseline is not None for group in again.next_groups(2, LIMIT_S))
    stopped_with_one = pytest.raises(ValueError, match="3 samples a prompt and goes on with 2.*greedy baseline")
    with executing(Immediate(parts()), staleness=bound(2, 1), group_size=2) as without, stopped_with_one:
        without.load_state(state)


def test_an_episode_over_its_time_is_a_failure() -> None:
    class Slow(Immediate):
        async def arun_episode(self, engine, data):
            if data.ordinal == 0:
                await asyncio.sleep(60)
            return await super().arun_episode(engine, data)

    with executing(Slow(parts()), staleness=bound(1, 0), episode_timeout_s=0.02) as executor:
        executor.start(prompts())
        assert ordinals(executor.next_groups(1, LIMIT_S)) == [1]
        metrics = executor.metrics()
    assert metrics["rollout/timed_out_episodes"] == 1 and metrics["rollout/failed_groups"] == 1


def test_groups_are_scored_before_they_are_filtered_and_errors_of_scoring_end_the_run() -> None:
    async def score(group: Group) -> None:
        await asyncio.sleep(0)
        if group.ordinal == 3:
            raise ArithmeticError("the reward is broken")
        group.trajectories[0].set_reward(float(group.ordinal % 2))

    def keep(group: Group) -> bool:
        return bool(group.trajectories[0].rewards[-1])

    with executing(Immediate(parts()), staleness=bound(1, 0), on_group=score, keep=keep) as executor:
        executor.start(prompts())
        assert ordinals(executor.next_groups(1, LIMIT_S)) == [1]
        executor.set_version(1)
        with pytest.raises(ArithmeticError):
            executor.next_groups(1, LIMIT_S)


@pytest.mark.parametrize(("policy", "trained", "staleness"), [("drop", [5, 6], 1), ("correct", [0, 5], 2)])
def test_a_straggler_beyond_the_bound(policy: str, trained: list[int], staleness: int) -> None:
    """Prompt 0 ends when its tokens are two versions old, one more than allowed."""
    workflow, engine = Held(lambda data: data.ordinal == 0), Policy()
    ends: list[tuple[Sequence[int], Phase, str]] = []
    ledger = PromptLedger(on_end=lambda *end: ends.append(end))
    with executing(workflow, staleness=bound(2, 1), engine=engine, ledger=ledger, stale_policy=policy) as executor:
        executor.start(prompts())
        for step, expected in ((1, [1, 2]), (2, [3, 4])):
            assert ordinals(executor.next_groups(2, LIMIT_S)) == expected
            engine.version = step
            executor.set_version(step)
        workflow.release(executor, 0)
        assert ordinals(executor.next_groups(2, LIMIT_S)) == trained
        metrics = executor.metrics()
    assert metrics["staleness/max"] == staleness
    assert metrics["staleness/beyond_share"] == pytest.approx(1 / 7 if policy == "drop" else 1 / 6)
    assert (((0,), Phase.DROPPED, "too old at step 3") in ends) == (policy == "drop")


@pytest.mark.parametrize(("versions", "mask"), [((0, 0, 1, 2), [0, 0, 1, 1]), ((0, 0), None)])
def test_old_tokens_are_masked_and_what_has_no_other_is_dropped(versions: tuple[int, ...], mask: list[int] | None) -> None:
    class Partial(Held):
        async def arun_episode(self, engine, data):
            result = await super().arun_episode(engine, data)
            return trajectory(*versions) if data.ordinal == 0 else result

    workflow, engine = Partial(lambda data: data.ordinal == 0), Policy()
    with executing(workflow, staleness=bound(2, 1), engine=engine, stale_policy="mask") as executor:
        executor.start(prompts())
        for step in (1, 2):
            executor.next_groups(2, LIMIT_S)
            engine.version = step
            executor.set_version(step)
        workflow.release(executor, 0)
        groups = executor.next_groups(2, LIMIT_S)
        metrics = executor.metrics()
    if mask is None:
        assert ordinals(groups) == [5, 6] and metrics["staleness/dropped_groups"] == 1
    else:
        assert groups[0].ordinal == 0 and groups[0].trajectories[0].response_mask == mask
        assert metrics["staleness/max"] == 1 and metrics["staleness/masked_token_share"] > 0


def test_a_pause_starts_nothing_and_delivers() -> None:
    workflow = Held(lambda data: data.ordinal == 0)
    with executing(workflow, staleness=bound(2, 1)) as executor:
        executor.start(prompts())
        executor.pause()
        assert ordinals(executor.next_groups(2, LIMIT_S)) == [1, 2]
        executor.set_version(1)
        workflow.release(executor, 0)
        assert ordinals(executor.next_groups(2, LIMIT_S)) == [0, 3]
        assert len(workflow.started) == 4
        executor.resume()
        until(lambda: len(workflow.started) == 6)


def test_a_row_whose_workflow_is_unknown_ends_the_run() -> None:
    with executing(Immediate(parts()), staleness=bound(1, 0)) as executor:
        executor.workflow_for = lambda row: {}[row["agent"]]
        executor.start(prompts())
        with pytest.raises(KeyError, match="agent"):
            executor.next_groups(1, LIMIT_S)


def test_what_is_taken_is_trained_when_its_step_is_over() -> None:
    """Groups may be taken for the next step while the version of the last is still being published."""
    with executing(Immediate(parts()), staleness=bound(2, 2)) as executor:
        executor.start(prompts())
        executor.next_groups(2, LIMIT_S, step=1)
        executor.trained(1)
        executor.next_groups(2, LIMIT_S, step=2)
        state = executor.state()
        assert executor.ledger.counts[Phase.TRAINED] == 2
        assert [group["ordinal"] for group in state["finished"]] == [2, 3, 4, 5]
        executor.set_version(1)
        assert executor.ledger.counts[Phase.TRAINED] == 2, "step 2 is not over"
        executor.set_version(2)
        assert executor.ledger.counts[Phase.TRAINED] == 4


def test_a_resumed_run_goes_on_where_the_checkpoint_was() -> None:
    workflow, engine = Held(lambda data: data.ordinal in (1, 5)), Policy()
    with executing(workflow, staleness=bound(2, 2), engine=engine, group_size=2) as executor:
        executor.start(prompts())
        taken = ordinals(executor.next_groups(2, LIMIT_S))
        engine.version = 1
        executor.set_version(1)
        until(lambda: executor.metrics()["rollout/ready_groups"] == 4)
        state = json.loads(json.dumps(executor.state()))
    assert taken == [0, 2]
    assert [group["ordinal"] for group in state["finished"]] == [3, 4, 6, 7]
    again = Held()
    with executing(again, staleness=bound(2, 2), engine=engine, group_size=2) as executor:
        executor.load_state(state)
        assert executor.first_ordinal == 1
        assert executor.staleness.accepted == 2 + 4 and executor.staleness.version == 1
        executor.start(prompts(first=0))
        for step in (2, 3, 4):
            groups = executor.next_groups(2, LIMIT_S)
            taken += ordinals(groups)
            assert all(len(group.trajectories) == 2 for group in groups)
            executor.set_version(step)
        assert again.started[:4] == ["1-0", "1-1", "5-0", "5-1"], "what was in work goes first"
        assert "3-0" not in again.started, "finished samples are not made again"
    assert sorted(taken) == list(range(8))


def test_prompts_that_begin_too_late_are_refused() -> None:
    with executing(Held(lambda _: True), staleness=bound(2, 0)) as executor:
        executor.start(prompts())
        state = executor.state()
    with executing(Immediate(parts()), staleness=bound(2, 0)) as executor:
        executor.load_state(state)
        with pytest.raises(ValueError, match="begin at ordinal 1, but 0 has not ended"):
            executor.start(prompts(first=1))


def test_other_group_sizes_are_refused() -> None:
    with executing(Immediate(parts()), staleness=bound(1, 0)) as executor:
        executor.start(prompts())
        until(lambda: executor.metrics()["rollout/ready_groups"] == 1)
        state = executor.state()
    with (
        executing(Immediate(parts()), staleness=bound(1, 0), group_size=2) as executor,
        pytest.raises(ValueError, match="stopped with 1 samples a prompt and goes on with 2"),
    ):
        executor.load_state(state)


def test_closing_ends_episodes_and_waits() -> None:
    with executing(Held(lambda _: True), staleness=bound(1, 0)) as executor:
        executor.start(prompts())
        waiting = threading.Thread(target=lambda: errors.append(pytest.raises(WorkflowError, executor.next_groups, 1, LIMIT_S)))
        errors: list[object] = []
        waiting.start()
        until(lambda: executor.runner.num_running == 1)
        executor.close()
        waiting.join(LIMIT_S)
        assert errors and not waiting.is_alive()
        until(lambda: executor.runner.num_running == 0)
