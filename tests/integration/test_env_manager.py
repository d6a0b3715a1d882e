"""Environments in lock-step in child processes: what they compute, and what a process that fails costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlhub.envs.base import EnvError
from rlhub.envs.process import EnvironmentProcess
from rlhub.envs.vector.base import ChunkResult, VectorEnv
from rlhub.envs.vector.check import CHECKS, check_vector_env
from rlhub.envs.vector.lockstep import make_vector_env
from rlhub.envs.vector.manager import EnvManager, EnvManagerOptions
from rlhub.errors import LoadError
from rlhub.utils.shared_segments import SHARED
from tests.support import vector_simulators
from tests.support.processes import all_end

SIMULATORS = f"{vector_simulators.__name__}:"
ROOT = Path(__file__).resolve().parents[2]
Maker = Callable[..., EnvManager]
REQUEST = EnvironmentProcess.request


@pytest.fixture
def manager() -> Iterator[Maker]:
    """Makes managers of 4 environments in 2 processes, and sees that nothing of them is left."""
    before = {child.pid for child in psutil.Process().children()}  # a cluster of other tests, whose processes come and go
    with ExitStack() as stack:

        def make(name: str = "Drift", **given: Any) -> EnvManager:
            made = EnvManager(EnvManagerOptions(name=SIMULATORS + name, **({"num_envs": 4, "processes": 2} | given)))
            stack.callback(made.close)
            return made

        yield make
    assert not segments(), "a name of shared memory is left"
    born = [child for child in psutil.Process().children() if child.pid not in before]
    below = {child.pid for child in born}
    for child in born:
        with suppress(psutil.NoSuchProcess):  # it has ended since
            below.update(one.pid for one in child.children(recursive=True))
    assert all_end(below), f"processes are left: {born}"


def segments() -> list[Path]:
    return list(SHARED.glob(f"rlhub-{os.getpid()}-*"))


def actions(seed: int, num_envs: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-0.9, 0.9, (num_envs, 8, 2)).astype(np.float32)


def play(env: VectorEnv, chunks: int, first: int = 0) -> list[ChunkResult]:
    return [env.chunk_step(actions(first + number)) for number in range(chunks)]


def same(one: ChunkResult, other: ChunkResult, rows: slice = slice(None)) -> bool:
    names = ("reward", "valid", "terminated", "truncated", "success", "lost")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    pairs += [(getattr(one.obs, name), getattr(other.obs, name)) for name in ("images", "state", "seed")]
    return all(np.array_equal(a[rows], b[rows]) for a, b in pairs)


@pytest.mark.parametrize(("name", "processes"), [("Drift", 2), ("Replayed", 3), ("Batched", 2), ("Stateless", 4)])
def test_the_suite_passes_over_processes(manager: Maker, name: str, processes: int) -> None:
    env = manager(name, processes=processes)
    assert check_vector_env(env, chunks=20) == [check.__name__ for check in CHECKS]


def test_processes_change_nothing(manager: Maker) -> None:
    env, plain = manager(processes=3), make_vector_env(SIMULATORS + "Drift", {}, 4)
    assert np.array_equal(env.reset(seeds=[1, 2, 3, 4]).images, plain.reset(seeds=[1, 2, 3, 4]).images)
    for one, other in zip(play(env, 8), play(plain, 8), strict=True):
        assert same(one, other) and one.info == other.info and one.num_rendered == other.num_rendered
        assert one.final_obs.instruction == other.final_obs.instruction
        assert np.array_equal(one.final_obs.images, other.final_obs.images)
    some = [3, 0]
    assert env.get_state(some) == plain.get_state(some)
    parts = [each.reset(some, seeds=[7, 8], initial=[1, 2]) for each in (env, plain)]
    assert np.array_equal(parts[0].images, parts[1].images) and parts[0].instruction == parts[1].instruction
    frames = [each.chunk_step(actions(3), "all").frames for each in (env, plain)]
    assert frames[0] is not None and frames[1] is not None and np.array_equal(frames[0].images, frames[1].images)


def innermost(env: EnvManager) -> list[psutil.Process]:
    """The processes that run the simulators: in a PID namespace, they are below its first process."""
    return [[psutil.Process(pid), *psutil.Process(pid).children(recursive=True)][-1] for pid in env.process_ids()]


def kill(env: EnvManager) -> np.ndarray:
    ends = innermost(env)[0]
    os.kill(env.process_ids()[0], signal.SIGKILL)
    psutil.wait_procs([ends], timeout=30)  # or it might still answer
    return actions(50)


def stop(env: EnvManager) -> np.ndarray:
    innermost(env)[0].suspend()
    return actions(50)


def trap(env: EnvManager) -> np.ndarray:
    sprung = actions(50)
    sprung[1, 3, 0] = 1.0
    return sprung


def only_one_is_late(patch: pytest.MonkeyPatch, faulty: EnvironmentProcess | None) -> None:
    """The others miss no limit, however long they wait for a core."""

    async def limited(process: EnvironmentProcess, operation: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        return await REQUEST(process, operation, arguments, timeout_s if process is faulty else max(timeout_s, 120.0))

    patch.setattr(EnvironmentProcess, "request", limited)


@pytest.mark.parametrize(
    ("fault", "settings", "why"),
    [
        (kill, {}, "SIGKILL"),
        (stop, {}, "not done after 3 s"),
        (trap, {"trap": "hang"}, "not done after 3 s"),
        (trap, {"trap": "grow"}, "more memory than it may"),
        (trap, {"trap": "raise"}, "has become unstable"),
    ],
)
def test_a_process_that_fails_costs_its_own_rows_and_is_replaced(
    manager: Maker,
    fault: Callable[[EnvManager], np.ndarray],
    settings: dict[str, Any],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeout_s = 3.0 if "not done" in why else 60.0
    only_one_is_late(monkeypatch, None)
    env, plain = (manager(settings=settings, timeout_s=timeout_s, memory_gb=1.0) for _ in range(2))
    for each in (env, plain):
        each.reset(seeds=[1, 2, 3, 4])
        play(each, 2)
    given = fault(env)
    only_one_is_late(monkeypatch, env._groups[0].process)
    began = time.monotonic()
    result = env.chunk_step(given)
    assert time.monotonic() - began < 100.0, "a new process takes about a second, more where all cores are busy; the limit is 120"
    expected = plain.chunk_step(actions(50))
    assert result.lost.tolist() == [True, True, False, False] and not result.valid[:2].any()
    assert why in result.info[0]["lost"] and not result.ended[:2].any()
    assert env.num_replaced == 1 and env.num_alive == 2 and not segments()
    assert same(result, expected, slice(2, 4)), "the other process's rows must not change"
    for one, other in zip(play(env, 4, 60), play(plain, 4, 60), strict=True):
        assert not one.lost.any() and one.valid[:, 0].all() and same(one, other, slice(2, 4))
        assert one.obs.images[:2].std() > 0


def test_a_loss_during_a_reset_is_reported_by_the_next_chunk(manager: Maker) -> None:
    env = manager()
    env.reset(seeds=[1, 2, 3, 4])
    play(env, 1)
    kill(env)
    obs = env.reset([0, 2], seeds=[11, 13])
    assert env.num_replaced == 1 and obs.seed.tolist() == [11, 13]
    result = env.chunk_step(actions(5))
    assert result.lost.tolist() == [False, True, False, False]
    assert result.valid[:, 0].tolist() == [False, False, True, True] and result.obs.seed[0] == 11
    assert all(result.obs.instruction)
    assert env.chunk_step(actions(6)).valid[:, 0].all()


def test_an_environment_that_always_fails_ends_the_run(manager: Maker) -> None:
    env = manager(settings={"trap": "raise"})
    env.reset(seeds=[1, 2, 3, 4])
    with pytest.raises(EnvError, match="(?s)environments 0 to 1 failed 4 times in a row.*unstable"):
        for number in range(5):
            assert env.chunk_step(trap(env)).lost.sum() == 2 and env.num_replaced == number + 1


def test_offloaded_environments_hold_no_memory_and_continue(manager: Maker) -> None:
    env, plain = (manager(settings={"size": 224}) for _ in range(2))
    for each in (env, plain):
        each.reset(seeds=[1, 2, 3, 4])
        play(each, 2)
    env.offload()
    assert env.num_alive == 0 and not env.process_ids()
    expected = play(plain, 3, 10)
    assert all(same(one, other) for one, other in zip(play(env, 3, 10), expected, strict=True))
    before = psutil.Process().memory_info().rss
    for _ in range(3):
        env.onload()
        env.chunk_step(actions(1))
        env.offload()
    assert psutil.Process().memory_info().rss - before < 20 * 2**20
    assert len(env.get_state([2])) == 1 and env.num_alive == 0, "a saved state needs no process"


def test_a_state_that_cannot_be_had_is_an_error(manager: Maker) -> None:
    env = manager("Stateless")
    env.reset(seeds=[1, 2, 3, 4])
    with pytest.raises(EnvError, match="cannot save its state"):
        env.offload()
    assert env.num_alive == 2 and env.chunk_step(actions(0)).valid[:, 0].all(), "nothing may be lost by the attempt"


def test_an_environment_that_cannot_be_built_is_an_error(manager: Maker) -> None:
    with pytest.raises(LoadError, match="no_such_setting"):
        manager(settings={"no_such_setting": 1}).reset(seeds=[1, 2, 3, 4])
    with pytest.raises(EnvError, match="has no VectorSpec"):
        make_vector_env("grid_walk", {}, 2)
    with pytest.raises(ValueError, match="processes=5 must be from 1 to num_envs=4"):
        manager(processes=5)


def test_chunks_of_two_managers_overlap_and_any_thread_may_call(manager: Maker, tmp_path: Path) -> None:
    """One after the other, the first would wait for the second until its limit."""
    one, two = (manager("Meeting", num_envs=2, processes=1, settings={"meet": str(tmp_path)}) for _ in range(2))
    for each in (one, two):
        each.reset(seeds=[1, 2])
    results = [each.submit_chunk(actions(1, 2)) for each in (one, two)]
    assert all(result.result().valid[:, 0].all() for result in results)
    assert len(list(tmp_path.iterdir())) == 2 and one.num_replaced == two.num_replaced == 0
    done: list[ChunkResult] = []
    threads = [threading.Thread(target=lambda: done.append(one.chunk_step(actions(2, 2)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4 and one.num_replaced == 0


def test_another_python_has_its_own_packages(manager: Maker, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    for folder in Path(np.__file__).parents[1].glob("numpy*"):
        (packages / folder.name).symlink_to(folder)
    simulator = tmp_path / "here.py"
    simulator.write_text(
        "import importlib.util, sys\n"
        "from tests.support.vector_simulators import Drift\n"
        "assert importlib.util.find_spec('torch') is None and importlib.util.find_spec('ray') is None, sys.path\n"
        f"assert sys.prefix == {str(venv)!r}\n"
    )
    given = EnvManagerOptions(name=f"{simulator}:Drift", num_envs=2, python=str(venv / "bin/python"))
    env = EnvManager(given)
    try:
        check_vector_env(env, chunks=5)
    finally:
        env.close()
    with pytest.raises(LoadError):  # the control: this process's Python has torch
        refused = EnvManager(EnvManagerOptions(name=f"{simulator}:Drift", num_envs=2))
        refused.reset(seeds=[1, 2])


def test_processes_run_on_their_cpus(manager: Maker) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    env = manager(affinity="cores")
    env.reset(seeds=[1, 2, 3, 4])
    own = [set(process.cpu_affinity()) for process in innermost(env)]
    assert own[0] | own[1] <= os.sched_getaffinity(0) and own[0] != own[1]
