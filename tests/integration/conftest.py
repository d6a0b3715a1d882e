"""Shared by the integration tests: one Ray cluster per session, because starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.order import longest_first

LONGEST = (
    "test_rollout_vllm.py",
    "test_async_vllm.py",
    "test_placement.py",
    "test_ray_job.py",
    "test_plugin_algorithms.py",
    "test_reward_model.py",
    "test_cluster_two_nodes.py",
    "test_worker_group_cluster.py",
)
"""Files of few tests that take longest: up to three minutes."""
NUM_CPUS = 5
"""Logical CPUs of the session's cluster: ranks of at most this many may live at once."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items, LONGEST)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster on loopback; `rlhub.single_controller.launch` uses it and leaves it running."""
    from rlhub.single_controller.ray import cluster, connect

    cluster.START_ATTEMPTS = 10  # of 30 s: most tests need it, and a machine may be busy for a while
    connection = connect({"num_cpus": NUM_CPUS, "object_store_memory": 300 * 2**20}, device="cpu", num_ranks=NUM_CPUS)
    yield
    connection.close()


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Of this process alone, for engines that are built in it, and only for the tests of a file."""
    import torch

    from rlhub.engines.training.collectives import ensure_process_group

    ensure_process_group(torch.device("cpu"))
    yield
    torch.distributed.destroy_process_group()
