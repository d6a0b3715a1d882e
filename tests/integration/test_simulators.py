"""Real simulators pass the suite in processes of a manager; those with dependencies of their own where their environment exists.

bash recipes/embodied_libero/setup_env.sh metaworld && pytest -m simulators tests/integration/test_simulators.py
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipes.embodied_libero import run
from rlhub.envs.vector.check import CHECKS, check_vector_env
from rlhub.envs.vector.manager import EnvManager, EnvManagerOptions
from tests.support.metrics import rows_of

ROOT = Path(__file__).resolve().parents[2]
BABYAI = {"tile_size": 8, "agent_pov": True}
REACH = {"env_name": "reach-v3", "camera_name": "corner2", "width": 64, "height": 64, "seed": 0}


def check(chunks: int, **options: Any) -> None:
    env = EnvManager(EnvManagerOptions(num_envs=2, processes=2, **options))
    try:
        assert check_vector_env(env, chunks=chunks) == [check.__name__ for check in CHECKS]
    finally:
        env.close()


@pytest.mark.parametrize(
    ("package", "name", "settings"),
    [
        ("mujoco", "reach_color", {}),
        ("minigrid", "gymnasium_vector", {"id": "BabyAI-GoToRedBallGrey-v0", "imports": ["minigrid"], "make_kwargs": BABYAI}),
        ("gymnasium", "gymnasium_vector", {"id": "Pendulum-v1", "pictures": False}),
    ],
)
def test_a_simulator_passes(package: str, name: str, settings: dict[str, Any]) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} of the extra 'envs' is not installed: bash scripts/setup_env.sh")
    more = {"chunk": 4, "max_steps": 12} if name == "gymnasium_vector" else {}
    check(100 if name == "reach_color" else 20, name=name, settings=settings | more)


@pytest.mark.simulators
@pytest.mark.parametrize(
    ("simulator", "name", "settings"),
    [
        (
            "metaworld",
            "gymnasium_vector",
            {"id": "Meta-World/MT1", "imports": ["metaworld"], "make_kwargs": REACH, "instruction": "reach the goal"},
        ),
        ("libero", "recipes/embodied_libero/libero_env.py:LiberoSimulator", {}),
        ("maniskill", "maniskill", {}),
    ],
)
def test_a_simulator_with_its_own_python_passes(simulator: str, name: str, settings: dict[str, Any]) -> None:
    python = python_of(simulator)
    check(3, name=name, settings=settings | {"chunk": 4, "max_steps": 12}, python=str(python), timeout_s=300.0)


def python_of(simulator: str) -> Path:
    python = ROOT / f".venv-{simulator}/bin/python"
    if not python.exists():
        pytest.skip(f"there is no {python}: bash recipes/embodied_libero/setup_env.sh {simulator}")
    return python


@pytest.mark.simulators
def test_two_steps_of_ppo_on_a_task_of_libero(tmp_path: Path) -> None:
    """The recipe: that everything is connected, not that it learns."""
    assert run.main(["--python", str(python_of("libero")), "--out", str(tmp_path), "trainer.save_freq=1"]) == 0
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollout/lost_episodes"] == 0 and row["rollout/calls"] == run.EPISODE / run.CHUNK
        assert abs(row["mismatch/kl"]) < 1e-5 and row["actor/grad_norm"] > 0
    before, *after = [load_file(file) for file in sorted(tmp_path.rglob("huggingface/model.safetensors"))]
    assert len(after) == 1 and any(not torch.equal(before[name], weight) for name, weight in after[0].items())
