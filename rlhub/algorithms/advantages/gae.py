"""Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equations 11-16): over the tokens of a response, and
over the calls of an episode, where a row of the batch is one call of the policy with a chunk of actions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.levels import Units
from rlhub.algorithms.masked import masked
from rlhub.algorithms.returns import scan, time_first
from rlhub.algorithms.statistics import whiten

CHUNKS = Units(level="chunk")


@dataclass(slots=True, kw_only=True)
class GAEKnobs:
    """gamma: discount, in (0, 1].  lam: bias-variance trade-off of the estimator, in [0, 1]."""

    gamma: float = 1.0
    lam: float = 1.0


def gae(inputs: AdvantageInputs, knobs: GAEKnobs) -> AdvantageOutputs:
    """Returns A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; returns = A + V; A is then whitened.

    inputs: rewards and values (batch, response); the scans run over model tokens only: at a masked token V_{t+1} and
    A_{t+1} pass through unchanged, so tool output between turns neither discounts nor bootstraps.
    """
    assert inputs.values is not None, "gae requires values"
    mask = time_first(inputs.response_mask, inputs.values.dtype)
    rewards, values = masked(inputs.token_level_rewards.t(), mask), masked(inputs.values.t(), mask)
    next_values = torch.cat([scan(values, mask, 0.0)[1:], torch.zeros_like(values[:1])])
    deltas = rewards.add_(next_values, alpha=knobs.gamma).sub_(values).mul_(mask)
    advantages = scan(deltas, mask, knobs.gamma * knobs.lam)
    returns = masked(values.add_(advantages).t().contiguous(), inputs.response_mask)
    return AdvantageOutputs(advantages=whiten(advantages.t().contiguous(), inputs.response_mask, inputs.gather), returns=returns)


@dataclass(slots=True, kw_only=True)
class ChunkGAEKnobs:
    """gamma: discount of a call, in (0, 1].  lam: bias-variance trade-off of the estimator, in [0, 1].
    whiten: shift and scale the advantages of the batch to mean 0 and standard deviation 1."""

    gamma: float = 0.99
    lam: float = 0.95
    whiten: bool = True

    def __post_init__(self) -> None:
        if not (0 < self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ValueError(f"gamma={self.gamma} must be in (0, 1] and lam={self.lam} in [0, 1]")


def chunk_gae(inputs: AdvantageInputs, knobs: ChunkGAEKnobs) -> AdvantageOutputs:
    """Returns A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, on all tokens of call t; returns = A + V.

    r_t is the reward of the call's actions together, and V_t the value at its first token.  Where the episode's call t + 1 is in
    the batch, V_{t+1} is its value.  Else V_{t+1} is next_values and A_{t+1} is 0: so a time limit, the end of a rollout and a
    call lost with its environment bootstrap, and only a call that terminated its episode has V_{t+1} = 0.  Rows without a token
    in the mask, as those of a lost environment, are no calls.  The variance of the whitening is unbiased, over calls.
    """
    assert inputs.values is not None and inputs.next_values is not None, "chunk_gae requires values and next_values"
    assert inputs.episode is not None and inputs.call is not None and inputs.terminated is not None, "requires episodes"
    mask = inputs.response_mask
    values = CHUNKS.firsts(inputs.values.double(), mask).squeeze(1) if mask.shape[1] else inputs.next_values.double() * 0
    numbers = {"rewards": inputs.outcome_rewards(), "values": values, "next_values": inputs.next_values.double()}
    whole = {"episode": inputs.episode, "call": inputs.call, "terminated": inputs.terminated.long(), "valid": mask.any(1).long()}
    every = inputs.gather.each(numbers | whole)
    advantages = advantages_of(every, knobs)
    returns = advantages + every["values"]
    if knobs.whiten:
        advantages = _whitened(advantages, every["valid"].bool())
    return AdvantageOutputs(
        advantages=inputs.on_tokens(inputs.gather.own(advantages)), returns=inputs.on_tokens(inputs.gather.own(returns))
    )


def advantages_of(calls: dict[str, Tensor], knobs: ChunkGAEKnobs) -> Tensor:
    """Returns (calls,) float64 advantages, 0 for rows that are no calls.

    calls: rewards, values, next_values, episode, call, terminated, valid, each (calls,).
    """
    order = _by_episode(calls["episode"], calls["call"])
    rewards, values, next_values = (calls[name][order].tolist() for name in ("rewards", "values", "next_values"))
    episode, call, ended, valid = (calls[name][order].tolist() for name in ("episode", "call", "terminated", "valid"))
    found = [0.0] * len(order)
    for t in reversed(range(len(order))):
        if not valid[t]:
            continue
        follows = t + 1 < len(order) and valid[t + 1] and (episode[t + 1], call[t + 1]) == (episode[t], call[t] + 1)
        follows = follows and not ended[t]
        bootstrap = values[t + 1] if follows else 0.0 if ended[t] else next_values[t]
        later = found[t + 1] if follows else 0.0
        found[t] = rewards[t] + knobs.gamma * bootstrap - values[t] + knobs.gamma * knobs.lam * later
    advantages = torch.zeros(len(order), dtype=torch.float64)
    advantages[order] = torch.tensor(found, dtype=torch.float64)
    return advantages


def _by_episode(episode: Tensor, call: Tensor) -> Tensor:
    """Returns the order of the rows by episode, and within one by call."""
    by_call = call.argsort(stable=True)
    return by_call[episode[by_call].argsort(stable=True)]


def _whitened(advantages: Tensor, valid: Tensor) -> Tensor:
    """Returns (A - mean) / std over the valid calls; only centred where fewer than two differ."""
    chosen = advantages[valid]
    if len(chosen) < 2:
        return masked(advantages, valid)
    return masked((advantages - chosen.mean()) / (chosen.var() + 1e-8).sqrt(), valid)
