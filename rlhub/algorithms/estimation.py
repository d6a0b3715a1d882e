"""The work on the token columns of a training batch between the forward passes and the updates.

`compute_advantages` goes from scores to advantages and says which tokens may train, and measures the mismatch of the policy that
sampled; `measure_batch` measures alone, where a user's own function makes the advantages.  `rollout_correction` weights and
rejects tokens for the mismatch; `select_tokens` has a policy loss choose tokens of a mini-batch.

Each is a function of some rows of the batch and of the gather that brings numbers of all rows together, so every rank calls it
with its own rows.  What it returns is the same in every bit however the batch is cut, and the metrics are those of the whole
batch, equal in every process.  Columns that are read:

- one number a row: sample_index, uid, valid (bool), scores, finish_reason, response_length, mini_batch, and prompt_length or
  instead attention_mask (rows, prompt + response);
- (rows, response): response_mask, and token_level_scores where rewards stand on other tokens than the last that the model wrote;
  instead given_rewards where a workflow gave them; where tools gave rewards added_rewards, and configured_scores, one number a
  row, the scores without them;
- where the estimator requires them or the settings read them: values, old_log_probs, ref_log_prob, rollout_log_probs,
  sum_pi_squared, baseline_rewards, reward/<name>, policy_version; one number a row: episode, call, terminated, next_values;
- where samples may have several rows: episode_id, one number a row, equal for the trajectories of an episode;
- where data sources have estimators of their own: estimator, one number a row, 0 for that of the run, else the place of the row's
  source among those, from 1.

No column is written twice: response_mask are the tokens of the model, learn_mask those of rows that train, and loss_mask those of
them that the policy's loss counts, where a correction has rejected some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rlhub.algorithms.correction.correct import Correction, correct
from rlhub.algorithms.correction.weights import log_ratios
from rlhub.algorithms.inputs import (
    COMPONENT,
    AdvantageInputs,
    AdvantageOutputs,
    SelectionInputs,
    on_last_token,
    refuse_lost_rewards,
)
from rlhub.algorithms.kl import penalized_rewards
from rlhub.algorithms.levels import TOKENS, Units
from rlhub.algorithms.masked import masked
from rlhub.algorithms.mismatch import measure_mismatch
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES
from rlhub.algorithms.returns import whiten_rewards
from rlhub.algorithms.statistics import (
    COUNT,
    SUM,
    EpisodeRows,
    Gather,
    Moments,
    batch_moments,
    row_moments,
    row_sums,
)
from rlhub.config.sections.actor import ActorConfig
from rlhub.config.sections.algorithm import AlgorithmConfig
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig
from rlhub.errors import ProtocolError, RewardError
from rlhub.registry import knobs_for
from rlhub.utils.seeding import Purpose, uniforms

EPISODES = ("episode", "call", "terminated")
"""The columns of a batch whose rows are calls of a policy in episodes."""
Columns = Mapping[str, Tensor]
"""Columns of a batch by name, of equally many rows."""


@dataclass(slots=True, kw_only=True)
class ColumnOutputs:
    """columns: new ones, in the order of the rows that were given.  metrics: of the whole batch."""

    columns: dict[str, Tensor]
    metrics: dict[str, float] = field(default_factory=dict)


def compute_advantages(
    columns: Columns,
    gather: Gather,
    algorithm: AlgorithmConfig,
    *,
    kl_coef: float = 0.0,
    version: int | None = None,
    mask_truncated: bool = False,
    by_source: Mapping[str, AlgorithmConfig] | None = None,
) -> ColumnOutputs:
    """Returns advantages, returns and learn_mask (rows, response).

    Rows that must not train are no part of learn_mask: samples without a valid score, or without a token of the model's to
    put it on, which the estimator does not see either; and truncated ones (mask_truncated), which it sees, since their reward
    counts.

    kl_coef: beta of the KL in the reward.  version: of the policy about to be updated, read with a column policy_version.
    by_source: the settings of data sources with an estimator of their own; their rows get what they would get as a batch of their
    own, and the estimator's metrics are source/<name>/...
    Raises RewardError where rewards are too large, ProtocolError for a reward on a token that the model did not write; both name
    the row by its number in sampled order, in every process.
    """
    metrics = mismatch_metrics(columns, gather, version)
    columns = with_old_log_probs(columns)
    valid = columns["valid"] & columns["response_mask"].bool().any(1)
    scored = masked(columns["response_mask"], valid[:, None])
    in_one = replace(algorithm, whiten_rewards=False) if by_source else algorithm
    rewards, of_kl = token_rewards(columns, scored, gather, in_one, kl_coef)
    inputs = advantage_inputs(columns, rewards, valid, scored, gather, algorithm.adv_estimator)
    if by_source:
        rewards, outputs = estimate_by_source(inputs, columns, valid, {"": algorithm, **by_source})
    else:
        outputs = estimate(inputs, algorithm)
    learns = valid & (columns["finish_reason"] == 0) if mask_truncated else valid
    found = {"advantages": outputs.advantages, "returns": outputs.returns, "learn_mask": masked(scored, learns[:, None])}
    first = None if inputs.episodes is None else gather.own(EpisodeRows(inputs.episodes).leading)
    rows = metric_rows({**columns, **found, "token_level_rewards": rewards}, valid, first)
    metrics |= of_kl | outputs.metrics | batch_metrics(gather.each(rows))
    check_advantages({**columns, **found}, scored, metrics, gather)
    return ColumnOutputs(columns=found, metrics=metrics)


def measure_batch(
    columns: Columns, gather: Gather, algorithm: AlgorithmConfig, *, kl_coef: float = 0.0, version: int | None = None
) -> dict[str, float]:
    """Returns what `compute_advantages` reports of a batch whose advantages something else has computed, but the estimator's own
    metrics: mismatch, lengths, and rewards, KL, advantages, returns and values where there are such columns."""
    metrics = mismatch_metrics(columns, gather, version)
    columns = with_old_log_probs(columns)
    valid, rewards = columns["response_mask"].bool().any(1), {}
    if {"scores", "valid"} <= columns.keys():
        valid &= columns["valid"]
        if not {"old_log_probs", "ref_log_prob"} <= columns.keys():
            algorithm = replace(algorithm, use_kl_in_reward=False)
        scored = masked(columns["response_mask"], valid[:, None])
        rewards["token_level_rewards"], of_kl = token_rewards(columns, scored, gather, algorithm, kl_coef)
        metrics |= of_kl
    return metrics | batch_metrics(gather.each(metric_rows({**columns, **rewards}, valid)))


def mismatch_metrics(columns: Columns, gather: Gather, version: int | None) -> dict[str, float]:
    """Returns the metrics of the mismatch where a forward pass has given the policy's own log-probs."""
    measured = "old_log_probs" in columns and "rollout_log_probs" in columns
    return measure_mismatch(columns, gather, version) if measured else {}


def with_old_log_probs(columns: Columns) -> Columns:
    """Returns the columns, in which the rollout's log-probs stand in for those of the policy before the update where these are
    not given."""
    if "old_log_probs" in columns or "rollout_log_probs" not in columns:
        return columns
    return {**columns, "old_log_probs": columns["rollout_log_probs"]}


def token_rewards(
    columns: Columns, scored: Tensor, gather: Gather, algorithm: AlgorithmConfig, kl_coef: float
) -> tuple[Tensor, dict[str, float]]:
    """Returns the rewards (rows, response), less kl_coef times the KL to the reference and whitened where the settings say so,
    and the metrics of the KL.  A row's one score stands on the last token that the model wrote; rewards of tools come on top."""
    mask = columns["response_mask"]
    own = columns.get("token_level_scores", columns.get("given_rewards"))
    if own is not None:  # as wide as the whole batch where the driver has made them
        refuse_lost_rewards(own, scored, gather)
        rewards = own[:, : mask.shape[1]]
    else:
        rewards = on_last_token(columns.get("configured_scores", columns["scores"]), mask)
    if "added_rewards" in columns:
        added = masked(columns["added_rewards"], columns["valid"][:, None])
        refuse_lost_rewards(added, scored, gather)
        rewards = rewards + added[:, : mask.shape[1]]
    metrics: dict[str, float] = {}
    if algorithm.use_kl_in_reward:
        kl = KL_ESTIMATORS.get(algorithm.kl_penalty)(columns["old_log_probs"], columns["ref_log_prob"])
        rewards = penalized_rewards(rewards, kl, mask, kl_coef)
        metrics = {"actor/reward_kl_penalty": mean_of_rows(kl, mask, gather), "actor/reward_kl_penalty_coeff": kl_coef}
    return whiten_rewards(rewards, scored, gather) if algorithm.whiten_rewards else rewards, metrics


def mean_of_rows(values: Tensor, mask: Tensor, gather: Gather) -> float:
    """Returns the mean over the batch's rows, those with a token, of the mean over their tokens."""
    rows = row_moments(values, mask)
    means = row_moments(rows[:, SUM] / rows[:, COUNT].clamp(min=1), rows[:, COUNT] > 0)
    return batch_moments(gather(means)).mean.item()


def advantage_inputs(
    columns: Columns, rewards: Tensor, valid: Tensor, scored: Tensor, gather: Gather, estimator: str
) -> AdvantageInputs:
    """Returns what the estimator reads; what it does not require is None.  valid: (rows,) bool; scored: (rows, response), the
    tokens of valid rows."""
    requires = ADVANTAGE_ESTIMATORS.row(estimator).requires
    optional = ("values", "old_log_probs", "sum_pi_squared", "baseline_rewards", "next_values")
    read = [*(EPISODES if "episodes" in requires else ()), *(name for name in optional if name in requires)]
    read += ["ref_log_prob"] if "reference" in requires else []
    if missing := [name for name in read if name in (*EPISODES, "next_values") and name not in columns]:
        raise ProtocolError(
            f"the batch has no column {', '.join(missing)}, which adv_estimator={estimator} reads; let the source of the batch "
            "add it, or choose another estimator"
        )
    samples = columns.get("episode_id", columns["sample_index"])
    group = own_group_when_invalid(columns["uid"], valid, samples)
    return AdvantageInputs(
        token_level_rewards=rewards,
        response_mask=scored,
        group=group,
        reward_components=reward_components(columns) if "reward_components" in requires else None,
        gather=gather,
        episodes=episode_rows(group, columns.get("episode_id"), gather),
        **{name: columns[name] for name in read},
    )


def episode_rows(group: Tensor, episode_id: Tensor | None, gather: Gather) -> Tensor | None:
    """Returns the number of each row's episode in the whole batch, (all rows,).  group, episode_id: (rows,) of these rows; None
    where every row is an episode."""
    if episode_id is None:
        return None
    every = gather.each({"group": group, "episode_id": episode_id})
    return EpisodeRows.of(every["group"], every["episode_id"]).index


def reward_components(columns: Columns) -> dict[str, Tensor]:
    """Returns the scorer's own numbers by name, (rows,) float64: columns `reward/<name>` of the batch."""
    return {name.removeprefix(COMPONENT): column for name, column in columns.items() if name.startswith(COMPONENT)}


def own_group_when_invalid(uid: Tensor, valid: Tensor, samples: Tensor) -> Tensor:
    """Returns group ids (rows,), where a sample without a valid score is a group of its own and moves nobody's baseline.

    samples: (rows,) int64, the number of each row's sample.
    """
    return torch.where(valid, uid, -1 - samples)


def estimate(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Returns the chosen estimator's advantages and returns of these rows.

    An estimator that says neither that it gathers ("gather") nor how it works on one number a sample ("per_sample") is given the
    whole batch: then the columns that it reads cross between the processes.
    """
    name = algorithm.adv_estimator
    knobs_class = ADVANTAGE_ESTIMATORS.knobs_class(name)
    knobs = knobs_for(knobs_class, algorithm, algorithm.adv_kwargs, where="algorithm.adv_kwargs")
    per_sample, estimator = ADVANTAGE_ESTIMATORS.companion(name, "per_sample"), ADVANTAGE_ESTIMATORS.get(name)
    if per_sample is not None:
        return inputs.broadcast(per_sample(inputs.samples(), knobs))
    if "gather" in ADVANTAGE_ESTIMATORS.row(name).requires:
        outputs: AdvantageOutputs = estimator(inputs, knobs)
        return outputs
    return inputs.own(estimator(inputs.whole(), knobs))


def estimate_by_source(
    inputs: AdvantageInputs, columns: Columns, valid: Tensor, algorithms: Mapping[str, AlgorithmConfig]
) -> tuple[Tensor, AdvantageOutputs]:
    """Returns the rewards (rows, response), whitened where the settings say so, and the advantages and returns made of them.

    The rows of each number in the column estimator are a batch of their own, in their sampled order: statistics see no other row.
    inputs: of all rows.  algorithms: by data source, in the order of the numbers; "" is that of rows without one of their own.
    valid: (rows,) bool.
    """
    if "estimator" not in columns:
        raise ProtocolError(
            "the batch has no column estimator, by which data.sources.<name>.adv_estimator finds its rows; let the node "
            "compute_advantages of trainer.pipeline read it, as the built-in pipelines do"
        )
    rewards, gather, mask = inputs.token_level_rewards.clone(), inputs.gather, inputs.response_mask
    found = AdvantageOutputs(advantages=torch.zeros_like(rewards), returns=torch.zeros_like(rewards))
    names = list(algorithms)
    for number in torch.unique(gather(columns["estimator"])).tolist():
        rows, name, algorithm = (columns["estimator"] == number).nonzero().squeeze(1), names[number], algorithms[names[number]]
        part = {key: column[rows] for key, column in columns.items()}
        own = Gather.of(part["sample_index"], gather.collect)
        if algorithm.whiten_rewards:
            rewards[rows] = whiten_rewards(rewards[rows], mask[rows], own)
        outputs = estimate(
            advantage_inputs(part, rewards[rows], valid[rows], mask[rows], own, algorithm.adv_estimator), algorithm
        )
        found.advantages[rows], found.returns[rows] = outputs.advantages, outputs.returns
        found.metrics |= {f"source/{name}/{key}" if name else key: value for key, value in outputs.metrics.items()}
    return rewards, found


def check_advantages(columns: Columns, scored: Tensor, metrics: Mapping[str, float], gather: Gather) -> None:
    """Raises RewardError where rewards are too large for advantages in float32.  scored: the tokens that the estimator read.

    What a model's own numbers (values, log-probs) have spoilt is left to the update, which skips a step that is not finite.
    """
    ends = [f"critic/{name}/{end}" for name in ("advantages", "returns") for end in ("max", "min")]
    if all(math.isfinite(metrics.get(end, 0.0)) for end in ends):
        return
    predicted = [columns[name] for name in ("values", "old_log_probs", "ref_log_prob") if name in columns]
    bad = scored.bool() & ~(columns["advantages"].isfinite() & columns["returns"].isfinite())
    spoilt = sum((~masked(column, scored).isfinite()).sum(1) for column in predicted) + torch.zeros(len(bad), dtype=torch.int64)
    found = gather.each({"bad": bad.sum(1), "spoilt": spoilt, "scores": columns["scores"].double()})
    if found["bad"].any() and not found["spoilt"].any():
        row, scores = int(found["bad"].nonzero()[0]), found["scores"]
        raise RewardError(
            f"row {row}: with a reward of {float(scores[row]):g}, in a batch whose rewards reach {float(scores.abs().max()):g}, "
            "its advantages are not finite in float32, whose largest number is 3.4e+38. Scale the rewards down"
        )


def metric_rows(columns: Columns, valid: Tensor, first: Tensor | None = None) -> dict[str, Tensor]:
    """Returns `row_moments` of what is reported of each row, by name, (rows, 5) float64.

    valid: (rows,) bool.  first: (rows,) bool, the first rows of their episodes, whose reward is reported, so that it counts
    once; None where every row is an episode.  Samples without a valid score count in lengths only: the 0 that stands in for
    their score would pass for a bad answer.
    """
    every, counted = torch.ones_like(valid), valid if first is None else valid & first
    mask = columns["response_mask"].bool() & valid[:, None]
    lengths = columns["response_length"]
    prompts = columns["prompt_length"] if "prompt_length" in columns else columns["attention_mask"].sum(1) - lengths
    tensors = {name: columns[name] for name in ("advantages", "returns", "values") if name in columns}
    scores = {"critic/score": row_moments(columns["scores"], counted)} if "scores" in columns else {}
    if "token_level_rewards" in columns:
        scores["critic/rewards"] = row_moments(row_sums(columns["token_level_rewards"], mask), counted)
    learns = columns.get("learn_mask", mask)
    return {
        "response_length": row_moments(lengths, every),
        "response_length/clip_ratio": row_moments(columns["finish_reason"] == 1, every),
        "prompt_length": row_moments(prompts, every),
        **scores,
        **{f"critic/{name}": row_moments(column, mask) for name, column in tensors.items()},
        "perf/total_num_tokens": row_moments(prompts + lengths, every),
        "actor/masked_samples": row_moments(~learns.bool().any(1), every),
    }


def batch_metrics(rows: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns reward/..., critic/{score,rewards,advantages,returns,values}/..., response_length/..., prompt_length/... and
    actor/masked_samples, the rows that do not train, out of `metric_rows` of all rows in sampled order."""
    moments = {name: batch_moments(column) for name, column in rows.items()}
    clipped, totals = moments.pop("response_length/clip_ratio"), ("perf/total_num_tokens", "actor/masked_samples")
    metrics = {name: moments.pop(name).total.item() for name in totals}
    metrics |= {name: value for prefix, found in moments.items() for name, value in spread(prefix, found).items()}
    metrics["response_length/clip_ratio"] = clipped.mean.item()
    scores = moments.get("critic/score")
    if scores is not None and scores.count > 0:
        metrics |= {"reward/mean": scores.mean.item(), "reward/std": (scores.squares / scores.count).sqrt().item()}
    return metrics


def spread(prefix: str, moments: Moments) -> dict[str, float]:
    """Returns mean, max and min; nothing where there is no value."""
    if moments.count == 0:
        return {}
    return {
        f"{prefix}/mean": moments.mean.item(),
        f"{prefix}/max": moments.highest.item(),
        f"{prefix}/min": moments.lowest.item(),
    }


def rollout_correction(columns: Columns, gather: Gather, config: RolloutCorrectionConfig, units: Units = TOKENS) -> ColumnOutputs:
    """Returns loss_mask (rows, response), which is learn_mask without rejected tokens, and where tokens are weighted
    importance_weights; the metrics are correction/* and mismatch/masked_share.

    It comes after the advantages, because a group's baseline uses all of its samples.  units: what is weighted or rejected as
    one, with the same value on all of its tokens.
    """
    tokens = columns["learn_mask"]
    mask, advantages = units.mask(tokens), units.firsts(columns["advantages"], tokens)
    log_ratio = units.sums(log_ratios(columns["old_log_probs"], columns["rollout_log_probs"], tokens), tokens)
    correction = correct(config, log_ratio, mask, advantages, gather)
    found = {"loss_mask": masked(tokens, units.tokens(correction.keep, tokens))}
    if correction.weights is not None:
        found["importance_weights"] = units.tokens(correction.weights.to(columns["old_log_probs"].dtype), tokens)
    return ColumnOutputs(columns=found, metrics=correction_metrics(correction, mask, gather))


def correction_metrics(correction: Correction, mask: Tensor, gather: Gather) -> dict[str, float]:
    """Returns means and shares over the model tokens before rejection, and the extremes of the weights that are applied."""
    applied = correction.keep if correction.weights is not None else torch.zeros_like(correction.keep)
    weights = mask if correction.weights is None else correction.weights
    found = gather.each({"tokens": mask.bool().sum(1), "weights": row_moments(weights, applied)})
    tokens = max(float(found["tokens"].sum()), 1.0)
    metrics = {name: float(total) / tokens for name, total in correction.sums.items()}
    if correction.scale is not None:
        metrics["correction/batch_norm_factor"] = float(correction.scale)
    extremes = batch_moments(found["weights"])
    if extremes.count > 0:
        metrics |= {"correction/weight_min": extremes.lowest.item(), "correction/weight_max": extremes.highest.item()}
    return metrics


def select_tokens(
    columns: Columns, gather: Gather, actor: ActorConfig, *, seed: int, step: int, action_dim: int = 1
) -> ColumnOutputs:
    """Returns selected (rows, response) uint8, 1 on the tokens that the loss chose in each mini-batch.

    The choice is a function of the run's seed, the step and the samples alone: the loss sees the rows of a whole mini-batch in
    sampled order, and each token's random key belongs to its sample and position.  For that the columns old_log_probs,
    advantages and loss_mask (where no correction made one, learn_mask) cross between the processes.  At
    actor.log_prob_level=action or chunk, actions of action_dim tokens or responses are chosen, with all of their tokens.
    """
    columns, name = with_old_log_probs(columns), actor.policy_loss.loss_mode
    select = POLICY_LOSSES.companion(name, "select")
    assert select is not None, f"{name} selects no tokens"
    kwargs, where = actor.policy_loss.kwargs, "actor_rollout_ref.actor.policy_loss.kwargs"
    knobs = knobs_for(POLICY_LOSSES.knobs_class(name), actor, kwargs, where=where)
    own_mask = columns["loss_mask"] if "loss_mask" in columns else columns["learn_mask"]
    old_log_probs, advantages, mask = (gather(column) for column in (columns["old_log_probs"], columns["advantages"], own_mask))
    rows = gather.each({"sample": columns["sample_index"], "mini_batch": columns["mini_batch"]})
    units, every = Units(level=actor.log_prob_level, action_dim=action_dim), mask
    mask, old_log_probs, advantages = units.mask(every), units.sums(old_log_probs, every), units.firsts(advantages, every)
    selected = torch.zeros(mask.shape, dtype=torch.uint8)
    for mini_batch in torch.unique(rows["mini_batch"]):
        members = (rows["mini_batch"] == mini_batch).nonzero().squeeze(1)
        inputs = SelectionInputs(
            old_log_probs=old_log_probs[members],
            advantages=advantages[members],
            response_mask=mask[members],
            keys=token_keys(seed, step, rows["sample"][members].numpy(), mask.shape[1]),
        )
        selected[members] = select(inputs, knobs).to(torch.uint8)
    return ColumnOutputs(columns={"selected": gather.own(units.tokens(selected, every))[:, : own_mask.shape[1]]})


def token_keys(seed: int, step: int, samples: np.ndarray, width: int) -> Tensor:
    """Returns (rows, width) float64 uniforms in [0, 1), a pure function of (seed, step, sample, position)."""
    keys = [uniforms(seed, Purpose.SELECTION, step, sample, count=width) for sample in samples.tolist()]
    return torch.from_numpy(np.array(keys).reshape(len(samples), width))
