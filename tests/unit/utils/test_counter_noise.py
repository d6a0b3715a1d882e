"""Noise from counters: a pure function of them, uniform, and unrelated between neighbours."""

from __future__ import annotations

import numpy as np

from rlhub.utils.counter_noise import random_bits, streams, uniforms

MASK = (1 << 64) - 1


def mixed(state: int) -> int:
    """SplitMix64's finalizer on Python integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_bits_are_those_of_the_definition() -> None:
    gamma = 0x9E3779B97F4A7C15
    state = 0
    for counter in (7, -2, 5):
        state = mixed(((state ^ (counter & MASK)) + gamma) & MASK)
    expected = [mixed((state + (position + 1) * gamma) & MASK) for position in range(4)]
    assert random_bits(streams(7, -2, np.array([5])), 0, 4).tolist() == [expected]
    assert random_bits(streams(7, -2, 5), 2, 2).tolist() == [expected[2:]]
    assert uniforms(streams(7, -2, 5), 4).tolist() == [[(bits >> 11) / 2**53 for bits in expected]]


def test_a_row_depends_on_its_own_counters_only() -> None:
    together = uniforms(streams(1, 2, np.arange(6)), 9)
    assert np.array_equal(together[[4, 1]], uniforms(streams(1, 2, np.array([4, 1])), 9))
    assert np.array_equal(together[:, :3], uniforms(streams(1, 2, np.arange(6)), 3))


def test_uniform_and_uncorrelated_between_neighbours() -> None:
    values = uniforms(streams(3, 1, np.arange(400)), 100)
    assert values.min() >= 0 and values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(2000)
    noise = 5 / np.sqrt(values[1:].size)
    others = {
        "sample": values[1:],
        "step": uniforms(streams(3, 2, np.arange(400)), 100)[:-1],
        "seed": uniforms(streams(4, 1, np.arange(400)), 100)[:-1],
        "swapped": uniforms(streams(1, 3, np.arange(400)), 100)[:-1],
    }
    for name, other in others.items():
        assert abs(np.corrcoef(values[:-1].ravel(), other.ravel())[0, 1]) < noise, name
        for shift in (1, 2):
            assert abs(np.corrcoef(values[:-1, shift:].ravel(), other[:, :-shift].ravel())[0, 1]) < noise, name
