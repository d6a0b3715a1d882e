"""A run saved under one layout goes on under any other: same loss at the next step, and at the one after it, which needs the
optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration import checkpoint_checks as checks
from tests.integration.fsdp_ranks import Ranks

WITHIN, ACROSS = 1e-6, 1e-5  # relative, of losses in float32: one backend, two backends
DENSE = [name for name in checks.LAYOUTS if not name.startswith("ep")]
EXPERTS = ["fsdp on 2", "tp2", "pp2", "ep2", "ep2 dp2"]
LAYOUTS = {"qwen2": DENSE, "qwen3_moe": EXPERTS}
CASES = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]
SOURCES = ("fsdp on 2", "megatron on 1", "tp2", "tp2 pp2", "ep2 dp2")
"""What every layout goes on from, besides itself; a single rank, which is quick, goes on from all."""


@pytest.fixture(scope="module")
def ranks():
    group = Ranks(4, "tests.integration.checkpoint_checks")
    yield group
    group.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

    sizes = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
    configs = {
        "qwen2": Qwen2Config(**sizes, tie_word_embeddings=True),
        "qwen3_moe": Qwen3MoeConfig(**sizes, **experts, tie_word_embeddings=False),
    }
    paths = {}
    for name, config in configs.items():
        torch.manual_seed(7)
        paths[name] = str(tmp_path_factory.mktemp("models") / name)
        model = AutoModelForCausalLM.from_config(config)
        for param in model.parameters():  # away from the zeros and ones of a fresh model
            param.data.add_(torch.randn_like(param) * 0.1)
        model.save_pretrained(paths[name])
    return paths


@dataclass
class Saved:
    """folders: by layout.  losses: of each run that was not interrupted, in the two steps after its save."""

    path: str
    folders: dict[str, str]
    losses: dict[str, list[float]]


@pytest.fixture(scope="module")
def saves(ranks: Ranks, models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    found = {model: Saved(path, {}, {}) for model, path in models.items()}
    for model, layout in CASES:
        saved, folder = found[model], tmp_path_factory.mktemp("saved")
        results = ranks.call(checks.save, layout, saved.path, str(folder), str(folder / "rendezvous"))
        saved.folders[layout], saved.losses[layout] = str(folder), results[0]
    return found


def backend(layout: str) -> str:
    return checks.LAYOUTS[layout][0]


def resume(ranks: Ranks, layout: str, saved: Saved, sources: list[str], place: Path, *, forget: bool) -> dict[str, list[float]]:
    """By source: the losses of two steps, on which all ranks agree."""
    folders = {source: saved.folders[source] for source in sources}
    results = ranks.call(checks.resume, layout, saved.path, folders, forget, str(place / "rendezvous"))
    taking_part = [result for result in results if result]
    assert len(taking_part) == checks.LAYOUTS[layout][1] and all(result == taking_part[0] for result in taking_part)
    return taking_part[0]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_goes_on_from_other_layouts(ranks: Ranks, saves: dict[str, Saved], model: str, layout: str, tmp_path: Path) -> None:
    saved = saves[model]
    sources = [one for one in saved.folders if layout.endswith("on 1") or one == layout or one in SOURCES]
    for source, found in resume(ranks, layout, saved, sources, tmp_path, forget=False).items():
        tolerance = WITHIN if backend(source) == backend(layout) else ACROSS
        assert found == pytest.approx(saved.losses[source], rel=tolerance), f"{source} -> {layout}"


@pytest.mark.parametrize(("model", "layout"), [("qwen2", "fsdp on 1"), ("qwen2", "tp2 dp2"), ("qwen3_moe", "ep2")])
def test_forgotten_moments_are_noticed(ranks: Ranks, saves: dict[str, Saved], model: str, layout: str, tmp_path: Path) -> None:
    """The control: weights alone give the next loss, but not the one after it."""
    saved = saves[model]
    for source, (first, second) in resume(ranks, layout, saved, ["fsdp on 2", "tp2"], tmp_path, forget=True).items():
        assert first == pytest.approx(saved.losses[source][0], rel=ACROSS)
        assert second != pytest.approx(saved.losses[source][1], rel=100 * ACROSS), f"{source} -> {layout}"
