"""Shared by the integration tests: one Ray cluster per session, because starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.order import longest_first

LONGEST = (
    "test_gpu_acceptance.py",
    "test_every_rank.py",
    "test_simulator_placement.py",
    "test_golden_runs.py",
    "test_rollout_vllm.py",
    "test_slurm_scripts.py",
    "test_embodied.py",
    "test_worker_group_cluster.py",
    "test_async_fuzz.py",
    "test_soak_serve.py",
    "test_kept_rows.py",
    "test_recipe_pipelines.py",
    "test_worker_group_faults.py",
    "test_async_vllm_dies.py",
    "test_lora.py",
    "test_serve_parallel.py",
    "test_placement.py",
    "test_environment_actors.py",
    "test_resumed_samplers.py",
)
"""Files that take longest: one to six minutes."""
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
