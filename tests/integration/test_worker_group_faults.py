"""What goes wrong in workers reaches the driver as a typed error in time, and closing leaves nothing behind."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from rlhub.config.sections.trainer import DeadlineConfig, TrainerConfig
from rlhub.errors import DataError, DeadlineError, ResourceError, WorkerDiedError, WorkerError
from rlhub.protocol import DataProto
from rlhub.single_controller import ClassWithInitArgs, Launched, LaunchOptions, launch
from rlhub.single_controller.ray import pending
from rlhub.single_controller.ray.reaper import marked_processes
from rlhub.trainer.launch import launch_workers
from tests.integration.controller_workers import Probe, Second
from tests.support.processes import alive, all_end

Start = Callable[..., Launched]


@pytest.fixture()
def start(ray_cluster: None, tmp_path: Path) -> Iterator[Start]:
    """Launch a Probe on two ranks; whatever the test does, it is closed afterwards and leaves no process."""
    runs: list[Launched] = []

    def start_run(**kwargs: Any) -> Launched:
        runs.append(launch({"actor": ClassWithInitArgs(Probe)}, LaunchOptions(ranks_per_node=2, log_dir=tmp_path, **kwargs)))
        return runs[-1]

    yield start_run
    for run in runs:
        run.close()


def late_when_only(patch: pytest.MonkeyPatch, rank: int) -> None:
    """No deadline passes before all ranks but this one have answered, however slow they are."""
    real = pending.Gather._seconds_left

    def seconds_left(gather: pending.Gather) -> float:
        return real(gather) if gather._late_ranks() == [rank] else max(real(gather), 0.05)

    patch.setattr(pending.Gather, "_seconds_left", seconds_left)


def test_exceptions_deadlines_and_a_death_with_hanging_peers(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    actor = run.groups["actor"]

    with pytest.raises(WorkerError, match=r"\[actor rank 1 on 127.0.0.1\] fail_on raised ValueError: no such luck") as caught:
        actor.fail_on(1)
    assert caught.value.remote_type == "ValueError" and 'raise ValueError("no such luck")' in caught.value.remote_traceback
    assert not isinstance(caught.value, WorkerDiedError)
    with pytest.raises(WorkerError) as caught:
        actor.fail_on(0, kind="data")
    assert isinstance(caught.value.__cause__, DataError)
    with pytest.raises(WorkerError, match="no_such_method"):
        actor.execute_all_sync("no_such_method")

    failing = actor.double_later(DataProto.from_dict({"y": torch.zeros(4)}))
    with pytest.raises(WorkerError, match="double_later raised KeyError"):
        failing.get()
    with pytest.raises(WorkerError, match="double_later raised KeyError"):
        actor.double(failing)
    assert actor.replicate(1) == [(0, 1), (1, 1)], "the workers go on"

    actor.deadline_s = DeadlineConfig(infer=3.0)
    begin = time.monotonic()
    with monkeypatch.context() as patch:
        late_when_only(patch, 1)
        with pytest.raises(DeadlineError, match=r"actor.sleep_on: not done after 3 s; still running: rank 1 on") as late:
            actor.sleep_on(1, 300.0)
    assert time.monotonic() - begin < 150 and late.value.seconds == 3.0
    assert wait_for(lambda: "sleep_on" in Path(actor.workers[1].log).read_text()), "the stacks are in the log"

    begin = time.monotonic()
    with pytest.raises(WorkerDiedError, match=f"process {actor.workers[0].pid} died") as died:
        actor.die_on(0, others_sleep_s=300.0)
    assert (died.value.role, died.value.rank) == ("actor", 0) and time.monotonic() - begin < 150
    with pytest.raises(WorkerDiedError, match="rank 0"):
        actor.only_zero(1)
    begin = time.monotonic()
    run.close()
    assert time.monotonic() - begin < 150, "a hanging peer is not waited for"
    assert all_end([worker.pid for worker in actor.workers])


def wait_for(condition: Callable[[], bool], seconds: float = 90.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_death_is_reported_rather_than_what_it_did_to_its_peers_and_children_are_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "GRACE_S", 60.0)  # the peers raise at once, and it may be late to die
    run = start()
    actor = run.groups["actor"]
    children = actor.start_child()
    assert all(alive(pid) for pid in children)
    with pytest.raises(WorkerDiedError, match="actor rank 1"):
        actor.die_and_break_peers(1)
    assert all(alive(pid) for pid in children), "the control: Ray does not end what a worker started"
    run.close()
    assert all_end([*children, *(worker.pid for worker in actor.workers)])


PLUGIN = """
import time
from rlhub.single_controller import Dispatch, Worker, register

class Guest(Worker):
    @register(Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self): ...

    @register(Dispatch.ONE_TO_ALL, deadline="checkpoint")
    def hang(self):
        time.sleep(600)
"""


def test_a_plugins_method_has_the_deadline_that_it_names(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guest_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    guest = importlib.import_module("guest_plugin").Guest
    config = TrainerConfig(device="cpu", n_gpus_per_node=1, plugins=["guest_plugin"], deadline_s=DeadlineConfig(checkpoint=2.0))
    begin = time.monotonic()
    words = r"guest.hang: not done after 2 s.*raise trainer.deadline_s.checkpoint"
    roles = {"guest": ClassWithInitArgs(guest)}
    with launch_workers(roles, config) as launched, pytest.raises(DeadlineError, match=words) as late:
        launched.groups["guest"].hang()
    assert late.value.seconds == 2.0 and time.monotonic() - begin < 300


def test_an_idle_death_and_a_stopped_process(start: Start) -> None:
    run = start(deadline_s=DeadlineConfig(shutdown=90.0))
    actor = run.groups["actor"]
    assert len(actor.replicate(1)) == 2
    actor.deadline_s = DeadlineConfig(update=5.0)
    os.kill(actor.workers[1].pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError, match="actor.replicate.*rank 1"):
        actor.replicate(1)
    actor.deadline_s = DeadlineConfig()
    os.kill(actor.workers[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 0"):
        actor.only_zero(1)
    begin = time.monotonic()
    run.close()
    assert time.monotonic() - begin < 90 and all_end([worker.pid for worker in actor.workers])


def worker_processes() -> set[int]:
    """Returns the processes of ranks, by the title that Ray gives them, of this test process's cluster: whatever a process starts
    inherits its environment, and another test process has another one."""
    mine = {name: value for name, value in os.environ.items() if name.startswith("PYTEST_XDIST_")}
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            if "WorkerProcess" in " ".join(process.info["cmdline"] or []) and mine.items() <= process.environ().items():
                found.add(process.pid)
    return found


def all_cpus_are_free() -> bool:
    return bool(ray.available_resources().get("CPU", 0) == ray.cluster_resources()["CPU"])


@pytest.mark.parametrize(
    ("kwargs", "plugins", "message"),
    [
        ({"fail_on_rank": 1}, [], r"critic rank 1 .*__init__ raised ValueError: rank 1 cannot be built"),
        ({}, ["no_such_plugin_module"], r"prepare raised ModuleNotFoundError: No module named 'no_such_plugin_module'"),
    ],
)
def test_what_cannot_start_says_why_and_gives_its_places_back(
    ray_cluster: None, kwargs: dict[str, Any], plugins: list[str], message: str
) -> None:
    assert wait_for(all_cpus_are_free)
    before = worker_processes()
    roles = {"actor": ClassWithInitArgs(Second), "critic": ClassWithInitArgs(Probe, **kwargs)}
    with pytest.raises(WorkerError, match=message):
        launch(roles, LaunchOptions(ranks_per_node=2, plugins=plugins))
    assert wait_for(all_cpus_are_free)
    assert all_end(worker_processes() - before), "what was killed ends when it gets a core"


def test_a_start_that_hangs_has_a_deadline(ray_cluster: None) -> None:
    class Stuck(Second):
        def __init__(self) -> None:
            time.sleep(600)

    begin = time.monotonic()
    with pytest.raises(DeadlineError, match=r"(actor.__init__|workers\.\w+): not done"):
        launch({"actor": ClassWithInitArgs(Stuck)}, LaunchOptions(deadline_s=DeadlineConfig(start=10.0)))
    assert time.monotonic() - begin < 200


def test_more_than_the_cluster_has_is_refused_with_numbers_and_knobs(ray_cluster: None) -> None:
    from rlhub.single_controller.ray import RayResourcePool

    assert wait_for(all_cpus_are_free)
    begin = time.monotonic()
    with pytest.raises(ResourceError, match=r"asked for 99 worker processes .*5 of 5 CPUs free.*n_gpus_per_node.*num_cpus"):
        RayResourcePool([99]).slots()
    assert time.monotonic() - begin < 60
    with pytest.raises(ResourceError, match=r"not given within 2 s .*trainer.device=cpu"):
        RayResourcePool([1], use_gpu=True, deadline_s=2, wait_for_nodes=True).slots()
    held = RayResourcePool([5])
    held.slots()
    with pytest.raises(ResourceError, match=r"0 of 5 CPUs free"):
        RayResourcePool([2], deadline_s=2).slots()
    held.release()


def test_marked_processes_are_only_the_runs_own(start: Start) -> None:
    run = start()
    actor = run.groups["actor"]
    marker = actor.environment()[0]["RLHUB_RUN_MARKER"]
    assert {process.pid for process in marked_processes(marker)} == {worker.pid for worker in actor.workers}
    assert marked_processes("someone else's") == []
    assert {worker.pid for worker in actor.workers} <= worker_processes(), "the control of what is said to have ended above"
