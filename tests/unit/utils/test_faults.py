"""Fault plans: what strikes where, when and how often, and that the table of places is the truth."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from rlhub.errors import InjectedFaultError
from rlhub.rewards.pool import RewardPool, RewardRequest
from rlhub.utils import faults
from rlhub.utils.faults import PLACES, Fault, FaultKind, FaultPlan
from tests.support.source_trees import ROOT

Plan = Callable[..., FaultPlan]


@pytest.fixture()
def plan(tmp_path: Path) -> Iterator[Plan]:
    """Installs these faults, as of a run whose records go to tmp_path."""

    def install(*planned: Fault, rank: int = 0, step: int = 1) -> FaultPlan:
        made = FaultPlan(faults=planned, record=str(tmp_path))
        faults.install(made, rank=rank)
        faults.begin_step(step)
        return made

    yield install
    faults.install(None)


def test_without_a_plan_every_place_is_passed() -> None:
    assert faults.installed() is None and faults.at("driver.step") is None and faults.current_step() == 0
    faults.at_call("actor", "update_actor", 1, 0)


def test_a_fault_strikes_at_its_place_rank_and_step_alone(plan: Plan) -> None:
    plan(Fault(kind="raise", place="actor.update_actor", rank=1, step=2))
    for role, method, step, rank in (
        ("actor", "update_actor", 1, 1),
        ("actor", "update_actor", 2, 0),
        ("actor", "sync_weights", 2, 1),
    ):
        faults.at_call(role, method, step, rank)
    with pytest.raises(InjectedFaultError, match=r"raise at actor.update_actor, rank 1, step 2"):
        faults.at_call("actor_rollout_ref", "update_actor", 2, 1)


def test_what_the_actors_processes_do_for_other_roles_has_those_roles_names(plan: Plan) -> None:
    plan(Fault(kind="raise", place="rollout.generate_sequences"), Fault(kind="raise", place="reference.compute_ref_log_prob"))
    for role, method in (("actor_rollout_ref", "generate_sequences"), ("actor", "compute_ref_log_prob")):
        with pytest.raises(InjectedFaultError):
            faults.at_call(role, method, 1, 0)


def test_a_fault_strikes_once_also_in_a_process_that_repeats_the_step(plan: Plan) -> None:
    planned = Fault(kind="raise", place="driver.step")
    made = plan(planned)
    with pytest.raises(InjectedFaultError):
        faults.at("driver.step")
    assert list(made.unstruck()) == []
    faults.at("driver.step")
    plan(planned)
    faults.at("driver.step")


def test_a_record_that_cannot_be_written_keeps_no_fault_from_striking(plan: Plan, tmp_path: Path) -> None:
    faults.install(FaultPlan(faults=(Fault(kind="raise", place="driver.step", step=0),), record=str(tmp_path / "missing")))
    with pytest.raises(InjectedFaultError):
        faults.at("driver.step")
    faults.at("driver.step")


def test_a_killed_and_a_stopped_process(plan: Plan) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        plan(Fault(kind="stop", place="environment.call", seconds=3.0), Fault(kind="kill", place="environment.call", step=2))
        faults.at("environment.call", pid=lambda: child.pid)
        assert until(lambda: state(child.pid) == "T"), "it stands still"
        assert until(lambda: state(child.pid) != "T"), "it goes on by itself"
        faults.begin_step(2)
        faults.at("environment.call", pid=lambda: child.pid)
        assert child.wait(60) == -signal.SIGKILL


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.parametrize(
    ("kind", "place", "number"),
    [
        ("full", "checkpoint.write", errno.ENOSPC),
        ("readonly", "metrics.write", errno.EROFS),
        ("refused", "remote.request", errno.ECONNREFUSED),
        ("reset", "remote.request", errno.ECONNRESET),
    ],
)
def test_what_the_system_would_say(plan: Plan, kind: FaultKind, place: str, number: int) -> None:
    plan(Fault(kind=kind, place=place))
    with pytest.raises(OSError, match="by trainer.faults") as caught:
        faults.at(place)
    assert caught.value.errno == number


def test_damage_to_files(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "actor").mkdir(parents=True)
    content = bytes(range(200))
    (folder / "small").write_bytes(b"1")
    largest = folder / "actor" / "shards"
    largest.write_bytes(content)
    plan(Fault(kind="flip", place="checkpoint.committed"), Fault(kind="truncate", place="checkpoint.written"))
    faults.at("checkpoint.committed", path=folder)
    found = largest.read_bytes()
    assert [number for number in range(200) if found[number] != content[number]] == [100] and found[100] == content[100] ^ 1
    faults.at("checkpoint.written", path=largest)
    assert largest.read_bytes() == found[:100] and (folder / "small").read_bytes() == b"1"


def test_a_delay_waits_and_a_place_with_kinds_of_its_own_is_told_which(plan: Plan) -> None:
    plan(Fault(kind="delay", place="driver.step", seconds=0.05), Fault(kind="nonfinite", place="engine.weights", rank=3))
    begin = time.monotonic()
    faults.at("driver.step")
    assert time.monotonic() - begin >= 0.05
    assert faults.at("engine.weights", rank=0) is None and faults.at("engine.weights", rank=3) == "nonfinite"


@pytest.mark.parametrize(
    ("kind", "found"),
    [("raise", "raised"), ("kill", "died"), ("segfault", "died"), ("nonfinite", "bad_value"), ("delay", "timeout")],
)
def test_a_reward_function_fails_in_its_own_process(plan: Plan, tmp_path: Path, kind: FaultKind, found: str) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    plan(Fault(kind=kind, place="reward.call"))
    pool = RewardPool(f"{tmp_path / 'reward.py'}:compute_score", num_workers=1, timeout_s=5.0 if kind == "delay" else 60.0)
    request = RewardRequest(data_source="", solution_str="", ground_truth="")
    first, second = pool.score([request, request])
    assert first.error is not None and first.error.kind == found and second.score == 1.0
    assert pool.score([request])[0].score == 1.0
    pool.close()


PLAIN = ("driver", "checkpoint", "weights", "metrics", "replica", "engine", "remote")
"""Beginnings of the places that are no call of a rank."""


def test_the_table_has_the_places_that_the_code_passes_and_no_other() -> None:
    texts = [path.read_text() for path in (ROOT / "rlhub").rglob("*.py") if path.name != "faults.py"]
    passed = {name for text in texts for name in re.findall(r'faults\.at\(\s*"([^"]+)"', text)}
    methods = {name for text in texts for name in re.findall(r"@register\([^\n]*\)\n\s+def (\w+)\(", text)}
    table = {name for name in PLACES if name.split(".")[0] in PLAIN}
    table |= {"reward.call", "environment.call"}
    assert passed == table
    assert {name.rpartition(".")[2] for name in set(PLACES) - table} <= methods


def test_every_kind_can_happen_somewhere() -> None:
    assert {kind for place in PLACES.values() for kind in place.kinds} == set(get_args(FaultKind))


def test_the_record_says_who_struck(plan: Plan) -> None:
    made = plan(Fault(kind="delay", place="driver.step", seconds=0.001))
    faults.at("driver.step")
    assert f'"pid": {os.getpid()}' in made.record_of(made.faults[0]).read_text()
