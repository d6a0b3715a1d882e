"""Admission: the formula, and that its two ways of giving a place back keep a run going."""

import pytest

from rlhub.rollout_service.executor.staleness import DECREASE, INCREASE, MOST, Pacing, StalenessManager


@pytest.mark.parametrize(
    ("options", "version", "accepted", "running", "expected"),
    [
        ({"max_staleness": 0}, 0, 0, 0, 4),
        ({"max_staleness": 0}, 0, 3, 1, 0),
        ({"max_staleness": 0}, 1, 4, 0, 4),
        ({"max_staleness": 2}, 0, 0, 0, 12),
        ({"max_staleness": 2}, 5, 20, 12, 0),
        ({"max_staleness": 8, "pipeline_depth": 1}, 0, 0, 0, 8),
        ({"max_staleness": 1, "pipeline_depth": 8}, 0, 0, 0, 8),  # the bound is the smaller
        ({"max_staleness": 2, "max_concurrent": 3}, 0, 0, 2, 1),
        ({"max_staleness": 1}, 3, 12, 9, -1),  # more restored than may run
        ({"max_staleness": 0}, 2, 14, 0, -2),
    ],
)
def test_capacity(options: dict[str, int], version: int, accepted: int, running: int, expected: int) -> None:
    manager = StalenessManager(batch=4, **options, version=version, accepted=accepted, running=running)
    assert manager.capacity == expected


def test_concurrency_defaults_to_what_the_bound_allows() -> None:
    assert StalenessManager(batch=4, max_staleness=3).concurrency == 16


def test_a_place_is_given_back_by_rejection_and_by_drop() -> None:
    manager = StalenessManager(batch=2, max_staleness=0)
    manager.on_submit()
    manager.on_submit()
    assert manager.capacity == 0
    manager.on_reject()
    assert manager.capacity == 1
    manager.on_accept()
    assert manager.capacity == 1, "an accepted group keeps its place until it is trained"
    manager.on_drop()
    assert manager.capacity == 2


def test_the_bound_counts_from_the_step_before() -> None:
    manager = StalenessManager(batch=2, max_staleness=1)
    assert not manager.is_stale(first_version=3, step=5)
    assert manager.is_stale(first_version=3, step=6)


def test_after_recovery_each_version_has_trained_a_batch() -> None:
    manager = StalenessManager(batch=4, max_staleness=1)
    manager.load_state({"version": 5}, finished=3, running=2)
    assert (manager.accepted, manager.running) == (23, 2)
    assert manager.capacity == 8 - 5


def test_recovery_counted_from_nothing_would_burst() -> None:
    """The control of the test above: a manager that forgets what was trained starts all versions' batches at once."""
    manager = StalenessManager(batch=4, max_staleness=1, max_concurrent=1000, version=5)
    assert manager.capacity == 28


def test_wrong_sizes_and_versions_that_go_back() -> None:
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        StalenessManager(batch=0, max_staleness=1)
    with pytest.raises(ValueError, match="max_staleness must be at least 0, got -1"):
        StalenessManager(batch=1, max_staleness=-1)
    with pytest.raises(ValueError, match="cannot go back from 3 to 2"):
        StalenessManager(batch=1, max_staleness=1, version=3).set_version(2)


def paced(batch: int = 16, max_staleness: int = 4, **options: int) -> StalenessManager:
    return StalenessManager(batch=batch, max_staleness=max_staleness, pacing=Pacing(batch), **options)


def test_the_lead_grows_by_what_the_trainer_waits_and_shrinks_while_groups_are_left() -> None:
    manager = paced()
    assert (manager.lead, manager.capacity) == (16, 32), "one batch ahead"
    manager.on_take(0.05, 0)
    assert manager.lead == 16 + round(0.05 * INCREASE * 16)
    manager.on_take(1.0, 0)
    assert manager.lead == 19 + MOST * 16, "one long wait is no reason to go to the bound"
    before = manager.lead
    manager.on_take(0.0, 9)
    assert manager.lead == before - DECREASE * 16
    manager.on_take(0.0, 0)
    assert manager.lead == before - 1, "neither waits for the other"


@pytest.mark.parametrize(("options", "most"), [({}, 64), ({"pipeline_depth": 2}, 32), ({"max_staleness": 1}, 16)])
def test_the_lead_stays_between_one_batch_and_the_bound(options: dict[str, int], most: int) -> None:
    manager = paced(**options)
    for _ in range(50):
        manager.on_take(1.0, 0)
    assert manager.lead == most
    for _ in range(500):
        manager.on_take(0.0, 40)
    assert manager.lead == 16


def test_without_staleness_pacing_changes_nothing() -> None:
    """Nor where the lead is fixed."""
    manager, plain = paced(max_staleness=0), StalenessManager(batch=16, max_staleness=0)
    fixed = StalenessManager(batch=16, max_staleness=4)
    for waited, left in ((1.0, 0), (0.0, 7), (0.5, 0)):
        manager.on_take(waited, left)
        fixed.on_take(waited, left)
    assert manager.capacity == plain.capacity == 16 and fixed.lead == 64


def test_a_resumed_run_goes_on_with_its_lead() -> None:
    """A checkpoint from before has none."""
    manager, again = paced(), paced()
    manager.on_take(0.1, 0)
    again.load_state(manager.state(), finished=0, running=0)
    assert again.pacing == manager.pacing and again.lead > 16
    again.load_state({"version": 3}, finished=0, running=0)
    assert again.version == 3


class Trainer:
    """A trainer with replicas that carry every load, in simulated time; group k takes the k-th of `group_s`, again and again."""

    def __init__(self, manager: StalenessManager, group_s: list[float], training_s: float = 1.0) -> None:
        self.manager, self.group_s, self.training_s = manager, group_s, training_s
        self.now = self.served = 0.0
        self.begun = 0
        self.waiting: list[tuple[float, int]] = []  # when it ends, and its version

    def admit(self) -> None:
        while self.manager.capacity > 0:
            self.manager.on_submit()
            self.waiting.append((self.now + self.group_s[self.begun % len(self.group_s)], self.manager.version))
            self.begun += 1

    def step(self) -> tuple[float, list[int]]:
        """Returns the share of the step's time in which the trainer waited, and the age of each group that it trained."""
        self.admit()
        asked, size = self.now, self.manager.batch
        self.waiting.sort()
        batch, self.waiting = self.waiting[:size], self.waiting[size:]
        self.now = max(asked, batch[-1][0])
        for _ in batch:
            self.manager.on_accept()
        share = (self.now - asked) / max(self.now - self.served, 1e-9)
        if self.manager.version:
            self.manager.on_take(share, sum(end <= self.now for end, _ in self.waiting))
        self.served = self.now
        self.admit()
        ages = [self.manager.version - version for _, version in batch]
        self.now += self.training_s
        self.manager.set_version(self.manager.version + 1)
        return share, ages


def simulated(manager: StalenessManager, group_s: list[float]) -> tuple[float, int]:
    """Returns the mean share of waiting and the median age over 200 steps, after 100 others."""
    trainer = Trainer(manager, group_s)
    steps = [trainer.step() for _ in range(300)][100:]
    ages = sorted(age for _, found in steps for age in found)
    return sum(share for share, _ in steps) / len(steps), ages[len(ages) // 2]


def test_samples_are_as_fresh_as_their_groups_are_short() -> None:
    """The control is a fixed lead, whose samples are as old as the bound, or one of a batch, at which the trainer waits."""
    short, long = [0.4, 0.5, 0.3], [0.5, 0.7, 0.6, 2.5, 0.4, 0.8, 1.4]
    assert simulated(paced(), short) == (0.0, 1) and simulated(StalenessManager(16, 4), short) == (0.0, 4)
    idle, median = simulated(paced(), long)
    assert idle <= 0.03 and median <= 2
    assert simulated(StalenessManager(16, 4), long) == (0.0, 4) and simulated(StalenessManager(16, 1), long)[0] > 0.1
