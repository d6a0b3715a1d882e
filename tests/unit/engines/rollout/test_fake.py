import pytest
import torch

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.base import GenerationRequest, RolloutEngine, SamplingParams, Shaping, check_requests
from rlhub.engines.rollout.fake import FakeEngine
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.errors import RequestError
from tests.support import rollout_contract as contract

WEIGHTS = {f"layer.{i}.weight": torch.randn(3, 2) for i in range(4)}


def fake_engine() -> RolloutEngine:
    engine = build_rollout_engine(
        RolloutSetup(
            config=RolloutConfig(name="fake"),
            model=ModelConfig(),
            device=torch.device("cpu"),
            seed=0,
            max_prompt_length=20,
            max_response_length=20,
        )
    )
    engine.initialize()
    engine.update_weights([list(WEIGHTS.items())], 0)
    return engine


def test_contract() -> None:
    contract.check_generation(fake_engine())
    contract.check_refusals(fake_engine(), max_model_len=40)
    contract.check_weight_stream(fake_engine(), list(WEIGHTS.items()))
    contract.check_live_weights(fake_engine(), WEIGHTS)
    contract.check_overwriting(fake_engine(), WEIGHTS)
    contract.check_agenerate(fake_engine())


def test_it_refuses_ids_outside_the_vocabulary_it_is_given() -> None:
    engine = slow_engine(vocab_size=25)
    engine.update_weights([list(WEIGHTS.items())], 0)
    contract.check_refusals(engine, max_model_len=100)
    contract.check_agenerate(engine)
    engine.shutdown()


def slow_engine(step_s: float = 0.002, vocab_size: int | None = None) -> FakeEngine:
    return FakeEngine(
        RolloutSetup(
            config=RolloutConfig(),
            model=ModelConfig(),
            device=torch.device("cpu"),
            seed=0,
            max_prompt_length=40,
            max_response_length=60,
        ),
        step_s=step_s,
        vocab_size=vocab_size,
    )


def test_requests_are_interrupted_between_two_steps() -> None:
    engine = slow_engine()
    contract.check_interruptions(engine, WEIGHTS)
    engine.shutdown()


def test_the_engine_keeps_its_own_copy_of_the_weights() -> None:
    engine = fake_engine()
    source = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    engine.update_weights([list(source.items())], 1)
    source["layer.0.weight"].zero_()
    assert torch.equal(next(engine.live_weights()).tensor, WEIGHTS["layer.0.weight"])


def test_what_shapes_the_distribution_is_refused_by_name_with_the_engine_that_has_it() -> None:
    request, shaping = GenerationRequest(prompt_ids=[3, 4], seed=0), Shaping(min_tokens=3)
    with pytest.raises(RequestError, match=r"min_tokens: this engine samples by .* alone; rollout.name=vllm has it") as refused:
        check_requests([request], SamplingParams(shaping=shaping), max_model_len=10)
    assert refused.value.param == "min_tokens"
    check_requests([request], SamplingParams(shaping=shaping), max_model_len=10, shapes=True)
    with pytest.raises(RequestError, match="logit_bias has token id 99"):
        biased = SamplingParams(shaping=Shaping(logit_bias=((99, 1.0),)))
        check_requests([request], biased, max_model_len=10, vocab_size=50, shapes=True)
