"""The inputs and outputs of advantage estimators and policy losses.

An optional column is present when the part's registry row names it in `requires`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from rlhub.algorithms.masked import masked
from rlhub.algorithms.statistics import HERE, EpisodeRows, Gather, row_sums
from rlhub.errors import ProtocolError


@dataclass(slots=True, kw_only=True)
class AdvantageInputs:
    """The whole training batch; the rows of one process, with the gather of all, where the estimator requires "gather".

    token_level_rewards: (batch, response) float, after any KL penalty; 0 outside the mask.  NaN there becomes 0, and another
        number is a ProtocolError.
    response_mask: (batch, response), true on tokens the model wrote; given as any dtype, held as bool.
    group: (batch,) int64, equal for samples of one prompt; None unless the estimator requires "groups".
    values: (batch, response) float, the critic's; requires "values".
    old_log_probs: (batch, response) float, log-probs of the policy at the start of the update; requires "old_log_probs".
    ref_log_prob: (batch, response) float, log-probs of the frozen reference; requires "reference".
    sum_pi_squared: (batch, response) float, sum over the vocabulary of the policy's squared probabilities at each token;
        requires "sum_pi_squared".
    baseline_rewards: (batch,) float, the reward of the prompt's greedy response; requires "baseline_rewards".
    episode: (batch,) int64, equal for the calls of one episode; requires "episodes", as do the next two.
    call: (batch,) int64, the number of the call in its episode.
    terminated: (batch,) bool, whether the episode ended by its own rules in this call, so that no value follows.
    next_values: (batch,) float, the value of the state after the call, for calls behind which no other of their episode stands;
        requires "next_values".
    reward_components: by name (batch,) float64, the scorer's own numbers of each sample; requires "reward_components".
    gather: brings numbers of the rows of all processes together, for statistics of the batch and of groups, whose samples may be
        in several processes.  Where all rows are here it changes nothing.
    episodes: (all rows,) int64, the number of each row's episode in the whole batch, as `EpisodeRows` has it; None where every
        row is an episode.  `samples` and `broadcast` count an episode once.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    group: Tensor | None = None
    values: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_prob: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    baseline_rewards: Tensor | None = None
    episode: Tensor | None = None
    call: Tensor | None = None
    terminated: Tensor | None = None
    next_values: Tensor | None = None
    reward_components: Mapping[str, Tensor] | None = None
    gather: Gather = HERE
    episodes: Tensor | None = None

    def __post_init__(self) -> None:
        self.response_mask = self.response_mask.bool()
        inside = masked(self.token_level_rewards, self.response_mask)
        if not torch.equal(inside, self.token_level_rewards):
            refuse_lost_rewards(self.token_level_rewards, self.response_mask)
        self.token_level_rewards = inside

    def outcome_rewards(self) -> Tensor:
        """Returns R_i = sum_t r_{i,t}, (batch,).  It is float64, so that samples with the same few rewards at other places have
        exactly equal outcomes."""
        return row_sums(self.token_level_rewards, self.response_mask)

    def samples(self) -> SampleInputs:
        """Returns what estimators of one number a sample read, of the whole batch.

        A sample is an episode.  The outcome of one with several rows is the mean of theirs, each of which carries the reward of
        the episode, and its model tokens are those of all its rows.
        """
        assert self.group is not None, "the estimator requires groups"
        numbers = {"rewards": self.outcome_rewards(), "group": self.group, "num_tokens": self.response_mask.sum(1)}
        every, episodes = self.gather.each(numbers), EpisodeRows(self.episodes)
        return SampleInputs(
            rewards=episodes.means(every["rewards"]),
            group=episodes.firsts(every["group"]),
            num_tokens=episodes.totals(every["num_tokens"]),
        )

    def of_samples(self, values: Tensor) -> Tensor:
        """Returns a_i m_{i,t}, (rows, response), of the rows that are here, for one number a sample of the whole batch, a."""
        return self.on_tokens(self.gather.own(EpisodeRows(self.episodes).each(values)))

    def broadcast(self, outputs: SampleOutputs) -> AdvantageOutputs:
        """Returns each sample's advantage on all of its model tokens, as advantages and as returns, of the rows that are here."""
        advantages = self.of_samples(outputs.advantages)
        return AdvantageOutputs(advantages=advantages, returns=advantages, metrics=outputs.metrics)

    def whole(self) -> AdvantageInputs:
        """Returns the rows of all processes in sampled order.  Each column crosses between them, padded to the widest process."""
        columns: dict[str, Any] = {column.name: getattr(self, column.name) for column in fields(self)} | {"gather": HERE}
        for name, column in columns.items():
            if isinstance(column, Tensor) and name != "episodes":
                columns[name] = self.gather(column)
        if self.reward_components is not None:
            columns["reward_components"] = self.gather.each(self.reward_components)
        return AdvantageInputs(**columns)

    def own(self, outputs: AdvantageOutputs) -> AdvantageOutputs:
        """Returns the part of these rows of what an estimator made of `whole()`."""
        tokens = self.response_mask.shape[1]
        advantages, returns = (self.gather.own(column)[:, :tokens] for column in (outputs.advantages, outputs.returns))
        return AdvantageOutputs(advantages=advantages, returns=returns, metrics=outputs.metrics)

    def on_tokens(self, per_sample: Tensor) -> Tensor:
        """Returns A_{i,t} = a_i m_{i,t}, (batch, response) in the rewards' dtype, for a (batch,); 0 outside the mask whatever a_i
        is."""
        return masked(per_sample.to(self.token_level_rewards.dtype)[:, None], self.response_mask)


def refuse_lost_rewards(rewards: Tensor, mask: Tensor, gather: Gather = HERE) -> None:
    """Raises ProtocolError, in every process, for a reward outside the mask, where it would train nothing and no estimator would
    say so.

    rewards: (rows, response); mask: (rows, response), or narrower where no token follows.  A row without any token in the mask,
    as a sample without a valid score, has no place for its reward and is passed over; so is NaN outside the mask, which is
    nobody's reward.
    """
    mask = torch.nn.functional.pad(mask.bool(), (0, rewards.shape[1] - mask.shape[1]))
    lost = (rewards != 0) & ~rewards.isnan() & ~mask & mask.any(1, keepdim=True)
    first = lost & (lost.cumsum(1) == 1)
    tokens = torch.arange(rewards.shape[1], device=rewards.device)
    numbers = {"count": lost.sum(1), "token": masked(tokens, first).sum(1), "reward": masked(rewards.double(), first).sum(1)}
    found = gather.each(numbers)
    if found["count"].any():
        row = int(found["count"].nonzero()[0])
        reward, total = float(found["reward"][row]), int(found["count"].sum())
        raise ProtocolError(
            f"row {row}, token {int(found['token'][row])}: a reward of {reward:g} stands where response_mask is 0, so it would "
            f"train nothing ({total} such tokens). Put rewards on tokens that the model wrote: the reward of a whole response on "
            "the last of them, as Trajectory.set_reward and inputs.on_last_token do"
        )


COMPONENT = "reward/"
"""Prefix of the columns that hold the scorer's own numbers."""


def on_last_token(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Returns (rows, response) float32: scores (rows,) on the last token of the mask, 0 elsewhere.

    response_mask: (rows, response), 1 on tokens that the model wrote: those of a tool or an environment after them train nothing.
    """
    written = response_mask.bool()
    last = written & (written.flip(1).cumsum(1).flip(1) == 1)
    return masked(scores.float()[:, None], last)


@dataclass(slots=True, kw_only=True)
class SampleInputs:
    """One number a sample (an episode) of the whole training batch, in sampled order: all that an estimator's companion
    `per_sample(inputs, knobs)` reads.

    rewards: (batch,) float64, the outcome R_i = sum_t r_{i,t}.  group: (batch,) int64, equal for samples of one prompt.
    num_tokens: (batch,) int64, the model's tokens; 0 for a sample without a valid score, which is a group of its own.
    """

    rewards: Tensor
    group: Tensor
    num_tokens: Tensor


@dataclass(slots=True, kw_only=True)
class SampleOutputs:
    """advantages: (batch,) float64, the same on every model token of a sample; metrics by name."""

    advantages: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class AdvantageOutputs:
    """advantages and returns, each (batch, response), 0 where response_mask is 0; metrics by name."""

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class PolicyLossInputs:
    """One micro-batch, whole rows of one mini-batch, each (rows, response).

    log_probs carries gradient; nothing else does.
    old_log_probs: of the proximal policy; equal to log_probs where the update takes one step on policy.
    weights: per-token importance weights that multiply the loss, or None.
    rollout_log_probs: of the policy that sampled the tokens; requires "rollout_log_probs".
    selected: 1 on the tokens that the loss's own `select` companion chose in the whole mini-batch; None without one.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    weights: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    selected: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class PolicyLossOutputs:
    """loss: (rows, response), 0 outside the mask, not yet aggregated.  sums: token sums that become metrics when divided by
    the global number of tokens."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SelectionInputs:
    """One whole mini-batch, before it is cut over ranks and micro-batches: what a loss's companion `select(inputs, knobs)`
    chooses tokens from.  It returns (rows, response), 1 on chosen tokens.

    old_log_probs: (rows, response), of the policy at the start of the update; advantages, response_mask: (rows, response).
    keys: (rows, response) float64 uniforms in [0, 1), a pure function of (seed, step, sample, position).
    """

    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    keys: Tensor
