"""From scores to advantages, and how far the policy that sampled is from the one that is trained.

All of it is the algorithms' own functions (rlhub.algorithms) over the columns of one training batch, on the driver, so that it
depends on no rank and no micro-batch.

`AdvantageEstimation` does the KL penalty and the whitening of token rewards, the estimator, and says which rows may train.

The rollout engine's policy is compared with the trainer's by the log-probs of the sampled tokens:
- `measure_mismatch` reports their distance as mismatch/*.
- `MismatchBound` stops the run beyond a bound.  Fingerprints prove that an engine has received the weights; what happens to them
  afterwards, or a kernel that computes something else, shows only in the log-probs of the tokens it samples.
- `correct_batch` weights and rejects tokens: after the advantages, because a group's baseline uses all of its samples, and after
  the critic's inputs are taken, because it learns from all of them.  What is rejected leaves only the policy's loss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhub.algorithms.correction.correct import Correction, correct
from rlhub.algorithms.correction.weights import log_ratios
from rlhub.algorithms.inputs import AdvantageInputs
from rlhub.algorithms.kl import AdaptiveKLController, FixedKLController, KLController, penalized_rewards
from rlhub.algorithms.masked import masked
from rlhub.algorithms.mismatch import (
    extreme_metrics,
    mismatch_metrics,
    mismatch_sums,
    staleness_metrics,
    staleness_sums,
    weight_extremes,
)
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS
from rlhub.algorithms.returns import whiten_rewards
from rlhub.algorithms.statistics import COUNT, SUM, batch_moments, row_moments
from rlhub.config.rules.asynchronous import is_collected
from rlhub.config.sections.algorithm import KLControlConfig
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.rollout_correction import KEY, RolloutCorrectionConfig
from rlhub.errors import PolicyMismatchError, RewardError
from rlhub.protocol import DataProto
from rlhub.registry import knobs_for
from rlhub.trainer.ppo.metrics import batch_metrics, metric_rows
from rlhub.trainer.ppo.requirements import Requirements
from rlhub.trainer.ppo.scoring import COMPONENT
from rlhub.utils.timing import PhaseTimer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class AdvantageEstimation:
    """The chosen estimator with its knobs, and the coefficient of the KL in the reward, which moves from step to step."""

    config: PPOConfig
    needs: Requirements
    timers: PhaseTimer
    kl_controller: KLController = field(init=False)
    _estimator: Any = field(init=False)
    _knobs: Any = field(init=False)

    def __post_init__(self) -> None:
        algorithm = self.config.algorithm
        self.kl_controller = build_kl_controller(algorithm.kl_ctrl)
        self._estimator = ADVANTAGE_ESTIMATORS.get(algorithm.adv_estimator)
        knobs_class = ADVANTAGE_ESTIMATORS.knobs_class(algorithm.adv_estimator)
        self._knobs = knobs_for(knobs_class, algorithm, algorithm.adv_kwargs, where="algorithm.adv_kwargs")

    def __call__(self, batch: DataProto) -> dict[str, float]:
        """Adds token_level_rewards, advantages, returns and learn_mask (rows, response), and returns the metrics of the batch.

        Rows that must not train are no part of learn_mask: samples without a valid score, or without a token of the model's to
        put it on, which the estimator does not see either; and truncated ones (if asked), which it sees, since their reward
        counts.
        """
        columns = batch.batch
        valid = columns["valid"] & columns["response_mask"].bool().any(1)
        scored = columns["response_mask"] * valid[:, None].long()
        rewards, metrics = self._penalize(batch)
        columns["token_level_rewards"] = whiten_rewards(rewards, scored) if self.config.algorithm.whiten_rewards else rewards
        with self.timers.measure("advantages"):
            outputs = self._estimator(self._inputs(batch, valid, scored), self._knobs)
        columns["advantages"], columns["returns"] = outputs.advantages, outputs.returns
        metrics |= outputs.metrics | batch_metrics(metric_rows(batch, valid))
        check_advantages(batch, scored, metrics)
        truncated_learn = not self.config.actor_rollout_ref.actor.mask_truncated
        columns["learn_mask"] = scored if truncated_learn else scored * (columns["finish_reason"] == 0)[:, None].long()
        metrics["actor/masked_samples"] = float((~columns["learn_mask"].any(1)).sum().item())
        return metrics

    def _inputs(self, batch: DataProto, valid: Tensor, scored: Tensor) -> AdvantageInputs:
        """Returns what the estimator reads; what it does not require is None.  valid: (rows,) bool; scored: (rows, response), the
        tokens of valid rows."""
        columns, needs = batch.batch, self.needs
        return AdvantageInputs(
            token_level_rewards=columns["token_level_rewards"],
            response_mask=scored,
            group=own_group_when_invalid(columns["uid"], valid),
            values=columns["values"] if needs.values else None,
            old_log_probs=old_log_probs(batch, needs.bypass) if needs.old_log_probs or needs.bypass else None,
            sum_pi_squared=columns["sum_pi_squared"] if needs.sum_pi_squared else None,
            baseline_rewards=columns["baseline_rewards"] if needs.baseline_rewards else None,
            reward_components=reward_components(batch) if needs.reward_components else None,
        )

    def _penalize(self, batch: DataProto) -> tuple[Tensor, dict[str, float]]:
        """Returns token_level_scores, less beta times the KL to the reference where the reward carries it, and its metrics."""
        columns, algorithm = batch.batch, self.config.algorithm
        if not algorithm.use_kl_in_reward:
            return columns["token_level_scores"], {}
        mask = columns["response_mask"]
        kl = KL_ESTIMATORS.get(algorithm.kl_penalty)(old_log_probs(batch, self.needs.bypass), columns["ref_log_prob"])
        rewards = penalized_rewards(columns["token_level_scores"], kl, mask, self.kl_controller.value)
        rows = row_moments(kl, mask)
        means, written = rows[:, SUM] / rows[:, COUNT].clamp(min=1), rows[:, COUNT] > 0
        mean_kl = batch_moments(row_moments(means, written)).mean.item()
        metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": self.kl_controller.value}
        self.kl_controller.update(mean_kl, len(batch))
        return rewards, metrics


def old_log_probs(batch: DataProto, bypass: bool) -> Tensor:
    """Returns the log-probs of the policy before the update, (rows, response): in bypass mode those of the rollout."""
    column: Tensor = batch.batch["rollout_log_probs" if bypass else "old_log_probs"]
    return column


def build_kl_controller(config: KLControlConfig) -> KLController:
    """Returns the controller of the KL-in-reward coefficient."""
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    return FixedKLController(config.kl_coef)


def reward_components(batch: DataProto) -> dict[str, Tensor]:
    """Returns the scorer's own numbers by name, (rows,) float64: columns `reward/<name>` of the batch."""
    return {name.removeprefix(COMPONENT): column for name, column in batch.batch.items() if name.startswith(COMPONENT)}


def own_group_when_invalid(uid: Tensor, valid: Tensor) -> Tensor:
    """Returns group ids (rows,), where a sample without a valid score is a group of its own and moves nobody's baseline."""
    return torch.where(valid, uid, -1 - torch.arange(len(uid)))


def check_advantages(batch: DataProto, scored: Tensor, metrics: Mapping[str, float]) -> None:
    """Raises RewardError where rewards are too large for advantages in float32.  scored: the tokens that the estimator read.

    What a model's own numbers (values, log-probs) have spoilt is left to the update, which skips a step that is not finite.
    """
    ends = [f"critic/{name}/{end}" for name in ("advantages", "returns") for end in ("max", "min")]
    if all(math.isfinite(metrics.get(end, 0.0)) for end in ends):
        return
    columns = batch.batch
    predicted = [columns[name] for name in ("values", "old_log_probs", "ref_log_prob") if name in columns.keys()]
    bad = scored.bool() & ~(columns["advantages"].isfinite() & columns["returns"].isfinite())
    if bad.any() and all(bool(masked(column, scored).isfinite().all()) for column in predicted):
        row = int(bad.any(1).nonzero()[0])
        scores = columns["scores"]
        raise RewardError(
            f"row {row}: with a reward of {float(scores[row]):g}, in a batch whose rewards reach {float(scores.abs().max()):g}, "
            "its advantages are not finite in float32, whose largest number is 3.4e+38. Scale the rewards down"
        )


def measure_mismatch(batch: DataProto) -> dict[str, float]:
    """Returns mismatch/* of rollout against trainer log-probs; without a forward pass of their own the update measures them."""
    columns = batch.batch
    measured = columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]
    return mismatch_of(*measured) | extreme_metrics(weight_extremes(*measured)) | mismatch_by_staleness(batch)


def mismatch_of(old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Returns mismatch/* without the extremes, over the tokens of the mask."""
    return mismatch_metrics({name: float(value) for name, value in mismatch_sums(old_log_probs, rollout_log_probs, mask).items()})


def mismatch_by_staleness(batch: DataProto) -> dict[str, float]:
    """Returns `staleness_metrics`; nothing of a batch that is from the newest version alone."""
    add_staleness(batch)
    columns = batch.batch
    if "staleness" not in columns.keys():
        return {}
    names = ("old_log_probs", "rollout_log_probs", "response_mask", "staleness")
    sums = staleness_sums(*(columns[name] for name in names))
    return staleness_metrics({name: float(value) for name, value in sums.items()})


def add_staleness(batch: DataProto) -> None:
    """Adds the column staleness: how many policy versions each token is behind the policy about to be updated.

    Column policy_version: (rows, response) or (rows,), of the policy that sampled; meta_info["policy_version"]: the current
    one.  A batch without the column is from the newest version and gets none.
    """
    columns = batch.batch
    if "policy_version" in columns.keys():
        columns["staleness"] = (batch.meta_info["policy_version"] - columns["policy_version"]).clamp(min=0)


BY_PRECISION = {"float32": (1e-3, 0.1), "16 bits": (0.1, 1.0)}
"""Nats a token to warn at and to stop at, of tokens from the very weights that are trained.  Sound engines: 1e-8 to 1e-5 with
float32 on both sides, 1e-3 to 0.02 with bfloat16 on one (mixtures of experts the most)."""

DRIFT = 0.5
"""Nats a token by which the policy itself may have moved in one version: far more than an update that still learns."""

OF_VERSION = "mismatch/kl/staleness_"


@dataclass(slots=True, kw_only=True, frozen=True)
class MismatchBound:
    """Bounds on mismatch/kl in nats a token; infinite means none.  oldest_keys: versions by which keys and values may be older
    than the token's own."""

    warn: float
    stop: float
    oldest_keys: int = 0

    def check(self, metrics: Mapping[str, float]) -> None:
        """Warns, or raises PolicyMismatchError, by the newest tokens of a step's batch; nothing where none was measured."""
        versions = [int(name.removeprefix(OF_VERSION)) for name in metrics if name.startswith(OF_VERSION)]
        name = f"{OF_VERSION}{min(versions)}" if versions else "mismatch/kl"
        if name not in metrics:
            return
        kl, allowance = metrics[name], DRIFT * max(min(versions, default=0), self.oldest_keys)
        text = (
            f"{name} is {kl:.3g} nats a token: the rollout engine does not sample from the policy that is trained. Its weights "
            "or its arithmetic are wrong (another dtype, a damaged engine, other kernels)"
        )
        if not math.isfinite(kl) or kl > self.stop + allowance:
            bound = self.stop + allowance
            raise PolicyMismatchError(
                f"{text}; the bound is {bound:g}. Nothing of this step was saved: run the command again, which builds the engine "
                f"anew, try rollout.name=hf or rollout.dtype=float32, or raise {KEY}.mismatch_stop",
                kl=kl,
                bound=bound,
            )
        if kl > self.warn + allowance:
            logger.warning("%s; usual is less than %g, and beyond %g the run stops", text, self.warn, self.stop + allowance)


def mismatch_bound(config: PPOConfig) -> MismatchBound:
    """Returns the bound that is set, else that of the precision of both sides.

    There is none by itself where samples are legitimately another policy's (batches of other jobs, a replay) or another
    distribution's (top_p and top_k leave tokens out, whose share counts as mismatch).
    """
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    others = is_collected(config) or config.trainer.replay_from is not None
    if others or rollout.top_p < 1.0 or rollout.top_k > 0:
        warn = stop = math.inf
    else:
        warn, stop = BY_PRECISION["float32" if _is_exact(config) else "16 bits"]
    return MismatchBound(
        warn=warn if correction.mismatch_warn is None else correction.mismatch_warn,
        stop=stop if correction.mismatch_stop is None else correction.mismatch_stop,
        oldest_keys=0 if rollout.recompute_kv_cache or rollout.mode == "sync" else max(config.trainer.max_staleness, 1),
    )


def _is_exact(config: PPOConfig) -> bool:
    """Returns whether trainer and rollout engine both compute in float32."""
    rollout, section = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.section
    known = not rollout.remote.urls and rollout.dtype in ("auto", "float32")
    return known and config.trainer.device == "cpu" and section.model_dtype != "bf16"


def correct_batch(batch: DataProto, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Adds importance_weights and loss_mask (rows, response), which is learn_mask without rejected tokens; returns correction/*
    and mismatch/masked_share.  Where the update corrects, this only prepares it."""
    columns, mask = batch.batch, batch.batch["learn_mask"]
    if config.in_update or not config.active:
        columns["loss_mask"] = mask
        if not config.in_update:
            return {"mismatch/masked_share": 0.0}
        add_staleness(batch)
        return {}
    log_ratio = log_ratios(columns["old_log_probs"], columns["rollout_log_probs"], mask)
    correction = correct(config, log_ratio, mask, columns["advantages"])
    if correction.weights is not None:
        columns["importance_weights"] = correction.weights.to(columns["old_log_probs"].dtype)
    columns["loss_mask"] = mask * correction.keep.to(mask.dtype)
    return correction_metrics(correction, mask)


def correction_metrics(correction: Correction, mask: torch.Tensor) -> dict[str, float]:
    """Returns means and shares over the model tokens before rejection, and the extremes of the weights that are applied."""
    tokens = max(float(mask.sum()), 1.0)
    metrics = {name: float(total) / tokens for name, total in correction.sums.items()}
    if correction.scale is not None:
        metrics["correction/batch_norm_factor"] = float(correction.scale)
    if correction.weights is not None and bool(correction.keep.any()):
        low, high = torch.aminmax(correction.weights[correction.keep])
        metrics |= {"correction/weight_min": float(low), "correction/weight_max": float(high)}
    return metrics
