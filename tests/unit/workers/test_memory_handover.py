"""Whoever holds memory in this process gives it up before training computes; who is gone is not asked."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.config.sections.reward import JudgeConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.workers import actor, base, memory_handover, roles
from rlhub.workers.memory_handover import WorkerRuntime
from rlhub.workers.roles import ActorRolloutRefWorker, CriticWorker, JudgeWorker


class Holder(memory_handover.MemoryHolder):
    def __init__(self) -> None:
        self.asked = 0

    def release_memory(self) -> None:
        self.asked += 1


def test_all_that_live_are_asked() -> None:
    first, second = Holder(), Holder()
    for holder in (first, second):
        memory_handover.register_memory_holder(holder)
    memory_handover.release_idle_memory()
    del second
    gc.collect()
    memory_handover.release_idle_memory()
    assert first.asked == 2


class Engine:
    """Notes what is asked of a training engine."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append(name) or {"values": None}


def test_the_critic_asks_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(roles, "release_idle_memory", lambda: calls.append("release_idle_memory"))
    worker = CriticWorker.__new__(CriticWorker)
    worker.engine = Engine(calls)  # type: ignore[assignment]
    monkeypatch.setattr(roles, "DataProto", SimpleNamespace(from_dict=lambda tensors: tensors))
    worker.compute_values(SimpleNamespace(batch={}))  # type: ignore[arg-type]
    assert calls == ["release_idle_memory", "infer"]


@pytest.mark.parametrize(("device", "free", "slept"), [("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0)])
def test_the_rollout_engine_sleeps_once_where_that_frees_memory(device: str, free: bool, slept: int) -> None:
    worker = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
    calls: list[str] = []
    worker.device, worker.rollout_asleep = SimpleNamespace(type=device), False  # type: ignore[assignment]
    worker.config = SimpleNamespace(rollout=SimpleNamespace(free_cache_engine=free))  # type: ignore[assignment]
    worker.rollout = Engine(calls)  # type: ignore[assignment]
    worker.release_memory()
    worker.release_memory()
    assert calls == ["sleep"] * slept


def test_the_rollout_engine_sleeps_until_its_first_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
    calls: list[str] = []
    worker.device, worker.engine, worker.rollout = SimpleNamespace(type="cuda"), None, Engine(calls)
    rollout = SimpleNamespace(free_cache_engine=True, update_weights_bucket_mb=1)
    worker.config, worker.runtime = SimpleNamespace(rollout=rollout), SimpleNamespace(deadline_s=1.0)
    monkeypatch.setattr(worker, "_init_actor", lambda: calls.append("actor"))
    monkeypatch.setattr(worker, "_init_rollout", lambda: calls.append("rollout"))
    worker.init_model()
    assert calls == ["actor", "rollout", "sleep"] and worker.rollout_asleep


def test_a_checkpoint_leaves_the_engine_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(base, "save_engine", lambda *_: calls.append("save") or [])
    monkeypatch.setattr(base, "load_engine", lambda *_: calls.append("load"))
    worker = CriticWorker.__new__(CriticWorker)
    worker.engine = Engine(calls)  # type: ignore[assignment]
    worker.save_checkpoint("folder")
    worker.load_checkpoint("folder")
    assert calls == ["save", "offload", "load", "offload"]


def test_the_actor_gives_its_memory_before_another_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    engine = Engine(calls)
    engine.dp_rank, engine.is_collect = 0, True  # type: ignore[attr-defined]
    monkeypatch.setattr(actor, "ensure_process_group", lambda *_, **__: None)
    monkeypatch.setattr(actor, "build_policy_engine", lambda *_, **__: engine)
    worker: Any = actor.ActorWorker.__new__(actor.ActorWorker)
    worker.config, worker.runtime, worker.device = ActorRolloutRefConfig(), SimpleNamespace(deadline_s=1.0, seed=0), None
    worker.train = worker.needs_reference = False
    worker._init_actor()
    assert calls == ["initialize", "offload"]


def test_a_judge_beside_the_rollout_engine_does_not_sleep_too() -> None:
    runtime = WorkerRuntime(device="cuda", seed=0, max_prompt_length=4, max_response_length=4)
    policy = ActorRolloutRefConfig(rollout=RolloutConfig(free_cache_engine=True))
    judge = JudgeWorker(JudgeConfig(), policy, runtime)
    assert not judge.rollout_config.free_cache_engine
