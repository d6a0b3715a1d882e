"""Both CPU engines that hold Hugging Face models take the fast products where there are any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from rlhub.config.model import ModelConfig
from rlhub.engines.training.fsdp.building import BuildPlan, build_sharded
from rlhub.engines.training.fsdp.sharding import Layout
from rlhub.models import products
from rlhub.models.products import FastLinear
from tests.integration.test_hf_engine import hf_engine
from tests.support.tiny_models import save_tiny_model

CPU = torch.device("cpu")


def training_model(folder: Path) -> nn.Module:
    config = ModelConfig(path=str(folder), lora_rank=2, target_modules="all-linear")
    plan = BuildPlan(model=config, kind="policy", dtype=torch.float32, temperature=1.0, trainable=True, seed=0)
    layout = Layout(mesh=None, shard_group=None, shard_rank=0, shard_size=1, replica=0)
    return build_sharded(plan, layout, CPU).model


def rollout_model(folder: Path) -> nn.Module:
    model = hf_engine(folder, load_checkpoint=True)._model
    assert model is not None
    return model


@pytest.mark.parametrize("build", [training_model, rollout_model])
@pytest.mark.parametrize("faster", [True, False])
def test_every_linear_layer_takes_them(
    build: Callable[[Path], nn.Module], faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "onednn_is_faster", lambda: faster)
    save_tiny_model(tmp_path)
    kinds = {type(module) for module in build(tmp_path).modules() if type(module) in (nn.Linear, FastLinear)}
    assert kinds == {FastLinear if faster else nn.Linear}
