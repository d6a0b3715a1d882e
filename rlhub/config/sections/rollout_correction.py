"""Section `algorithm.rollout_correction`: corrects the gap between the policy that sampled (mu) and the one that trains (pi).

The names of the rejection rules and the spelling of thresholds ("lo_hi") are the field's, so that established command lines
work.  This file turns the spellings into numbers; the maths is in `rlhub.algorithms.correction`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rlhub.config.schema import PositiveFloat
from rlhub.registry import suggest

KEY = "algorithm.rollout_correction"
RATIO_RULES = ("token_k1", "seq_sum_k1", "seq_mean_k1")
"""Rejection rules whose threshold is a band of probability ratios mu / pi_old."""
DIVERGENCE_RULES = (
    "token_k2", "token_k3", "seq_sum_k2", "seq_sum_k3", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
"""Rejection rules whose threshold is the largest divergence, in nats."""


@dataclass(slots=True, kw_only=True)
class RolloutCorrectionConfig:
    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights pi_old / mu on the loss: of each token, or of the sequence (less bias, more variance); null: none."""
    rollout_is_threshold: float | str = 2.0
    """A number truncates larger weights to it (TIS); a band such as "0.5_5.0" sets weights outside it to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch, so that they change the step's direction rather than its size."""
    rollout_rs: list[str] | None = None
    """Rejection rules, one or several; tokens or sequences that fail any of them leave the policy loss: token_k1, token_k2,
    token_k3, seq_sum_k1 ... seq_mean_k3, seq_max_k2, seq_max_k3 (k1 bounds the ratio mu / pi_old, k2 and k3 a divergence).
    null: none."""
    rollout_rs_threshold: list[str] | None = None
    """One threshold for all rules, or one for each: for k1 a band "0.5_2.0" (a number c means 1/c to c), for k2 and k3 the
    largest divergence."""
    bypass_mode: bool = False
    """Use the rollout's log-probs as the old ones, which saves a forward pass; the loss's own ratio is then pi / mu."""
    m2po_threshold: PositiveFloat | None = None
    """M2PO: largest mean of log(pi_old / mu)^2 over the tokens that a trust region would hold back; the tokens of the largest
    values leave the loss until it is reached. The paper uses 0.04; null: off."""
    proximal: Literal["old_log_probs", "a3po"] = "old_log_probs"
    """Policy that the loss clips against: old_log_probs, from a forward pass of its own, or a3po, without that pass, an
    interpolation between the rollout's and the current log-probs by the samples' staleness."""

    mismatch_warn: PositiveFloat | None = None
    """Warn where mismatch/kl of a step's newest tokens, in nats a token, exceeds this; null: 0.001 where trainer and rollout
    engine compute in float32 (usual 1e-8 to 1e-5), else 0.1 (usual 1e-3 to 0.02), none with top_p or top_k."""
    mismatch_stop: PositiveFloat | None = None
    """End the run where mismatch/kl exceeds this; null: 0.1 in float32, else 1, none with top_p or top_k. Both bounds are
    raised by 0.5 for each policy version by which a step's newest tokens are stale (trainer.max_staleness)."""

    @property
    def in_update(self) -> bool:
        """True where the update computes weights and rejection from the current log-probs."""
        return self.bypass_mode or self.proximal != "old_log_probs"

    @property
    def active(self) -> bool:
        """True where tokens are weighted or rejected."""
        return self.rollout_is is not None or bool(self.rollout_rs) or self.m2po_threshold is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits a weight or ratio (lower <= x <= upper; lower None: truncate at upper) or a divergence (x <= upper)."""

    lower: float | None
    upper: float


def weight_bounds(threshold: float | str) -> Bounds:
    """Returns the bounds that `rollout_is_threshold` spells.  Raises ValueError that says what to write."""
    lower, upper = _split(threshold)
    if lower is None and upper < 1:
        raise ValueError(
            f"got {threshold}: truncation below 1 would shrink even the weights of tokens on which both policies agree; give a "
            'number of at least 1 (2.0 is usual), or a band with decimal points such as "0.5_5.0" (0.5_5 is read as 0.55)'
        )
    return Bounds(lower=lower, upper=upper)


def rejection_bounds(rules: list[str] | None, thresholds: list[str] | None) -> dict[str, Bounds]:
    """Returns the bounds of each rule, in the user's order; {} without rules.  Raises ValueError that says what to write."""
    names = list(dict.fromkeys(_items(rules)))
    for name in names:
        if name not in RATIO_RULES + DIVERGENCE_RULES:
            known = RATIO_RULES + DIVERGENCE_RULES
            raise ValueError(f"no rejection rule {name!r}{suggest(name, known)}; known: {', '.join(known)}")
    values = _items(thresholds)
    if names and len(values) not in (1, len(names)):
        example = ",".join("0.5_2.0" if name in RATIO_RULES else "0.01" for name in names)
        raise ValueError(
            f"got {len(values)} thresholds for {len(names)} rules; give one for all or one each, e.g. '\"{example}\"'"
        )
    return {
        name: _rule_bounds(name, value) for name, value in zip(names, values * (len(names) // max(len(values), 1)), strict=True)
    }


def problems(config: RolloutCorrectionConfig) -> list[str]:
    """Returns the problems of this section alone."""
    found = []
    try:
        weight_bounds(config.rollout_is_threshold)
    except ValueError as error:
        found.append(f"{KEY}.rollout_is_threshold: {error}")
    if config.rollout_rs and not config.rollout_rs_threshold:
        found.append(
            f"{KEY}.rollout_rs={','.join(config.rollout_rs)} needs {KEY}.rollout_rs_threshold: "
            'a band of ratios such as "0.5_2.0" for k1, the largest divergence such as 0.01 for k2 and k3'
        )
    elif config.rollout_rs:
        try:
            rejection_bounds(config.rollout_rs, config.rollout_rs_threshold)
        except ValueError as error:
            found.append(f"{KEY}.rollout_rs, rollout_rs_threshold: {error}")
    warn, stop = config.mismatch_warn, config.mismatch_stop
    if warn is not None and stop is not None and warn > stop:
        found.append(f"{KEY}.mismatch_warn={warn:g} is above {KEY}.mismatch_stop={stop:g}: the run would end before it warns")
    return [*found, *_in_update_problems(config)]


def notes(config: RolloutCorrectionConfig) -> list[str]:
    """Returns notes on settings that are allowed and may surprise."""
    if config.proximal == "old_log_probs":
        return []
    proximal = f"{KEY}.proximal={config.proximal}"
    found = [
        f"{proximal}: samples of a synchronous run are from the newest policy, whose proximal policy is the current one: no clip"
    ]
    if config.rollout_is is None:
        found.append(
            f"{proximal} without {KEY}.rollout_is: its loss is meant to carry the weight pi_prox / mu (rollout_is=token)"
        )
    return found


def _in_update_problems(config: RolloutCorrectionConfig) -> list[str]:
    """Returns the problems of corrections that need the whole batch, where the log-ratio exists micro-batch by micro-batch."""
    if not config.in_update:
        return []
    switch = "bypass_mode=true" if config.bypass_mode else f"proximal={config.proximal}"
    why = f"needs the whole batch's log-ratios before the update, which {KEY}.{switch} knows only inside it; turn one of them off"
    found = []
    if config.bypass_mode and config.proximal != "old_log_probs":
        found.append(
            f"{KEY}.bypass_mode=true and {KEY}.proximal={config.proximal} both say what the old log-probs are; choose one"
        )
    if config.rollout_is is not None and config.rollout_is_batch_normalize:
        found.append(f"{KEY}.rollout_is_batch_normalize=true {why}")
    if config.m2po_threshold is not None:
        found.append(f"{KEY}.m2po_threshold={config.m2po_threshold} {why}")
    return found


def _items(values: list[str] | None) -> list[str]:
    """Returns the entries of a list whose items may themselves be lists, separated by commas."""
    return [part.strip() for value in values or () for part in str(value).split(",") if part.strip()]


def _split(threshold: float | str) -> tuple[float | None, float]:
    """Returns (lower, upper) of "lo_hi", or (None, number) of a number.  Raises ValueError unless 0 < lower <= upper."""
    parts = str(threshold).strip().split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(0 < number < math.inf for number in numbers) or numbers != sorted(numbers):
        raise ValueError(f'got {threshold!r}, expected a positive number such as 2.0 or a band "lo_hi" with 0 < lo <= hi')
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _rule_bounds(name: str, threshold: str) -> Bounds:
    """Returns the bounds that one rule's threshold spells."""
    lower, upper = _split(threshold)
    if name in DIVERGENCE_RULES:
        if lower is not None:
            raise ValueError(f"{name}: got the band {threshold!r}, expected one number, the largest divergence that is kept")
        return Bounds(lower=None, upper=upper)
    if lower is None and upper < 1:
        raise ValueError(
            f"{name}: got {threshold}; a number c keeps ratios from 1/c to c and must be at least 1; "
            'write a band with decimal points, such as "0.5_2.0"'
        )
    return Bounds(lower=1 / upper if lower is None else lower, upper=upper)
