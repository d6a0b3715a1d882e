"""The quickstart: data, a tiny model, a supervised warm start, then reinforcement learning.

    python recipes/arithmetic/run.py [--seed 1] [--out outputs/arithmetic] [key=value ...]

Each stage is a command of its own, shown as it runs, and is skipped when its result is there; an interrupted training goes
on from its newest checkpoint.  `key=value` settings go to the last stage, for example `algorithm.adv_estimator=rloo`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhub.config.devices import count_gpus

logger = logging.getLogger("arithmetic")

HERE = Path(__file__).resolve().parent
NUM_RANKS_ON_CPU = 2
CHECKPOINTED_MODEL = "model/huggingface"
"""Where a checkpoint folder holds the model for `from_pretrained`."""


@dataclass(slots=True, kw_only=True)
class Options:
    """What the command line asks for."""

    out: Path
    """Folder of all results; one for each seed and warm start."""
    seed: int
    """Of the teacher, the first weights, the order of the data and sampling."""
    num_steps: int
    """Reinforcement-learning steps."""
    num_sft_steps: int
    """Steps of the warm start."""
    num_ranks: int
    """Worker processes that share each batch."""
    name: str
    """Folder of the last stage below `out`: another name, another run from the same warm start."""
    overrides: list[str]
    """Settings of the last stage."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are not done; returns the exit status of the one that failed, or 0."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.monotonic()
    out = options.out
    build = [sys.executable, str(HERE / "build_model.py"), "--seed", str(options.seed), "--out"]
    generate = [sys.executable, str(HERE / "generate.py"), "--seed", str(options.seed), "--out"]
    try:
        make_folder("data", generate, out / "data")
        make_folder("model", build, out / "model")
        warm_start = train_sft(options)
        call("reinforcement learning", rl_command(options, warm_start))
    except subprocess.CalledProcessError as error:
        logger.error("stopped: the command above ended with status %d", error.returncode)
        return int(error.returncode)
    run_folder = out / options.name
    logger.info("\n%s", summary(run_folder / "metrics.jsonl"))
    logger.info("done in %.0f s; report: %s", time.monotonic() - started, run_folder / "report.html")
    return 0


def parse(arguments: Sequence[str] | None) -> Options:
    """The command line; what is not ours must look like key=value."""
    parser = argparse.ArgumentParser(
        description="Teach a tiny model to add six dice: warm start, then GRPO.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="folder for everything (default: outputs/arithmetic/seed<seed>)")
    parser.add_argument("--seed", type=int, default=1, help="seed of teacher, weights, data order and sampling")
    parser.add_argument("--steps", type=int, default=RL_STEPS, help="reinforcement-learning steps")
    parser.add_argument("--sft-steps", type=int, default=SFT_STEPS, help="steps of the warm start")
    parser.add_argument(
        "--ranks", type=int, default=max(1, count_gpus()) if count_gpus() else NUM_RANKS_ON_CPU, help="worker processes"
    )
    parser.add_argument("--name", default="grpo", help="name of the last stage's folder; choose another to compare settings")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of main_ppo")
    found = parser.parse_intermixed_args(arguments)
    if wrong := [text for text in found.overrides if "=" not in text]:
        parser.error(f"not understood: {' '.join(wrong)}; settings are given as key=value")
    return Options(
        out=(found.out or Path("outputs/arithmetic") / f"seed{found.seed}").absolute(),
        seed=found.seed,
        num_steps=found.steps,
        num_sft_steps=found.sft_steps,
        num_ranks=found.ranks,
        name=found.name,
        overrides=found.overrides,
    )


SFT_STEPS = 400
RL_STEPS = 60


def sft_settings(options: Options, folder: Path) -> list[str]:
    """main_sft: enough to learn the additions; twice the steps change the accuracy by less than 0.03."""
    return [
        f"data.train_files={options.out / 'data/sft.parquet'}",
        "data.train_batch_size=128",
        "data.max_length=20",
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


def rl_settings(options: Options, warm_start: Path, folder: Path) -> list[str]:
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
        *trainer_settings(options, folder),
        *options.overrides,
    ]


def trainer_settings(options: Options, folder: Path) -> list[str]:
    """What both trainings share."""
    return [
        f"trainer.seed={options.seed}",
        f"trainer.n_gpus_per_node={options.num_ranks}",
        "trainer.project_name=arithmetic",
        f"trainer.experiment_name={folder.name}",
        f"trainer.default_local_dir={folder}",
    ]


def rl_command(options: Options, warm_start: Path) -> list[str]:
    """Always run: main_ppo itself knows whether its run is finished or to be resumed."""
    settings = rl_settings(options, warm_start, options.out / options.name)
    return [sys.executable, "-m", "rlhub.trainer.main_ppo", *settings]


def train_sft(options: Options) -> Path:
    """The warm start's model folder, trained if it is not there."""
    folder = options.out / "sft"
    result = folder / f"global_step_{options.num_sft_steps}" / CHECKPOINTED_MODEL
    if result.is_dir():
        logger.info("\nwarm start: done before, %s", result)
    else:
        call("warm start", [sys.executable, "-m", "rlhub.trainer.main_sft", *sft_settings(options, folder)])
    return result


def make_folder(stage: str, command: list[str], folder: Path) -> None:
    """Run `command <folder>` into a folder beside and rename it, so that a half-made one is never taken for done."""
    if folder.is_dir():
        logger.info("\n%s: done before, %s", stage, folder)
        return
    aside = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    call(stage, [*command, str(aside)])
    aside.rename(folder)


def call(stage: str, command: list[str]) -> None:
    """Show and run a command; CalledProcessError if it fails."""
    logger.info("\n%s:\n  %s", stage, shlex.join(command))
    started = time.monotonic()
    # One thread a rank: on few cores, ranks that each take all of them wait for one another.
    subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ})
    logger.info("%s: %.0f s", stage, time.monotonic() - started)


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
