"""One GPU, one process: training engine and vLLM take turns, and what is sampled comes from the policy that is trained.

The engine is built in one thread and stepped in another, as a replica of the rollout service has it.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig, OptimConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.sharding_manager.manager import ShardingManager
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PROMPT, NEW = [5, 6, 7, 13], 24
PARAMS = SamplingParams(max_new_tokens=NEW)
REQUESTS = [GenerationRequest(prompt_ids=PROMPT, seed=seed) for seed in range(32)]
ROUNDING = 0.1  # nats between two computations in bfloat16
LIMIT_S = 120.0
SHARE, GIVEN_BACK = 0.2, 0.1  # of the memory: what the engine takes, and at least gives back


def build(folder: Path, device: torch.device) -> tuple[FSDPEngine, RolloutEngine]:
    model = ModelConfig(path=str(folder))
    ensure_process_group(device)
    train = FSDPEngine(
        model,
        FSDPConfig(param_offload=True, optimizer_offload=True),
        OptimConfig(lr=1e-2),
        kind="policy",
        device=device,
    )
    train.initialize()
    train.offload()
    config = RolloutConfig(name="vllm", mode="async", gpu_memory_utilization=SHARE, max_num_seqs=16)
    rollout = build_rollout_engine(
        RolloutSetup(config=config, model=model, device=device, seed=0, max_prompt_length=8, max_response_length=NEW)
    )
    builder = threading.Thread(target=rollout.initialize)
    builder.start()
    builder.join()
    return train, rollout


def rows_of(completions: list[Completion]) -> dict[str, torch.Tensor]:
    responses = torch.tensor([completion.token_ids for completion in completions])
    ids = torch.cat([torch.tensor([PROMPT]).expand(len(completions), -1), responses], 1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "responses": responses,
        "response_mask": torch.ones_like(responses),
    }


def difference(train: FSDPEngine, completions: list[Completion]) -> float:
    """The largest between the log-probs of who sampled and of who trains."""
    computed = train.infer(rows_of(completions), outputs=("log_probs",))["log_probs"]
    return float((computed - torch.tensor([completion.log_probs for completion in completions])).abs().max())


def likelihood(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
    assert outputs.log_probs is not None
    return LossOutput(loss=-(outputs.log_probs * micro["response_mask"]).sum() / 100)


async def one_by_one(rollout: RolloutEngine) -> list[Completion]:
    answers = [rollout.agenerate(request, PARAMS) for request in REQUESTS]
    return list(await asyncio.wait_for(asyncio.gather(*answers), LIMIT_S))


def free_share(device: torch.device) -> float:
    """Of the device's memory."""
    if device.type == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return free / total


def take_turns(folder: Path, device: torch.device) -> list[float]:
    """Three rounds: weights, samples in both ways, sleep, log-probs, a step.  The shares of memory that each sleep gave back."""
    train, rollout = build(folder, device)
    manager, freed = ShardingManager(train, rollout, bucket_bytes=1 << 20), []
    for version in range(3):
        manager.sync(version)
        batch, single = rollout.generate(REQUESTS, PARAMS), asyncio.run(one_by_one(rollout))
        assert len({tuple(completion.token_ids) for completion in single}) > len(REQUESTS) // 2
        awake = free_share(device)
        rollout.sleep()
        freed.append(free_share(device) - awake)
        assert difference(train, batch) < ROUNDING and difference(train, single) < ROUNDING
        train.forward_backward(rows_of(single), likelihood)
        assert not train.optimizer_step().skipped
    manager.sync(3)
    rollout.sleep()
    assert difference(train, single) > ROUNDING, "the weights have moved, so samples of before differ"
    rollout.shutdown()
    return freed


def test_samples_come_from_the_policy_that_is_trained(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    freed = take_turns(tmp_path, torch.device("cuda", 0))
    assert min(freed) > GIVEN_BACK, "the engine's share of the memory, but for what it needs in any case"
