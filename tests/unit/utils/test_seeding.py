"""Seeds and noise: words of Philox by its definition, fixed values (a resumed run must draw the same), range, independence."""

from __future__ import annotations

import itertools

import numpy as np

from rlhub.utils.seeding import Purpose, permutation, random_bits, sample_seed, sample_seeds, uniforms

MASK = (1 << 64) - 1
FROZEN = [651907389, 1822588161, 769044998, 1049938050]
ORDER = [3, 1, 4, 2, 0, 5]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """One block of Philox4x64-10, on Python integers, as in the paper."""
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [(second >> 64) ^ counter[1] ^ key[0], second & MASK, (first >> 64) ^ counter[3] ^ key[1], first & MASK]
        key = [(key[0] + 0x9E3779B97F4A7C15) & MASK, (key[1] + 0xBB67AE8584CAA73B) & MASK]
    return counter


def test_the_reference_has_the_authors_known_answers() -> None:
    """Random123's kat_vectors: philox4x64 10."""
    ones = [MASK] * 4
    assert philox([0] * 4, [0, 0]) == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox(ones, ones[:2]) == [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]


def test_bits_are_those_of_the_definition() -> None:
    """The counter's lowest word counts blocks, from 1 on as numpy does; the key is the seed and the purpose."""
    blocks = [philox([block, 7, -2 & MASK, 5], [-3 & MASK, Purpose.TOKEN]) for block in range(1, 4)]
    expected = list(itertools.chain(*blocks))
    assert random_bits(-3, Purpose.TOKEN, 7, -2, 5, count=12).tolist() == expected
    for first, count in ((1, 1), (3, 6), (4, 4), (11, 1)):
        assert random_bits(-3, Purpose.TOKEN, 7, -2, 5, first=first, count=count).tolist() == expected[first : first + count]
    assert uniforms(-3, Purpose.TOKEN, 7, -2, 5, count=12).tolist() == [(word >> 11) / 2**53 for word in expected]


def test_values_are_frozen() -> None:
    assert [sample_seed(1, 0, 0), sample_seed(1, 0, 1), sample_seed(1, 1, 0), sample_seed(2, 0, 0)] == FROZEN
    assert permutation(1, 0, 6).tolist() == ORDER


def test_sample_seeds_are_in_range_and_collide_no_more_than_chance() -> None:
    seeds = [seed for ordinal in range(2500) for seed in sample_seeds(1, ordinal, 8)]
    assert min(seeds) >= 0 and max(seeds) < 2**31
    assert seeds[:48] == [sample_seed(1, ordinal, sample) for ordinal in range(6) for sample in range(8)]
    assert len(set(seeds)) > 19_980  # 20,000 draws of 2**31: 0.1 expected collisions


def test_roles_of_the_numbers_differ() -> None:
    triples = list(itertools.permutations((1, 2, 3)))
    assert len({sample_seed(*triple) for triple in triples}) == 6
    assert len({int(random_bits(1, purpose, 2)[0]) for purpose in Purpose}) == len(Purpose)


def test_permutation_depends_on_seed_and_epoch_only() -> None:
    assert sorted(permutation(1, 0, 100).tolist()) == list(range(100))
    assert permutation(1, 0, 100).tolist() == permutation(1, 0, 100).tolist()
    assert permutation(1, 0, 100).tolist() != permutation(1, 1, 100).tolist() != permutation(2, 1, 100).tolist()


def rows(seed: int, step: int) -> np.ndarray:
    return np.array([uniforms(seed, Purpose.SELECTION, step, sample, count=100) for sample in range(400)])


def test_uniform_and_uncorrelated_between_neighbours() -> None:
    values = rows(3, 1)
    assert values.min() >= 0 and values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(2000)
    noise = 5 / np.sqrt(values[1:].size)
    others = {"sample": values[1:], "step": rows(3, 2)[:-1], "seed": rows(4, 1)[:-1], "swapped": rows(1, 3)[:-1]}
    for name, other in others.items():
        assert abs(np.corrcoef(values[:-1].ravel(), other.ravel())[0, 1]) < noise, name
        for shift in (1, 2):
            assert abs(np.corrcoef(values[:-1, shift:].ravel(), other[:, :-shift].ravel())[0, 1]) < noise, name
