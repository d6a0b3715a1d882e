"""Admission: the formula, and that its two ways of giving a place back keep a run going."""

import pytest

from rlhub.rollout_service.executor.staleness import StalenessManager


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
