"""Shared by the integration tests: one Ray cluster per session, because starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

NUM_CPUS = 4
"""Logical CPUs of the session's cluster: ranks of at most this many may live at once."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster on loopback; `rlhub.single_controller.launch` uses it and leaves it running."""
    from rlhub.single_controller.ray import connect

    connection = connect({"num_cpus": NUM_CPUS, "object_store_memory": 300 * 2**20}, device="cpu", num_ranks=NUM_CPUS)
    yield
    connection.close()
