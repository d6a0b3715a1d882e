"""A tiny policy of a vision-language model's architecture learns from pixels to touch the target whose colour it is told: it is
cloned weakly from a scripted expert, then improved by PPO in simulators.

    python recipes/embodied_reach/run.py [--seed 1] [--out outputs/embodied_reach/seed1] [key=value ...]

Each stage is a command of its own, shown as it runs, and is skipped when its result is there.  `key=value` settings go to the
last stage, for example `env.stages=2`.  --from-scratch leaves the cloning out.
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
from recipes.cpu_time import CPUTime

logger = logging.getLogger("embodied_reach")

HERE = Path(__file__).resolve().parent
PROJECT = "embodied_reach"
WEAK = 0.30
CHECK_EVERY = 10  # updates of cloning
SCENES, SCENES_FROM_SCRATCH = 128, 256
"""Scenes of a step.  Random weights succeed rarely, and learn reliably from twice as many episodes and updates."""
ACTIONS = (
    "{chunk: 2, action_dim: 2, bins: 5, first_bin_id: 11, place_ids: [7, 8, 9, 10], image_token_id: 3, tokens_per_image: 4, "
    "value_head: true, value_scale: 5.0}"
)
"""model.vla of the tiny model; `demonstrations.VLA` is the same."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the stages that are not done; returns the exit status of the one that failed, or 0."""
    parser = stages.parser_of(
        "Teach a tiny vision-language-action policy to touch the named target: cloning, then PPO in simulators.",
        task=PROJECT,
        name="ppo",
        steps=150,
        sft_steps=200,
        num_ranks=2,
    )
    parser.add_argument("--from-scratch", action="store_true", help="begin PPO with random weights")
    parser.add_argument("--episodes", type=stages.positive, default=2048, help="demonstrations")
    parser.add_argument("--weak", type=float, default=WEAK, help="success at which cloning ends, over 256 states of its own")
    options, found = stages.parse(parser, arguments)
    with CPUTime() as cpu:
        status = stages.run(options, lambda: learn(options, found))
    logger.info("CPU time of all processes, simulators and ranks together: %.1f minutes", cpu.seconds / 60)
    return status


def learn(options: stages.Options, asked: argparse.Namespace) -> None:
    """Runs all stages, and says what came out.  asked: the recipe's own options."""
    stages.make_folder(options, "model", HERE / "build_model.py")
    start = options.out / "model" if asked.from_scratch else weak_clone(options, asked)
    folder = options.out / options.name
    scenes = SCENES_FROM_SCRATCH if asked.from_scratch else SCENES
    stages.train("reinforcement learning", "main_ppo", ppo_settings(options, start, folder, scenes))
    logger.info("\n%s", summary(folder / "metrics.jsonl"))


def weak_clone(options: stages.Options, asked: argparse.Namespace) -> Path:
    """Returns the model folder of the first checkpoint of the cloning that is good enough."""
    chosen = stages.sft_folder(options) / "weak.txt"
    if chosen.is_file():
        logger.info("\ncloning: done before, %s", chosen.read_text().strip())
        return Path(chosen.read_text().strip())
    stages.make_folder(options, "demonstrations", HERE / "demonstrations.py", f"--episodes={asked.episodes}")
    stages.train("cloning", "main_sft", clone_settings(options))
    folder = stages.sft_folder(options)
    command = [sys.executable, str(HERE / "choose.py"), str(folder), f"--seed={options.seed}", f"--at-least={asked.weak}"]
    stages.call("first check of the clone that is good enough", command)
    return Path(chosen.read_text().strip())


def clone_settings(options: stages.Options) -> list[str]:
    """Returns the settings of main_sft: updates of 128 demonstrated calls, each checkpoint a check."""
    return [
        f"data.train_files={options.out / 'demonstrations'}",
        "data.train_batch_size=128",
        "data.max_length=32",
        f"data.seed={options.seed}",
        f"model.path={options.out / 'model'}",
        f"model.vla={ACTIONS}",
        "optim.lr=1e-3",
        f"trainer.total_training_steps={options.num_sft_steps}",
        f"trainer.save_freq={CHECK_EVERY}",
        "trainer.backend=local",
        *stages.trainer_settings(options, PROJECT, stages.sft_folder(options)),
        "trainer.n_gpus_per_node=1",
    ]


def ppo_settings(options: stages.Options, start: Path, folder: Path, scenes: int) -> list[str]:
    """Returns the settings of main_ppo: scenes of one episode each a step, and up to 4 updates for each 64 of them.

    gamma and lambda count calls of two actions.  target_kl ends the updates of a step whose policy has moved far.
    """
    return [
        "env.name=reach_color",
        "env.val_scenes=512",
        f"data.train_batch_size={scenes}",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        f"data.seed={options.seed}",
        f"actor_rollout_ref.model.path={start}",
        f"actor_rollout_ref.model.vla={ACTIONS}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.actor.log_prob_level=chunk",
        "actor_rollout_ref.actor.value_loss_coef=1.0",
        "actor_rollout_ref.actor.cliprange_value=inf",
        "actor_rollout_ref.actor.entropy_coeff=0.003",
        "actor_rollout_ref.actor.clip_ratio_low=0.2",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.ppo_epochs=4",
        "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.target_kl=0.05",
        "actor_rollout_ref.actor.grad_clip=0.5",
        "actor_rollout_ref.actor.optim.lr=6e-4",
        "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=20",
        "algorithm.adv_estimator=chunk_gae",
        "algorithm.gamma=0.8",
        "algorithm.lam=0.8",
        f"trainer.total_training_steps={options.num_steps}",
        "trainer.test_freq=25",
        f"trainer.save_freq={options.num_steps}",
        "trainer.log_val_generations=2",
        *stages.trainer_settings(options, PROJECT, folder),
        *options.overrides,
    ]


def summary(metrics: Path) -> str:
    """Returns success over the fixed initial states by steps, a line each."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return "\n".join(
        f"step {row['step']:4d}   success {row['val/success']:.3f} [{row['val/success_low']:.3f}, {row['val/success_high']:.3f}]"
        for row in rows
        if "val/success" in row
    )


if __name__ == "__main__":
    sys.exit(main())
