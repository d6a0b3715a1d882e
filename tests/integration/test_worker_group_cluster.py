"""A cluster that rlhub starts by itself: loopback only, more ranks than cores, clear refusals, nothing left behind."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_scenario(name: str, tmp_path: Path, timeout_s: float = 1200.0) -> dict[str, Any]:
    """Run in a process of its own, since a process can be in one cluster only."""
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.integration.cluster_scenarios", name, str(output)]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    result = run_scenario("own_cluster", tmp_path)
    ranks = result["ranks"]
    assert result["per_rank"] == list(range(ranks)), "more CPU ranks than cores start"
    assert result["sum"] == [ranks * (ranks + 1) / 2] * ranks
    assert result["niceness"] == [os.nice(0)] * ranks
    addresses = [ipaddress.ip_address(address.removeprefix("::ffff:")) for address in result["listening"]]
    assert addresses and all(address.is_loopback for address in addresses), result["listening"]
    assert result["helpers"] == ["raylet"], "no process that nothing reads from"
    assert result["left"] == [] and result["descendants"] == []


def test_a_cluster_that_is_too_small_is_refused_at_once(tmp_path: Path) -> None:
    result = run_scenario("refusals", tmp_path)
    assert "asked for 2 worker processes (2 on 1 node(s), 1 CPU each)" in result["cpus"]
    assert "1 of 1 CPUs free" in result["cpus"] and "trainer.ray_init.num_cpus" in result["cpus"]
    assert "1 CPU and 1 GPU each" in result["gpus"] and "trainer.n_gpus_per_node" in result["gpus"]
    assert "ray_init.num_cpus has no effect" in result["join"]
    assert result["seconds"] < 500, "it would be waited for 600 s for each"


def test_a_head_that_ends_or_stands_still_is_an_error_in_time_and_nothing_is_left(tmp_path: Path) -> None:
    """Ray by itself ends the driver after a minute, with a line of its own."""
    result = run_scenario("lost_head", tmp_path)
    assert "has ended" in result["killed"]["message"] and "has not answered for 10 s" in result["stopped"]["message"]
    for outcome in result.values():
        assert outcome["seconds"] < 50.0 and outcome["closed"] < 120.0, outcome
        assert outcome["left"] == [] and outcome["descendants"] == [], outcome


def test_a_joined_cluster_whose_head_stands_still_is_left_in_time(tmp_path: Path) -> None:
    """Ray by itself asks the head for minutes when the driver exits."""
    result = run_scenario("lost_joined", tmp_path)
    assert "has not answered for 10 s (trainer.deadline_s.cluster)" in result["message"]
    assert result["code"] == 1 and result["seconds"] < 100.0 and result["left"] == [], result


def test_a_cluster_ends_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    """Ray's agents by themselves wait a minute for the cluster to come back."""
    result = run_scenario("killed_driver", tmp_path)
    assert sum("Agent" in name for name in result["names"]) == 2, result["names"]
    assert result["ended"] and result["seconds"] < 45.0, result
