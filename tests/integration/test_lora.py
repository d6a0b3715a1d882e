"""LoRA: adapters alone reach every rollout engine, whose log-probs are those of the merged weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhub.utils.ports import free_port
from tests.integration import lora_checks as checks
from tests.integration.lora_checks import FLIPPED
from tests.integration.test_megatron_engine import Group
from tests.support.tiny_models import save_tiny_model

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 900
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job found."""
    folder = tmp_path_factory.mktemp("lora")
    save_tiny_model(folder / "model")
    base = [sys.executable, "-m", "tests.integration.lora_checks", str(folder), str(folder / "model"), str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    commands = [[*base, str(request.param), str(rank)] for rank in range(request.param)]
    ranks = [subprocess.Popen(command, cwd=ROOT, env=environment) for command in commands]
    try:
        for process in ranks:
            process.wait(START_LIMIT_S)
    finally:
        for process in ranks:
            process.kill()
    results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(request.param)]
    assert not any("error" in result for result in results), results
    return results


def test_each_update_brings_the_adapters_alone(job: list[dict[str, Any]]) -> None:
    for name, found in [pair for result in job for pair in result.items()]:
        size = found["adapter_bytes"] if "by folder" in name or len(job) == 1 else None
        assert size is None or found["sizes"] == [size] * 3, name
        assert found.get("wrong", []) == [], name


def test_log_probs_are_those_of_the_merged_weights(job: list[dict[str, Any]]) -> None:
    for name, found in [pair for result in job for pair in result.items()]:
        assert max(found["errors"]) < TOLERANCE, (name, found["errors"])
        assert found.get("base_error", 1.0) > 100 * TOLERANCE, "the adapters must change the policy"


def test_one_flipped_element_of_an_adapter_is_caught_by_name(job: list[dict[str, Any]]) -> None:
    for result in job:
        assert (result["vllm"]["flipped"], result["vllm"]["healed"]) == (FLIPPED, 7)


def test_versions_through_a_folder_have_the_trainers_fingerprint(job: list[dict[str, Any]]) -> None:
    for found in [result["hf by folder"] for result in job if "hf by folder" in result]:
        assert (found["agree"], found["version"]) == ([True] * 3, 2)


# --- Megatron -----------------------------------------------------------------------------------------------------------------

TP2 = {"tensor_model_parallel_size": 2}
SOME = {"target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"]}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {"layout": TP2 | {"sequence_parallel": False}}),
    "tp2 sequence parallel, recomputed": (2, {"layout": TP2, "model": {"enable_gradient_checkpointing": True}}),
    "tp2, some layers": (2, {"layout": TP2 | {"sequence_parallel": False}, "model": SOME}),
    "pp2": (2, {"layout": {"pipeline_model_parallel_size": 2}}),
    "dp2": (2, {}),
    "tp2, value": (2, {"layout": TP2, "kind": "value"}),
}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Group(tmp_path_factory.mktemp("ranks"), ranks=2)
    yield made
    made.ranks.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("small")
    save_tiny_model(path)
    return str(path)


@pytest.mark.parametrize("name", CASES)
def test_megatron_computes_and_trains_pefts_adapters(group: Group, small: str, name: str) -> None:
    world, case = CASES[name]
    for found in group.call(checks.on_megatron, world, small, case):
        assert found["drawn"], "A is what the other engine draws"
        assert max(found["loss"], found["norm"], found["weights"]) < 1e-5, found
        assert found["infer"] < 1e-4 and found["moved"] > 1e-3
        assert found["without"] > 1e-3 or world > 1  # a rank may have only rows without targets
        assert found["published"] == found["saved"]


def test_a_gradient_that_ranks_do_not_sum_is_seen(group: Group, small: str) -> None:
    case = {"layout": TP2 | {"sequence_parallel": False}, "damage": True}
    assert all(found["weights"] > 1e-5 for found in group.call(checks.on_megatron, 2, small, case))


def test_adapters_of_megatron_are_saved_and_loaded_as_pefts(group: Group, small: str, tmp_path: Path) -> None:
    for number, layout in enumerate((TP2, {"pipeline_model_parallel_size": 2})):
        for found in group.call(checks.saved_by_megatron, 2, small, str(tmp_path / str(number)), layout):
            assert max(found) < 1e-6
