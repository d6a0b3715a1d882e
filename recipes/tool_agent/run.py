"""An agent learns to use a calculator: data, a tiny model, a supervised warm start, then asynchronous GRPO with tools.

    python recipes/tool_agent/run.py [--seed 1] [--out outputs/tool_agent] [key=value ...]

Each stage is a command of its own, shown as it runs, and is skipped when its result is there; an interrupted training goes
on from its newest checkpoint.  `key=value` settings go to the last stage, for example `trainer.max_staleness=0`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages
from recipes.tool_agent.reward import compute_score
from rlhub.config.devices import count_gpus
from rlhub.tracking.generations import read_generations

logger = logging.getLogger("tool_agent")

HERE = Path(__file__).resolve().parent
PROJECT = "tool_agent"
NUM_VALIDATION = 256  # as generate.py makes them
SFT_STEPS = 120
RL_STEPS = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are not done; returns the exit status of the one that failed, or 0."""
    options = parse(arguments)
    return stages.run(options, lambda: learn(options))


def parse(arguments: Sequence[str] | None) -> stages.Options:
    """The command line."""
    parser = stages.parser_of(
        "Teach a tiny model to use a calculator: warm start, then GRPO on episodes with tools.",
        task=PROJECT,
        name="grpo",
        steps=RL_STEPS,
        sft_steps=SFT_STEPS,
        num_ranks=count_gpus() or 1,
    )
    return stages.parse(parser, arguments)[0]


def learn(options: stages.Options) -> None:
    """All stages, and what came out."""
    folder = options.out / options.name
    stages.make_task(options, HERE)
    warm_start = stages.warm_start(options, sft_settings(options))
    stages.train("reinforcement learning", "main_ppo", rl_settings(options, warm_start, folder))
    logger.info("\n%s", summary(folder))


def sft_settings(options: stages.Options) -> list[str]:
    """main_sft on conversations: only what the teacher says is learned, not what the tool answers."""
    return stages.sft_settings(options, PROJECT, max_length=64)


def rl_settings(options: stages.Options, warm_start: Path, folder: Path) -> list[str]:
    """main_ppo: 16 problems x 8 episodes a step, generated while the step before trains; validation runs episodes too."""
    return [
        f"data.train_files={options.out / 'data/train.parquet'}",
        f"data.val_files={options.out / 'data/val.parquet'}",
        "data.train_batch_size=16",
        "data.max_prompt_length=12",
        "data.max_response_length=40",
        f"data.seed={options.seed}",
        f"actor_rollout_ref.model.path={warm_start}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.optim.lr=6e-4",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={HERE / 'tools.yaml'}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={HERE / 'reward.py'}",
        "reward_model.num_workers=1",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.max_staleness=1",
        f"trainer.total_training_steps={options.num_steps}",
        "trainer.test_freq=12",
        f"trainer.save_freq={options.num_steps}",
        f"trainer.log_val_generations={NUM_VALIDATION}",
        *stages.trainer_settings(options, PROJECT, folder),
        *options.overrides,
    ]


def summary(folder: Path) -> str:
    """Held-out accuracy and share of episodes in which the calculator answered, over the steps, one line each."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [
        f"step {row['step']:4d}   right {row['val/pass@1']:.3f}   called {call_share(folder, row['step']):.3f}"
        for row in rows
        if "val/pass@1" in row
    ]
    return "\n".join(lines)


def call_share(folder: Path, step: int) -> float:
    """Of the validation at this step, all of whose episodes are in the run's folder."""
    samples = read_generations(folder / "generations" / f"val-{step:06d}.jsonl")
    return sum(compute_score("", sample.response, "")["called"] for sample in samples) / len(samples)


if __name__ == "__main__":
    sys.exit(main())
