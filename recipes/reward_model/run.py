"""A reward model from preference pairs, then GRPO with it as the only reward.

    python recipes/reward_model/run.py [--seed 1] [--out outputs/arithmetic] [key=value ...]

Stages: data, model, warm start and pairs as in recipes/dpo (those that are there are used), main_rm, evaluation of the warm
start, main_ppo with the reward model in place of the rule, evaluation by the rule of what came out.  `key=value` settings go
to main_ppo.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages
from recipes.arithmetic import run as arithmetic
from recipes.dpo import run as pairs

logger = logging.getLogger("reward_model")

STEPS = 20
RM_STEPS = 500


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are not done; returns the exit status of the one that failed, or 0."""
    parser = pairs.parser_of("Train a reward model on preference pairs, then a policy on its scores.", "grpo_rm", STEPS)
    parser.add_argument("--rm-steps", type=stages.positive, default=RM_STEPS, help="steps of the reward model's training")
    options, found = stages.parse(parser, arguments)
    return stages.run(options, lambda: learn(options, found.rm_steps))


def learn(options: stages.Options, rm_steps: int) -> None:
    """All stages, and what came out."""
    folder, rm_folder = options.out / options.name, options.out / "rm"
    warm_start = pairs.prepare(options)
    reward_model = pairs.model_of(rm_folder, rm_steps)
    if not reward_model.is_dir():
        stages.train("reward model", "main_rm", rm_settings(options, rm_steps, warm_start, rm_folder))
    before = pairs.evaluate(options, warm_start, "before")
    stages.train("reinforcement learning", "main_ppo", rl_settings(options, warm_start, reward_model, folder))
    after = pairs.evaluate(options, pairs.model_of(folder, options.num_steps, "actor"), f"{options.name}_after")
    logger.info("\nreward model:\n%s", pairs.summary(rm_folder))
    logger.info("right answers, by the rule that training never saw: %.3f before, %.3f after", before, after)


def rm_settings(options: stages.Options, steps: int, warm_start: Path, folder: Path) -> list[str]:
    """main_rm: 128 pairs a step."""
    return [
        *pairs.pair_settings(options, warm_start),
        "data.train_batch_size=128",
        "optim.lr=2e-3",
        "optim.lr_scheduler_type=cosine",
        "optim.lr_warmup_steps=20",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={max(steps // 10, 1)}",
        *stages.trainer_settings(options, arithmetic.PROJECT, folder),
        *pairs.machine_settings(options),
    ]


def rl_settings(options: stages.Options, warm_start: Path, reward_model: Path, folder: Path) -> list[str]:
    """main_ppo as in recipes/arithmetic, but the rule is not run: a response is worth what the reward model says.

    Few steps, and a KL loss: further from the warm start a policy finds answers that the reward model wrongly likes.
    """
    return [
        *arithmetic.rl_settings(options, warm_start, folder),
        "reward_model.enable=True",
        "reward_model.function_weight=0",
        f"reward_model.model.path={reward_model}",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.3",
        *options.overrides,
    ]


if __name__ == "__main__":
    sys.exit(main())
