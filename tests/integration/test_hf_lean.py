"""The lean step against the model's own forward: every family, both precisions, padding, compaction, growth, new weights."""

import copy
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.cache_utils import Cache
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from rlhub.engines.rollout.base import GenerationRequest, SamplingParams
from rlhub.engines.rollout.hf import decode, lean
from rlhub.engines.rollout.hf.attention import GROUPED_ATTENTION
from rlhub.engines.rollout.hf.lean import LeanStep, why_not_lean
from rlhub.engines.rollout.hf.step import DecodeStep, ModelStep
from tests.integration.test_hf_engine import hf_engine
from tests.support import rollout_contract as contract
from tests.support.tiny_models import greedy_choices, save_tiny_model, tiny_model

MAX_MODEL_LEN = 200
VOCABULARY = 71
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,  # low, so that the wavelengths lie on both sides of the original context
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2 tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2 untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama with llama3 rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen3, heads wider than hidden": Qwen3Config(**SIZES, head_dim=32),
    "mistral, one key-value head": MistralConfig(**SIZES | {"num_key_value_heads": 1}, sliding_window=None),
}
MANY_STOPS = tuple(range(2, VOCABULARY, 8))  # so that rows leave the batch early
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}


def random_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Biases and norms are random too, so that a lost one is noticed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=GROUPED_ATTENTION, dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.requires_grad_(False).eval()


def keep_precision(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """The family's RMSNorm in the precision of its input: transformers rounds it to float32."""
    norm = type(model.get_decoder().norm)
    monkeypatch.setattr(norm, "forward", lambda self, x: rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon))


class Recorder:
    """A step that keeps the logits it gave."""

    fused: Sequence[Tensor] = ()

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self.logits: list[Tensor] = []

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None) -> Tensor:
        self.logits.append(self._step(tokens, positions, cache, mask))
        return self.logits[-1]


def run(
    model: PreTrainedModel, step: DecodeStep, max_new_tokens: int, prompts: list[list[int]], stops: tuple[int, ...] = ()
) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy completions and the logits of every step."""
    params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, stop_token_ids=stops, ignore_eos=not stops)
    limits = decode.DecodeLimits(max_model_len=MAX_MODEL_LEN, max_prefill_tokens=1000)
    requests = [GenerationRequest(prompt_ids=prompt, seed=0) for prompt in prompts]
    recorder = Recorder(step)
    completions = decode.decode(model, recorder, requests, params, limits)
    return contract.tokens(completions), recorder.logits


def largest_difference(ours: list[Tensor], reference: list[Tensor]) -> float:
    """Relative to the largest logit."""
    assert [logits.shape for logits in ours] == [logits.shape for logits in reference]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(ours, reference, strict=True))


def prompts_of_many_lengths() -> list[list[int]]:
    return [[3 + (7 * i + 5 * j) % 60 for j in range(1 + i % 9)] for i in range(12)]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_logits_are_those_of_the_model(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(CONFIGS[name], dtype)
    if dtype == torch.float64:
        keep_precision(monkeypatch, model)
    monkeypatch.setattr(decode, "FIRST_CAPACITY", 4)
    reference_tokens, reference = run(copy.deepcopy(model), ModelStep(model), 24, prompts_of_many_lengths(), MANY_STOPS)
    assert why_not_lean(model) is None
    tokens, logits = run(model, LeanStep(model, MAX_MODEL_LEN), 24, prompts_of_many_lengths(), MANY_STOPS)
    assert tokens == reference_tokens
    assert len({len(rows) for rows in logits}) > 1, "rows must leave the batch"
    assert largest_difference(logits, reference) < TOLERANCES[dtype]


def test_a_cache_without_padding_that_grows_past_its_first_capacity() -> None:
    model = random_model(CONFIGS["qwen2 tied"], torch.float32)
    prompts, num_tokens = [[5, 6, 7], [8, 9, 3]], decode.FIRST_CAPACITY + 20
    reference_tokens, reference = run(model, ModelStep(copy.deepcopy(model)), num_tokens, prompts)
    tokens, logits = run(model, LeanStep(model, MAX_MODEL_LEN), num_tokens, prompts)
    assert tokens == reference_tokens
    assert len(tokens[0]) == num_tokens
    assert largest_difference(logits, reference) < TOLERANCES[torch.float32]


def test_half_precision_is_as_close_to_float32_as_the_model_is() -> None:
    exact = random_model(CONFIGS["qwen2 tied"], torch.float32)
    half = copy.deepcopy(exact).to(torch.bfloat16)
    prompts = [[5, 6, 7]]
    _, reference = run(exact, ModelStep(exact), 2, prompts)
    _, generic = run(half, ModelStep(copy.deepcopy(half)), 2, prompts)
    _, ours = run(half, LeanStep(half, MAX_MODEL_LEN), 2, prompts)
    errors = [largest_difference([one.float() for one in logits], reference) for logits in (generic, ours)]
    assert errors[1] < 2 * errors[0] < 0.2


@pytest.mark.parametrize("broken", ["rotation", "bias"])
def test_the_comparison_notices_a_wrong_step(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(CONFIGS["llama with biases"], torch.float32)
    _, reference = run(copy.deepcopy(model), ModelStep(model), 2, [[5, 6, 7]])
    if broken == "rotation":
        rotate = lean._rotate
        monkeypatch.setattr(lean, "_rotate", lambda heads, cos, sin: rotate(heads, cos, -sin))
    else:
        add = lean._add_product
        monkeypatch.setattr(lean, "_add_product", lambda hidden, inputs, weight, bias: add(hidden, inputs, weight, None))
    _, logits = run(model, LeanStep(model, MAX_MODEL_LEN), 2, [[5, 6, 7]])
    assert largest_difference(logits, reference) > 100 * TOLERANCES[torch.float32]


def test_there_is_one_copy_of_every_weight() -> None:
    model = random_model(CONFIGS["qwen3, heads wider than hidden"], torch.float32)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    LeanStep(model, MAX_MODEL_LEN)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) and after[name].is_contiguous() for name in before)
    storages = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes() for parameter in after.values()}
    assert sum(storages.values()) == sum(parameter.nbytes for parameter in before.values())


def generate_after_an_update(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Completions of an engine whose weights were exchanged, and what full forwards with the new weights choose for them."""
    save_tiny_model(folder)
    engine = hf_engine(folder, load_checkpoint=True)
    engine.generate(contract.requests()[:1], SamplingParams(max_new_tokens=2))
    model = tiny_model(seed=1)
    engine.update_weights([list(model.named_parameters())], 1)
    tokens = contract.tokens(engine.generate(contract.requests(), SamplingParams(temperature=0.0, max_new_tokens=10)))
    return tokens, choices(model, tokens)


def choices(model: PreTrainedModel, tokens: list[list[int]]) -> list[list[int]]:
    """What the model itself chooses greedily along these completions of the contract's prompts."""
    return [greedy_choices(model, prompt, one)[0] for prompt, one in zip(contract.PROMPTS, tokens, strict=True)]


def test_an_update_reaches_the_fused_weights(tmp_path: Path) -> None:
    ours, reference = generate_after_an_update(tmp_path)
    assert ours == reference


def test_a_stale_copy_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean, "_share", lambda parameters: torch.cat([parameter.detach() for parameter in parameters]))
    ours, reference = generate_after_an_update(tmp_path)
    assert ours != reference


class OtherMLP(Qwen2MLP):
    """A layer type that this package does not know."""


def test_unknown_parts_have_a_reason() -> None:
    def reason(config: PreTrainedConfig) -> str:
        return why_not_lean(random_model(config, torch.float32)) or ""

    assert "none of the families" in reason(Gemma2Config(**SIZES, head_dim=16))
    assert "GELU" in reason(Qwen2Config(**SIZES, hidden_act="gelu"))
    assert "dynamic" in reason(LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}))
    model = random_model(CONFIGS["qwen2 tied"], torch.float32)
    layer: nn.Module = model.get_decoder().layers[1]
    layer.mlp = OtherMLP(model.config)
    assert "OtherMLP" in (why_not_lean(model) or "")


def test_an_engine_with_an_unknown_model_uses_its_forward(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(Qwen2Config(**SIZES, hidden_act="gelu"), torch.float32)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.DEBUG, logger="rlhub.engines.rollout.hf"):
        engine = hf_engine(tmp_path, load_checkpoint=True)
    assert "the model's own forward" in caplog.text
    tokens = contract.tokens(engine.generate(contract.requests(), SamplingParams(temperature=0.0, max_new_tokens=6)))
    model.set_attn_implementation("eager")
    assert tokens == choices(model, tokens)


def test_an_engine_with_a_known_model_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path)
    engine = hf_engine(tmp_path, load_checkpoint=True)

    def refuse(*_: object) -> None:
        raise AssertionError("the model's own forward was used")

    monkeypatch.setattr(ModelStep, "__call__", refuse)
    assert len(engine.generate(contract.requests(), SamplingParams(max_new_tokens=4))) == len(contract.PROMPTS)
