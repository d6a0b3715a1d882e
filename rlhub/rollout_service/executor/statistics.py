"""What generation beside training is measured by.  All names are here; each call of `metrics` speaks of the time since the last.

staleness/mean, p50, p95, max     of the samples taken for training, in versions
staleness/share_<s>               their histogram: the share that was <s> versions behind, the last with all that were more
staleness/beyond_share            share of groups that had tokens beyond the bound when training came to them
staleness/dropped_groups          of these, left out
staleness/masked_token_share      share of the taken tokens that were masked for their age
rollout/accepted_groups           finished and fit to train
rollout/rejected_groups           ended by an episode that returned None or raised Reject
rollout/filtered_groups           finished and turned down by the group filter
rollout/failed_groups             ended by an episode that failed
rollout/timed_out_episodes        episodes given up after their time
rollout/running_groups            in work now
rollout/ready_groups              finished and waiting for training now
rollout/in_flight_share           running / (running + ready)
rollout/capacity                  groups that might be started now
rollout/wasted_token_share        tokens of finished episodes whose groups were rejected, filtered out or dropped
rollout/idle_share                share of the time in which no group was in work
rollout/wait_s                    seconds in which training waited for groups
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from rlhub.rollout_service.executor.episode_groups import Group


@dataclass(slots=True)
class RolloutStatistics:
    """Counts since the last `metrics`.  One thread at a time."""

    counts: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    good_tokens: int = 0
    wasted_tokens: int = 0
    masked_tokens: int = 0
    wait_s: float = 0.0
    _idle_s: float = 0.0
    _idle_since: float | None = field(default_factory=time.monotonic)
    _since: float = field(default_factory=time.monotonic)

    def take(self, group: Group, step: int, *, beyond: bool) -> None:
        """The group will be trained at this step; `beyond`: it has, or had, tokens older than the bound."""
        for trajectory in group.trajectories:
            if any(trajectory.response_mask):
                self.staleness[step - 1 - trajectory.first_version] += 1
        self.good_tokens += group.num_tokens
        self.counts["consumed_groups"] += 1
        self.counts["beyond_groups"] += beyond

    def drop(self, group: Group) -> None:
        """The group was too old."""
        self.counts.update(("consumed_groups", "beyond_groups", "dropped_groups"))
        self.wasted_tokens += group.num_tokens

    def work(self, running: int) -> None:
        """So many groups are in work from now on."""
        if running == 0 and self._idle_since is None:
            self._idle_since = time.monotonic()
        elif running and self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None

    def metrics(self, *, running: int, ready: int, capacity: int) -> dict[str, float]:
        """See the module docstring."""
        now = time.monotonic()
        if self._idle_since is not None:
            self._idle_s, self._idle_since = self._idle_s + now - self._idle_since, now
        counted = ("accepted_groups", "rejected_groups", "filtered_groups", "failed_groups", "timed_out_episodes")
        values = {f"rollout/{name}": float(self.counts[name]) for name in counted} | {
            "rollout/running_groups": float(running),
            "rollout/ready_groups": float(ready),
            "rollout/in_flight_share": running / max(running + ready, 1),
            "rollout/capacity": float(capacity),
            "rollout/wasted_token_share": self.wasted_tokens / max(self.wasted_tokens + self.good_tokens, 1),
            "rollout/idle_share": self._idle_s / max(now - self._since, 1e-9),
            "rollout/wait_s": self.wait_s,
            "staleness/beyond_share": self.counts["beyond_groups"] / max(self.counts["consumed_groups"], 1),
            "staleness/dropped_groups": float(self.counts["dropped_groups"]),
            "staleness/masked_token_share": self.masked_tokens / max(self.masked_tokens + self.good_tokens, 1),
        }
        values |= {f"staleness/{name}": value for name, value in (summary(self.staleness) | shares(self.staleness)).items()}
        self._start_anew(now)
        return values

    def _start_anew(self, now: float) -> None:
        self.counts.clear()
        self.staleness.clear()
        self.good_tokens = self.wasted_tokens = self.masked_tokens = 0
        self.wait_s = self._idle_s = 0.0
        self._since = now


OLDEST_SHARE = 7
"""The last bar of the histogram: with it there is a colour for each."""


def shares(histogram: Counter[int]) -> dict[str, float]:
    """share_<value> of all that is counted, for every value that occurs; values above OLDEST_SHARE count as that one."""
    total = histogram.total()
    found: Counter[int] = Counter()
    for value, count in histogram.items():
        found[min(max(value, 0), OLDEST_SHARE)] += count
    return {f"share_{value}": found[value] / total for value in sorted(found)}


def summary(histogram: Counter[int]) -> dict[str, float]:
    """mean, p50, p95 (nearest rank) and max of a histogram value -> count; nothing of an empty one."""
    total = histogram.total()
    if total == 0:
        return {}
    values = sorted(histogram)
    mean = sum(value * count for value, count in histogram.items()) / total
    return {
        "mean": mean,
        "p50": float(_quantile(histogram, values, total, 50)),
        "p95": float(_quantile(histogram, values, total, 95)),
        "max": float(values[-1]),
    }


def _quantile(histogram: Counter[int], values: list[int], total: int, percent: int) -> int:
    """The smallest value that at least so many percent do not exceed."""
    reached = 0
    for value in values:
        reached += histogram[value]
        if 100 * reached >= percent * total:
            return value
    return values[-1]
