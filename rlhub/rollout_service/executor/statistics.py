"""The metrics of generation during training.  Each call of `metrics` covers the time since the last one.

staleness/mean, p50, p95, max     of the samples taken for training, in versions
staleness/share_<s>               their histogram: the share that was <s> versions behind; the last share includes all older ones
staleness/beyond_share            share of groups that had tokens beyond the bound when training came to them
staleness/dropped_groups          number of these that were dropped
staleness/masked_token_share      share of the taken tokens that were masked for their age
rollout/accepted_groups           groups that finished and may be trained
rollout/rejected_groups           groups that ended because an episode returned None or raised Reject
rollout/filtered_groups           groups that finished and that the group filter refused
rollout/failed_groups             groups that ended because too many of their episodes failed
rollout/lost_groups               finished groups whose tokens were lost with a process, and which are generated again
rollout/timed_out_episodes        episodes that exceeded their time limit
rollout/retried_episodes          episodes that failed and began again; only where there are any
rollout/failed_episodes           episodes that failed for good; only where there are any
rollout/trained_share             share of the latest prompts' samples that trained: others failed, or were dropped for their age
rollout/trained_share_short       the same for the prompts whose responses are shorter than the mean, and
rollout/trained_share_long        for the others: what is lost should not be what is difficult
rollout/trained_share_slope       change of the log-odds of training with one standard deviation more of mean response length,
                                  and rollout/trained_share_slope_se, its standard error
                                  (these five only where samples were lost, over the latest WINDOW prompts)
rollout/running_groups            groups in progress now
rollout/ready_groups              groups that are finished and wait for training now
rollout/in_flight_share           running / (running + ready)
rollout/capacity                  groups that may be started now
rollout/lead                      batches beyond the present step's by which generation may run ahead now
rollout/wasted_token_share        share of tokens of finished episodes whose groups were rejected, filtered out or dropped
rollout/idle_share                share of the time in which no group was in progress
rollout/wait_s                    seconds in which training waited for groups
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhub.agents.trajectory import Sampled, rows_of
from rlhub.rollout_service.executor.episode_groups import Group

WINDOW = 512
"""Prompts over which the trained share is measured."""
NEWTON_STEPS = 50
"""The steps of logistic_slope, each at most 1 in either coefficient; it converges in about 10."""


@dataclass(slots=True, frozen=True)
class EndedPrompt:
    """How many of a prompt's samples trained.  length: mean response length of those whose episodes ended well, in tokens."""

    length: float
    trained: int
    samples: int


@dataclass(slots=True)
class RolloutStatistics:
    """Counts since the last call of `metrics`.  Only one thread may use it at a time."""

    counts: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    good_tokens: int = 0
    wasted_tokens: int = 0
    masked_tokens: int = 0
    wait_s: float = 0.0
    ended: deque[EndedPrompt] = field(default_factory=lambda: deque(maxlen=WINDOW))
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
        self._end(group.trajectories, len(group.row_counts), trained=True)

    def drop(self, group: Group) -> None:
        """Counts a group that was dropped for its age."""
        self.counts.update(("consumed_groups", "beyond_groups", "dropped_groups"))
        self.wasted_tokens += group.num_tokens
        self._end(group.trajectories, len(group.row_counts), trained=False)

    def reject(self, count: str, results: Sequence[Sampled | None], group_size: int) -> None:
        """Counts a group that ended without anything to train, under that name.  Those that failed count in the trained share,
        those that a workflow or a filter turned down do not.  results: of its episodes, None for those without one."""
        self.counts[count] += 1
        self.wasted_tokens += sum(result.num_tokens for result in results if result is not None)
        if count == "failed_groups":
            self._end([result for result in results[:group_size] if result is not None], group_size, trained=False)

    def _end(self, samples: Sequence[Sampled], group_size: int, *, trained: bool) -> None:
        """Counts the samples of a prompt that has ended.  samples: those whose episodes ended well."""
        lengths = [sum(row.response_length for row in rows_of(sample)) for sample in samples]
        mean = sum(lengths) / len(lengths) if lengths else math.nan
        self.ended.append(EndedPrompt(mean, len(samples) if trained else 0, group_size))

    def work(self, running: int) -> None:
        """Sets the number of groups in progress from now on."""
        if running == 0 and self._idle_since is None:
            self._idle_since = time.monotonic()
        elif running and self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None

    def metrics(self, *, running: int, ready: int, capacity: int, lead: float) -> dict[str, float]:
        """Returns the metrics that the module docstring lists."""
        now = time.monotonic()
        if self._idle_since is not None:
            self._idle_s, self._idle_since = self._idle_s + now - self._idle_since, now
        counted = ["accepted_groups", "rejected_groups", "filtered_groups", "failed_groups", "lost_groups", "timed_out_episodes"]
        counted += [name for name in ("retried_episodes", "failed_episodes") if self.counts[name]]
        values = {f"rollout/{name}": float(self.counts[name]) for name in counted} | {
            "rollout/running_groups": float(running),
            "rollout/ready_groups": float(ready),
            "rollout/in_flight_share": running / max(running + ready, 1),
            "rollout/capacity": float(capacity),
            "rollout/lead": lead,
            "rollout/wasted_token_share": self.wasted_tokens / max(self.wasted_tokens + self.good_tokens, 1),
            "rollout/idle_share": self._idle_s / max(now - self._since, 1e-9),
            "rollout/wait_s": self.wait_s,
            "staleness/beyond_share": self.counts["beyond_groups"] / max(self.counts["consumed_groups"], 1),
            "staleness/dropped_groups": float(self.counts["dropped_groups"]),
            "staleness/masked_token_share": self.masked_tokens / max(self.masked_tokens + self.good_tokens, 1),
        }
        values |= {f"staleness/{name}": value for name, value in (summary(self.staleness) | shares(self.staleness)).items()}
        values |= {f"rollout/trained_share{name}": value for name, value in trained_shares(self.ended).items()}
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


def trained_shares(ended: Sequence[EndedPrompt]) -> dict[str, float]:
    """Returns the trained share of these prompts and, by the ends of their names, those of the ones below the mean length and of
    the others, and its slope over the length; an empty mapping where no sample was lost.

    Prompts without a length count in the whole only.
    """
    if all(prompt.trained == prompt.samples for prompt in ended):
        return {}
    shares = {"": _share(ended)}
    known = [prompt for prompt in ended if not math.isnan(prompt.length)]
    mean = sum(prompt.length for prompt in known) / max(len(known), 1)
    short, long = ([one for one in known if (one.length < mean) is below] for below in (True, False))
    if short and long:
        shares |= {"_short": _share(short), "_long": _share(long)}
        slope, error = logistic_slope(*zip(*((one.length, one.trained, one.samples) for one in known), strict=True))
        shares |= {"_slope": slope, "_slope_se": error} if math.isfinite(error) else {}
    return shares


def _share(ended: Sequence[EndedPrompt]) -> float:
    return sum(prompt.trained for prompt in ended) / sum(prompt.samples for prompt in ended)


def logistic_slope(values: Sequence[float], successes: Sequence[int], trials: Sequence[int]) -> tuple[float, float]:
    """Returns the slope of a logistic regression of successes among trials, per standard deviation of `values`, and its standard
    error, which grows with the dispersion of the counts where that is more than binomial.

    The slope is (0, inf) where it is not identified: no success, no failure, or values that are all equal.  A prior of standard
    deviation 10 bounds it where the values separate successes from failures.
    """
    x, k, n = (np.asarray(column, dtype=np.float64) for column in (values, successes, trials))
    if k.sum() in (0, n.sum()) or x.std() == 0:
        return 0.0, math.inf
    design = np.stack([np.ones_like(x), (x - x.mean()) / x.std()], 1)
    prior = np.diag([0.0, 1 / 10**2])
    beta = np.array([math.log(k.sum() / (n.sum() - k.sum())), 0.0])
    for _ in range(NEWTON_STEPS):
        share = 1 / (1 + np.exp(-np.clip(design @ beta, -30, 30)))
        weight = n * share * (1 - share)
        covariance = np.linalg.inv(design.T @ (design * weight[:, None]) + prior)
        beta = beta + np.clip(covariance @ (design.T @ (k - n * share) - prior @ beta), -1, 1)
    dispersion = ((k - n * share) ** 2 / np.maximum(weight, 1e-12)).sum() / max(len(x) - 2, 1)
    return float(beta[1]), float(math.sqrt(covariance[1, 1] * max(dispersion, 1.0)))
