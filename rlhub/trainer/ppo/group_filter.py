"""The user's own filter of groups, algorithm.group_filter=path.py:function.

    def keep(group: ScoredGroup) -> bool: ...

It sees what the samples of one prompt scored and decides whether they may train, beside or instead of dynamic sampling's rule
that they must differ (algorithm.filter_groups).  It runs in every process that runs the training loop, so its answer must follow
from the group alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import ConfigError, RewardError
from rlhub.protocol import Batch
from rlhub.trainer.ppo.scoring import SIGNAL
from rlhub.utils.user_code import load_target

KEY = "algorithm.group_filter"


@dataclass(slots=True, kw_only=True, frozen=True)
class ScoredGroup:
    """One prompt with the numbers of its samples that have a valid score, equally many of each.

    rewards: the scores.  correct: what validation would count as right.  metric: the number that algorithm.filter_groups.metric
    names.  lengths: tokens of the responses.  num_failed: samples without a valid score.
    """

    ordinal: int
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    rewards: tuple[float, ...]
    correct: tuple[bool, ...]
    metric: tuple[float, ...]
    lengths: tuple[int, ...]
    num_failed: int


GroupFilter = Callable[[ScoredGroup], bool]


def load_group_filter(config: PPOConfig) -> GroupFilter | None:
    """Returns the user's function with its answers checked; None where none is set.  Raises ConfigError if it is no function."""
    target = config.algorithm.group_filter
    if target is None:
        return None
    function = load_target(target)
    if not callable(function):
        raise ConfigError(
            f"{KEY}={target}: a {type(function).__name__}; expected a function of a group that returns True or False"
        )

    def keep(group: ScoredGroup) -> bool:
        try:
            answer = function(group)
        except Exception as error:  # boundary to the user's code
            raise RewardError(f"{KEY}={target} failed on prompt {group.ordinal}: {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool):
            raise RewardError(f"{KEY}={target} returned {answer!r:.80} for prompt {group.ordinal}; expected True or False")
        return answer

    return keep


def scored_groups(batch: Batch, n: int) -> Iterator[ScoredGroup]:
    """Yields the groups of a scored batch with n rows side by side for each prompt."""
    columns, objects = batch.batch, batch.non_tensor_batch
    for first in range(0, len(batch), n):
        rows = slice(first, first + n)
        valid = columns["valid"][rows]
        named = {"rewards": "scores", "correct": "correct", "metric": SIGNAL, "lengths": "response_length"}
        numbers = {name: tuple(columns[column][rows][valid].tolist()) for name, column in named.items()}
        yield ScoredGroup(
            ordinal=int(columns["ordinal"][first]),
            data_source=objects["data_source"][first],
            ground_truth=objects["ground_truth"][first],
            extra_info=objects["extra_info"][first],
            num_failed=int((~valid).sum()),
            **numbers,
        )
