"""main_export: from shards of any layout to a folder that transformers loads, and a verification that sees what is wrong."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen3MoeConfig

from rlhub.checkpoint.shards import write_shards
from rlhub.checkpoint.store import CheckpointStore
from rlhub.config.sections.training import FSDPConfig, ModelConfig
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.models.experts import unfused_tensors
from rlhub.models.hf import save_sidecars
from rlhub.protocol.weights.pieces import Piece, flat_regions, take
from rlhub.trainer import main_export
from rlhub.workers import export as export_worker
from rlhub.workers.base import save_engine
from tests.unit.models.conftest import save_model, save_tokenizer

WRITERS = 3
CPU = torch.device("cpu")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status, and what was said on stderr; the log is in caplog."""
    code = main_export.command(list(arguments))
    return code, capsys.readouterr().err


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that runs start from."""
    path = save_model(tmp_path_factory.mktemp("base") / "qwen2")
    save_tokenizer(path, eos_token="<eos>", pad_token="<pad>", chat_template="{{ messages }}")
    return path


def trained(model: Any, seed: int = 5) -> dict[str, Tensor]:
    """Weights that are not those of the base, as checkpoints name them."""
    generator = torch.Generator().manual_seed(seed)
    moved = {name: p.detach() + 0.2 * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    return dict(unfused_tensors(moved.items()))


def commit(run_folder: Path, step: int, weights: dict[str, Tensor], role: str = "actor", **metrics: float) -> Path:
    """A checkpoint whose shards are flat ranges of every tensor, as a distributed optimizer cuts them."""
    store = CheckpointStore(run_folder)
    aside, entries = store.begin(step), []
    for rank in range(WRITERS):
        entries += write_shards(aside / role, rank, WRITERS, pieces(weights, rank))
    return store.commit(step, entries, {}, metrics=metrics)


def pieces(weights: dict[str, Tensor], rank: int) -> list[Piece]:
    found = []
    for name, full in weights.items():
        size, shape = full.numel(), tuple(full.shape)
        for box in flat_regions(shape, size * rank // WRITERS, size * (rank + 1) // WRITERS):
            found.append(Piece(name=f"model.{name}", tensor=take(full, box), shape=shape, region=box))
    return found


@pytest.fixture
def weights(base: Path) -> dict[str, Tensor]:
    return trained(AutoModelForCausalLM.from_pretrained(base))


def test_policy(base: Path, weights: dict[str, Tensor], tmp_path: Path, capsys: Any, caplog: Any) -> None:
    """Small files, verified; the newest checkpoint, not the highest step, and the settings of the run for the rest."""
    commit(tmp_path / "run", 9, {name: weight + 1 for name, weight in weights.items()})
    commit(tmp_path / "run", 4, weights)
    (tmp_path / "run/config.yaml").write_text(json.dumps({"actor_rollout_ref": {"model": {"path": str(base)}}}))
    output = tmp_path / "out"
    arguments = [f"checkpoint={tmp_path / 'run'}", f"output={output}", "max_shard_gb=0.000005", "--verify"]
    assert run(capsys, *arguments)[0] == 0, caplog.text
    assert "100 %" in caplog.text and "global_step_4" in caplog.text
    assert "largest difference of log_probs and entropy over 124 tokens" in caplog.text
    assert f"all {len(weights)} weights are the checkpoint's" in caplog.text
    assert len(list(output.glob("model-*.safetensors"))) > 1 and not list(tmp_path.glob(".exporting*"))
    loaded = AutoModelForCausalLM.from_pretrained(output)
    assert loaded.dtype == torch.float32
    assert all(torch.equal(param, weights[name]) for name, param in loaded.named_parameters())
    assert AutoTokenizer.from_pretrained(output).chat_template == "{{ messages }}"
    code, said = run(capsys, *arguments)
    assert code == 2 and f"output: {output} exists, and nothing is overwritten" in said


def test_dtype_best_and_named_steps(base: Path, weights: dict[str, Tensor], tmp_path: Path, capsys: Any, caplog: Any) -> None:
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.5)):
        commit(tmp_path / "run", step, {name: weight + step / 10 for name, weight in weights.items()}, **{"val/pass@1": score})
    (tmp_path / "run/config.yaml").write_text(json.dumps({"trainer": {"keep_best": "val/pass@1"}}))
    common = [f"checkpoint={tmp_path / 'run'}", f"model_path={base}", "dtype=bf16", "verify=true"]
    for choice, step in (("step=best", 2), ("step=3", 3), ("step=latest", 3)):
        output = tmp_path / choice
        assert run(capsys, *common, f"output='{output}'", choice)[0] == 0, caplog.text
        found = load_file(output / "model.safetensors")
        assert all(torch.equal(found[name], (weight + step / 10).bfloat16()) for name, weight in weights.items())
        assert AutoConfig.from_pretrained(output).dtype == torch.bfloat16
    code, said = run(capsys, *common, f"output={tmp_path / 'x'}", "step=7")
    assert code == 2 and "has no checkpoint of step 7; it has 1, 2, 3" in said
    code, said = run(capsys, *common, f"output={tmp_path / 'x'}", "step=best", "best_metric=val/pass@2")
    assert code == 2 and "has 'val/pass@2'; its checkpoints have val/pass@1" in said


def test_critic(base: Path, tmp_path: Path, capsys: Any, caplog: Any) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    weights = trained(model)
    checkpoint = commit(tmp_path, 1, weights, role="critic")
    output = tmp_path / "out"
    arguments = [f"checkpoint={checkpoint}", f"output={output}", f"model_path={base}", "--verify"]
    code, said = run(capsys, *arguments)
    assert code == 2 and "has critic, not actor or model" in said
    assert run(capsys, *arguments, "role=critic")[0] == 0, caplog.text
    assert "largest difference of values" in caplog.text
    loaded = AutoModelForSequenceClassification.from_pretrained(output)
    assert loaded.num_labels == 1 and torch.equal(loaded.score.weight, weights["score.weight"])


def test_mixture_of_experts(tmp_path: Path, capsys: Any, caplog: Any) -> None:
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **experts, max_position_embeddings=64))
    model.save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base", eos_token="<eos>", pad_token="<pad>")
    checkpoint = commit(tmp_path, 1, trained(model))
    common = [f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}", f"model_path={tmp_path / 'base'}", "--verify"]
    assert run(capsys, *common)[0] == 0, caplog.text
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in load_file(tmp_path / "out/model.safetensors")


@pytest.fixture
def adapted(base: Path, tmp_path: Path) -> Path:
    """A checkpoint of a LoRA run as a worker saves it."""
    lora = {"lora_rank": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "down_proj"]}
    model = ModelConfig(path=str(base), enable_gradient_checkpointing=False, **lora)
    ensure_process_group(CPU)
    engine = FSDPEngine(model, FSDPConfig(), None, kind="policy", device=CPU)
    engine.initialize()
    for param in engine.params:
        if ".lora_B." in param.name:
            torch.nn.init.normal_(param.param, generator=torch.Generator().manual_seed(2), std=0.3)
    store = CheckpointStore(tmp_path)
    folder = store.begin(1) / "actor"
    entries = save_engine(engine, folder, 0, 1)
    save_sidecars(model, folder / "huggingface")
    return store.commit(1, entries, {})


@pytest.mark.parametrize("dtype", ["null", "bf16"])
def test_adapters_are_merged(adapted: Path, tmp_path: Path, capsys: Any, caplog: Any, dtype: str) -> None:
    """Even where the checkpoint's own merged copy is gone; its configuration and tokenizer are used."""
    expected = load_file(adapted / "actor/huggingface/model.safetensors")
    (adapted / "actor/huggingface/model.safetensors").unlink()
    output = tmp_path / "out"
    assert run(capsys, f"checkpoint={adapted}", f"output={output}", f"dtype={dtype}", "--verify")[0] == 0, caplog.text
    found = load_file(output / "model.safetensors")
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name].to(wanted)) for name in found)


def test_adapters_without_their_scale(adapted: Path, tmp_path: Path, capsys: Any) -> None:
    (adapted / "actor/adapter/adapter_config.json").unlink()
    code, said = run(capsys, f"checkpoint={adapted}", f"output={tmp_path / 'out'}")
    assert code == 1 and "adapter_config.json: No such file" in said


DAMAGE: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "model.layers.1.mlp.up_proj.weight: 1 of 384 elements differ, the first at [3, 7]": lambda found: (
        found["model.layers.1.mlp.up_proj.weight"][3, 7:8].neg_(),
        found,
    )[1],
    "model.layers.0.self_attn.q_proj.weight: 256 of 256 elements differ": lambda found: (
        found["model.layers.0.self_attn.q_proj.weight"].copy_(found["model.layers.0.self_attn.q_proj.weight"].roll(4, 0)),
        found,
    )[1],
    "model.norm.weight: the checkpoint has it, the export does not": lambda found: {
        name: tensor for name, tensor in found.items() if name != "model.norm.weight"
    },
}


@pytest.mark.parametrize("finding", DAMAGE)
def test_verification_sees(
    base: Path, weights: dict[str, Tensor], tmp_path: Path, capsys: Any, caplog: Any, monkeypatch: Any, finding: str
) -> None:
    """The control: a writer that gets a weight wrong does not pass, and its folder does not get the name asked for."""
    write = export_worker.write_hf_weights

    def wrong(folder: Path, *arguments: Any, **options: Any) -> Any:
        entries = write(folder, *arguments, **options)
        path = folder / "model.safetensors"
        found = DAMAGE[finding](load_file(path))
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, path, {"format": "pt"})
        return entries

    monkeypatch.setattr(export_worker, "write_hf_weights", wrong)
    checkpoint = commit(tmp_path, 1, weights)
    common = [f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}", f"model_path={base}"]
    assert run(capsys, *common, "--verify")[0] == 1
    assert f"first differing weight: {finding}" in caplog.text
    difference, allowed = re.search(r"over 124 tokens: (\S+) \(allowed: (\S+)\)", caplog.text).groups()
    assert float(difference) > 2 * float(allowed)
    assert not (tmp_path / "out").exists() and (tmp_path / ".exporting_out").is_dir()


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), None), (1e5, "fp16")])
def test_weights_that_are_not_finite_are_not_exported(
    base: Path, weights: dict[str, Tensor], tmp_path: Path, capsys: Any, value: float, dtype: str | None
) -> None:
    """Nor those that would become so."""
    name = "model.layers.1.mlp.up_proj.weight"
    damaged = weights[name].clone()
    damaged[2, 3] = value
    checkpoint = commit(tmp_path, 1, weights | {name: damaged})
    asked = [f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}", f"model_path={base}"] + (
        [f"dtype={dtype}"] if dtype else []
    )
    code, said = run(capsys, *asked)
    assert code == 1 and f"{name} is not finite" in said and not (tmp_path / "out").exists()


def test_damaged_checkpoints_are_named(base: Path, weights: dict[str, Tensor], tmp_path: Path, capsys: Any) -> None:
    """A flipped bit, a file cut short, a missing file of a rank, a missing index: each refused before anything is written."""
    commit(tmp_path / "run", 1, weights)
    whole = commit(tmp_path / "run", 2, weights)
    shard, index = "actor/shards-rank00001-00000.safetensors", "actor/shards-rank00002.json"
    for file, damage, told in (
        (shard, lambda path: path.write_bytes(flipped(path.read_bytes())), "has another checksum than its manifest says"),
        (shard, lambda path: path.write_bytes(path.read_bytes()[:-4]), "bytes, its manifest says"),
        (shard, Path.unlink, "No such file"),
        (index, Path.unlink, "No such file"),
    ):
        content = (whole / file).read_bytes()
        damage(whole / file)
        code, said = run(capsys, f"checkpoint={tmp_path / 'run'}", f"output={tmp_path / 'out'}", f"model_path={base}")
        assert code == 1 and f"{file}" in said and told in said and "export another: global_step_1" in said, said
        (whole / file).write_bytes(content)
    assert not (tmp_path / "out").exists()
    assert run(capsys, f"checkpoint={tmp_path / 'run'}", f"output={tmp_path / 'out'}", f"model_path={base}")[0] == 0


def flipped(content: bytes) -> bytes:
    """One bit of the last tensor."""
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


def test_what_is_no_checkpoint(base: Path, weights: dict[str, Tensor], tmp_path: Path, capsys: Any) -> None:
    code, said = run(capsys, f"checkpoint={tmp_path}", f"output={tmp_path / 'out'}")
    assert code == 1 and "no checkpoint with a manifest.json here" in said
    code, said = run(capsys, f"checkpoint={tmp_path / 'nowhere'}", "best_metric=x")
    assert code == 2 and all(one in said for one in ("no such folder", "output is not set", "read with step=best only"))
    checkpoint = commit(tmp_path, 1, weights)
    code, said = run(capsys, f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}")
    assert code == 2 and "model_path is not set" in said
    code, said = run(capsys, f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}", "step=1")
    assert code == 2 and "is one checkpoint; leave step out" in said
