"""Runs rollout engines and the sharding manager in ranks of one job and writes what it saw as JSON.

Started by test_rollout_vllm.py as `python -m tests.integration.rollout_scenarios <folder> <port> <world size> <rank>`;
vLLM's start is the expensive part, so one job serves many assertions.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig
from rlhub.engines.rollout.base import GenerationRequest, RolloutEngine, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.engines.rollout.vllm.engine import VLLMEngine
from rlhub.engines.training.base import TrainEngine
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.errors import EngineError, WeightMismatchError
from rlhub.models.experts import unfused_tensors
from rlhub.sharding_manager.manager import ShardingManager
from rlhub.sharding_manager.route import Route
from tests.integration import vllm_batches
from tests.support import interruptions
from tests.support import rollout_contract as contract
from tests.support.plain_train_engine import PlainTrainEngine
from tests.support.tiny_models import Family, greedy_reference, save_tiny_model, sequence_log_probs, tiny_model

MAX_MODEL_LEN = 96
BUCKET = 4096
GREEDY_TOKENS = 16
INTERRUPTED_TOKENS = 24
NUM_INTERRUPTIONS = 20
# One of each kind of live parameter: fused rows, fused bias, split columns, vocabulary rows, replicated, experts.
FLIPPED = {
    "qwen2": ["model.layers.1.self_attn.k_proj.bias", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"],
    "qwen3": ["model.layers.0.self_attn.q_norm.weight", "model.layers.1.self_attn.v_proj.weight"],
    "llama": ["model.layers.1.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"],
    "qwen3_moe": [
        "model.layers.0.mlp.experts.3.down_proj.weight",
        "model.layers.1.mlp.experts.2.up_proj.weight",
        "model.layers.1.mlp.gate.weight",
    ],
}


@dataclass(slots=True, kw_only=True)
class Case:
    """tp: tensor-parallel size of the rollout; two ranks with tp 1 are two replicas.  fsdp: a sharded trainer."""

    family: Family
    tied: bool
    tp: int
    fsdp: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}-tp{self.tp}"


CASES = {  # by number of ranks
    1: [
        Case(family="qwen2", tied=True, tp=1),
        Case(family="llama", tied=False, tp=1),
        Case(family="qwen3", tied=True, tp=1),
        Case(family="qwen3_moe", tied=False, tp=1),
    ],
    2: [
        Case(family="qwen2", tied=True, tp=1, fsdp=True),
        Case(family="qwen2", tied=True, tp=2),
        Case(family="llama", tied=False, tp=2, fsdp=True),
        Case(family="qwen3_moe", tied=False, tp=2, fsdp=True),
    ],
}


def build(folder: Path, name: str, tp: int, rank: int, **options: Any) -> RolloutEngine:
    return build_rollout_engine(
        RolloutSetup(
            config=RolloutConfig(name=name, tensor_model_parallel_size=tp, max_num_seqs=16, **options),
            model=ModelConfig(path=str(folder)),
            device=torch.device("cpu"),
            seed=0,
            max_prompt_length=MAX_MODEL_LEN // 2,
            max_response_length=MAX_MODEL_LEN // 2,
            dp_rank=rank // tp,
            tp_rank=rank % tp,
        )
    )


def process_state() -> dict[str, Any]:
    """What building an engine must leave as it was."""
    return {
        "python": repr(random.getstate()),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "set_num_threads": repr(torch.set_num_threads),
        "affinity": sorted(os.sched_getaffinity(0)),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
    }


def greedy(engine: RolloutEngine) -> list[list[int]]:
    return contract.tokens(engine.generate(contract.requests(), SamplingParams(temperature=0.0, max_new_tokens=GREEDY_TOKENS)))


def log_prob_error(engine: RolloutEngine, model: PreTrainedModel) -> float:
    """Largest difference to a full forward, sampling at a temperature."""
    worst = 0.0
    completions = engine.generate(contract.requests(), SamplingParams(temperature=0.7, max_new_tokens=GREEDY_TOKENS))
    for prompt, completion in zip(contract.PROMPTS, completions, strict=True):
        expected = sequence_log_probs(model, prompt, completion.token_ids, 0.7)
        worst = max(worst, *(abs(a - b) for a, b in zip(expected, completion.log_probs, strict=True)))
    return worst


def long_prompt_error(engine: RolloutEngine, model: PreTrainedModel) -> float:
    """Largest difference of log-probs to a full forward, for a prompt of several cache blocks: a stale prefix shows."""
    request = GenerationRequest(prompt_ids=[3 + i % 60 for i in range(70)], seed=0)
    completion = engine.generate([request], SamplingParams(max_new_tokens=12))[0]
    expected = sequence_log_probs(model, list(request.prompt_ids), completion.token_ids, 1.0)
    return max(abs(a - b) for a, b in zip(expected, completion.log_probs, strict=True))


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (EngineError, WeightMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def flip(engine: RolloutEngine, name: str) -> None:
    view = next(piece.tensor for piece in engine.live_weights() if piece.name == name)
    index = (view.shape[0] - 1, *([0] * (view.dim() - 1)))
    view[index] = torch.nextafter(view[index], torch.tensor(torch.inf))


def caught_flip(engine: RolloutEngine, manager: ShardingManager, name: str, *, here: bool) -> str:
    """Sync with one element of `name` changed after the update, on this rank or not; the name the manager reports."""
    exchange = Route._exchange

    def flip_first(self: Route, sent: dict[int, list[int]]) -> dict[int, list[int]]:
        if here:
            flip(engine, name)
        return exchange(self, sent)

    try:
        with mock.patch.object(Route, "_exchange", flip_first):
            manager.sync(9)
    except WeightMismatchError as error:
        return error.weight
    return "not caught"


def model_folder(folder: Path, family: Family, rank: int) -> Path:
    return folder / f"rank{rank}-{family}"


@torch.no_grad()
def perturb(weights: Iterable[tuple[str, Tensor]], seed: int) -> None:
    """Scale every weight by a factor of its own: the same change for whole and for sharded weights."""
    for name, weight in weights:
        weight.mul_(0.7 + 0.6 * (zlib.crc32(f"{name}:{seed}".encode()) % 1000) / 1000)


def build_trainer(case: Case, path: Path) -> tuple[TrainEngine, Callable[[], Iterable[tuple[str, Tensor]]]]:
    """The engine and a way to its live weights."""
    if not case.fsdp:
        plain = PlainTrainEngine(tiny_model(case.family, tied=case.tied))
        return plain, plain.model.named_parameters
    engine = FSDPEngine(ModelConfig(path=str(path)), FSDPConfig(), None, kind="policy", device=torch.device("cpu"))
    engine.initialize()
    return engine, lambda: [(item.name, item.param) for item in engine.params]


def observe_step(engine: RolloutEngine, manager: ShardingManager, model: PreTrainedModel, version: int) -> dict[str, Any]:
    """Sync, and compare what the engine then generates with full forwards of `model`."""
    report = manager.sync(version)
    return {
        "reference": [greedy_reference(model, prompt, GREEDY_TOKENS)[0] for prompt in contract.PROMPTS],
        "greedy": greedy(engine),
        "long_prompt_error": long_prompt_error(engine, model),
        "log_prob_error": log_prob_error(engine, model),
        "num_weights": report.num_weights,
        "sampled": contract.tokens(engine.generate(contract.requests(), SamplingParams(max_new_tokens=12))),
        "version": engine.version,
    }


def stale_prefix_error(engine: VLLMEngine, manager: ShardingManager, model: PreTrainedModel) -> float:
    """The long prompt's error when prefixes of the old weights are found; the caller has just changed the weights."""
    with mock.patch.object(engine._running(), "weights_changed"):
        manager.sync(5)
    return long_prompt_error(engine, model)


def interrupt(engine: VLLMEngine, model: PreTrainedModel) -> dict[str, Any]:
    """Running requests get new weights after 20 random numbers of tokens; with old keys and values as the control."""
    models = (model, tiny_model(seed=5))
    positions = sorted(random.Random(3).sample(range(1, INTERRUPTED_TOKENS), NUM_INTERRUPTIONS))
    length = INTERRUPTED_TOKENS
    seen = interruptions.observe(engine, models, positions, num_tokens=length, recompute=True)
    kept = interruptions.observe(engine, models, positions[::6], num_tokens=length, recompute=False)
    late = interruptions.late_error(engine, models, nullcontext())
    stale = interruptions.late_error(engine, models, mock.patch.object(engine._running(), "weights_changed"))
    return {
        "seen": [asdict(one) for one in seen],
        "kept": [asdict(one) for one in kept],
        "late_error": late,
        "stale_error": stale,
    }


def run_case(folder: Path, case: Case, rank: int, world_size: int) -> dict[str, Any]:
    """Build, sync, generate, change the weights, sync again, corrupt; everything an assertion needs."""
    path = model_folder(folder, case.family, rank)
    train, live = build_trainer(case, path)
    model = tiny_model(case.family, tied=case.tied)
    engine = build(path, "vllm", case.tp, rank)
    assert isinstance(engine, VLLMEngine)
    before = process_state()
    engine.initialize()
    out: dict[str, Any] = {"undisturbed": process_state() == before}
    out["without_weights"] = error_of(lambda: greedy(engine))
    manager = ShardingManager(train, engine, bucket_bytes=BUCKET)

    def change(seed: int) -> None:
        perturb(live(), seed)
        perturb(model.named_parameters(), seed)

    out["steps"] = []
    for version in range(2):
        out["steps"].append(observe_step(engine, manager, model, version))
        change(version)
    out["stale_prefix_error"] = stale_prefix_error(engine, manager, model)
    weights = {name: tensor.detach() for name, tensor in unfused_tensors(model.named_parameters())}
    contract.check_live_weights(engine, weights)
    contract.check_overwriting(engine, weights)
    contract.check_standby(engine, weights)
    contract.check_generation(engine)
    contract.check_nonfinite_weights(engine)
    if case.family == "qwen2":
        out["batches"] = vllm_batches.compare(engine)
    out["errors"] = vllm_batches.observe_errors(engine)
    contract.check_refusals(engine, MAX_MODEL_LEN)
    contract.check_weight_stream(engine, list(weights.items()))
    if case.tp == 1:
        contract.check_agenerate(engine)
        contract.check_interruptions(engine, weights)
        if world_size == 1 and case.family == "qwen2":
            out["interrupted"] = interrupt(engine, model)
            out["ahead"] = vllm_batches.observe_ahead(engine)
    else:
        out["agenerate"] = error_of(lambda: next(iter(engine.agenerate(contract.requests()[0], SamplingParams()).__await__())))
    last = rank == world_size - 1
    out["flips"] = {name: caught_flip(engine, manager, name, here=last) for name in FLIPPED[case.family]}
    out["healed"] = error_of(lambda: manager.sync(10))
    out["failure"] = vllm_batches.observe_failure(engine)
    engine.shutdown()
    engine.shutdown()
    out["after_shutdown"] = error_of(lambda: greedy(engine))
    total = torch.tensor(1)
    dist.all_reduce(total)
    out["group_alive"] = int(total) == world_size
    return out


def main() -> None:
    folder, port, world_size, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    for case in CASES[world_size]:  # in a process group transformers would save on rank 0 only
        save_tiny_model(model_folder(folder, case.family, rank), case.family, tied=case.tied)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    out: dict[str, Any] = {}
    try:
        for case in CASES[world_size]:
            out[case.name] = run_case(folder, case, rank, world_size)
    except BaseException:
        out["error"] = traceback.format_exc()
        raise
    finally:
        (folder / f"rank{rank}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main()
