"""Groups that come to nothing: what stops a run, and what is said before."""

from __future__ import annotations

import logging

import pytest

from rlhub.rollout_service.executor.batches import FailureLimit
from rlhub.rollout_service.executor.staleness import StalenessManager


def test_failures_in_a_row_stop_the_run_and_others_do_not() -> None:
    failure_limit, error = FailureLimit(3), ValueError("a bug")
    for _ in range(5):
        assert failure_limit.failed(1, error) is None and failure_limit.failed(2, error) is None
        failure_limit.complete()
    assert failure_limit.failed(1, error) is None and failure_limit.failed(2, error) is None
    stop = failure_limit.failed(3, error)
    assert str(stop).startswith("3 groups of episodes failed in a row, the last with ValueError: a bug. Correct the workflow")
    assert stop is not None and stop.__cause__ is error


def test_failures_and_rejections_are_told_of_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    failure_limit = FailureLimit(2)
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            failure_limit.failed(number, ValueError("a bug"))
            failure_limit.complete()
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [1, 2, 4, 8, 16]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            failure_limit.rejected("filtered out")
        failure_limit.accepted()
        failure_limit.rejected("again")
        failure_limit.rejected("and again")
    assert [record.args for record in caplog.records] == [
        *((count, "filtered out") for count in (2, 4, 8, 16)),
        (2, "and again"),
    ]


def test_groups_that_are_always_too_old_stop_the_run() -> None:
    staleness = StalenessManager(batch=2, max_staleness=1)
    staleness.set_version(4)
    failure_limit = FailureLimit(6)
    assert failure_limit.dropped(5, staleness) is None
    assert "6 groups in a row were more than 1 versions old when they came, at version 4" in str(
        failure_limit.dropped(6, staleness)
    )
