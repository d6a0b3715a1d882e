"""vLLM on CPU, in one rank and in two: generation, weight updates, and what the weight check catches."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhub.utils.ports import free_port
from tests.integration.rollout_scenarios import CASES, FLIPPED, INTERRUPTED_TOKENS, NUM_INTERRUPTIONS
from tests.support.interruptions import Seen, check

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 600  # vLLM's import alone takes ten seconds of CPU time a process


def run_job(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """What each rank of one job saw."""
    port = free_port()
    command = [sys.executable, "-m", "tests.integration.rollout_scenarios", str(folder), str(port), str(world_size)]
    # Other than what the ranks tell torch, which must count in the threads of their engines too.
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment) for rank in range(world_size)]
    try:
        for process in ranks:
            process.wait(START_LIMIT_S)
    finally:
        for process in ranks:
            process.kill()
    results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]
    errors = [result["error"] for result in results if "error" in result]
    assert not errors, "\n".join(errors)
    assert [process.returncode for process in ranks] == [0] * world_size
    return results


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_job(tmp_path_factory.mktemp("job"), request.param)


def cases(job: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(case, what a rank saw) for every rank; all the cases of the job's size are there."""
    expected = {case.name for case in CASES[len(job)]}
    assert all(set(result) == expected for result in job)
    return [pair for result in job for pair in result.items()]


def test_greedy_completions_equal_full_forwards_before_and_after_an_update(job: list[dict[str, Any]]) -> None:
    for name, case in cases(job):
        first, second = case["steps"]
        for version, step in enumerate((first, second)):
            assert step["greedy"] == step["reference"], name
            assert step["version"] == version
        assert first["reference"] != second["reference"], "the update must change what is generated"


def test_cached_prefixes_do_not_outlive_their_weights(job: list[dict[str, Any]]) -> None:
    for name, case in cases(job):
        assert all(step["long_prompt_error"] < 2e-5 for step in case["steps"]), name
        assert case["stale_prefix_error"] > 1e-3, "without the reset this test would have to fail"


def test_log_probs_are_those_of_the_tempered_distribution(job: list[dict[str, Any]]) -> None:
    for name, case in cases(job):
        assert all(step["log_prob_error"] < 2e-5 for step in case["steps"]), name


def test_ranks_sample_the_same_for_the_same_seeds(job: list[dict[str, Any]]) -> None:
    for name, case in job[0].items():
        for result in job[1:]:
            assert [step["sampled"] for step in result[name]["steps"]] == [step["sampled"] for step in case["steps"]]


def test_one_flipped_element_in_the_engine_is_caught_by_name_on_every_rank(job: list[dict[str, Any]]) -> None:
    for name, case in cases(job):
        assert case["flips"] == {weight: weight for weight in FLIPPED[name.split("-")[0]]}
        assert case["healed"] == "none"


def test_the_trainers_process_is_left_as_it_was(job: list[dict[str, Any]]) -> None:
    for name, case in cases(job):
        assert case["undisturbed"], name
        assert case["group_alive"], name


def test_an_engine_without_weights_refuses_to_generate(job: list[dict[str, Any]]) -> None:
    for _, case in cases(job):
        for answer in (case["without_weights"], case["after_shutdown"]):
            assert answer.startswith("EngineError") and "update_weights" in answer


def test_single_requests_are_refused_under_tensor_parallelism(job: list[dict[str, Any]]) -> None:
    for name, case in cases(job):
        assert ("agenerate" in case) == name.endswith("tp2")
        assert "tensor-parallel" in case.get("agenerate", "tensor-parallel")


def interrupted(job: list[dict[str, Any]]) -> dict[str, Any]:
    if len(job) > 1:
        pytest.skip("one rank shows it")
    found: dict[str, Any] = job[0]["qwen2-tp1"]["interrupted"]
    return found


def test_interrupted_requests_go_on_under_the_new_weights(job: list[dict[str, Any]]) -> None:
    case = interrupted(job)
    seen = [Seen(**one) for one in case["seen"]]
    assert len({one.at for one in seen}) == NUM_INTERRUPTIONS
    check([replace(one, lengths=tuple(one.lengths)) for one in seen], num_tokens=INTERRUPTED_TOKENS)  # type: ignore[arg-type]
    for at in {one["at"] for one in case["kept"]}:
        worst = max(one["error_after"] for one in case["kept"] if one["at"] == at)
        assert worst > 1e-3, "with old keys and values the check must fail"


def test_a_prefix_of_an_interrupted_request_is_not_shared_across_an_update(job: list[dict[str, Any]]) -> None:
    case = interrupted(job)
    assert case["late_error"] < 2e-5
    assert case["stale_error"] > 1e-3, "without the reset this test would have to fail"


def test_whole_batches_are_what_vllms_own_interface_gives(job: list[dict[str, Any]]) -> None:
    for name, case in cases(job):
        assert ("batches" in case) == name.startswith("qwen2")
        if not name.startswith("qwen2"):
            continue
        batches = case["batches"]
        assert len(batches["same"]) == 7 and all(batches["same"].values()), (name, batches["same"])
        assert batches["reasons"]["stops"] == ["length", "stop"] and batches["reasons"]["ignored stops"] == ["length"]
        assert not batches["other seeds"], "the comparison must be able to fail"


def test_whole_batches_leave_nothing_in_a_core_that_runs_ahead(job: list[dict[str, Any]]) -> None:
    if len(job) > 1:
        pytest.skip("one rank shows it")
    ahead = job[0]["qwen2-tp1"]["ahead"]
    assert ahead["same"] and not ahead["left"]
    assert ahead["left by LLM"], "without the draining this test would have to fail"
    assert "rollout.mode=async" in ahead["refusal"]


def test_errors_outside_the_steps_leave_the_engine_as_it_was(job: list[dict[str, Any]]) -> None:
    for name, case in cases(job):
        assert case["errors"] == {"vllm_params": True, "add_request": True, "progress_of": True}, name


def test_after_an_error_inside_a_step_the_engine_generates_no_more(job: list[dict[str, Any]]) -> None:
    for name, case in cases(job):
        assert "_Broken" in case["failure"]["failure"], name
        assert "built again" in case["failure"]["answer"], name


@pytest.mark.parametrize(("file", "count"), [("vllm_experts_checks.py", 9), ("vllm_fp8_checks.py", 16)])
def test_vllms_own_layouts_are_written_and_read_back_on_every_rank(file: str, count: int) -> None:
    checks = Path(__file__).with_name(file)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(checks)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert sum(map(int, re.findall(r"(\d+) (?:passed|skipped)", done.stdout))) == count  # older versions lack a kernel
