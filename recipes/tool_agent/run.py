"""An agent learns to use a calculator: data, a tiny model, a supervised warm start, then asynchronous GRPO with tools.

    python recipes/tool_agent/run.py [--seed 1] [--out outputs/tool_agent] [key=value ...]

Each stage is a command of its own, shown as it runs, and is skipped when its result is there; an interrupted training goes
on from its newest checkpoint.  `key=value` settings go to the last stage, for example `trainer.max_staleness=0`.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes.arithmetic import run as arithmetic
from recipes.tool_agent.reward import compute_score
from rlhub.config.devices import count_gpus
from rlhub.tracking.generations import read_generations

logger = logging.getLogger("tool_agent")

HERE = Path(__file__).resolve().parent
NUM_VALIDATION = 256  # as generate.py makes them
SFT_STEPS = 120
RL_STEPS = 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are not done; returns the exit status of the one that failed, or 0."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.monotonic()
    seed = ["--seed", str(options.seed), "--out"]
    run_folder = options.out / options.name
    try:
        arithmetic.make_folder("data", [sys.executable, str(HERE / "generate.py"), *seed], options.out / "data")
        arithmetic.make_folder("model", [sys.executable, str(HERE / "build_model.py"), *seed], options.out / "model")
        warm_start = train_sft(options)
        settings = rl_settings(options, warm_start, run_folder)
        arithmetic.call("reinforcement learning", [sys.executable, "-m", "rlhub.trainer.main_ppo", *settings])
    except subprocess.CalledProcessError as error:
        logger.error("stopped: the command above ended with status %d", error.returncode)
        return int(error.returncode)
    logger.info("\n%s", summary(run_folder))
    logger.info("done in %.0f s; report: %s", time.monotonic() - started, run_folder / "report.html")
    return 0


def parse(arguments: Sequence[str] | None) -> arithmetic.Options:
    """The command line; what is not ours must look like key=value."""
    parser = argparse.ArgumentParser(
        description="Teach a tiny model to use a calculator: warm start, then GRPO on episodes with tools.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="folder for everything (default: outputs/tool_agent/seed<seed>)")
    parser.add_argument("--seed", type=int, default=1, help="seed of teacher, weights, data order and sampling")
    parser.add_argument("--steps", type=int, default=RL_STEPS, help="reinforcement-learning steps")
    parser.add_argument("--sft-steps", type=int, default=SFT_STEPS, help="steps of the warm start")
    parser.add_argument("--ranks", type=int, default=max(1, count_gpus()), help="worker processes that train")
    parser.add_argument("--name", default="grpo", help="name of the last stage's folder; choose another to compare settings")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of main_ppo")
    found = parser.parse_intermixed_args(arguments)
    if wrong := [text for text in found.overrides if "=" not in text]:
        parser.error(f"not understood: {' '.join(wrong)}; settings are given as key=value")
    return arithmetic.Options(
        out=(found.out or Path("outputs/tool_agent") / f"seed{found.seed}").absolute(),
        seed=found.seed,
        num_steps=found.steps,
        num_sft_steps=found.sft_steps,
        num_ranks=found.ranks,
        name=found.name,
        overrides=found.overrides,
    )


def train_sft(options: arithmetic.Options) -> Path:
    """The warm start's model folder, trained if it is not there."""
    folder = options.out / "sft"
    result = folder / f"global_step_{options.num_sft_steps}" / arithmetic.CHECKPOINTED_MODEL
    if result.is_dir():
        logger.info("\nwarm start: done before, %s", result)
    else:
        arithmetic.call("warm start", [sys.executable, "-m", "rlhub.trainer.main_sft", *sft_settings(options, folder)])
    return result


def sft_settings(options: arithmetic.Options, folder: Path) -> list[str]:
    """main_sft on conversations: only what the teacher says is learned, not what the tool answers."""
    return [
        f"data.train_files={options.out / 'data/sft.parquet'}",
        "data.train_batch_size=128",
        "data.max_length=64",
        f"data.seed={options.seed}",
        f"model.path={options.out / 'model'}",
        "model.enable_gradient_checkpointing=False",
        "optim.lr=4e-3",
        "optim.lr_scheduler_type=cosine",
        "optim.min_lr_ratio=0.1",
        "optim.lr_warmup_steps=20",
        f"trainer.total_training_steps={options.num_sft_steps}",
        f"trainer.save_freq={options.num_sft_steps}",
        *trainer_settings(options, folder),
    ]


def rl_settings(options: arithmetic.Options, warm_start: Path, folder: Path) -> list[str]:
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
        "actor_rollout_ref.actor.optim.lr=1e-3",
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
        *trainer_settings(options, folder),
        *options.overrides,
    ]


def trainer_settings(options: arithmetic.Options, folder: Path) -> list[str]:
    """What both trainings share."""
    return [
        f"trainer.seed={options.seed}",
        f"trainer.n_gpus_per_node={options.num_ranks}",
        "trainer.project_name=tool_agent",
        f"trainer.experiment_name={folder.name}",
        f"trainer.default_local_dir={folder}",
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
