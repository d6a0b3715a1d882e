"""verl's side of algorithm_cost.py, in a process of its own with verl's environment; reads commands as lines of JSON.

{"do": "agree", "file": PATH}    write every case's numbers to PATH
{"do": "cost", "name": NAME}     CPU seconds of one call
{"do": "balance", ...}           CPU seconds and the largest part of one partition
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import algorithm_inputs as drawn
import torch
from algorithm_inputs import Batch
from torch import Tensor
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo import rollout_corr_helper as correction
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.config import ActorConfig

Numbers = dict[str, Tensor]


def actor(low: float = drawn.CLIP_LOW, high: float = drawn.CLIP_HIGH) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=drawn.DUAL_CLIP,
    )


def both(pair: tuple[Tensor, Tensor]) -> Numbers:
    return {"advantages": pair[0], "returns": pair[1]}


def estimators() -> dict[str, Numbers]:
    b, one, single = drawn.batch(), drawn.batch(group=1), drawn.batch(holes=False)
    positive = drawn.batch()
    config = SimpleNamespace(gamma=drawn.GAMMA)
    grouped = (b.scores, b.mask)
    components = {name: (b.per_row * (index + 1) + index).numpy() for index, name in enumerate(drawn.COMPONENTS)}
    gdpo_batch = {"prompts": torch.zeros(len(b.mask), 1), "attention_mask": _attention(single)}
    gdpo_config = {"gdpo_reward_keys": list(drawn.COMPONENTS), "gdpo_reward_weights": list(drawn.COMPONENTS.values())}
    otb = verl.compute_optimal_token_baseline_advantage
    turns = verl.compute_multi_turn_optimal_token_baseline_advantage
    return {
        "gae": both(verl.compute_gae_advantage_return(b.rewards, b.values, b.mask, drawn.GAMMA, drawn.LAM)),
        "grpo": both(verl.compute_grpo_outcome_advantage(*grouped, b.uids)),
        "grpo, vectorised": both(verl.compute_grpo_vectorized_outcome_advantage(*grouped, b.uids)),
        "grpo without std": both(verl.compute_grpo_outcome_advantage(*grouped, b.uids, norm_adv_by_std_in_grpo=False)),
        "grpo, groups of one": both(verl.compute_grpo_outcome_advantage(one.scores, one.mask, one.uids)),
        "grpo_passk": both(verl.compute_grpo_passk_outcome_advantage(*grouped, b.uids, config={})),
        "gdpo": both(
            verl.compute_gdpo_outcome_advantage(
                single.scores,
                single.mask,
                single.uids,
                config=gdpo_config,
                non_tensor_batch=components,
                batch=gdpo_batch,
            )
        ),
        "rloo": both(verl.compute_rloo_outcome_advantage(*grouped, b.uids)),
        "rloo, vectorised": both(verl.compute_rloo_vectorized_outcome_advantage(*grouped, b.uids)),
        "rloo, groups of one": both(verl.compute_rloo_vectorized_outcome_advantage(one.scores, one.mask, one.uids)),
        "opo": both(verl.compute_opo_outcome_advantage(*grouped, b.uids)),
        "opo, groups of one": both(verl.compute_opo_outcome_advantage(one.scores, one.mask, one.uids)),
        "gpg, no reward of 0": both(verl.compute_gpg_outcome_advantage(positive.scores, positive.mask, positive.uids)),
        "gpg, some rewards of 0": both(verl.compute_gpg_outcome_advantage(b.scores * (b.scores > 0), b.mask, b.uids)),
        "reinforce_plus_plus": both(verl.compute_reinforce_plus_plus_outcome_advantage(b.rewards, b.mask, config=config)),
        "reinforce_plus_plus_baseline": both(verl.compute_reinforce_plus_plus_baseline_outcome_advantage(*grouped, b.uids)),
        "reinforce_plus_plus_baseline, groups of one": both(
            verl.compute_reinforce_plus_plus_baseline_outcome_advantage(*_some_alone(b))
        ),
        "remax": both(verl.compute_remax_outcome_advantage(b.rewards, b.per_row, b.mask)),
        "optimal_token_baseline": both(
            otb(single.rewards, single.mask, single.uids, single.old_log_probs, single.sum_pi_squared)
        ),
        "optimal_token_baseline, several turns": both(turns(b.rewards, b.mask, b.uids, b.old_log_probs, b.sum_pi_squared)),
    }


def _attention(b: Batch) -> Tensor:
    return torch.cat([torch.ones(len(b.mask), 1, dtype=torch.int64), b.mask], 1)


def _some_alone(b: Batch) -> tuple[Tensor, Tensor, Any]:
    uids = b.uids
    uids[0] = "alone"
    return b.scores, b.mask, uids


def loss(function: Callable[..., Any], b: Batch, advantages: Tensor, log_probs: Tensor, **options: Any) -> Numbers:
    """The aggregated loss and its gradient; `old` is what the loss takes for the old policy."""
    old = options.pop("old", b.old_log_probs)
    current = log_probs.clone().requires_grad_()
    value, _ = function(old, current, advantages, b.mask, **options)
    (gradient,) = torch.autograd.grad(value, current)
    return {"loss": value.detach(), "gradient": gradient}


def losses() -> dict[str, Numbers]:
    b, config = drawn.batch(), actor()
    near = actor(drawn.SEQUENCE_CLIP_LOW, drawn.SEQUENCE_CLIP_HIGH)
    whole, few = actor(), actor()
    object.__setattr__(whole.policy_loss, "clip_cov_ratio", 1.0)
    object.__setattr__(whole.policy_loss, "clip_cov_lb", 0.2)
    object.__setattr__(whole.policy_loss, "kl_cov_ratio", 0.1)
    object.__setattr__(few.policy_loss, "clip_cov_ratio", 0.05)
    object.__setattr__(few.policy_loss, "clip_cov_lb", 0.2)
    divergence = actor(drawn.DIVERGENCE, drawn.DIVERGENCE)
    object.__setattr__(divergence, "clip_ratio_c", 20.0)
    shifted = b.old_log_probs + 0.05  # the covariance with the advantage is that of the old ones
    sequence = {"loss_agg_mode": "seq-mean-token-mean"}
    mu, token = b.rollout_log_probs, b.advantages
    return {
        "vanilla": loss(verl.compute_policy_loss_vanilla, b, token, b.log_probs, config=config),
        "vanilla, weighted": loss(
            verl.compute_policy_loss_vanilla, b, token, b.log_probs, config=config, rollout_is_weights=b.weights
        ),
        "gspo": loss(verl.compute_policy_loss_gspo, b, token, b.log_probs, config=near, **sequence),
        "gspo, PPO's clip_ratio": loss(verl.compute_policy_loss_gspo, b, token, b.log_probs, config=config, **sequence),
        "sapo": loss(verl.compute_policy_loss_sapo, b, token, b.log_probs, config=config, **sequence),
        "gpg loss": loss(verl.compute_policy_loss_gpg, b, token, b.log_probs, config=config),
        "reinforce": loss(
            verl.compute_policy_loss_reinforce,
            b,
            token,
            b.log_probs,
            config=config,
            rollout_is_weights=b.weights,
            loss_agg_mode="token-mean",
        ),
        "dppo_tv": loss(verl.compute_policy_loss_dppo_tv, b, token, b.log_probs, config=divergence, old=mu),
        "dppo_tv, pi_old recomputed": loss(verl.compute_policy_loss_dppo_tv, b, token, b.log_probs, config=divergence),
        "dppo_kl": loss(verl.compute_policy_loss_dppo_kl, b, token, b.log_probs, config=divergence, old=mu),
        "clip_cov, the whole band": loss(verl.compute_policy_loss_clip_cov, b, token, shifted, config=whole),
        "clip_cov, a share at random": loss(verl.compute_policy_loss_clip_cov, b, token, b.log_probs, config=few),
        "kl_cov": loss(verl.compute_policy_loss_kl_cov, b, token, shifted, config=whole),
        "geo_mean": loss(verl.compute_policy_loss_geo_mean, b, b.sequence_advantages, b.log_probs, config=config),
        "geo_mean, weighted": loss(
            verl.compute_policy_loss_geo_mean,
            b,
            b.sequence_advantages,
            b.log_probs,
            config=config,
            rollout_is_weights=b.weights,
        ),
        "cispo, bounded below": loss(verl.compute_policy_loss_cispo, b, token, b.log_probs, config=config),
        "cispo": loss(verl.compute_policy_loss_cispo, b, token, b.log_probs, config=config),
    }


def pieces() -> dict[str, Numbers]:
    b = drawn.batch()
    b.mask[5] = 0  # a row without tokens
    found: dict[str, Numbers] = {}
    for name in drawn.KL_NAMES:
        current = b.log_probs.clone().requires_grad_()
        value = verl.kl_penalty(current, b.rollout_log_probs, name)
        found[f"KL {name}"] = {"value": value.detach(), "gradient": torch.autograd.grad(value.sum(), current)[0]}
    for mode in drawn.AGGREGATIONS:
        found[f"aggregation {mode}"] = {"loss": verl.agg_loss(b.advantages, b.mask, mode, loss_scale_factor=drawn.SCALE)}
    norm = "seq-mean-token-sum-norm"
    found[f"aggregation {norm}, no factor given"] = {"loss": verl.agg_loss(b.advantages, b.mask, norm)}
    values = b.values.clone().requires_grad_()
    value, share = verl.compute_value_loss(values, b.rewards, b.values + b.advantages, b.mask, 0.5)
    found["value loss"] = {"loss": value.detach(), "gradient": torch.autograd.grad(value, values)[0], "clipped": share}
    controller = verl.AdaptiveKLController(0.2, 6.0, 10_000)
    for current_kl in (3.0, 6.3, 20.0):
        controller.update(current_kl, 512)
    found["adaptive KL coefficient"] = {"value": torch.tensor(controller.value, dtype=torch.float64)}
    return found


def corrections() -> dict[str, Numbers]:
    b = drawn.batch()
    ratio = b.old_log_probs - b.rollout_log_probs
    found: dict[str, Numbers] = {}
    for level in ("token", "sequence"):
        for name, threshold, normalise in (("truncated", 1.5, False), ("band", "0.7_1.4", False), ("normalised", 1.5, True)):
            weights, _ = correction.compute_rollout_correction_weights(ratio, b.mask, level, threshold, normalise)
            found[f"weights by {level}, {name}"] = {"weights": weights}
    for rule, threshold in drawn.REJECTION.items():
        kept, _ = correction.compute_rollout_rejection_mask(ratio, b.mask, rule, threshold)
        found[f"rejection {rule}"] = {"kept": kept.double()}
    kept, _ = correction.compute_rollout_rejection_mask(ratio, b.mask, "token_k1", drawn.ONE_SIDED)
    found["rejection token_k1, a lopsided band"] = {"kept": kept.double()}
    return found


def cost_calls() -> dict[str, Callable[[], Any]]:
    b = drawn.cost_batch()
    uids = b.uids
    return {
        "gae": lambda: verl.compute_gae_advantage_return(b.scores, b.values, b.mask, 1.0, 0.95),
        "grpo": lambda: verl.compute_grpo_outcome_advantage(b.scores, b.mask, uids),
        "grpo, vectorised": lambda: verl.compute_grpo_vectorized_outcome_advantage(b.scores, b.mask, uids),
        "rloo": lambda: verl.compute_rloo_outcome_advantage(b.scores, b.mask, uids),
        "rloo, vectorised": lambda: verl.compute_rloo_vectorized_outcome_advantage(b.scores, b.mask, uids),
    }


def balance(kind: str, items: int, seed: int, equal: bool) -> dict[str, float]:
    lengths = drawn.lengths(kind, items, seed).tolist()
    start = time.process_time()
    parts = get_seqlen_balanced_partitions(lengths, drawn.NUM_PARTS, equal_size=equal)
    spent = time.process_time() - start
    return {"cpu_s": spent, "largest": max(sum(lengths[row] for row in part) for part in parts)}


def main() -> None:
    torch.set_num_threads(1)
    calls: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if command["do"] == "agree":
            torch.save({**estimators(), **losses(), **pieces(), **corrections()}, command["file"])
        elif command["do"] == "cost":
            calls = calls or cost_calls()
            answer = {"cpu_s": drawn.cpu_seconds(calls[command["name"]])}
        else:
            answer = balance(command["kind"], command["items"], command["seed"], command["equal"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
