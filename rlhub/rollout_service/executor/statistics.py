"""The metrics of generation during training.  Each call of `metrics` covers the time since the last one.

staleness/mean, p50, p95, max     of the samples taken for training, in versions
staleness/share_<s>               their histogram: the share that was <s> versions behind; the last share includes all older ones
staleness/beyond_share            share of groups that had tokens beyond the bound when training came to them
staleness/dropped_groups          number of these that were dropped
staleness/masked_token_share      share of the taken tokens that were masked for their age
rollout/accepted_groups           groups that finished and may be trained
rollout/rejected_groups           groups that ended because an episode returned None or raised Reject
rollout/filtered_groups           groups that finished and that the group filter refused
rollout/failed_groups             groups that ended because an episode failed
rollout/lost_groups               finished groups whose tokens were lost with a process, and which are generated again
rollout/timed_out_episodes        episodes that exceeded their time limit
rollout/retried_episodes          episodes that failed and began again; only where there are any
rollout/running_groups            groups in progress now
rollout/ready_groups              groups that are finished and wait for training now
rollout/in_flight_share           running / (running + ready)
rollout/capacity                  groups that may be started now
rollout/wasted_token_share        share of tokens of finished episodes whose groups were rejected, filtered out or dropped
rollout/idle_share                share of the time in which no group was in progress
rollout/wait_s                    seconds in which training waited for groups
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from rlhub.rollout_service.executor.episode_groups import Group


@dataclass(slots=True)
class RolloutStatistics:
    """Counts since the last call of `metrics`.  Only one thread may use it at a time."""

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
        """Counts a group that is taken for this training step.  beyond: it has, or had, tokens older than the bound."""
        for sample in group.trajectories:
            if sample.num_tokens:
                self.staleness[step - 1 - sample.first_version] += 1
        self.good_tokens += group.num_tokens
        self.counts["consumed_groups"] += 1
        self.counts["beyond_groups"] += beyond

    def drop(self, group: Group) -> None:
        """Counts a group that was dropped for its age."""
        self.counts.update(("consumed_groups", "beyond_groups", "dropped_groups"))
        self.wasted_tokens += group.num_tokens

    def work(self, running: int) -> None:
        """Sets the number of groups in progress from now on."""
        if running == 0 and self._idle_since is None:
            self._idle_since = time.monotonic()
        elif running and self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None

    def metrics(self, *, running: int, ready: int, capacity: int) -> dict[str, float]:
        """Returns the metrics that the module docstring lists."""
        now = time.monotonic()
        if self._idle_since is not None:
            self._idle_s, self._idle_since = self._idle_s + now - self._idle_since, now
        counted = ["accepted_groups", "rejected_groups", "filtered_groups", "failed_groups", "lost_groups", "timed_out_episodes"]
        counted += ["retried_episodes"] if self.counts["retried_episodes"] else []
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
"""The last bar of the histogram; the report has a colour for each bar up to it."""


def shares(histogram: Counter[int]) -> dict[str, float]:
    """Returns share_<value> of all that is counted, for every value that occurs; values above OLDEST_SHARE count as
    OLDEST_SHARE."""
    total = histogram.total()
    found: Counter[int] = Counter()
    for value, count in histogram.items():
        found[min(max(value, 0), OLDEST_SHARE)] += count
    return {f"share_{value}": found[value] / total for value in sorted(found)}


def summary(histogram: Counter[int]) -> dict[str, float]:
    """Returns mean, p50, p95 (nearest rank) and max of a histogram value -> count; an empty mapping for an empty histogram."""
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
    """Returns the smallest value that at least `percent` percent of the counted values do not exceed."""
    reached = 0
    for value in values:
        reached += histogram[value]
        if 100 * reached >= percent * total:
            return value
    return values[-1]
