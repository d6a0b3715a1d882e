from pathlib import Path

import pytest
import torch

from rlhub.config.sections.training import ModelConfig
from rlhub.models.hf import ModelKind, build_model
from tests.support.tiny_models import save_tiny_model


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_a_padding_token_that_was_written_trains_like_any_other(tmp_path: Path, kind: ModelKind) -> None:
    pad = save_tiny_model(tmp_path, tied=False).config.pad_token_id
    config = ModelConfig(path=str(tmp_path), enable_gradient_checkpointing=False)
    model = build_model(config, kind, dtype=torch.float32, attention="sdpa", seed=0)
    ids = torch.tensor([[5, pad, 7, pad, 9]])
    weight = model.get_input_embeddings().weight
    model.base_model(input_ids=ids, use_cache=False).last_hidden_state.square().sum().backward()

    looked_up = weight.detach()[ids].requires_grad_()
    model.base_model(inputs_embeds=looked_up, use_cache=False).last_hidden_state.square().sum().backward()
    assert looked_up.grad is not None and weight.grad is not None
    expected = torch.zeros_like(weight).index_add(0, ids[0], looked_up.grad[0])
    assert expected[pad].norm() > 0
    torch.testing.assert_close(weight.grad, expected)
