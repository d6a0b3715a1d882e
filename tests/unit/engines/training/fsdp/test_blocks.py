"""Blocks that are compiled or computed again train as plain ones; counted are what is computed again, and what is compiled."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhub.config.sections.training import FSDPConfig, ModelConfig, recompute_of
from rlhub.engines.training.fsdp import blocks, building, logprob
from rlhub.engines.training.fsdp.blocks import prepare_blocks, resolve_compile
from rlhub.engines.training.fsdp.building import BuildPlan
from rlhub.engines.training.packing import model_inputs
from rlhub.errors import ConfigError
from tests.support.tiny_models import VOCABULARY, save_tiny_model

CPU = torch.device("cpu")
WAYS = ["none", "selective", "full"]
counters = torch._dynamo.utils.counters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    save_tiny_model(found)
    return found


@pytest.fixture(autouse=True)
def no_machine_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The graphs and their gradients are made as ever, and run without inductor, which takes a minute."""
    monkeypatch.setattr(blocks, "BACKEND", "aot_eager")
    monkeypatch.setattr(logprob, "_compiled", lambda function: function)  # the head's own test compiles it
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def root_of(folder: Path, *, recompute: str = "none", compiled: bool = False, share: bool = False, lora: int = 0) -> Any:
    model = ModelConfig(path=str(folder), lora_rank=lora)
    plan = BuildPlan(
        model=model,
        kind="policy",
        dtype=torch.float32,
        temperature=0.7,
        trainable=True,
        seed=0,
        share_prefixes=share,
        recompute=recompute,
        compiled=compiled,
    )
    prepared = building._prepared(plan)
    prepare_blocks(prepared, recompute, compiled=compiled)
    return building._root(prepared, plan).train()


def rows_of(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, 1:]}


class Operations(TorchDispatchMode):
    """Counts the operations inside the context by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def gradients(root: Any, lengths: list[int], *, share: bool = False, compiled: bool = False) -> tuple[list[Tensor], Counter[str]]:
    """The gradient of a pass over rows of these lengths, and the operations of its backward pass, unless it is compiled."""
    root.zero_grad()
    inputs = model_inputs(rows_of(lengths), pack=True, device=CPU, share_prefixes=share)
    outputs = root(inputs, frozenset({"log_probs", "entropy"}))
    factors = torch.linspace(-1, 1, len(outputs["log_probs"]))
    operations = Operations()
    with contextlib.nullcontext() if compiled else operations:
        ((factors * outputs["log_probs"]).sum() + 0.1 * outputs["entropy"].sum()).backward()
    return [param.grad.clone() for param in root.parameters() if param.grad is not None], operations.counts


def assert_equal(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain) > 0
    for one, other in zip(ours, plain, strict=True):
        assert float((one - other).norm() / other.norm().clamp(min=1e-12)) < 1e-5


def test_recomputation_changes_no_gradient_and_selective_computes_no_product_again(folder: Path) -> None:
    found = {way: gradients(root_of(folder, recompute=way), [7, 2, 5]) for way in WAYS}
    for way in WAYS:
        assert_equal(found[way][0], found["none"][0])
    products, norms = ({way: found[way][1][name] for way in WAYS} for name in ("mm", "rsqrt"))
    addmm = {way: found[way][1]["addmm"] for way in WAYS}  # q, k and v have biases
    kernel = {way: found[way][1]["_scaled_dot_product_flash_attention_for_cpu"] for way in WAYS}
    assert products["selective"] == products["none"] and addmm["selective"] == addmm["none"] and kernel["selective"] == 0
    assert (products["full"] - products["none"], addmm["full"] - addmm["none"], kernel["full"]) == (
        6,
        6,
        2,
    )  # it ends before the last product
    assert norms == {"none": 0, "selective": 2 * 2, "full": 2 * 2}  # two of each block


@pytest.mark.parametrize("way", WAYS)
def test_compiled_blocks_have_the_plain_gradients_without_graph_breaks(folder: Path, way: str) -> None:
    """Rows of any number and length: one graph for all blocks at the first size, and one for all others."""
    plain, compiled = root_of(folder), root_of(folder, recompute=way, compiled=True)
    graphs = []
    for lengths in ([7, 2, 5], [9, 4, 3, 2], [30, 12, 5], [6, 21, 2, 2, 9], [17, 8]):
        assert_equal(gradients(compiled, lengths, compiled=True)[0], gradients(plain, lengths)[0])
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 2, 2, 2, 2]
    assert not counters["graph_break"] and not counters["recompile_limit"]


def test_a_control_a_break_in_a_block_is_counted(folder: Path) -> None:
    root = root_of(folder, compiled=True)
    act = root.model.model.layers[0].mlp.act_fn

    class Broken(torch.nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return act(values)

    root.model.model.layers[0].mlp.act_fn = Broken()
    gradients(root, [7, 2, 5], compiled=True)
    assert counters["graph_break"]


@pytest.mark.parametrize("changes", [{"share": True}, {"lora": 4}], ids=["shared prefixes", "adapters"])
def test_other_ways_to_compute_a_policy(folder: Path, changes: dict[str, Any]) -> None:
    share = changes.get("share", False)
    plain, other = root_of(folder, **changes), root_of(folder, recompute="selective", compiled=True, **changes)
    ours, expected = (gradients(root, [7, 2, 5], share=share, compiled=True)[0] for root in (other, plain))
    assert_equal([grad for grad in ours if grad.any()], [grad for grad in expected if grad.any()])
    assert not counters["graph_break"]


def test_a_pass_without_gradient_keeps_nothing(folder: Path) -> None:
    inputs = model_inputs(rows_of([7, 2, 5]), pack=True, device=CPU)
    with torch.no_grad():
        expected = root_of(folder)(inputs, frozenset({"log_probs"}))["log_probs"]
        found = root_of(folder, recompute="selective")(inputs, frozenset({"log_probs"}))["log_probs"]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("stored", "setting", "way"),
    [(False, "full", "none"), (True, "auto", "full"), (True, "selective", "selective"), (True, "none", "none")],
)
def test_the_settings_of_recomputation(stored: bool, setting: Any, way: str) -> None:
    model = ModelConfig(enable_gradient_checkpointing=stored)
    assert recompute_of(model, FSDPConfig(recompute_granularity=setting)) == way


def test_models_are_compiled_where_set_or_on_a_gpu_with_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = torch.device("cuda")
    assert resolve_compile(True, CPU) and not resolve_compile(None, CPU) and not resolve_compile(False, CPU)
    monkeypatch.setattr(blocks, "compiler_problem", lambda device: None)
    assert resolve_compile(None, cuda) and not resolve_compile(False, cuda)
    monkeypatch.setattr(blocks, "compiler_problem", lambda device: "no C compiler")
    assert not resolve_compile(None, cuda)
    assert "no C compiler" in caplog.text and "uncompiled" in caplog.text
    with pytest.raises(ConfigError, match=r"use_torch_compile: .*no C compiler.*set it to false"):
        resolve_compile(True, cuda)


def test_a_compiler_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler\nmore")

    monkeypatch.setattr(blocks, "BACKEND", failing)
    assert "no compiler" in str(blocks.compiler_problem(CPU))
