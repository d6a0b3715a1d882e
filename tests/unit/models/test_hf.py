from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Gemma2Config, GptOssConfig, PreTrainedConfig

from rlhub.config.sections.training import ModelConfig
from rlhub.errors import EngineError
from rlhub.models.hf import ModelKind, build_model
from rlhub.models.packed_attention import PACKED_ATTENTION, plan_attention
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


TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CAPPED = Gemma2Config(
    **TINY, num_key_value_heads=1, head_dim=8, attn_logit_softcapping=0.5, initializer_range=0.5, pad_token_id=0
)
SINKS = GptOssConfig(**TINY, num_key_value_heads=1, head_dim=8, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0)


@pytest.mark.parametrize("config", [CAPPED, SINKS], ids=["capped", "sinks"])
def test_scores_that_a_model_changes_are_computed_or_refused(tmp_path: Path, config: PreTrainedConfig) -> None:
    """A value model without packing equals transformers' own eager attention; packed rows are refused with the remedy."""
    config.num_labels = 1
    torch.manual_seed(0)
    reference = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path), enable_gradient_checkpointing=False)
    ids = torch.randint(1, 32, (1, 6))
    positions = torch.arange(6)[None]

    def states(attention: str | None, **options: object) -> torch.Tensor:
        built = build_model(settings, "value", dtype=torch.float32, attention=attention, seed=0).eval()
        return built.base_model(input_ids=ids, position_ids=positions, use_cache=False, **options).last_hidden_state

    expected = reference.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    torch.testing.assert_close(states(None), expected)
    with pytest.raises(EngineError, match="use_remove_padding=False"):
        states(PACKED_ATTENTION, packing=plan_attention([6], torch.device("cpu")))
    if config is CAPPED:  # the control: transformers computes it by sdpa without the cap and without a word
        assert (states("sdpa") - expected).abs().max() > 1e-4
