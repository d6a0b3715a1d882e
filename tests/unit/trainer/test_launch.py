"""Launching: pools build their models side by side, and the log says what is being built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhub.config.sections.trainer import TrainerConfig
from rlhub.single_controller import ClassWithInitArgs, Worker
from rlhub.trainer import launch
from rlhub.trainer.launch import in_turn


def test_one_role_of_each_pool_at_a_time() -> None:
    groups: dict[str, Any] = {
        role: SimpleNamespace(role=role) for role in ("actor", "critic", "rollout", "reward_model", "judge")
    }
    turns = in_turn(groups, {"rollout": "generation", "reward_model": "scoring", "judge": "scoring"})
    assert [[group.role for group in turn] for turn in turns] == [["actor", "rollout", "reward_model"], ["critic", "judge"]]


def test_the_start_is_told_step_by_step(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It takes minutes with large models, and a silent program looks like one that hangs."""
    seen: list[list[str]] = []
    model = SimpleNamespace(submit=lambda: seen.append([record.message for record in caplog.records]))
    group = SimpleNamespace(role="actor", init_model=model)
    monkeypatch.setattr(launch, "launch", lambda *_, **__: SimpleNamespace(groups={"actor": group}))
    monkeypatch.setattr(launch, "wait_all", list)
    with caplog.at_level("INFO"):
        launch.launch_workers({"actor": ClassWithInitArgs(Worker)}, TrainerConfig(backend="ray", device="cpu", n_gpus_per_node=2))
    assert seen == [["starting actor, with Ray, 2 ranks on cpu", "building actor"]]
