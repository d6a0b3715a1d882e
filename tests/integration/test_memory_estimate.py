"""The memory estimate before a start against the memory of a process that trains, on CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlhub.config.rules.derive import derive
from rlhub.config.rules.placement import MAIN
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.training import Recompute
from rlhub.trainer.preflight.memory import DeviceModel, tenants_of
from scripts.bench.tiny_model import build
from tests.support.memory_use import RESULT, VOCABULARY

ROOT = Path(__file__).resolve().parents[2]
BOUND = 0.15
MINI, MICRO, PROMPT, RESPONSE = 4, 2, 128, 128
"""Two passes of 512 tokens in an update."""


def estimated(folder: Path, recompute: Recompute) -> DeviceModel:
    """The actor of a run with this model, as the checks before a start see it."""
    config = PPOConfig()
    part = config.actor_rollout_ref
    part.model = replace(part.model, path=str(folder))
    part.actor.fsdp_config.recompute_granularity = recompute
    part.actor = replace(part.actor, ppo_mini_batch_size=MINI, ppo_micro_batch_size_per_gpu=MICRO)
    config.data = replace(config.data, max_prompt_length=PROMPT, max_response_length=RESPONSE, train_batch_size=MINI)
    config.algorithm.adv_estimator = "grpo"
    config.trainer.device = "cpu"
    derive(config)
    (actor,) = tenants_of(config)[MAIN].models
    return actor


def total(model: DeviceModel) -> float:
    assert model.update is not None and model.update[0].num_tokens == MICRO * (PROMPT + RESPONSE)
    return model.whole.params + model.whole.grads + model.whole.states + model.update[1]


@pytest.mark.parametrize("recompute", ["full", "selective", "none"])
def test_an_update_takes_the_memory_that_was_estimated(tmp_path: Path, recompute: Recompute) -> None:
    """Without the states, without the activations, or with those of another way, the estimate would miss the bound."""
    build(tmp_path, hidden=256, layers=6, vocab_size=VOCABULARY)
    arguments = [str(tmp_path), *map(str, (recompute, MINI, MICRO, PROMPT, RESPONSE))]
    # Else the allocator keeps freed blocks for later, which is memory that nobody asked for.
    variables = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.memory_use", *arguments],
        cwd=ROOT, env=variables, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    measured = int((tmp_path / RESULT).read_text())
    model, other = estimated(tmp_path, recompute), estimated(tmp_path, "full" if recompute == "none" else "none")
    assert model.update is not None
    assert total(model) == pytest.approx(measured, rel=BOUND)
    for wrong in (total(model) - model.whole.states, total(model) - model.update[1], total(other)):
        assert wrong != pytest.approx(measured, rel=BOUND)
