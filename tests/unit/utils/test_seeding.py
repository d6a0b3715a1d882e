"""Seeds: fixed values (a resumed run of another version must draw the same noise), range, spread."""

from __future__ import annotations

import numpy as np

from rlhub.utils.seeding import permutation, sample_seed, sample_seeds

FROZEN = [1489305978, 908839664, 733647653, 212563560]


def test_values_are_frozen() -> None:
    assert [sample_seed(1, 0, 0), sample_seed(1, 0, 1), sample_seed(1, 1, 0), sample_seed(2, 0, 0)] == FROZEN


def test_range_and_no_more_collisions_than_chance() -> None:
    ordinals, samples = np.divmod(np.arange(20_000), 8)
    seeds = sample_seeds(1, ordinals, samples)
    assert seeds.min() >= 0 and seeds.max() < 2**31 and seeds.dtype == np.int64
    assert seeds.tolist()[:50] == [sample_seed(1, int(o), int(s)) for o, s in zip(ordinals[:50], samples[:50], strict=True)]
    assert len(set(seeds.tolist())) > 19_980  # 20,000 draws of 2**31: 0.1 expected collisions


def test_roles_of_the_numbers_differ() -> None:
    assert len({sample_seed(a, b, c) for a, b, c in ((1, 2, 3), (3, 2, 1), (2, 1, 3), (1, 3, 2), (2, 3, 1), (3, 1, 2))}) == 6


def test_permutation_depends_on_seed_and_epoch_only() -> None:
    assert sorted(permutation(1, 0, 100).tolist()) == list(range(100))
    assert permutation(1, 0, 100).tolist() == permutation(1, 0, 100).tolist()
    assert permutation(1, 0, 100).tolist() != permutation(1, 1, 100).tolist() != permutation(2, 1, 100).tolist()
