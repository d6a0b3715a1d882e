"""A whole GRPO driver: copy it, change it.  Settings are those of main_ppo.

python recipes/minimal_grpo/grpo.py data.train_files=train.parquet actor_rollout_ref.model.path=MODEL
"""

import contextlib
import logging
import sys

import torch

from rlhub.algorithms.advantages.grpo import GRPOKnobs, grpo
from rlhub.algorithms.inputs import AdvantageInputs, on_last_token
from rlhub.config.cli import run
from rlhub.config.sections.ppo import PPOConfig
from rlhub.trainer.launch import launch_workers
from rlhub.trainer.ppo.metrics import mean_metrics
from rlhub.trainer.ppo.scoring import prepare_reward
from rlhub.trainer.ppo.trainer import build_data, worker_roles
from rlhub.trainer.ppo.worker_groups import groups_of

logger = logging.getLogger("grpo")


def main(config: PPOConfig) -> None:
    config.algorithm.adv_estimator = "grpo"  # decides which workers start: no critic
    data = build_data(config)
    reward = prepare_reward(config, data.tokenizer)
    samples = config.actor_rollout_ref.rollout.n
    sampling = {"n": samples, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "log_probs": True}
    roles = worker_roles(config, data.total_steps)
    with contextlib.closing(reward), launch_workers(roles, config.trainer) as launched:
        workers, score = groups_of(launched.groups), reward.manager(launched.groups)
        for step, prompts in zip(range(1, data.total_steps + 1), data.loader.endless(), strict=False):
            prompts.meta_info.update(sampling)
            uid = torch.arange(len(prompts)).repeat_interleave(samples)

            workers.weights.sync(step - 1)  # the trainer's shards -> the rollout engine, checked weight by weight
            batch = prompts.select(batch_keys=["ordinal"], meta_info_keys=[]).repeat(samples)
            batch.union(workers.rollout.generate_sequences(prompts.select(non_tensor_batch_keys=[])))

            rewards = score(batch)
            mask = batch.batch["response_mask"]
            rows = AdvantageInputs(token_level_rewards=on_last_token(rewards.scores, mask), response_mask=mask, group=uid)
            batch.batch["advantages"] = grpo(rows, GRPOKnobs()).advantages

            columns = ["input_ids", "attention_mask", "response_mask", "advantages", "rollout_log_probs"]
            update = batch.select(batch_keys=columns, non_tensor_batch_keys=[])
            update.meta_info["num_mini_batches"] = 1  # one optimizer step: on-policy, so no clip ever binds
            metrics = mean_metrics(workers.actor.update_actor(update).meta_info["metrics"])
            logger.info("step %d reward %.3f mismatch %.1e", step, rewards.scores.mean(), metrics["mismatch/kl"])


if __name__ == "__main__":
    sys.exit(run(PPOConfig, "ppo", main, description=__doc__ or ""))
