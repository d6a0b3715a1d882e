"""Which processes have which roles under a placement, and what the driver calls for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhub.trainer.ppo.trainer import worker_roles
from rlhub.trainer.ppo.worker_groups import groups_of
from tests.unit.config.rules.test_derive import good


def roles(placement: dict[str, str], **settings: object) -> dict[str, tuple[str, Any]]:
    """Role -> (worker class, its keyword `needs_reference`)."""
    pools = {name: {} for name in placement.values()}
    config = good(trainer__pools=pools, trainer__placement=placement, algorithm__adv_estimator="gae", **settings)
    built = worker_roles(config, 10)
    return {role: (spec.cls.__name__, spec.kwargs.get("needs_reference")) for role, spec in built.items()}


KL = {"actor_rollout_ref__actor__use_kl_loss": True}
CRITIC = ("CriticWorker", None)


@pytest.mark.parametrize(
    ("placement", "settings", "expected"),
    [
        ({}, {}, {"actor_rollout_ref": ("ActorRolloutRefWorker", False), "critic": CRITIC}),
        ({}, KL, {"actor_rollout_ref": ("ActorRolloutRefWorker", True), "critic": CRITIC}),
        ({"critic": "own"}, KL, {"actor_rollout_ref": ("ActorRolloutRefWorker", True), "critic": CRITIC}),
        (
            {"rollout": "own"},
            KL,
            {"actor": ("ActorWorker", True), "rollout": ("RolloutWorker", None), "critic": CRITIC},
        ),
        (
            {"rollout": "own", "reference": "other"},
            KL,
            {
                "actor": ("ActorWorker", False),
                "rollout": ("RolloutWorker", None),
                "reference": ("ReferenceWorker", None),
                "critic": CRITIC,
            },
        ),
        (
            {"reference": "own"},
            KL,
            {"actor_rollout_ref": ("ActorRolloutRefWorker", False), "reference": ("ReferenceWorker", None), "critic": CRITIC},
        ),
        ({"reference": "own"}, {}, {"actor_rollout_ref": ("ActorRolloutRefWorker", False), "critic": CRITIC}),
    ],
)
def test_roles_of_a_placement(placement: dict[str, str], settings: dict[str, Any], expected: dict[str, Any]) -> None:
    assert roles(placement, **settings) == expected


PIPELINES = """
from rlhub.pipeline.builtin import ppo
from rlhub.pipeline.graph import Pipeline

def without_reference(config, needs):
    return ppo(config, needs).remove("compute_ref_log_prob")

def with_a_role(config, needs):
    step = ppo(config, needs)
    step.roles = {"second": "rlhub.workers.roles:CriticWorker"}
    return step.add("train_second", on="second", run="update_critic", reads="values returns", trains="second")

def with_reference(config, needs):
    return ppo(config, needs).insert("more", below="balance", on="reference", run="compute_ref_log_prob", reads="input_ids")
"""


def test_a_pipeline_decides_which_roles_there_are(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(PIPELINES)
    both = {"critic": CRITIC, "actor_rollout_ref": ("ActorRolloutRefWorker", False)}
    assert roles({}, **KL, trainer__pipeline=f"{path}:without_reference") == both
    assert roles({}, **KL, trainer__pipeline="ppo") == both | {"actor_rollout_ref": ("ActorRolloutRefWorker", True)}
    assert roles({}, trainer__pipeline=f"{path}:with_reference") == both | {"actor_rollout_ref": ("ActorRolloutRefWorker", True)}
    assert roles({}, trainer__pipeline=f"{path}:with_a_role") == both | {"second": CRITIC}


def test_a_checkpoint_has_the_roles_that_a_pipeline_trains() -> None:
    calls: list[str] = []
    launched = {role: Group(role, calls) for role in ("actor_rollout_ref", "second", "third")}
    groups = groups_of(launched, ["second"])  # type: ignore[arg-type]
    assert groups.trained.keys() == {"actor", "second"}


class Group:
    """Notes what it was asked for, in a list that all groups share."""

    def __init__(self, role: str, calls: list[str]) -> None:
        self.role, self.calls, self.world_size = role, calls, 2

    def __getattr__(self, method: str) -> Any:
        def submit(*args: Any) -> Any:
            self.calls.append(f"{self.role}.{method}{args}")

            def get() -> Any:
                self.calls.append(f"got {self.role}.{method}")
                return [[f"{self.role} rank {rank}"] for rank in range(self.world_size)]

            return SimpleNamespace(done=lambda: True, get=get)

        return SimpleNamespace(submit=submit) if method != "open_transfer" else lambda size: f"meeting of {size}"


def test_colocated_roles_are_one_group() -> None:
    calls: list[str] = []
    launched: dict[str, Any] = {role: Group(role, calls) for role in ("actor_rollout_ref", "critic")}
    groups = groups_of(launched)
    assert groups.actor is groups.rollout is groups.reference is launched["actor_rollout_ref"]
    assert groups.critic is launched["critic"] and calls == []
    groups.weights.sync(3)
    assert calls == ["actor_rollout_ref.sync_weights(3,)", "got actor_rollout_ref.sync_weights"]


def test_both_sides_of_a_transfer_are_asked_before_one_is_waited_for() -> None:
    calls: list[str] = []
    launched: dict[str, Any] = {role: Group(role, calls) for role in ("actor", "rollout", "reference")}
    groups = groups_of(launched)
    assert (groups.rollout, groups.reference, groups.critic) == (launched["rollout"], launched["reference"], None)
    assert calls[:2] == ["actor.join_transfer('meeting of 2',)", "rollout.join_transfer('meeting of 2',)"]
    calls.clear()
    groups.weights.sync(5)
    assert calls == [
        "actor.sync_weights(5,)", "rollout.sync_weights(5,)", "got actor.sync_weights", "got rollout.sync_weights"
    ]  # fmt: skip


def test_checkpoints_hold_what_is_trained_wherever_it_is() -> None:
    calls: list[str] = []
    launched: dict[str, Any] = {role: Group(role, calls) for role in ("actor", "rollout", "critic")}
    groups = groups_of(launched)
    calls.clear()
    entries: list[Any] = groups.save(Path("/run"))
    assert entries == ["actor rank 0", "actor rank 1", "critic rank 0", "critic rank 1"]
    assert calls[:2] == ["actor.save_checkpoint('/run/actor',)", "critic.save_checkpoint('/run/critic',)"]
    groups.load(Path("/run"))
    assert "actor.load_checkpoint('/run/actor',)" in calls and not any(call.startswith("rollout") for call in calls)
