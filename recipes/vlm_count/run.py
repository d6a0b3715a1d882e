"""A tiny vision-language model learns to count shapes in pictures: data, model, a supervised warm start, then GRPO.

    python recipes/vlm_count/run.py [--seed 1] [--black] [--architecture qwen2_5_vl] [--out FOLDER] [key=value ...]

Each stage is a command of its own, shown as it runs, and is skipped when its result is there.  `key=value` settings go to the
last stage.  --black is the control: all stages with black pictures, in a folder of their own.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages
from recipes.arithmetic.run import summary
from recipes.cpu_time import CPUTime

logger = logging.getLogger("vlm_count")

HERE = Path(__file__).resolve().parent
PROJECT = "vlm_count"
SFT_STEPS, RL_STEPS = 400, 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the stages that are not done; returns the exit status of the one that failed, or 0."""
    parser = stages.parser_of(
        "Teach a tiny vision-language model to count: warm start, then GRPO.",
        task=PROJECT,
        name="grpo",
        steps=RL_STEPS,
        sft_steps=SFT_STEPS,
        num_ranks=2,
    )
    parser.add_argument("--black", action="store_true", help="the control: black pictures everywhere")
    parser.add_argument("--architecture", choices=("qwen2_5_vl", "smolvlm"), default="smolvlm", help="of the model")
    options, found = stages.parse(parser, arguments)
    if found.black:
        options.out = options.out.with_name(f"{options.out.name}_black")
    with CPUTime() as cpu:
        status = stages.run(options, lambda: learn(options, found))
    logger.info("CPU time of all processes together: %.1f minutes", cpu.seconds / 60)
    return status


def learn(options: stages.Options, asked: argparse.Namespace) -> None:
    """Runs all stages, and says what came out.  asked: the recipe's own options."""
    stages.make_folder(options, "data", HERE / "generate.py", *(["--black"] if asked.black else []))
    stages.make_folder(options, "model", HERE / "build_model.py", f"--architecture={asked.architecture}")
    warm_start = stages.warm_start(options, sft_settings(options))
    folder = options.out / options.name
    stages.train("reinforcement learning", "main_ppo", rl_settings(options, warm_start, folder))
    logger.info("\n%s", summary(folder / "metrics.jsonl"))


def sft_settings(options: stages.Options) -> list[str]:
    """Returns the settings of main_sft."""
    return [*stages.sft_settings(options, PROJECT, max_length=40), "optim.lr=2e-3"]


def rl_settings(options: stages.Options, warm_start: Path, folder: Path) -> list[str]:
    """Returns the settings of main_ppo: 32 pictures x 8 samples a step; validation samples as training does."""
    return [
        f"data.train_files={options.out / 'data/train.parquet'}",
        f"data.val_files={options.out / 'data/val.parquet'}",
        "data.train_batch_size=32",
        "data.max_prompt_length=36",
        "data.max_response_length=4",
        f"data.seed={options.seed}",
        f"actor_rollout_ref.model.path={warm_start}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={HERE / 'reward.py'}",
        "reward_model.num_workers=1",
        f"trainer.total_training_steps={options.num_steps}",
        "trainer.test_freq=20",
        f"trainer.save_freq={options.num_steps}",
        *stages.trainer_settings(options, PROJECT, folder),
        *options.overrides,
    ]


if __name__ == "__main__":
    sys.exit(main())
