"""What a run did with its prompts, checked from the outside: from what training, the ledger and the reward function wrote down.

Nothing here shares code with what is audited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

MOST_SHOWN = 5


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainedGroup:
    """A group as training saw it.  versions: of the tokens that trained, sample after sample, in order."""

    ordinal: int
    step: int
    versions: Sequence[Sequence[int]]

    @property
    def staleness(self) -> int:
        """Of its oldest sample: (step - 1) - version of the first token that trained."""
        return max((self.step - 1 - versions[0] for versions in self.versions if versions), default=0)


def audit(
    *,
    trained: Sequence[TrainedGroup],
    dropped: Iterable[int],
    rejected: Iterable[int],
    unended: Collection[int],
    next_ordinal: int,
    scored: Collection[int],
    bound: int | None,
    first: int = 0,
) -> list[str]:
    """Sentences on what is wrong; none if each prompt below next_ordinal was trained, dropped or rejected exactly once or is
    still to end, nothing was trained unscored or beyond the bound on staleness (None: there is none), and what the reward
    function saw is all accounted for."""
    ends = Counter(group.ordinal for group in trained)
    ends.update(dropped)
    ends.update(rejected)
    drawn = range(first, next_ordinal)
    findings = {
        "ended more than once": [ordinal for ordinal, count in ends.items() if count > 1],
        "ended, but is said to be open": [ordinal for ordinal in unended if ordinal in ends],
        "was drawn, but neither ended nor is open": [o for o in drawn if o not in ends and o not in unended],
        "was never drawn": [ordinal for ordinal in {*ends, *unended, *scored} if ordinal not in drawn],
        "was trained without being scored": [group.ordinal for group in trained if group.ordinal not in scored],
        "was scored and forgotten": [ordinal for ordinal in scored if ordinal not in ends and ordinal not in unended],
    }
    if bound is not None:
        late = [group.ordinal for group in trained if group.staleness > bound]
        findings[f"was trained more than {bound} versions late"] = late
    findings["has tokens whose versions go back"] = [group.ordinal for group in trained if not all(map(rising, group.versions))]
    return [sentence(what, sorted(found)) for what, found in findings.items() if found]


def rising(versions: Sequence[int]) -> bool:
    """Whether no token was written by an older policy than the one before it."""
    return all(one <= next_one for one, next_one in zip(versions, versions[1:], strict=False))


def sentence(what: str, ordinals: Sequence[int]) -> str:
    shown = ", ".join(map(str, ordinals[:MOST_SHOWN]))
    return f"{len(ordinals)} prompts: {what}: {shown}{', ...' if len(ordinals) > MOST_SHOWN else ''}"
