"""What the ranks of test_lora.py run: adapters alone on their way from the training ranks to a rollout engine."""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig
from rlhub.engines.rollout.base import GenerationRequest, RolloutEngine, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.megatron.engine import MegatronEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.errors import WeightMismatchError
from rlhub.models.hf import ModelKind
from rlhub.models.lora import add_lora, lora_names, named_parameters, saved_names, set_adapters
from rlhub.models.megatron import lora as adapters
from rlhub.protocol.weights.pieces import take
from rlhub.rollout_service.weights_folder import folder_reader
from rlhub.sharding_manager.files import WeightWriter
from rlhub.sharding_manager.manager import ShardingManager
from rlhub.sharding_manager.route import Route
from rlhub.workers.base import save_engine
from tests.integration.fsdp_checks import INFERRED, OUTPUTS, loss_for, make_rows, plain_gradient, plain_model, plain_outputs
from tests.integration.megatron_checks import HUGE, SGD, distance, make_engine, on_first_ranks, own_rows, stream
from tests.support.tiny_models import sequence_log_probs

CPU, BUCKET = torch.device("cpu"), 1 << 14
FLIPPED = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
RANK, TARGETS = 4, ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
PARAMS = SamplingParams(max_new_tokens=8, temperature=0.8)
REQUESTS = [GenerationRequest(prompt_ids=list(range(3, 3 + length)), seed=length) for length in (4, 9, 17)]


def model_config(path: str) -> ModelConfig:
    return ModelConfig(path=path, lora_rank=RANK, lora_alpha=6.0, target_modules=TARGETS, enable_gradient_checkpointing=False)


def trainer(path: str) -> FSDPEngine:
    engine = FSDPEngine(model_config(path), FSDPConfig(), None, kind="policy", device=CPU)
    engine.initialize()
    engine.publishes_adapters = True
    return engine


def rollout(path: str, name: str, **options: Any) -> RolloutEngine:
    setup = RolloutSetup(
        config=RolloutConfig(name=name, dtype="float32", lora_sync="adapter", max_num_seqs=8, **options),
        model=model_config(path),
        device=CPU,
        seed=0,
        max_prompt_length=32,
        max_response_length=32,
    )
    engine = build_rollout_engine(setup)
    engine.initialize()
    return engine


@torch.no_grad()
def step(train: FSDPEngine, seed: int) -> dict[str, Tensor]:
    """Changes every adapter; returns the adapters as published."""
    generator = torch.Generator().manual_seed(seed)
    for param in train.params:
        if ".lora_" in param.name:
            whole = torch.randn(param.global_shape, generator=generator) * 0.1
            param.local.copy_(whole[param.offset : param.offset + param.local.shape[0]])
    return {name: tensor.clone() for bucket in train.published_weights() for name, tensor in bucket}


def merged_error(train: FSDPEngine, engine: RolloutEngine, path: str, *, adapters: bool = True) -> float:
    """The largest difference of the rollout's log-probs from those of the trainer's merged weights, or of the base."""
    model = AutoModelForCausalLM.from_pretrained(path)
    merged = {name: tensor.clone() for bucket in train.named_weights() for name, tensor in bucket}
    if adapters:
        model.load_state_dict(merged, strict=False)
    completions = engine.generate(REQUESTS, PARAMS)
    worst = 0.0
    for request, done in zip(REQUESTS, completions, strict=True):
        expected = sequence_log_probs(model, list(request.prompt_ids), done.token_ids, PARAMS.temperature)
        worst = max(worst, *(abs(a - b) for a, b in zip(expected, done.log_probs, strict=True)))
    return worst


def colocated(path: str, name: str, tp: int = 1) -> dict[str, Any]:
    """Three updates of the same ranks' engine, and one with a flipped element."""
    train, engine = trainer(path), rollout(path, name, tensor_model_parallel_size=tp)
    manager = ShardingManager(train, engine, bucket_bytes=BUCKET)
    wrong, errors, sizes = [], [], []
    for version in range(3):
        full = step(train, version)
        sizes.append(manager.sync(version).bytes)
        pieces = list(engine.live_weights())
        assert {piece.name for piece in pieces} == set(full)
        wrong += [p.name for p in pieces if not torch.equal(p.tensor, take(full[p.name], p.region))]
        errors.append(merged_error(train, engine, path))
    return {
        "wrong": wrong,
        "errors": errors,
        "sizes": sizes,
        "adapter_bytes": sum(tensor.nbytes for tensor in full.values()),
        "own_bytes": sum(piece.tensor.nbytes for piece in engine.live_weights()),
        "base_error": merged_error(train, engine, path, adapters=False),
        "flipped": flipped(manager, engine),
        "healed": manager.sync(7).version,
    }


def flipped(manager: ShardingManager, engine: RolloutEngine) -> str:
    """The weight named by an update after which the lowest bit of one live element is another one, on the last rank."""
    last, exchange = dist.get_rank() == dist.get_world_size() - 1, Route._exchange

    def flip_first(self: Route, sent: dict[int, list[int]]) -> dict[int, list[int]]:
        if last:
            view = next(piece.tensor for piece in engine.live_weights() if piece.name == FLIPPED)
            view[-1, 0] = torch.nextafter(view[-1, 0], torch.tensor(torch.inf))
        return exchange(self, sent)

    with mock.patch.object(Route, "_exchange", flip_first):
        try:
            manager.sync(6)
        except WeightMismatchError as error:
            return error.weight
    return ""


def by_folder(path: str, folder: Path, name: str, tp: int) -> dict[str, Any]:
    """Three versions through a folder into an engine of single requests, which is in processes of vLLM's or in this one."""
    train, engine = trainer(path), rollout(path, name, mode="async", tensor_model_parallel_size=tp)
    writer = WeightWriter(train, folder, bucket_bytes=BUCKET, timeout_s=300)
    reader = folder_reader(engine, folder, bucket_bytes=BUCKET, timeout_s=300)
    errors, sizes, agree = [], [], []
    for version in range(3):
        full = step(train, version)
        written = writer.write(version)
        report = reader.place(reader.prepare(version))
        sizes.append(written.wire_bytes)
        agree.append(report.fingerprint == written.fingerprint)
        errors.append(merged_error(train, engine, path))
    engine.shutdown()
    adapter_bytes = sum(tensor.nbytes for tensor in full.values())
    return {"errors": errors, "sizes": sizes, "agree": agree, "adapter_bytes": adapter_bytes, "version": engine.version}


@on_first_ranks
def on_megatron(path: str, case: dict[str, Any]) -> dict[str, Any]:
    """One step of an engine with adapters beside one of peft's model, from the same weights and rows; relative L2 distances.

    case: layout, model and kind; damage: True leaves the parts of the gradient of A unsummed, which must be noticed.
    """
    kind: ModelKind = case.get("kind", "policy")
    settings = {"lora_rank": 3, "lora_alpha": 6.0, **case.get("model", {})}
    micro = MicroBatchConfig(max_tokens=20)
    built = make_engine(path, kind, model=settings, layout=case.get("layout", {}), optim=SGD, grad_clip=HUGE, micro_batch=micro)
    assert isinstance(built, MegatronEngine)
    model = peft_model(path, kind, settings, stream(built))
    plain = dict(named_parameters(model))
    pieces = [piece for piece in built._pieces() if plain[piece.name].requires_grad]
    drawn = all(torch.equal(piece.tensor, take(plain[piece.name], piece.region)) for piece in pieces)
    with torch.no_grad():
        for name, param in plain.items():
            if ".lora_B." in name:
                param.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
        for piece in pieces:
            piece.tensor.copy_(take(plain[piece.name], piece.region))
    rows = make_rows()
    mine = own_rows(rows, built)
    inferred = {on: built.infer(mine, outputs=INFERRED[kind], adapters=on) for on in (True, False)}
    with torch.no_grad():
        expected = {True: plain_outputs(model, mine, kind)}
        set_adapters(model, False)
        expected[False] = plain_outputs(model, mine, kind)
        set_adapters(model, True)
    loss = plain_gradient(model, rows, kind)
    broken = mock.patch.object(adapters, "copy_to_tensor_model_parallel_region", lambda low: low)
    with broken if case.get("damage") else nullcontext():
        sums = built.forward_backward(mine, loss_for(kind, rows), outputs=OUTPUTS[kind])
    norm = sum(float(param.grad.double().square().sum()) for param in plain.values() if param.requires_grad) ** 0.5
    report = built.optimizer_step()
    with torch.no_grad():
        for param in plain.values():
            if param.requires_grad:
                param.sub_(param.grad, alpha=SGD["lr"] / SGD["eps"])
        merged = {
            one.weight: plain[one.weight] + one.scaling * plain[one.lora_b] @ plain[one.lora_a] for one in lora_names(model)
        }
    wanted = {name: merged.get(name, param.detach()) for name, param in plain.items() if ".lora_" not in name}
    built.publishes_adapters = True
    published = [name for bucket in built.published_weights() for name, _ in bucket]
    return {
        "drawn": drawn,
        "loss": abs(sums["loss"] - loss) / abs(loss),
        "norm": abs(report.grad_norm - norm) / norm,
        "weights": distance(stream(built), wanted),
        "moved": distance(wanted, {name: plain[name].detach() for name in wanted}),
        "infer": max(float((inferred[on][n] - expected[on][n]).abs().max()) for on in expected for n in expected[on]),
        "without": max(float((inferred[True][n] - inferred[False][n]).abs().max()) for n in inferred[True]),
        "published": sorted(published),
        "saved": sorted(saved_names(model, "policy").values()),
    }


def peft_model(path: str, kind: ModelKind, settings: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    """The Hugging Face model with peft's adapters, and the engine's scalar head if it has one."""
    model = plain_model(path, kind, torch.float32)
    if kind != "policy":
        model.score.weight.data.copy_(weights["score.weight"])
    head = model.lm_head if kind == "policy" else model.score
    add_lora(model, ModelConfig(path=path, **settings), head=head, seed=0)
    head.requires_grad_(kind != "policy")
    return model


@on_first_ranks
def saved_by_megatron(path: str, folder: str, layout: dict[str, Any]) -> list[float]:
    """Saves adapters as a worker does; an engine that starts from them, cut otherwise, and peft's model with them must agree."""
    settings = {"lora_rank": 3, "lora_alpha": 6.0, "target_modules": TARGETS}
    built = make_engine(path, model=settings, layout=layout)
    assert isinstance(built, MegatronEngine)
    with torch.no_grad():
        for piece in built._pieces():
            if ".lora_B." in piece.name:
                whole = torch.empty(piece.shape).normal_(std=0.2, generator=torch.Generator().manual_seed(len(piece.name)))
                piece.tensor.copy_(take(whole, piece.region))
    save_engine(built, Path(folder), dist.get_rank(), dist.get_world_size())
    dist.barrier()
    again = make_engine(path, model=settings | {"lora_adapter_path": f"{folder}/adapter"}, layout=layout, seed=9)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), f"{folder}/adapter").eval()
    merged = theirs.merge_and_unload()
    expected = {name: param.detach() for name, param in merged.named_parameters()}
    return [distance(stream(one), expected) for one in (built, again)]


def main() -> None:
    """Runs the cases of a job of `world_size` ranks as one of them, and writes what it found."""
    folder, path, port, world_size, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    out: dict[str, Any] = {}
    try:
        ensure_process_group(CPU, timeout_s=120)
        out["vllm"] = colocated(path, "vllm", tp=world_size)
        if world_size == 1:
            out["hf"] = colocated(path, "hf")
            out["hf by folder"] = by_folder(path, folder / "hf", "hf", 1)
            out["vllm_async by folder"] = by_folder(path, folder / "vllm_async", "vllm_async", 2)
    except BaseException:
        out["error"] = traceback.format_exc()
        raise
    finally:
        (folder / f"rank{rank}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main()
