"""The audit of a whole run catches an executor that is broken on purpose: too far ahead, forgetful, or stuck."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlhub.errors import DeadlineError
from rlhub.rollout_service.executor.episode_groups import Group
from rlhub.rollout_service.executor.executor import WorkflowExecutor
from rlhub.rollout_service.executor.ledger import Phase, PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager
from tests.support.audit import TrainedGroup, audit
from tests.support.episodes import Held, Policy, executing, prompts

BATCH, BOUND = 4, 1


@dataclass
class Records:
    """What a run writes down; a resumed run takes back what came after its checkpoint."""

    trained: list[TrainedGroup] = field(default_factory=list)
    ends: list[tuple[int, Phase]] = field(default_factory=list)
    scored: set[int] = field(default_factory=set)

    def of(self, phase: Phase) -> list[int]:
        return [ordinal for ordinal, ended in self.ends if ended is phase]

    def train(self, groups: Sequence[Group], step: int) -> None:
        for group in groups:
            versions = [[v for v, used in zip(t.versions, t.response_mask, strict=True) if used] for t in group.trajectories]
            self.trained.append(TrainedGroup(ordinal=group.ordinal, step=step, versions=versions))


def life(
    records: Records,
    *,
    state: dict[str, Any] | None = None,
    steps: Sequence[int] = range(1, 9),
    staleness: type[StalenessManager] = StalenessManager,
    max_staleness: int = BOUND,
    ledger_class: type[PromptLedger] = PromptLedger,
    wait_s: float = 60.0,
) -> tuple[dict[str, Any], PromptLedger]:
    """Train these steps; every eighth prompt ends two steps after it was first waited for.  The state at the end."""
    policy, since = Policy(), {}
    policy.version = steps[0] - 1
    ledger = ledger_class(on_end=lambda ended, phase, _: records.ends.extend((ordinal, phase) for ordinal in ended))
    workflow = Held(lambda data: data.ordinal % 8 == 2)

    async def score(group: Group) -> None:
        records.scored.add(group.ordinal)

    with executing(workflow, staleness=staleness(BATCH, max_staleness), ledger=ledger, engine=policy, on_group=score) as executor:
        if state is not None:
            executor.load_state(state)
        executor.start(prompts(executor.first_ordinal))
        for step in steps:
            for held in [ordinal for ordinal, gate in list(workflow.gates.items()) if not gate.is_set()]:
                if step >= since.setdefault(held, step) + 2:
                    workflow.release(executor, held)
            records.train(take(executor, wait_s), step)
            policy.version = step
            executor.set_version(step)
        return json.loads(json.dumps(executor.state())), ledger


def take(executor: WorkflowExecutor, wait_s: float) -> list[Group]:
    """A batch; waits on where more may be started, which only needs a core."""
    while True:
        try:
            return executor.next_groups(BATCH, wait_s)
        except DeadlineError as late:
            if "0 more may be started" in str(late):
                raise


def findings(records: Records, ledger: PromptLedger, unended: Sequence[int] | None = None) -> list[str]:
    return audit(
        trained=records.trained,
        dropped=records.of(Phase.DROPPED),
        rejected=records.of(Phase.REJECTED),
        unended=ledger.in_phase(*Phase) if unended is None else unended,
        next_ordinal=ledger.next_ordinal,
        scored=records.scored,
        bound=BOUND,
    )


def test_a_run_and_its_continuation_pass() -> None:
    records = Records()
    state, _ = life(records)
    open_then = {ordinal for ordinal, _ in state["ledger"]["open"]}
    records.ends = [end for end in records.ends if end[0] not in open_then]  # what came after the checkpoint did not happen
    _, ledger = life(records, state=state, steps=range(9, 17))
    assert findings(records, ledger) == []
    assert records.of(Phase.DROPPED), "stragglers are among them"


class OneBatchMore(StalenessManager):
    """Starts a batch more than the bound allows."""

    @property
    def capacity(self) -> int:
        return super().capacity + self.batch


def test_admission_beyond_the_bound_is_caught() -> None:
    """With consumption broken the same way samples train too old; with consumption as it is they are dropped instead."""
    records = Records()
    _, ledger = life(records, max_staleness=BOUND + 1)
    assert any("more than 1 versions late" in finding for finding in findings(records, ledger))
    paced, ahead = Records(), Records()
    life(paced, steps=range(1, 20))
    _, ledger = life(ahead, steps=range(1, 20), staleness=OneBatchMore)
    assert findings(ahead, ledger) == []
    assert len(ahead.of(Phase.DROPPED)) > len(paced.of(Phase.DROPPED))


class Forgetful(PromptLedger):
    """Leaves one prompt out of what it tells a checkpoint."""

    def state(self) -> dict[str, Any]:
        whole = super().state()
        return whole | {"open": whole["open"][1:]}


def test_a_ledger_that_forgets_a_prompt_is_caught() -> None:
    records = Records()
    state, _ = life(records, ledger_class=Forgetful)
    state["finished"] = [group for group in state["finished"] if group["ordinal"] != records_first(state)]
    open_then = {ordinal for ordinal, _ in state["ledger"]["open"]}
    records.ends = [end for end in records.ends if end[0] not in open_then]
    _, ledger = life(records, state=state, steps=range(9, 17))
    assert any("neither ended nor is open" in finding for finding in findings(records, ledger))


def records_first(state: dict[str, Any]) -> int:
    """The forgotten one: finished, perhaps, but open to nobody."""
    listed = {ordinal for ordinal, _ in state["ledger"]["open"]}
    return next((group["ordinal"] for group in state["finished"] if group["ordinal"] not in listed), -1)


class Keeping(StalenessManager):
    """Does not give back the place of what is dropped."""

    def on_drop(self) -> None:
        pass


def test_a_drop_that_keeps_its_place_ends_in_a_deadline_and_not_in_a_hang() -> None:
    with pytest.raises(DeadlineError, match="0 more may be started"):
        life(Records(), staleness=Keeping, steps=range(1, 40), wait_s=0.5)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"dropped": [0]}, "1 prompts: ended more than once: 0"),
        ({"rejected": []}, "neither ended nor is open: 2"),
        ({"unended": [1, 3]}, "ended, but is said to be open: 1"),
        ({"scored": {0}}, "trained without being scored: 1"),
        ({"scored": {0, 1, 2, 9}}, "was never drawn: 9"),
        ({"bound": 0}, "trained more than 0 versions late: 1"),
        ({"trained": [TrainedGroup(ordinal=o, step=2, versions=[[1, 0]]) for o in (0, 1)]}, "versions go back: 0, 1"),
    ],
)
def test_what_the_audit_finds(change: dict[str, Any], finding: str) -> None:
    trained = [TrainedGroup(ordinal=0, step=1, versions=[[0, 0]]), TrainedGroup(ordinal=1, step=2, versions=[[0, 1], [1]])]
    right = {
        "trained": trained,
        "dropped": [],
        "rejected": [2],
        "unended": [3],
        "next_ordinal": 4,
        "scored": {0, 1},
        "bound": 1,
    }
    assert audit(**right) == []
    assert any(finding in found for found in audit(**right | change))
