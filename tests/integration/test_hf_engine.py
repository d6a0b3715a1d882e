from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.base import GenerationRequest, RolloutEngine, SamplingParams
from rlhub.engines.rollout.hf import cache, decode
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.errors import EngineError
from tests.support import rollout_contract as contract
from tests.support.tiny_models import END_OF_SEQUENCE, Family, greedy_choices, save_tiny_model, sequence_log_probs

MAX_MODEL_LEN = 64


def hf_engine(folder: Path, config: RolloutConfig | None = None, **options: object) -> RolloutEngine:
    engine = build_rollout_engine(
        RolloutSetup(
            config=config or RolloutConfig(name="hf"),
            model=ModelConfig(path=str(folder)),
            device=torch.device("cpu"),
            seed=0,
            **{"max_prompt_length": MAX_MODEL_LEN // 2, "max_response_length": MAX_MODEL_LEN // 2, **options},  # type: ignore[arg-type]
        )
    )
    engine.initialize()
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return save_tiny_model(folder)


@pytest.fixture
def engine(folder: Path, model: PreTrainedModel) -> RolloutEngine:
    engine = hf_engine(folder)
    engine.update_weights([list(model.named_parameters())], 0)
    return engine


def test_contract(engine: RolloutEngine, model: PreTrainedModel) -> None:
    contract.check_generation(engine)
    contract.check_refusals(engine, MAX_MODEL_LEN)
    contract.check_weight_stream(engine, list(model.named_parameters()))
    contract.check_live_weights(engine, dict(model.named_parameters()))
    contract.check_overwriting(engine, dict(model.named_parameters()))
    with torch.no_grad():
        contract.check_standby(engine, dict(model.named_parameters()))
    contract.check_nonfinite_weights(engine)
    contract.check_agenerate(engine)
    contract.check_interruptions(engine, dict(model.named_parameters()), num_tokens=40)


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen2", False), ("qwen3", True), ("llama", False)])
def test_greedy_completions_equal_full_forwards(tmp_path: Path, family: Family, tied: bool) -> None:
    model = save_tiny_model(tmp_path, family, tied=tied)
    engine = hf_engine(tmp_path)
    engine.update_weights([list(model.named_parameters())], 0)
    params = SamplingParams(temperature=0.0, max_new_tokens=20)
    for prompt, completion in zip(contract.PROMPTS, engine.generate(contract.requests(), params), strict=True):
        tokens, log_probs = greedy_choices(model, prompt, completion.token_ids)
        assert completion.token_ids == tokens and len(tokens) == 20
        assert completion.log_probs == pytest.approx(log_probs, abs=1e-5)


def test_log_probs_are_those_of_a_full_forward_at_the_temperature(engine: RolloutEngine, model: PreTrainedModel) -> None:
    for temperature in (1.0, 0.7):
        completions = engine.generate(contract.requests(), SamplingParams(temperature=temperature, max_new_tokens=30))
        for prompt, completion in zip(contract.PROMPTS, completions, strict=True):
            expected = sequence_log_probs(model, prompt, completion.token_ids, temperature)
            assert completion.log_probs == pytest.approx(expected, abs=1e-5)


def many_requests() -> list[GenerationRequest]:
    """Prompts of 1 to 20 tokens, two seeds each, in an order that is not sorted."""
    return [GenerationRequest(prompt_ids=[3 + (7 * i + j) % 60 for j in range(1 + i % 20)], seed=i) for i in range(40)]


def test_batching_compaction_and_growth_do_not_change_completions(
    folder: Path, model: PreTrainedModel, engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_new_tokens=40, stop_token_ids=(END_OF_SEQUENCE, 5, 9))
    whole = engine.generate(many_requests(), params)
    assert len({len(completion.token_ids) for completion in whole}) > 10, "lengths must differ for rows to leave the batch"
    monkeypatch.setattr(decode, "FIRST_CAPACITY", 2)
    small = hf_engine(folder, RolloutConfig(name="hf", max_num_seqs=7, max_num_batched_tokens=30))
    small.update_weights([list(model.named_parameters())], 0)
    parts = small.generate(many_requests(), params)
    monkeypatch.setattr(decode, "KEEP_FRACTION", 0.0)
    uncompacted = engine.generate(many_requests(), params)
    for other in (parts, uncompacted):
        assert contract.tokens(other) == contract.tokens(whole)
        for one, two in zip(other, whole, strict=True):
            assert one.log_probs == pytest.approx(two.log_probs, abs=1e-5)
            assert one.finish_reason == two.finish_reason


def test_the_test_above_notices_rows_that_get_mixed_up(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_new_tokens=40, stop_token_ids=(END_OF_SEQUENCE, 5, 9))
    whole = engine.generate(many_requests(), params)
    keep = cache.BufferLayer.keep
    monkeypatch.setattr(cache.BufferLayer, "keep", lambda self, rows, first: keep(self, rows.flip(0), first))
    assert contract.tokens(engine.generate(many_requests(), params)) != contract.tokens(whole)


def test_completions_end_at_max_model_len(engine: RolloutEngine) -> None:
    prompts = [[5] * (MAX_MODEL_LEN - 3), [7] * 4]
    completions = engine.generate(
        [GenerationRequest(prompt_ids=prompt, seed=1) for prompt in prompts], SamplingParams(max_new_tokens=10)
    )
    assert [len(completion.token_ids) for completion in completions] == [3, 10]
    assert [completion.finish_reason for completion in completions] == ["length", "length"]


def test_ignore_eos_runs_on(engine: RolloutEngine) -> None:
    every_token = tuple(range(71))
    stopping = engine.generate(contract.requests(), SamplingParams(max_new_tokens=5, stop_token_ids=every_token))
    assert {len(completion.token_ids) for completion in stopping} == {1}
    params = SamplingParams(max_new_tokens=5, stop_token_ids=every_token, ignore_eos=True)
    assert {len(completion.token_ids) for completion in engine.generate(contract.requests(), params)} == {5}


def test_building_leaves_the_random_state_and_needs_an_update(folder: Path, model: PreTrainedModel) -> None:
    torch.manual_seed(11)
    state = torch.get_rng_state()
    engine = hf_engine(folder)
    assert torch.equal(torch.get_rng_state(), state)
    assert engine.version == -1
    with pytest.raises(EngineError, match="update_weights"):
        engine.generate(contract.requests(), SamplingParams(max_new_tokens=2))


def test_load_checkpoint_generates_at_once(folder: Path, model: PreTrainedModel) -> None:
    engine = hf_engine(folder, load_checkpoint=True)
    completion = engine.generate(contract.requests()[:1], SamplingParams(temperature=0.0, max_new_tokens=8))[0]
    assert completion.token_ids == greedy_choices(model, contract.PROMPTS[0], completion.token_ids)[0]
    assert completion.versions == [-1] * 8


def test_a_weight_of_another_shape_is_refused_by_name(engine: RolloutEngine, model: PreTrainedModel) -> None:
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    weights["model.norm.weight"] = torch.ones(3)
    with pytest.raises(EngineError, match="model.norm.weight"):
        engine.update_weights([list(weights.items())], 1)


def test_tensor_parallelism_and_sliding_windows_are_refused(folder: Path, model: PreTrainedModel) -> None:
    with pytest.raises(EngineError, match="tensor_model_parallel_size"):
        hf_engine(folder, RolloutConfig(name="hf", tensor_model_parallel_size=2))
    override = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    engine = build_rollout_engine(
        RolloutSetup(
            config=RolloutConfig(name="hf"),
            model=ModelConfig(path=str(folder), override_config=override),
            device=torch.device("cpu"),
            seed=0,
            max_prompt_length=32,
            max_response_length=32,
        )
    )
    with pytest.raises(EngineError, match="sliding_attention"):
        engine.initialize()
