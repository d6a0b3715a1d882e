"""Ranks over two nodes of different size, joined by address, and the loss of a node."""

from __future__ import annotations

from pathlib import Path

from tests.integration.test_worker_group_cluster import run_scenario


def test_two_nodes_of_different_size(tmp_path: Path) -> None:
    result = run_scenario("two_nodes", tmp_path)
    assert result["owned"] is False
    first, second, third = result["node_ids"]
    assert first != second and second == third
    assert result["local"] == [["0", "0", "1"], ["1", "0", "2"], ["2", "1", "2"]]
    assert result["sum"] == [6.0] * 3
    role, rank, seconds = result["lost"]
    assert role == "actor" and rank in (1, 2) and seconds < 300
    assert result["left"] == []
