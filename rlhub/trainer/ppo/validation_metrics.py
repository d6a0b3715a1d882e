"""The numbers of a validation: pass@k, and the mean, best, worst and majority of a prompt's samples, per data source.

- `val/pass@k`, `val/<source>/pass@k`: the unbiased chance that one of k samples is right, which takes k of the n samples without
  replacement.
- `val-core/<source>/<variable>/...` and `val-aux/<source>/<variable>/...`, under the names that the field's dashboards read
  (verl's process_validation_metrics): `mean@n` and `std@n` of a prompt's n samples; `best@k`, `worst@k` and `maj@k`, each with
  `/mean` and `/std`, of k samples drawn from them with replacement (bootstrap, NUM_DRAWS draws).  All are averages over prompts.
  k is 2, 4, 8 ... below n, and n.

A variable is the reward, or a number that the reward function returns beside its score.  val-core has mean, best and majority at
k = n of the main variable, which is `acc` where the reward function returns one and else `reward`; val-aux has the rest.  The
majority is the score of the most frequent prediction, which the reward function returns as `pred`; without it there is none.

Samples without a valid score count only in lengths and in val/reward/num_failed, and a prompt with fewer than k valid samples
is left out of pass@k, best@k, worst@k and maj@k, of which it says nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhub.rewards.base import FAILED, FAILED_SHARE

CORRECT_ABOVE = 0.5  # of the score, where the scorer returns no "acc" of its own
REWARD, ACCURACY, PREDICTION = "reward", "acc", "pred"
NUMBERS = (bool, int, float, np.bool_, np.number)
NUM_DRAWS = 1000
"""Bootstrap draws: the error of a mean of numbers between 0 and 1 is at most 0.5 / sqrt(1000) = 0.016 a prompt."""
SEED = 42
"""Seed of the draws: the same samples give the same metrics, whenever they are validated."""


@dataclass(slots=True, kw_only=True)
class ScoredSamples:
    """Holds samples of some prompts, n of each side by side, all (rows,).

    details: what the scorer returned beside the score, None where a row has no such entry.  failures: reward/num_failed and its
    kinds.
    """

    scores: np.ndarray
    correct: np.ndarray
    valid: np.ndarray
    lengths: np.ndarray
    details: dict[str, np.ndarray] = field(default_factory=dict)
    failures: dict[str, float] = field(default_factory=dict)


def joined(parts: Sequence[ScoredSamples]) -> ScoredSamples:
    """Returns the samples of all parts in order; a detail that one part lacks is None in its rows, and failures add up."""
    scores, correct, valid, lengths = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("scores", "correct", "valid", "lengths")
    )
    failures: Counter[str] = Counter()
    for part in parts:
        failures.update({name: count for name, count in part.failures.items() if name.startswith(FAILED)})
    details = {
        name: np.concatenate([part.details.get(name, np.full(len(part.scores), None)) for part in parts])
        for name in dict.fromkeys(name for part in parts for name in part.details)
    }
    return ScoredSamples(scores=scores, correct=correct, valid=valid, lengths=lengths, details=details, failures=dict(failures))


def validation_metrics(samples: ScoredSamples, sources: Sequence[str], n: int | Sequence[int]) -> dict[str, float]:
    """Returns every metric of one validation.  sources: one per prompt.  n: the samples of each prompt, equally many for those of
    a source.  What needs a valid sample and has none is left out."""
    counts = np.broadcast_to(n, len(sources))
    places = np.arange(counts.max(initial=1)) < counts[:, None]
    correct, valid = np.zeros_like(places), np.zeros_like(places)
    correct[places], valid[places] = samples.correct, samples.valid
    counted = samples.scores[samples.valid].astype(np.float64)
    metrics = {
        **pass_metrics("val", correct, valid),
        **({"val/reward/mean": float(counted.mean())} if len(counted) else {}),
        "val/response_length/mean": float(samples.lengths.mean()),
        "val/num_prompts": float(len(correct)),
    }
    for source in sorted(set(sources)):
        prompts = np.array([one == source for one in sources])
        own_n = int(counts[prompts][0])
        metrics |= pass_metrics(f"val/{source}", correct[prompts, :own_n], valid[prompts, :own_n])
        metrics |= source_metrics(source, samples, prompts.repeat(counts), own_n)
    return metrics | failure_metrics(samples)


def failure_metrics(samples: ScoredSamples) -> dict[str, float]:
    """Returns val/reward/num_failed, the same of each kind of failure, and val/reward/failed_share of all samples."""
    share = samples.failures.get(FAILED, 0.0) / max(len(samples.scores), 1)
    return {f"val/{name}": float(count) for name, count in sorted(samples.failures.items())} | {f"val/{FAILED_SHARE}": share}


# --- right or wrong --------------------------------------------------------------------------------------------------------


def accuracy(details: Mapping[str, np.ndarray], scores: np.ndarray) -> np.ndarray:
    """Returns (rows,) float64: the scorer's own "acc" where it gives one, else 1 where the score is above 0.5."""
    default = (scores > CORRECT_ABOVE).astype(np.float64)
    own = details.get(ACCURACY)
    if own is None:
        return default
    return np.array([one if value is None else float(value) for one, value in zip(default, own, strict=True)])


def correctness(details: Mapping[str, np.ndarray], scores: np.ndarray) -> np.ndarray:
    """Returns (rows,) bool: whether a sample is right, by the scorer's own "acc" where it gives one, else by its score."""
    return accuracy(details, scores) > CORRECT_ABOVE


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the unbiased chance that one of k samples is right: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv
    2107.03374)."""
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def powers_up_to(limit: int) -> list[int]:
    """Returns 1, 2, 4, ... and the limit itself."""
    return sorted({1 << i for i in range(limit.bit_length()) if 1 << i <= limit} | {limit})


def pass_metrics(prefix: str, correct: np.ndarray, valid: np.ndarray) -> dict[str, float]:
    """Returns prefix/pass@k for k = 1, 2, 4, ... n, each over the prompts that have k valid samples; none where no prompt has.

    correct, valid: (prompts, n) bool.
    """
    counts = list(zip(valid.sum(1).tolist(), (correct & valid).sum(1).tolist(), strict=True))
    found = {k: [pass_at_k(n, c, k) for n, c in counts if n >= k] for k in powers_up_to(correct.shape[1])}
    return {f"{prefix}/pass@{k}": float(np.mean(chances)) for k, chances in found.items() if chances}


# --- mean, best, worst and majority of k -----------------------------------------------------------------------------------


def source_metrics(source: str, samples: ScoredSamples, rows: np.ndarray, n: int) -> dict[str, float]:
    """Returns val-core/<source>/... and val-aux/<source>/... of the rows of one data source, (all rows,) bool."""

    def of_source(column: np.ndarray) -> np.ndarray:
        return np.asarray(column[rows].reshape(-1, n))

    valid = of_source(samples.valid)
    votes = None
    if PREDICTION in samples.details:
        predictions = of_source(samples.details[PREDICTION])
        votes = ballots(predictions) if any(one is not None for one in predictions[valid]) else None
    found = {}
    for variable, column in variables(samples).items():
        values = of_source(column)
        if metrics := sample_metrics(values, valid & np.isfinite(values), votes):
            found[variable] = metrics
    core = ACCURACY if ACCURACY in found else REWARD
    return {
        f"{_section(variable == core, name, n)}/{source}/{variable}/{name}": value
        for variable, metrics in found.items()
        for name, value in metrics.items()
    }


def _section(is_core: bool, name: str, n: int) -> str:
    kind, _, size = name.partition("/")[0].partition("@")
    return "val-core" if is_core and kind in ("mean", "best", "maj") and int(size) == n else "val-aux"


def variables(samples: ScoredSamples) -> dict[str, np.ndarray]:
    """Returns the reward and every number that the scorer returned beside it, (rows,) float64, NaN where a row has none."""
    found = {
        name: np.array([np.nan if value is None else float(value) for value in column])
        for name, column in samples.details.items()
        if name != PREDICTION and all(value is None or isinstance(value, NUMBERS) for value in column)
    }
    if ACCURACY in found:
        found[ACCURACY] = accuracy(samples.details, samples.scores)
    return found | {REWARD: samples.scores.astype(np.float64)}


def ballots(predictions: np.ndarray) -> np.ndarray:
    """Returns predictions of any shape as numbers from 0 on, equal ones for equal texts; a missing one is a vote of its own."""
    texts = [str(one) for one in predictions.ravel()]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return np.array([numbers[text] for text in texts], dtype=np.int64).reshape(predictions.shape)


def sample_metrics(values: np.ndarray, valid: np.ndarray, votes: np.ndarray | None) -> dict[str, float]:
    """Returns mean@n, std@n, best@k/mean ... of one variable, averaged over the prompts that have what each needs.

    values float64, valid bool, votes int64 or None: (prompts, n).
    """
    n = valid.shape[1]
    generator = np.random.default_rng(SEED)
    found: dict[str, list[float]] = defaultdict(list)
    for prompt, counted in enumerate(valid):
        own = values[prompt, counted]
        if len(own):
            found[f"mean@{n}"].append(own.mean())
        if len(own) and n > 1:
            found[f"std@{n}"].append(own.std())
        for k in powers_up_to(n)[1:]:
            if k <= len(own):
                cast = votes[prompt, counted] if votes is not None else None
                for kind, drawn in resampled(own, cast, k, generator).items():
                    found[f"{kind}@{k}/mean"].append(drawn.mean())
                    found[f"{kind}@{k}/std"].append(drawn.std())
    return {name: float(np.mean(numbers)) for name, numbers in found.items()}


def resampled(values: np.ndarray, votes: np.ndarray | None, k: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the best, the worst and, with votes, the majority's value in each draw of k samples, (NUM_DRAWS,) each.

    values float64, votes int64: (samples,) of one prompt.
    """
    draws = generator.integers(len(values), size=(NUM_DRAWS, k))
    taken = values[draws]
    found = {"best": taken.max(1), "worst": taken.min(1)}
    if votes is not None:
        found["maj"] = taken[np.arange(NUM_DRAWS), first_of_majority(votes[draws])]
    return found


def first_of_majority(votes: np.ndarray) -> np.ndarray:
    """Returns for each row of votes, (draws, k) int64, the place of the first vote for what most votes are for; of equally
    frequent ones the one that was voted for first."""
    rows, width = np.arange(len(votes))[:, None], int(votes.max()) + 1
    counts = np.bincount((rows * width + votes).ravel(), minlength=len(votes) * width).reshape(-1, width)
    return np.asarray(counts[rows, votes].argmax(1))
