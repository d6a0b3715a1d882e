"""The quickstart: data, a tiny model, a supervised warm start, then reinforcement learning.

    python recipes/arithmetic/run.py [--seed 1] [--out outputs/arithmetic] [key=value ...]

Each stage is a command of its own, shown as it runs, and is skipped when its result is there; an interrupted training goes
on from its newest checkpoint.  `key=value` settings go to the last stage, for example `algorithm.adv_estimator=rloo`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages
from rlhub.config.devices import count_gpus

logger = logging.getLogger("arithmetic")

HERE = Path(__file__).resolve().parent
PROJECT = "arithmetic"
NUM_RANKS_ON_CPU = 2
SFT_STEPS = 400
RL_STEPS = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are not done; returns the exit status of the one that failed, or 0."""
    options = parse(arguments)
    return stages.run(options, lambda: learn(options))


def parse(arguments: Sequence[str] | None) -> stages.Options:
    """The command line."""
    return stages.parse(parser(), arguments)[0]


def parser(name: str = "grpo") -> argparse.ArgumentParser:
    """Of the command line.  name: of the last stage's folder."""
    return stages.parser_of(
        "Teach a tiny model to add six dice: warm start, then GRPO.",
        task=PROJECT,
        name=name,
        steps=RL_STEPS,
        sft_steps=SFT_STEPS,
        num_ranks=count_gpus() or NUM_RANKS_ON_CPU,
    )


def learn(options: stages.Options) -> None:
    """All stages, and what came out."""
    folder = options.out / options.name
    warm_start = prepare(options)
    stages.train("reinforcement learning", "main_ppo", rl_settings(options, warm_start, folder))
    logger.info("\n%s", summary(folder / "metrics.jsonl"))


def prepare(options: stages.Options) -> Path:
    """Data, model and warm start; returns the warm start's folder."""
    stages.make_task(options, HERE)
    return stages.warm_start(options, sft_settings(options))


def sft_settings(options: stages.Options) -> list[str]:
    """main_sft; twice the steps do not raise the accuracy."""
    return stages.sft_settings(options, PROJECT, max_length=20)


def rl_settings(options: stages.Options, warm_start: Path, folder: Path) -> list[str]:
    """main_ppo: 32 problems x 8 samples a step, one on-policy update; validation samples as training does."""
    return [
        f"data.train_files={options.out / 'data/train.parquet'}",
        f"data.val_files={options.out / 'data/val.parquet'}",
        "data.train_batch_size=32",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        f"data.seed={options.seed}",
        f"actor_rollout_ref.model.path={warm_start}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={HERE / 'reward.py'}",
        "reward_model.num_workers=1",
        f"trainer.total_training_steps={options.num_steps}",
        "trainer.test_freq=20",
        f"trainer.save_freq={options.num_steps}",
        "trainer.log_val_generations=8",
        *stages.trainer_settings(options, PROJECT, folder),
        *options.overrides,
    ]


def summary(metrics: Path) -> str:
    """Validation accuracy and response length over the steps, one line each."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    lines = [
        f"step {row['step']:4d}   right {row['val/pass@1']:.3f}   length {row['val/response_length/mean']:.2f} tokens"
        for row in rows
        if "val/pass@1" in row
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
