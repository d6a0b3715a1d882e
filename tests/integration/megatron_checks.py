"""What the ranks of test_megatron_engine.py run: the Megatron engine on tiny models, in sub-groups of the ranks, compared with a
plain Hugging Face loop and with the FSDP engine in the same processes."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from rlhub.models.megatron import compat  # noqa: F401  # before megatron, which it imports quietly

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rlhub.config.sections.training import FSDPConfig, MegatronConfig, ModelConfig, OptimConfig
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows, StepReport, TrainEngine
from rlhub.engines.training.collectives import check_finite
from rlhub.engines.training.expert_load import load_of
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.megatron import weights
from rlhub.engines.training.megatron.engine import MegatronEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.engines.training.packing import needed_tokens
from rlhub.errors import ConfigError, NonFiniteError
from rlhub.models.experts import unfused_tensors
from rlhub.models.megatron.model import PackedAttention, PackedRows
from rlhub.models.packed_attention import attend_packed, plan_attention
from rlhub.protocol.weights.pieces import Piece, take
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
from tests.support.device_moves import counted_moves, moves_of_each_use
from tests.support.memory import peak_allocation

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


def on_first_ranks(check: Callable[..., Any]) -> Callable[..., Any]:
    """A check for `Ranks.call` with two more arguments in front, as in `ranks_of`; ranks beyond the first return None."""

    @functools.wraps(check)
    def run(world: int, rendezvous: str, *args: Any) -> Any:
        with ranks_of(world, rendezvous) as member:
            return check(*args) if member else None

    return run


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
    for holding in engine._live_ranges():
        if not holding.replica:
            grad = holding.parts.param.main_grad.flatten()[holding.start : holding.stop]
            mine += [(p.name, p.shape, p.region, p.tensor.clone()) for p in weights._pieces("grad", grad, holding)]
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
    "tp2xpp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_model_parallel_size": 2}),
    "cp2xpp2": (4, {"context_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "cp2xtp2": (4, {"context_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
    "cp2xdp2_whole": (4, {"context_model_parallel_size": 2, "use_distributed_optimizer": False}),
    "tp2xdp2_whole": (4, {"tensor_model_parallel_size": 2, "use_distributed_optimizer": False}),
}
"""Name -> (ranks, MegatronConfig fields)."""
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "experts": (1, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "ep2xtp2": (4, {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
}
FSDP: dict[str, tuple[int, dict[str, Any]]] = {"fsdp1": (1, {}), "fsdp2": (2, {})}


@contextlib.contextmanager
def unsummed_head_norms() -> Iterator[None]:
    """The control: tensor-parallel ranks keep their parts of the gradients of norms."""
    with mock.patch("megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads"):
        yield


def attend_alone(
    self: PackedAttention, query: Tensor, key: Tensor, value: Tensor, _: None, packed_seq_params: PackedRows, **options: Any
) -> Tensor:
    """The control: a context-parallel rank's tokens see those of the same row and rank only."""
    assert packed_seq_params.plan is not None
    count, first = len(query), parallel_state.get_context_parallel_rank() * len(query)
    lengths = packed_seq_params.plan.boundaries.clamp(first, first + count).diff().tolist()
    lengths = [length for length in (*lengths, count - sum(lengths)) if length]  # padding is a row
    tokens = (tensor[:, 0] for tensor in (query, key, value))
    return attend_packed(*tokens, plan_attention(lengths, CPU), scaling=self.scale).flatten(1)[:, None]


DAMAGE: dict[str | None, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "norms": unsummed_head_norms,
    "exchange": functools.partial(mock.patch.object, PackedAttention, "forward", attend_alone),
}


@on_first_ranks
def agreement(path: str, kind: str, case: dict[str, Any]) -> dict[str, Any]:
    """One step of an engine beside one of a plain loop, from the same weights and rows; distances are relative L2.

    case: backend, layout, model, micro, uneven; damage "loss", "weight", "norms" or "exchange": a broken product that must
    be seen.
    """
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
    plain_load = load_of_rows(model, rows) if built.expert_load is not None else None
    if case.get("damage") == "weight":
        model.get_parameter("model.norm.weight").data[0] *= -1
    expected = plain_gradient(model, rows, kind)
    loss = _scaled(loss_for(kind, rows), 1.001 if case.get("damage") == "loss" else 1.0)
    with DAMAGE.get(case.get("damage"), contextlib.nullcontext)():
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
        "load": built.expert_load and built.expert_load.metrics(built.reduce),
        "plain_load": plain_load,
    }


def load_of_rows(model: Any, rows: Rows) -> dict[str, float]:
    """The load of experts where each row passes alone, without the tokens that no engine needs."""
    load = load_of(model, CPU)
    assert load is not None
    for ids, needed in zip(rows["input_ids"], needed_tokens(rows)[1], strict=True):
        if needed.any():
            model(ids[needed][None], use_cache=False)
    return load.metrics(lambda values, **_: values)


def _scaled(loss: Callable[[ForwardOutputs, Rows], LossOutput], factor: float) -> Callable[[ForwardOutputs, Rows], LossOutput]:
    def scaled(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        result = loss(outputs, micro)
        return LossOutput(loss=result.loss * factor, sums=result.sums)

    return scaled


def fsdp_gradients(engine: TrainEngine) -> dict[str, Tensor]:
    assert isinstance(engine, FSDPEngine)
    return dict(unfused_tensors((param.name, full(param.param.grad)) for param in engine.params))


@on_first_ranks
def gathered(path: str, layout: dict[str, Any]) -> Any:
    """Sample numbers and token rows that each rank has of all, from the rows of its model copy."""
    engine, numbers = make_engine(path, layout=layout), torch.arange(7)
    own = own_rows({"numbers": numbers, "tokens": numbers[:, None].expand(7, 3).bfloat16()}, engine, uneven=True)
    found = [engine.gather(column) for column in own.values()]
    return engine.dp_size, *(column[column.reshape(len(column), -1)[:, 0].argsort()].float().numpy() for column in found)


@on_first_ranks
def adam_steps(path: str, layout: dict[str, Any], backend: str = "megatron") -> dict[str, Any]:
    """Three clipped AdamW steps with warm-up and decay: (weights, gradient norms, rates) of an engine."""
    # eps well above rounding errors: AdamW's first steps divide vanishing gradients by their own size
    optim = {"lr": 1e-2, "weight_decay": 0.1, "lr_warmup_steps": 2, "eps": 1e-3}
    built = make_engine(path, backend=backend, layout=layout, optim=optim, grad_clip=0.5, micro_batch=MicroBatchConfig(rows=2))
    reports = train(built, 3)
    return {"weights": numpy_of(stream(built)), "norms": [r.grad_norm for r in reports], "rates": [r.lr for r in reports]}


def train(engine: TrainEngine, steps: int, seed: int = 5) -> list[StepReport]:
    reports = []
    for step in range(steps):
        rows = make_rows(seed + step)
        engine.forward_backward(own_rows(rows, engine), loss_for("policy", rows), outputs=OUTPUTS["policy"])
        reports.append(engine.optimizer_step())
    return reports


def numpy_of(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@on_first_ranks
def not_finite(path: str, layout: dict[str, Any], where: str) -> dict[str, Any]:
    """One model copy's loss or gradient is NaN: the step must be skipped on all, and the next be as if it had not been."""
    built, fresh = make_engine(path, layout=layout), make_engine(path, layout=layout)
    before, rows = stream(built), make_rows()
    inner = loss_for("policy", rows)

    def poisoned(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        result = inner(outputs, micro)
        if built.dp_rank == built.dp_size - 1:
            assert outputs.log_probs is not None
            if where == "loss":
                result.loss = result.loss * torch.tensor(float("nan"))
            else:
                outputs.log_probs.register_hook(lambda grad: grad * float("inf"))
        return result

    built.forward_backward(own_rows(rows, built), poisoned, outputs=OUTPUTS["policy"])
    skipped = built.optimizer_step().skipped
    after = stream(built)
    return {
        "skipped": skipped,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "next": [r.grad_norm for r in train(built, 1)] == [r.grad_norm for r in train(fresh, 1)],
        "scalars": built.scalar_state(),
    }


@on_first_ranks
def infinite_step(path: str, layout: dict[str, Any]) -> tuple[str, ...]:
    """A step by a learning rate that float32 does not have: the weights that every rank is told of."""
    built = make_engine(path, layout=layout, optim={"lr": 1e39})
    check_finite(built, "before")
    train(built, 1)
    try:
        check_finite(built, "after the update")
    except NonFiniteError as error:
        return error.weights
    return ()


class Stored:
    """A checkpoint in memory: whole tensors, and how often each element was written."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.times: dict[str, Tensor] = {}

    def write(self, pieces: list[tuple[str, tuple[int, ...], Any, Tensor]]) -> None:
        for name, shape, region, tensor in pieces:
            take(self.tensors.setdefault(name, torch.full(shape, torch.nan)), region).copy_(tensor)
            take(self.times.setdefault(name, torch.zeros(shape)), region).add_(1)

    def read(self, piece: Piece) -> Tensor:
        assert self.tensors[piece.name].shape == piece.shape
        return take(self.tensors[piece.name], piece.region).to(piece.tensor.dtype)


def saved(engine: TrainEngine) -> Stored:
    """What the ranks write, put together on every rank."""
    mine = [(piece.name, piece.shape, piece.region, piece.tensor.clone()) for piece in engine.state_shards()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    stored = Stored()
    for pieces in everyone:
        stored.write(pieces)
    return stored


@on_first_ranks
def save(path: str, layout: dict[str, Any], folder: str, backend: str = "megatron") -> Any:
    """Train, save, train on; returns the gradient norms and weights after the save."""
    built = make_engine(path, backend=backend, layout=layout, optim={"lr": 1e-2, "eps": 1e-3})
    train(built, 2)
    stored = saved(built)
    if dist.get_rank() == 0:
        torch.save((stored.tensors, built.scalar_state()), Path(folder) / "state.pt")
    once = all(bool((times == 1).all()) for times in stored.times.values())
    norms = [report.grad_norm for report in train(built, 2, seed=50)]
    return {"names": sorted(stored.tensors), "once": once, "norms": norms, "weights": numpy_of(stream(built))}


@on_first_ranks
def resume(path: str, layout: dict[str, Any], folder: str, backend: str = "megatron") -> Any:
    """Load what `save` wrote into an engine that has run before, and train on."""
    built = make_engine(path, backend=backend, layout=layout, optim={"lr": 1e-2, "eps": 1e-3})
    train(built, 1, seed=99)
    stored = Stored()
    stored.tensors, scalars = torch.load(Path(folder) / "state.pt")
    built.load_state(stored.read)
    built.load_scalar_state(scalars)
    norms = [report.grad_norm for report in train(built, 2, seed=50)]
    return {"norms": norms, "weights": numpy_of(stream(built))}


@on_first_ranks
def half_precision(path: str, layout: dict[str, Any]) -> dict[str, Any]:
    """A model in bfloat16 beside its float32 masters: what is saved, what a step and loading do to both."""
    built = make_engine(path, layout={"model_dtype": "bf16"} | layout)
    exact = make_engine(path, layout=layout)
    reports = [(a.grad_norm, b.grad_norm) for a, b in zip(train(built, 2), train(exact, 2), strict=True)]
    stored, weights = saved(built), stream(built)
    for tensor in stored.tensors.values():
        tensor.mul_(1.5)
    built.load_state(stored.read)
    again, loaded = saved(built), stream(built)
    masters = {name.removeprefix("model."): t for name, t in again.tensors.items() if name.startswith("model.")}
    return {
        "norms": max(abs(a - b) / b for a, b in reports),
        "dtypes": {str(tensor.dtype) for tensor in weights.values()},
        "masters": all(torch.equal(again.tensors[name], stored.tensors[name]) for name in stored.tensors),
        "model": all(torch.equal(loaded[name], masters[name].bfloat16()) for name in masters),
        "finer": any(not torch.equal(masters[name], loaded[name].float()) for name in masters),
    }


@on_first_ranks
def hosted_states(path: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Masters and moments in host memory: what is brought to the device, and whether two steps, and one after loading, are those
    of an engine that keeps them there."""
    layout = {"model_dtype": "bf16"} | layout
    hosted, usual = make_engine(path, layout=layout | {"optimizer_offload": True}), make_engine(path, layout=layout)
    assert isinstance(hosted, MegatronEngine) and hosted.optimizer is not None
    rows = {name: column for name, column in own_rows(make_rows(), hosted).items() if name != "target"}
    counts = []
    for seed in (5, 6):
        counts.append(moves_of_each_use(hosted, rows, lambda seed=seed: train(hosted, 1, seed)))
        train(usual, 1, seed)
    same = [_equal(saved(hosted).tensors, saved(usual).tensors)]
    stored = saved(usual)
    for tensor in stored.tensors.values():
        tensor.mul_(1.5)
    for engine in (hosted, usual):
        engine.load_state(stored.read)
        with counted_moves():
            train(engine, 1, 7)
    same += [_equal(saved(hosted).tensors, saved(usual).tensors), _equal(stream(hosted), stream(usual))]
    masters_and_moments = len(hosted.optimizer.ranges) * 3
    return {"counts": counts, "states": masters_and_moments, "same": same}


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@on_first_ranks
def pieces_and_stream(path: str, layout: dict[str, Any], bucket_bytes: int) -> dict[str, Any]:
    """Buckets of the stream, and whether it and the live pieces are the checkpoint's weights, bit for bit."""
    built = make_engine(path, layout=layout, optim=None)
    expected = named(plain_model(path, "policy", torch.float32), Tensor.detach)
    buckets, exact = [], True
    for bucket in built.named_weights(bucket_bytes=bucket_bytes):
        exact &= torch.is_grad_enabled()
        buckets.append([(name, tensor.numel() * tensor.element_size()) for name, tensor in bucket])
        exact &= all(torch.equal(tensor, expected[name]) for name, tensor in bucket)
    pieces = built.local_weights()
    assert pieces is not None
    live = all(torch.equal(piece.tensor, take(expected[piece.name], piece.region)) for piece in pieces)
    return {"buckets": buckets, "exact": exact, "live": live, "names": sorted(expected)}


@on_first_ranks
def stream_peak(path: str, layout: dict[str, Any], bucket_bytes: int) -> tuple[int, int]:
    """Returns the bytes of all weights and the most bytes that tensors took at once while they were streamed."""
    built = make_engine(path, layout=layout, optim=None)
    sizes: list[int] = []

    def stream() -> None:
        sizes.extend(t.nbytes for bucket in built.named_weights(bucket_bytes=bucket_bytes) for _, t in bucket)

    peak = peak_allocation(stream)
    return sum(sizes), peak


@on_first_ranks
def other_sizes(path: str) -> str:
    """What a second engine of the process with other groups is told."""
    make_engine(path, layout={"tensor_model_parallel_size": 2}, optim=None)
    try:
        make_engine(path, layout={"pipeline_model_parallel_size": 2}, optim=None)
    except ConfigError as error:
        return str(error)
    return ""
