"""No row sees another: packed, padded and single rows give the same numbers and gradients on every attention backend.

`tests/gpu/test_packed_kernel.py` asks the same of the variable-length CUDA kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhub.config.sections.training import FSDPConfig, ModelConfig, OptimConfig
from rlhub.engines.training import packing
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.packing import OUTPUTS
from rlhub.models import packed_attention as attention
from tests.unit.models.conftest import save_model

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
VOCAB, PROMPT, RESPONSE = 31, 5, 7
PROMPTS = [5, 1, 3, 1, 2, 4]
RESPONSES = [7, 1, 2, 6, 5, 1]  # the second row is one token before one target: packed, a row of length 1
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
BACKENDS = ("packed", "packed in groups", "padded")
KINDS = ("policy", "value", "reward")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads share two key and value heads (grouped-query attention); weights away from their start, so that what
    attention does shows in the outputs."""
    path = save_model(tmp_path_factory.mktemp("isolation") / "model", vocab_size=VOCAB)
    model = AutoModelForCausalLM.from_pretrained(path)
    for param in model.parameters():
        param.data.add_(torch.randn_like(param) * 0.3)
    model.save_pretrained(path)
    return path


def make_rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    columns = torch.arange(PROMPT + RESPONSE)
    starts, ends = PROMPT - torch.tensor(PROMPTS)[:, None], PROMPT + torch.tensor(RESPONSES)[:, None]
    mask = ((columns >= starts) & (columns < ends)).long()
    response_mask = mask[:, PROMPT:].clone()
    response_mask[3, 2:4] = 0  # tokens of a tool, inside a response
    ids = torch.randint(0, VOCAB, mask.shape, generator=generator)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "response_mask": response_mask,
        "factor": torch.randn(response_mask.shape, generator=generator, dtype=torch.float64),
    }


def make_engine(folder: Path, backend: str, kind: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> FSDPEngine:
    if backend == "packed in groups":
        monkeypatch.setattr(attention, "MIN_GROUP_TOKENS", 4)
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=False, use_remove_padding=backend != "padded")
    engine = FSDPEngine(model, FSDPConfig(model_dtype=dtype), OptimConfig(lr=1e-3), kind=kind, device=CPU, temperature=0.8)
    engine.initialize()
    return engine


def loss_of(values: dict[str, Tensor], factor: Tensor) -> Tensor:
    """Every output of every token counts, differently."""
    return sum((value * (factor[:, 0] if value.dim() == 1 else factor).to(value.dtype)).sum() for value in values.values())


def engine_numbers(engine: FSDPEngine, rows: Rows, wanted: frozenset[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(outputs, gradient of `loss_of` by parameter)."""

    def loss(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        return LossOutput(loss=loss_of({name: getattr(outputs, name) for name in sorted(wanted)}, micro["factor"]))

    engine.forward_backward(rows, loss, outputs=wanted)
    gradients = {param.name: param.param.grad.clone() for param in engine.params}
    return engine.infer(rows, outputs=wanted), gradients


def plain_model(engine: FSDPEngine, folder: Path, dtype: str) -> Any:
    loader: Any = AutoModelForCausalLM
    if engine.kind != "policy":
        loader = AutoModelForSequenceClassification
    model = loader.from_pretrained(folder, dtype=DTYPES[dtype], **({} if engine.kind == "policy" else {"num_labels": 1}))
    if engine.kind != "policy":
        model.score.weight.data.copy_(next(p.param for p in engine.params if p.name == "score.weight").detach())
    return model


def plain_row(model: Any, kind: str, rows: Rows, row: int) -> dict[str, Tensor]:
    """One row through the plain model without any padding: its outputs, each with a first axis of one row."""
    real = rows["attention_mask"][row].bool()
    ids = rows["input_ids"][row][real]
    before = real.cumsum(0)[PROMPT:] - 2  # the token that predicts each column of the response
    mask = rows["response_mask"][row].bool()
    if kind == "policy":
        log_p = (model(ids[None]).logits[0] / 0.8).log_softmax(-1)[before.clamp(min=0)]
        chosen = log_p.gather(1, rows["input_ids"][row, PROMPT:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        squared = (2 * log_p.detach()).exp().sum(-1)  # measured only, it has no gradient
        outputs = {"log_probs": chosen, "entropy": entropy, "sum_pi_squared": squared}
        return {name: torch.where(mask, value, 0)[None] for name, value in outputs.items()}
    numbers = model.score(model.model(ids[None]).last_hidden_state)[0, :, 0]
    if kind == "reward":
        return {"scores": numbers[-1:]}
    return {"values": torch.where(mask, numbers[before.clamp(min=0)], 0)[None]}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        scale = max(1.0, float(expected[name].abs().max()))
        assert (value - expected[name]).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rows_at_once_are_rows_alone(
    folder: Path, backend: str, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder, backend, kind, dtype, monkeypatch)
    rows = make_rows()
    found, gradients = engine_numbers(engine, rows, OUTPUTS[engine.kind])
    model = plain_model(engine, folder, dtype)
    alone: dict[str, list[Tensor]] = {name: [] for name in found}
    for row in range(len(PROMPTS)):
        values = plain_row(model, kind, rows, row)
        loss_of(values, rows["factor"][row : row + 1]).backward()
        for name, value in values.items():
            alone[name].append(value.detach())
    assert_close(found, {name: torch.cat(values) for name, values in alone.items()}, TOLERANCE[dtype])
    assert_close(gradients, {name: param.grad for name, param in model.named_parameters()}, TOLERANCE[dtype])


def garbage_effect(engine: FSDPEngine, kept: int) -> float:
    """How much row `kept` changes, in its outputs and in the gradient of its own loss, when all others become garbage."""
    rows = make_rows()
    rows["factor"][torch.arange(len(PROMPTS)) != kept] = 0
    before, gradient = engine_numbers(engine, rows, OUTPUTS[engine.kind])
    other = torch.arange(len(PROMPTS)) != kept
    rows["input_ids"][other] = (rows["input_ids"][other] + 7) % VOCAB * rows["attention_mask"][other]
    after, gradient_after = engine_numbers(engine, rows, OUTPUTS[engine.kind])
    assert any(not torch.equal(before[name][other], after[name][other]) for name in before)
    changes = [(before[name][kept] - after[name][kept]).abs().max() for name in before]
    changes += [(gradient[name] - gradient_after[name]).abs().max() for name in gradient]
    return float(max(changes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_garbage_in_other_rows_changes_nothing(folder: Path, backend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder, backend, kind, "fp64", monkeypatch)
    for kept in (1, len(PROMPTS) - 1):  # the shortest row, between others, and the last
        assert garbage_effect(engine, kept) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_that_joins_rows_is_seen(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: attention that takes all rows for one lets garbage through, and packed differs from single rows."""
    engine = make_engine(folder, "packed", kind, "fp64", monkeypatch)
    right = engine.infer(make_rows(), outputs=OUTPUTS[engine.kind])
    monkeypatch.setattr(packing, "plan_attention", lambda lengths, device: attention.plan_attention([sum(lengths)], device))
    assert garbage_effect(engine, len(PROMPTS) - 1) > 1e-3
    joined = engine.infer(make_rows(), outputs=OUTPUTS[engine.kind])
    assert any((joined[name] - right[name]).abs().max() > 1e-3 for name in right)


def varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What the CUDA kernel promises for these arguments, one query at a time."""
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert torch.equal(q_bounds, k_bounds) and q_bounds.dtype == torch.int32
    assert longest_q == longest_k == int(q_bounds.diff().max())
    assert window_size in ((-1, 0), (3, 0))  # any earlier token, or the three before; none later: causal
    share = q.shape[1] // k.shape[1]
    assert enable_gqa or share == 1
    out = torch.empty_like(q)
    for first, end in zip(q_bounds[:-1].tolist(), q_bounds[1:].tolist(), strict=True):
        for token in range(first, end):
            oldest = first if window_size[0] == -1 else max(first, token - window_size[0])
            for head in range(q.shape[1]):
                weights = (k[oldest : token + 1, head // share] @ q[token, head] * scale).softmax(0)
                out[token, head] = weights @ v[oldest : token + 1, head // share]
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 4])
def test_the_variable_length_kernel_is_called_with_the_rows_bounds(
    kv_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arguments, on CPU; the kernel itself needs a GPU."""
    monkeypatch.setattr(attention, "varlen_attn", varlen_reference)
    lengths = [4, 1, 6, 2]
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, sum(lengths), 3, dtype=torch.float64) for heads in (4, kv_heads, kv_heads)]
    plan = attention.plan_attention(lengths, CPU)
    options = {"scaling": 0.4, "packing": plan, "sliding_window": window}
    expected, _ = attention.packed_attention(torch.nn.Module(), *tensors, None, **options)
    tokens = [tensor[0].transpose(0, 1) for tensor in tensors]
    found = attention._variable_length(*tokens, plan, 0.4, window)
    torch.testing.assert_close(found[None], expected)
