"""What the ranks of test_megatron_engine.py run: the Megatron engine on tiny models, in sub-groups of the ranks, compared with a
plain Hugging Face loop and with the FSDP engine in the same processes."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from rlhub.models.megatron import compat  # noqa: F401  # before megatron, which it imports quietly

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rlhub.config.model import ModelConfig
from rlhub.config.training import FSDPConfig, MegatronConfig, OptimConfig
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows, TrainEngine
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.megatron import state
from rlhub.engines.training.megatron.engine import MegatronEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.models.experts import unfused_tensors
from rlhub.utils.regions import take
from tests.integration.fsdp_checks import (
    INFERRED,
    OUTPUTS,
    TEMPERATURE,
    full,
    loss_for,
    make_rows,
    plain_gradient,
    plain_model,
    plain_outputs,
)

CPU = torch.device("cpu")
SGD = {"lr": 1e7, "eps": 1e8, "weight_decay": 0.0}
"""AdamW whose first step is one of plain gradient descent with rate 0.1: the gradient vanishes beside eps."""
HUGE = 1e9  # no clipping


@contextlib.contextmanager
def ranks_of(world: int, rendezvous: str) -> Iterator[bool]:
    """A process group of the first `world` ranks for the time of a call; yields whether this rank is one of them."""
    rank = int(os.environ["RANK"])
    if rank >= world:
        yield False
        return
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timeout)
    try:
        yield True
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def make_engine(path: str, kind: str = "policy", backend: str = "megatron", **changes: Any) -> TrainEngine:
    """An initialized engine; changes: model, optim and the backend's own settings by name (`layout`), and engine arguments."""
    model = {"path": path, "enable_gradient_checkpointing": False} | changes.pop("model", {})
    layout, optim = changes.pop("layout", {}), changes.pop("optim", {"lr": 1e-2})
    section: Any = MegatronConfig(**layout) if backend == "megatron" else FSDPConfig(**{"model_dtype": "fp32"} | layout)
    built: TrainEngine = (MegatronEngine if backend == "megatron" else FSDPEngine)(
        ModelConfig(**model),
        section,
        None if optim is None else OptimConfig(**optim),
        kind=kind,  # type: ignore[arg-type]
        device=CPU,
        temperature=TEMPERATURE,
        **changes,
    )
    built.initialize()
    return built


def own_rows(rows: Rows, engine: TrainEngine, uneven: bool = False) -> dict[str, Tensor]:
    """This model copy's rows; `uneven`: the last copy of several has none."""
    rank, size = engine.dp_rank, engine.dp_size
    uneven = uneven and size > 1
    own = slice(rank, None, size - uneven) if not uneven or rank < size - 1 else slice(0, 0)
    return {name: column[own] for name, column in rows.items()}


def stream(engine: TrainEngine, bucket_bytes: int = 4096) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in engine.named_weights(bucket_bytes=bucket_bytes) for name, tensor in bucket}


def gradients(engine: MegatronEngine) -> dict[str, Tensor]:
    """The whole gradient under checkpoint names, put together from what each rank's optimizer will step: every element must
    come exactly once."""
    mine = []
    for holding in engine._held():
        if not holding.replica:
            grad = holding.parts.param.main_grad.flatten()[holding.start : holding.stop]
            mine += [(p.name, p.shape, p.region, p.tensor.clone()) for p in state._pieces("grad", grad, holding)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    full: dict[str, Tensor] = {}
    count: dict[str, Tensor] = {}
    for name, shape, region, tensor in (piece for pieces in everyone for piece in pieces):
        name = name.removeprefix("grad.")
        take(full.setdefault(name, torch.zeros(shape)), region).copy_(tensor)
        take(count.setdefault(name, torch.zeros(shape)), region).add_(1)
    assert all(bool((times == 1).all()) for times in count.values()), "an element of the gradient is held twice or by nobody"
    return full


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative L2 distance of two models' worth of tensors."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    error = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    return (error / sum(float(tensor.double().square().sum()) for tensor in expected.values())) ** 0.5


def named(model: Any, values: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    """Of a plain model's parameters, under checkpoint names; a tied one once."""
    return dict(unfused_tensors((name, values(param)) for name, param in model.named_parameters()))


DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": False}),
    "tp2_sp": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "vpp": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "dp2_whole": (2, {"use_distributed_optimizer": False}),
    "tp2xpp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "tp2xdp2": (4, {"tensor_model_parallel_size": 2}),
    "tp2xdp2_whole": (4, {"tensor_model_parallel_size": 2, "use_distributed_optimizer": False}),
    "pp2xdp2": (4, {"pipeline_model_parallel_size": 2}),
}
"""Name -> (ranks, MegatronConfig fields)."""
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "experts": (1, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "ep2_whole": (2, {"expert_model_parallel_size": 2, "use_distributed_optimizer": False}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "ep2xtp2": (4, {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
    "ep2xpp2": (4, {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}
FSDP: dict[str, tuple[int, dict[str, Any]]] = {"fsdp1": (1, {}), "fsdp2": (2, {})}


@contextlib.contextmanager
def unsummed_head_norms() -> Iterator[None]:
    """The control: tensor-parallel ranks keep their parts of the gradients of norms."""
    with mock.patch("megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads"):
        yield


def agreement(world: int, rendezvous: str, path: str, kind: str, case: dict[str, Any]) -> dict[str, Any] | None:
    """One step of an engine beside one of a plain loop, from the same weights and rows; distances are relative L2.

    case: backend, layout, model, micro, uneven; damage "loss", "weight" or "norms": a broken product that must be seen.
    """
    with ranks_of(world, rendezvous) as member:
        return _agreement(path, kind, case) if member else None


def _agreement(path: str, kind: str, case: dict[str, Any]) -> dict[str, Any]:
    built = make_engine(
        path,
        kind,
        case.get("backend", "megatron"),
        model=case.get("model", {}),
        layout=case.get("layout", {}),
        optim=SGD,
        grad_clip=HUGE,
        micro_batch=MicroBatchConfig(**case.get("micro", {"max_tokens": 20})),
    )
    rows = make_rows()
    mine = own_rows(rows, built, case.get("uneven", False))
    model = plain_model(path, kind, torch.float32)
    if kind != "policy":
        model.score.weight.data.copy_(stream(built)["score.weight"])
    exact = distance(stream(built), named(model, Tensor.detach))
    inferred = built.infer(mine, outputs=INFERRED[kind])
    with torch.no_grad():
        outputs = plain_outputs(model, mine, kind) if len(mine["input_ids"]) else inferred
    if case.get("damage") == "weight":
        next(iter(model.parameters())).data[5, 0] *= -1
    expected = plain_gradient(model, rows, kind)
    loss = _scaled(loss_for(kind, rows), 1.001 if case.get("damage") == "loss" else 1.0)
    with unsummed_head_norms() if case.get("damage") == "norms" else contextlib.nullcontext():
        for _ in range(2):  # gradients start from zero each time
            sums = built.forward_backward(mine, loss, outputs=OUTPUTS[kind])
    found = gradients(built) if isinstance(built, MegatronEngine) else fsdp_gradients(built)
    grads = named(model, lambda param: param.grad)
    norm = sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5
    report = built.optimizer_step()
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(param.grad, alpha=SGD["lr"] / SGD["eps"])
    return {
        "exact": exact,
        "sums": sums,
        "loss": abs(sums["loss"] - expected) / abs(expected),
        "gradient": distance(found, grads),
        "norm": abs(report.grad_norm - norm) / norm,
        "weights": distance(stream(built), named(model, Tensor.detach)),
        "infer": max(
            (float((inferred[name] - outputs[name]).abs().max()) for name in outputs if outputs[name].numel()), default=0
        ),
        "collect": (built.dp_rank, built.dp_size, built.is_collect),
    }


def _scaled(loss: Callable[[ForwardOutputs, Rows], LossOutput], factor: float) -> Callable[[ForwardOutputs, Rows], LossOutput]:
    def scaled(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        result = loss(outputs, micro)
        return LossOutput(loss=result.loss * factor, sums=result.sums)

    return scaled


def fsdp_gradients(engine: TrainEngine) -> dict[str, Tensor]:
    assert isinstance(engine, FSDPEngine)
    return dict(unfused_tensors((param.name, full(param.param.grad)) for param in engine.params))
