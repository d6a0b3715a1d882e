"""The in-process backend behaves as the Ray backend does at world size 1."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhub.config.sections.trainer import DeadlineConfig
from rlhub.errors import ConfigError, DataError, WorkerError
from rlhub.protocol import DataProto
from rlhub.single_controller import ClassWithInitArgs, Dispatch, Launched, LaunchOptions, Worker, launch, register
from rlhub.single_controller.calls import ObservedCall


class Role(Worker):
    def __init__(self, base: int, fail: bool = False) -> None:
        if fail:
            raise ValueError("cannot be built")
        self.base = base
        self.closed: list[str] = []

    @register(Dispatch.ONE_TO_ALL)
    def add(self, value: int) -> int:
        return self.base + value

    @register(Dispatch.ONE_TO_ALL)
    async def later(self, value: int) -> tuple[int, str]:
        await asyncio.sleep(0)
        return value, threading.current_thread().name

    @register(Dispatch.DP_COMPUTE_PROTO)
    def take(self, batch: DataProto) -> DataProto:
        taken = batch.pop(["x"])
        taken.rename("x", "y")
        return taken

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def take_later(self, batch: DataProto) -> DataProto:
        if "x" not in batch.batch.keys():
            raise DataError("no x")
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[int, int, str, str]:
        return self.rank, self.world_size, self.context.role, os.environ["MASTER_PORT"]

    def close(self) -> None:
        self.closed.append("closed")


def run(**kwargs: Any) -> Launched:
    roles = {"actor": ClassWithInitArgs(Role, 3), "critic": ClassWithInitArgs(Role, base=5)}
    return launch(roles, LaunchOptions(backend="local", **kwargs))


def batch() -> DataProto:
    return DataProto.from_dict({"x": torch.arange(3), "z": torch.zeros(3)})


def test_roles_answer_as_a_group_of_one() -> None:
    with run() as launched:
        actor, critic = launched.groups["actor"], launched.groups["critic"]
        assert actor.add(1) == [4] and critic.add(1) == [6]
        assert actor.world_size == 1 and actor.workers[0].pid == os.getpid()
        assert actor.where()[0][:3] == (0, 1, "actor")
        value, thread = actor.later(7)[0]
        assert value == 7 and thread == "rlhub-worker-loop"


def test_calls_run_in_the_callers_thread() -> None:
    class Threaded(Worker):
        @register(Dispatch.RANK_ZERO)
        def thread(self) -> int:
            return threading.get_ident()

    with launch({"a": ClassWithInitArgs(Threaded)}, LaunchOptions(backend="local")) as launched:
        assert launched.groups["a"].thread() == threading.get_ident()


def test_calls_of_several_threads_come_one_at_a_time() -> None:
    """Training and the validation beside it share what scores; under Ray a rank takes one call at a time anyway."""

    class Alone(Worker):
        def __init__(self) -> None:
            self.inside = self.most = 0

        @register(Dispatch.RANK_ZERO)
        def work(self) -> int:
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.01)
            self.inside -= 1
            return self.most

    with launch({"a": ClassWithInitArgs(Alone)}, LaunchOptions(backend="local")) as launched, ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(launched.groups["a"].work) for _ in range(4)]
        assert {call.result() for call in calls} == {1}


def test_environment_is_set_for_the_run_and_restored() -> None:
    before = os.environ.get("MASTER_PORT")
    launched = run()
    assert os.environ["RANK"] == "0" and os.environ["MASTER_PORT"] == launched.groups["actor"].where()[0][3]
    launched.close()
    launched.close()
    assert os.environ.get("MASTER_PORT") == before


def test_a_worker_that_changes_its_columns_leaves_the_drivers_batch_alone() -> None:
    with run() as launched:
        mine = batch()
        assert set(launched.groups["actor"].take(mine).batch.keys()) == {"y"}
        assert set(mine.batch.keys()) == {"x", "z"}


def test_errors_are_worker_errors_that_keep_the_original_as_cause() -> None:
    with run() as launched:
        with pytest.raises(WorkerError, match=r"\[actor rank 0 .*add raised TypeError") as caught:
            launched.groups["actor"].add("x")
        assert caught.value.role == "actor" and caught.value.rank == 0 and caught.value.remote_type == "TypeError"
        assert isinstance(caught.value.__cause__, TypeError) and "return self.base + value" in caught.value.remote_traceback
        with pytest.raises(WorkerError, match="no_such"):
            launched.groups["actor"].execute_all_sync("no_such")


def test_futures_hold_results_and_failures() -> None:
    with run() as launched:
        actor = launched.groups["actor"]
        future = actor.take_later(batch())
        assert len(future.get()) == 3 and len(actor.take(future)) == 3
        failed = actor.take_later(batch().select(["z"]))
        with pytest.raises(WorkerError, match="no x") as caught:
            failed.get()
        assert isinstance(caught.value.__cause__, DataError)


def test_a_role_that_cannot_be_built_is_a_worker_error_and_leaves_no_environment() -> None:
    before = dict(os.environ)
    with pytest.raises(WorkerError, match="critic rank 0.*cannot be built"):
        roles = {"actor": ClassWithInitArgs(Role, 1), "critic": ClassWithInitArgs(Role, 1, fail=True)}
        launch(roles, LaunchOptions(backend="local"))
    assert dict(os.environ) == before


def test_close_reaches_the_workers_and_ends_the_groups() -> None:
    launched = run()
    worker = launched.groups["actor"]._rank._workers["actor"]  # type: ignore[attr-defined]
    launched.close()
    assert worker.closed == ["closed"]


def test_more_than_one_rank_needs_ray() -> None:
    with pytest.raises(ConfigError, match=r"nnodes=1 x .*n_gpus_per_node=2 = 2.*backend=ray"):
        run(ranks_per_node=2)


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="known: ray, local"):
        launch({}, LaunchOptions(backend="threads"))  # type: ignore[arg-type]


def test_plugins_are_imported_before_workers_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rlhub_test_plugin.py").write_text("import os\nos.environ['RLHUB_TEST_PLUGIN'] = 'seen'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RLHUB_TEST_PLUGIN", "unseen")
    with run(plugins=["rlhub_test_plugin"]):
        assert os.environ["RLHUB_TEST_PLUGIN"] == "seen"


def test_a_passed_deadline_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Worker):
        @register(deadline="infer")
        def slow(self) -> None:
            threading.Event().wait(0.02)

    with launch({"a": ClassWithInitArgs(Slow)}, LaunchOptions(backend="local")) as launched:
        launched.groups["a"].deadline_s = DeadlineConfig(infer=0.001)
        launched.groups["a"].slow()
    assert "a.slow took" in caplog.text and "(trainer.deadline_s.infer)" in caplog.text


def test_an_observer_can_stop_a_call() -> None:
    class Stopper:
        def on_start(self, call: ObservedCall) -> None:
            raise RuntimeError("not now")

        def on_end(self, call: ObservedCall, seconds: float, error: BaseException | None) -> None: ...

        def on_transfer(self, call: ObservedCall, *, sent: int = 0, received: int = 0) -> None: ...

    with run(observers=[Stopper()]) as launched, pytest.raises(RuntimeError, match="not now"):
        launched.groups["actor"].add(1)
