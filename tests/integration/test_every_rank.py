"""Every rank runs the loop: as under one driver, bit for bit, with and without Ray, and no rank outlives another's death."""

from __future__ import annotations

from pathlib import Path

from tests.support.every_rank import POOLS, RANKS, start_ranks


def test_batches_by_reference_are_those_of_one_driver(tmp_path: Path) -> None:
    """The same checks as through Ray, in five processes of three pools of which each runs its own share."""
    size = RANKS + sum(sum(counts) for counts in POOLS.values())
    ranks = start_ranks(size, "-m", "tests.support.every_rank", log=tmp_path / "log")
    codes = [rank.wait(300) for rank in ranks]
    assert codes == [0] * size, "\n".join((tmp_path / f"log.{rank}").read_text()[-3000:] for rank in range(size))
