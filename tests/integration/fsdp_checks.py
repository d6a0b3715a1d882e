"""What the ranks of test_fsdp.py run: engines on tiny models, compared with a plain Hugging Face loop in the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhub.checkpoint.shard_reader import ShardReader
from rlhub.checkpoint.shards import write_shards
from rlhub.config.sections.training import FSDPConfig, ModelConfig, OptimConfig
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows
from rlhub.engines.training.collectives import check_finite, ensure_process_group
from rlhub.engines.training.fsdp import blocks, building, engine, logprob, weights
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.errors import NonFiniteError
from rlhub.models.lora import add_lora
from rlhub.workers.base import save_engine
from tests.support.memory import peak_allocation

CPU = torch.device("cpu")
TEMPERATURE = 0.7
ENTROPY = 0.1
POLICY_OUTPUTS = ("log_probs", "entropy")
OUTPUTS = {"policy": POLICY_OUTPUTS, "value": ("values",), "reward": ("scores",)}
INFERRED = OUTPUTS | {"policy": (*POLICY_OUTPUTS, "sum_pi_squared")}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def make_rows(seed: int = 1, vocab: int = 67) -> dict[str, Tensor]:
    """9 rows of unequal lengths with a fully masked one, a hole in a response and a response of the full width."""
    generator = torch.Generator().manual_seed(seed)
    prompt, response = 6, 8
    prompts = torch.tensor([6, 1, 3, 2, 5, 4, 6, 1, 2])
    responses = torch.tensor([8, 3, 0, 1, 5, 2, 8, 7, 4])
    columns = torch.arange(prompt + response)
    mask = ((columns >= prompt - prompts[:, None]) & (columns < prompt + responses[:, None])).long()
    response_mask = mask[:, prompt:].clone()
    response_mask[4, 1:3] = 0  # tokens the model did not write, inside the response
    ids = torch.randint(3, vocab, mask.shape, generator=generator)
    return {
        "input_ids": torch.where(mask.bool(), ids, 0),
        "attention_mask": mask,
        "response_mask": response_mask,
        "target": torch.randn(response_mask.shape, generator=generator, dtype=torch.float64),
    }


def my_rows(rows: Rows, uneven: bool) -> dict[str, Tensor]:
    """This rank's rows; `uneven`: the last rank of several has none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if uneven and world > 1:
        own = slice(0, 0) if rank == world - 1 else slice(rank, None, world - 1)
    else:
        own = slice(rank, None, world)
    return {name: column[own] for name, column in rows.items()}


def policy_loss(num_tokens: float) -> Callable[[ForwardOutputs, Rows], LossOutput]:
    def loss(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        assert outputs.log_probs is not None and outputs.entropy is not None
        mask = micro["response_mask"]
        terms = -outputs.log_probs * micro["target"].to(outputs.log_probs.dtype) - ENTROPY * outputs.entropy
        return LossOutput(loss=torch.where(mask.bool(), terms, 0).sum() / num_tokens, sums={"tokens": mask.sum()})

    return loss


def value_loss(num_tokens: float) -> Callable[[ForwardOutputs, Rows], LossOutput]:
    def loss(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        assert outputs.values is not None
        error = (outputs.values - micro["target"].to(outputs.values.dtype)) ** 2
        return LossOutput(loss=torch.where(micro["response_mask"].bool(), error, 0).sum() / num_tokens)

    return loss


def reward_loss(num_rows: int) -> Callable[[ForwardOutputs, Rows], LossOutput]:
    def loss(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        assert outputs.scores is not None
        error = (outputs.scores - micro["target"][:, 0].to(outputs.scores.dtype)) ** 2
        return LossOutput(loss=torch.where(micro["attention_mask"].bool().any(1), error, 0).sum() / num_rows)

    return loss


def loss_for(kind: str, rows: Rows) -> Callable[[ForwardOutputs, Rows], LossOutput]:
    num_tokens = float(rows["response_mask"].sum())
    if kind == "reward":
        return reward_loss(len(rows["input_ids"]))
    return policy_loss(num_tokens) if kind == "policy" else value_loss(num_tokens)


def make_engine(path: str, kind: str = "policy", **changes: Any) -> FSDPEngine:
    """An initialized engine; changes: model, fsdp and optim fields by name, and FSDPEngine arguments."""
    ensure_process_group(CPU, timeout_s=120)
    model = {"path": path, "enable_gradient_checkpointing": False} | changes.pop("model", {})
    fsdp = {"model_dtype": "fp64"} | changes.pop("fsdp", {})
    optim = changes.pop("optim", {"lr": 1e-2})
    built = FSDPEngine(
        ModelConfig(**model),
        FSDPConfig(**fsdp),
        None if optim is None else OptimConfig(**optim),
        kind=kind,  # type: ignore[arg-type]
        device=CPU,
        temperature=TEMPERATURE,
        **changes,
    )
    built.initialize()
    return built


def plain_model(path: str, kind: str, dtype: torch.dtype) -> Any:
    if kind == "policy":
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, num_labels=1)
    return model


def plain_outputs(model: Any, rows: Rows, kind: str) -> dict[str, Tensor]:
    """Row by row, token by token, without padding."""
    if kind == "reward":
        return {"scores": plain_scores(model, rows)}
    response_mask = rows["response_mask"]
    count, width = response_mask.shape
    prompt = rows["input_ids"].shape[1] - width
    names = INFERRED[kind]
    results: dict[str, list[Tensor]] = {name: [] for name in names}
    for row in range(count):
        real = rows["attention_mask"][row].bool()
        ids = rows["input_ids"][row][real]
        if kind == "policy":
            logits = model(ids[None]).logits[0] / TEMPERATURE
            log_p = logits.log_softmax(-1)
            numbers = {"entropy": -(log_p.exp() * log_p).sum(-1), "sum_pi_squared": log_p.exp().square().sum(-1)}
        else:
            numbers = {"values": model.score(model.model(ids[None]).last_hidden_state)[0, :, 0]}
        before = real.cumsum(0)[prompt:] - 2
        for name in names:
            line = []
            for column in range(width):
                if not response_mask[row, column]:
                    line.append(torch.zeros((), dtype=model.dtype))
                elif name == "log_probs":
                    line.append(log_p[before[column], rows["input_ids"][row, prompt + column]])
                else:
                    line.append(numbers[name][before[column]])
            results[name].append(torch.stack(line))
    return {name: torch.stack(lines) for name, lines in results.items()}


def plain_scores(model: Any, rows: Rows) -> Tensor:
    """What transformers' own classifier says of each row alone, without its padding."""
    ids = [row[real.bool()] for row, real in zip(rows["input_ids"], rows["attention_mask"], strict=True)]
    return torch.stack([model(row[None]).logits[0, 0] for row in ids])


def plain_gradient(model: Any, rows: Rows, kind: str) -> float:
    outputs = plain_outputs(model, rows, kind)
    loss = loss_for(kind, rows)(ForwardOutputs(**outputs), rows).loss
    loss.backward()
    return float(loss)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative_error(engine_: FSDPEngine, reference: Any) -> float:
    """Relative L2 distance of the whole gradients."""
    grads = {name: param.grad for name, param in reference.named_parameters()}
    error = norm = 0.0
    for param in engine_.params:
        assert param.param.grad is not None, f"{param.name} has no gradient"
        expected = grads[param.name]
        error += float((full(param.param.grad) - expected).double().square().sum())
        norm += float(expected.double().square().sum())
    return (error / norm) ** 0.5


@contextmanager
def thresholds(large: bool) -> Iterator[None]:
    """`large`: treat the tiny model as a large one (sharded by layer, read on rank 0, gradients reduced at once)."""
    if not large:
        yield
        return
    with (
        mock.patch.object(building, "BROADCAST_BYTES", 0),
        mock.patch.object(weights, "WHOLE_MODEL_BYTES", 0),
        mock.patch.object(engine, "UNSHARDED_GRAD_BYTES", 0),
    ):
        yield


@contextmanager
def without_inductor() -> Iterator[None]:
    """Graphs are made as ever, and run without machine code of their own, which takes a minute to make."""
    compiled = partial(torch.compile, backend="aot_eager")
    with mock.patch.object(blocks, "BACKEND", "aot_eager"), mock.patch.object(logprob, "_compiled", compiled):
        yield


def gradient(path: str, kind: str, case: dict[str, Any]) -> tuple[float, float, float]:
    """(relative error of the gradient, loss of the engine, loss of the plain loop).

    case: dtype, micro (MicroBatchConfig fields), model, fsdp, large, uneven, damage (scales the engine's loss), own_head (the
    checkpoint has the head).
    """
    dtype = case.get("dtype", "fp64")
    rows = make_rows()
    with thresholds(case.get("large", False)), without_inductor():
        built = make_engine(
            path,
            kind,
            model=case.get("model", {}),
            fsdp={"model_dtype": dtype} | case.get("fsdp", {}),
            micro_batch=MicroBatchConfig(**case.get("micro", {})),
        )
        loss = loss_for(kind, rows)
        outputs = OUTPUTS[kind]
        for _ in range(2):  # gradients start from zero each time
            sums = built.forward_backward(my_rows(rows, case.get("uneven", False)), loss, outputs=outputs)
    reference = plain_model(path, kind, DTYPES[dtype])
    if kind != "policy" and not case.get("own_head"):
        head = next(p for p in built.params if p.name == "score.weight")
        reference.score.weight.data.copy_(full(head.param.detach()))
    if case.get("damage"):
        rows["target"][0, 0] += 0.01
    expected = plain_gradient(reference, rows, kind)
    return relative_error(built, reference), sums["loss"], expected


def inference(path: str, kind: str, case: dict[str, Any]) -> float:
    """Largest difference of `infer` from the plain loop, on this rank's rows."""
    rows = make_rows()
    built = make_engine(path, kind, model=case.get("model", {}), infer_micro_batch=MicroBatchConfig(**case.get("micro", {})))
    mine = my_rows(rows, case.get("uneven", False))
    outputs = INFERRED[kind]
    results = built.infer(mine, outputs=outputs)
    reference = plain_model(path, kind, torch.float64)
    if kind != "policy" and not case.get("own_head"):
        reference.score.weight.data.copy_(full(built.params[-1].param.detach()))
    if not len(mine["input_ids"]):
        return 0.0
    with torch.no_grad():
        expected = plain_outputs(reference, mine, kind)
    return max(float((results[name] - expected[name]).abs().max()) for name in outputs)


def reward_contamination(path: str, pack: bool) -> float:
    """Largest change of the other rows' scores when one row's tokens change (it must be 0 up to rounding)."""
    built = make_engine(path, "reward", model={"use_remove_padding": pack}, optim=None)
    rows = make_rows()
    before = built.infer(rows, outputs=("scores",))["scores"]
    rows["input_ids"][4] = torch.where(rows["attention_mask"][4].bool(), rows["input_ids"][4] % 60 + 3, 0)
    change = (built.infer(rows, outputs=("scores",))["scores"] - before).abs()
    assert change[4] > 1e-3
    change[4] = 0
    return float(change.max())


def save_reward(path: str, folder: str) -> list[float]:
    """Train a reward model a little and save it as a worker does; returns its scores of `make_rows`."""
    built = make_engine(path, "reward", fsdp={"model_dtype": "fp32"})
    for seed in range(2):
        rows = make_rows(seed)
        built.forward_backward(my_rows(rows, False), loss_for("reward", rows), outputs=("scores",))
        built.optimizer_step()
    save_engine(built, Path(folder), dist.get_rank(), dist.get_world_size())
    return built.infer(make_rows(), outputs=("scores",))["scores"].tolist()


def stream(engine_: FSDPEngine, bucket_bytes: int = 4096) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in engine_.named_weights(bucket_bytes=bucket_bytes) for name, tensor in bucket}


def train(engine_: FSDPEngine, steps: int, seed: int = 5) -> list[float]:
    norms = []
    for step in range(steps):
        rows = make_rows(seed + step)
        engine_.forward_backward(my_rows(rows, False), loss_for("policy", rows), outputs=POLICY_OUTPUTS)
        norms.append(engine_.optimizer_step().grad_norm)
    return norms


def steps_against_torch(path: str, fsdp: dict[str, Any], large: bool) -> tuple[float, float]:
    """Three clipped AdamW steps: (largest weight difference, largest relative difference of gradient norms)."""
    optim = {"lr": 1e-2, "weight_decay": 0.1, "lr_warmup_steps": 2}
    with thresholds(large):
        built = make_engine(path, fsdp=fsdp, optim=optim, grad_clip=0.5, micro_batch=MicroBatchConfig(rows=2))
        norms = train(built, 3)
    model = plain_model(path, "policy", torch.float64)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], foreach=False, fused=False
    )
    worst = 0.0
    for step in range(3):
        plain_gradient(model, make_rows(5 + step), "policy")
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        worst = max(worst, abs(norms[step] - norm) / norm)
        for group in adamw.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        adamw.step()
        adamw.zero_grad()
    expected = dict(model.named_parameters())
    streamed = stream(built)
    assert streamed.keys() == expected.keys()
    return max(float((streamed[name] - expected[name]).abs().max()) for name in expected), worst


def bucket_sizes(path: str, bucket_bytes: int) -> tuple[list[list[tuple[str, int]]], bool]:
    """(names and bytes of each bucket, whether all weights are bitwise those of the checkpoint and gradients stay on)."""
    built = make_engine(path, optim=None)
    reference = dict(plain_model(path, "policy", torch.float64).named_parameters())
    buckets, exact = [], True
    for bucket in built.named_weights(bucket_bytes=bucket_bytes):
        exact &= torch.is_grad_enabled()  # between buckets the consumer's own mode holds
        buckets.append([(name, tensor.numel() * tensor.element_size()) for name, tensor in bucket])
        exact &= all(torch.equal(tensor, reference[name]) for name, tensor in bucket)
    return buckets, exact


def large_model_is_exact(path: str) -> bool:
    """A model read on rank 0 alone and broadcast: weights and rotary frequencies as if every rank had read it."""
    with thresholds(True):
        built = make_engine(path, fsdp={"model_dtype": "fp32"}, optim=None)
    small = make_engine(path, fsdp={"model_dtype": "fp32"}, optim=None)
    a, b = stream(built), stream(small)
    buffers = dict(small.model.named_buffers())
    same_buffers = all(torch.equal(buffer, buffers[name]) for name, buffer in built.model.named_buffers())
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) and same_buffers and len(buffers) > 0


LORA = {"lora_rank": 4, "lora_alpha": 8.0}


def lora(path: str, large: bool) -> dict[str, float]:
    """Facts about an engine with adapters after training steps; the reference pass comes first, as in a step of a run."""
    ensure_process_group(CPU, timeout_s=120)
    torch.manual_seed(dist.get_rank())  # ranks draw the same adapters whatever their random states
    with thresholds(large):
        built = make_engine(path, model=LORA)
    rows, mine = make_rows(), my_rows(make_rows(), False)
    base = {p.name: full(p.param.detach()).clone() for p in built.params}
    before = built.infer(mine, outputs=("log_probs",), adapters=False)["log_probs"]
    same = built.infer(mine, outputs=("log_probs",))["log_probs"]
    assert torch.equal(before, same)
    with thresholds(large):
        train(built, 3)
    after = built.infer(mine, outputs=("log_probs",))["log_probs"]
    without = built.infer(mine, outputs=("log_probs",), adapters=False)["log_probs"]
    merged = plain_model(path, "policy", torch.float64)
    missing, unexpected = merged.load_state_dict(stream(built), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    with torch.no_grad():
        expected = plain_outputs(merged, my_rows(rows, False), "policy")["log_probs"]
    frozen = max(float((full(p.param.detach()) - base[p.name]).abs().max()) for p in built.params if not p.param.requires_grad)
    whole = plain_model(path, "policy", torch.float64)
    add_lora(whole, ModelConfig(**LORA), head=whole.lm_head, seed=0)
    drawn = {name: param for name, param in whole.named_parameters() if ".lora_A." in name}
    return {
        "adapters": len(drawn),
        "as_drawn": all(torch.equal(base[name], param) for name, param in drawn.items()),
        "moved": float((after - before).abs().max()),
        "without": float((without - before).abs().max()),
        "merged": float((after - expected).abs().max()),
        "frozen": frozen,
        "trainable": float(sum(p.param.numel() for p in built.params if p.param.requires_grad)),
    }


def save_adapter(path: str, kind: str, folder: str) -> dict[str, Any]:
    """Train a model with adapters and save it as a worker does; returns the names of the files written and of what trained."""
    built = make_engine(path, kind, model=LORA, fsdp={"model_dtype": "fp32"})
    outputs = OUTPUTS[kind]
    for seed in range(2):
        rows = make_rows(seed)
        built.forward_backward(my_rows(rows, False), loss_for(kind, rows), outputs=outputs)
        built.optimizer_step()
    entries = save_engine(built, Path(folder), dist.get_rank(), dist.get_world_size())
    dist.barrier()
    return {
        "files": [str(Path(entry.path).relative_to(folder)) for entry in entries],
        "trained": [param.name for param in built.params if param.param.requires_grad],
    }


def save(path: str, folder: str, steps: int, model: dict[str, Any]) -> dict[str, Any]:
    """Train, save, train on; returns the scalars at the save and the weights at the end."""
    built = make_engine(path, model=model)
    train(built, steps)
    write_shards(Path(folder), dist.get_rank(), dist.get_world_size(), built.state_shards())
    scalars = built.scalar_state()
    dist.barrier()
    norms = train(built, 2, seed=50)
    return {"scalars": scalars, "norms": norms, "weights": {k: v.numpy() for k, v in stream(built).items()}}


def resume(path: str, folder: str, scalars: dict[str, Any], warm: bool, model: dict[str, Any]) -> dict[str, Any]:
    """Load what `save` wrote and train on; `warm`: into an engine that has run and stepped before."""
    built = make_engine(path, model=model, seed=8)
    if warm:
        train(built, 1, seed=99)
    with ShardReader(Path(folder)) as reader:
        built.load_state(reader.read)
    built.load_scalar_state(scalars)
    norms = train(built, 2, seed=50)
    return {"norms": norms, "weights": {k: v.numpy() for k, v in stream(built).items()}}


def not_finite(path: str, where: str) -> dict[str, Any]:
    """One rank's loss or gradient is NaN: the step must be skipped on all, and the next be as if it had not been."""
    built = make_engine(path)
    before = stream(built)
    rows = make_rows()
    inner = loss_for("policy", rows)

    def poisoned(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        result = inner(outputs, micro)
        if dist.get_rank() == dist.get_world_size() - 1:
            assert outputs.log_probs is not None
            if where == "loss":
                result.loss = result.loss * torch.tensor(float("nan"))
            else:
                outputs.log_probs.register_hook(lambda grad: grad * float("inf"))
        return result

    built.forward_backward(my_rows(rows, False), poisoned, outputs=POLICY_OUTPUTS)
    report = built.optimizer_step()
    after = stream(built)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    norms = train(built, 1)
    fresh = train(make_engine(path), 1)
    return {"skipped": report.skipped, "unchanged": unchanged, "next": norms == fresh, "scalars": built.scalar_state()}


def infinite_weight(path: str, folder: str) -> tuple[str, tuple[str, ...], list[str]]:
    """The last rank's rows of one weight become infinite: what the save says on every rank, and what it has written."""
    built = make_engine(path)
    rank, world = dist.get_rank(), dist.get_world_size()
    check_finite(built, "before")
    if rank == world - 1:
        next(p for p in built.params if p.name.endswith("1.mlp.up_proj.weight")).local[0, 0] = float("inf")
    try:
        save_engine(built, Path(folder), rank, world)
    except NonFiniteError as error:
        return str(error), error.weights, [path.name for path in Path(folder).iterdir()]
    return "", (), []


def stream_peak(path: str, bucket_bytes: int) -> tuple[int, int]:
    """Returns the bytes of all weights and the most bytes that tensors took at once while they were streamed."""
    built = make_engine(path, fsdp={"model_dtype": "fp32"}, optim=None)
    sizes: list[int] = []

    def stream() -> None:
        sizes.extend(t.nbytes for bucket in built.named_weights(bucket_bytes=bucket_bytes) for _, t in bucket)

    peak = peak_allocation(stream)
    return sum(sizes), peak
