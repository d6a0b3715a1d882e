"""A coding agent learns from its tests: data, a tiny model, a supervised warm start, then asynchronous GRPO with a sandbox.

    python recipes/coding_agent/run.py [--seed 1] [--out outputs/coding_agent] [key=value ...]

Each stage is a command of its own, shown as it runs, and is skipped when its result is there; an interrupted training goes
on from its newest checkpoint.  `key=value` settings go to the last stage, for example
`actor_rollout_ref.rollout.agent.kwargs.sandbox=docker`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages

logger = logging.getLogger("coding_agent")

HERE = Path(__file__).resolve().parent
PROJECT = "coding_agent"
NUM_VALIDATION = 128  # as generate.py makes them
SFT_STEPS = 120
RL_STEPS = 24
MAX_PROMPT, MAX_RESPONSE = 16, 80


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are not done; returns the exit status of the one that failed, or 0."""
    options = parse(arguments)
    return stages.run(options, lambda: learn(options))


def parse(arguments: Sequence[str] | None) -> stages.Options:
    """The command line."""
    parser = stages.parser_of(
        "Teach a tiny model to write functions that pass their tests: warm start, then GRPO with a sandbox.",
        task=PROJECT,
        name="grpo",
        steps=RL_STEPS,
        sft_steps=SFT_STEPS,
        num_ranks=1,
    )
    return stages.parse(parser, arguments)[0]


def learn(options: stages.Options) -> None:
    """All stages, and what came out."""
    folder = options.out / options.name
    stages.make_task(options, HERE)
    warm_start = stages.warm_start(options, sft_settings(options))
    stages.train("reinforcement learning", "main_ppo", rl_settings(options, warm_start, folder))
    logger.info("\n%s", summary(folder / "metrics.jsonl"))


def sft_settings(options: stages.Options) -> list[str]:
    """main_sft on conversations: only what the teacher writes is learned."""
    return [*stages.sft_settings(options, PROJECT, max_length=MAX_PROMPT + MAX_RESPONSE), "trainer.backend=local"]


def rl_settings(options: stages.Options, warm_start: Path, folder: Path) -> list[str]:
    """main_ppo: 8 problems x 8 episodes a step, generated while the step before trains; validation runs episodes too.

    All in one process: with a model this small, starting others costs more than they save.
    """
    return [
        f"data.train_files={options.out / 'data/train.parquet'}",
        f"data.val_files={options.out / 'data/val.parquet'}",
        "data.train_batch_size=8",
        f"data.max_prompt_length={MAX_PROMPT}",
        f"data.max_response_length={MAX_RESPONSE}",
        f"data.seed={options.seed}",
        f"actor_rollout_ref.model.path={warm_start}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=6e-4",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.rollout.agent.default_agent_loop='{HERE / 'workflow.py'}:CodingAgent'",
        "actor_rollout_ref.rollout.agent.kwargs.sandbox=bwrap",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.backend=local",
        "trainer.max_staleness=1",
        f"trainer.total_training_steps={options.num_steps}",
        f"trainer.test_freq={options.num_steps}",
        f"trainer.save_freq={options.num_steps}",
        f"trainer.log_val_generations={NUM_VALIDATION}",
        *stages.trainer_settings(options, PROJECT, folder),
        *options.overrides,
    ]


def summary(metrics: Path) -> str:
    """The share of held-out functions that pass their tests over the steps, one line each."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return "\n".join(f"step {row['step']:4d}   passed {row['val/pass@1']:.3f}" for row in rows if "val/pass@1" in row)


if __name__ == "__main__":
    sys.exit(main())
