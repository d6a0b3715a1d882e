import numpy as np
import pytest
import torch

from rlhub.engines.rollout.base import SamplingParams
from rlhub.engines.rollout.hf.decode import sample_tokens, token_uniforms


def reference_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, top-k, top-p one after another, written as loops over one row."""
    probabilities = np.exp(logits.astype(np.float64) / params.temperature)
    probabilities /= probabilities.sum()
    order = sorted(range(len(logits)), key=lambda i: -probabilities[i])
    if params.top_k > 0:
        for i in order[params.top_k :]:
            probabilities[i] = 0
        probabilities /= probabilities.sum()
    mass, kept = 0.0, set()
    for i in order:
        if mass < params.top_p:
            kept.add(i)
        mass += probabilities[i]
    probabilities = np.array([p if i in kept else 0.0 for i, p in enumerate(probabilities)])
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=4),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.3, top_k=6, top_p=0.8),
    ],
)
def test_frequencies_and_log_probs_are_those_of_the_truncated_distribution(params: SamplingParams) -> None:
    logits = torch.randn(11, generator=torch.Generator().manual_seed(1)) * 2
    expected = reference_distribution(logits.numpy(), params)
    draws = 20_000
    noise = (torch.arange(draws) + 0.5) / draws  # an even grid: frequencies are exact to 1 / draws
    tokens, log_probs = sample_tokens(logits.expand(draws, -1), noise, params)
    frequencies = np.bincount(tokens.numpy(), minlength=11) / draws
    assert np.abs(frequencies - expected).max() < 2 / draws
    np.testing.assert_allclose(log_probs.exp().numpy(), expected[tokens.numpy()], rtol=1e-5)


def test_noise_at_its_ends_selects_a_possible_token() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf], [1e4, 0.0, 0.0, -1e4]])
    for value in (0.0, 1 - 2**-24):
        tokens, log_probs = sample_tokens(logits, torch.full((2,), value), SamplingParams())
        assert torch.isfinite(log_probs).all()
        assert tokens[0] in (1, 2)
        assert tokens[1] == 0


def test_greedy_takes_the_best_token_and_its_log_prob_at_temperature_one() -> None:
    logits = torch.randn(5, 9)
    tokens, log_probs = sample_tokens(logits, torch.rand(5), SamplingParams(temperature=0.0))
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).max(-1).values)


def test_uniforms_depend_on_seed_and_index_alone() -> None:
    seeds = [3, 0, 2**31 - 1, -5]
    whole = token_uniforms(seeds, [0] * 4, 200)
    assert whole.dtype == np.float32 and whole.min() >= 0 and whole.max() < 1
    np.testing.assert_array_equal(token_uniforms(seeds[::-1], [64] * 4, 64), whole[::-1, 64:128])
    np.testing.assert_array_equal(token_uniforms(seeds[1:2], [199], 1), whole[1:2, 199:])
    np.testing.assert_array_equal(token_uniforms(seeds[:2], [7, 30], 5), np.stack([whole[0, 7:12], whole[1, 30:35]]))
    assert len(np.unique(token_uniforms(range(2000), [0] * 2000, 100))) > 0.98 * 200_000
