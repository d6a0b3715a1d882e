"""DPO from preference pairs: the arithmetic task's warm start learns that right, worked answers are preferred.

    python recipes/dpo/run.py [--seed 1] [--out outputs/arithmetic] [key=value ...]

Stages: data, model and warm start of recipes/arithmetic (those that are there are used), preference pairs, evaluation of the
warm start, main_dpo, evaluation of what came out.  `key=value` settings go to main_dpo.
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
from recipes.arithmetic import run as arithmetic
from rlhub.config.devices import count_gpus

logger = logging.getLogger("dpo")

HERE = Path(__file__).resolve().parent
STEPS = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are not done; returns the exit status of the one that failed, or 0."""
    options, _ = stages.parse(parser_of("Teach a tiny model by preference pairs: warm start, then DPO.", "dpo", STEPS), arguments)
    return stages.run(options, lambda: learn(options))


def learn(options: stages.Options) -> None:
    """All stages, and what came out."""
    folder = options.out / options.name
    warm_start = prepare(options)
    before = evaluate(options, warm_start, "before")
    stages.train("DPO", "main_dpo", dpo_settings(options, warm_start, folder))
    after = evaluate(options, model_of(folder, options.num_steps), f"{options.name}_after")
    logger.info("\n%s", summary(folder))
    logger.info("right answers: %.3f before, %.3f after", before, after)


def parser_of(description: str, name: str, steps: int) -> argparse.ArgumentParser:
    """The command line.  name, steps: of the last training."""
    return stages.parser_of(
        description,
        task=arithmetic.PROJECT,
        name=name,
        steps=steps,
        sft_steps=arithmetic.SFT_STEPS,
        num_ranks=count_gpus() or arithmetic.NUM_RANKS_ON_CPU,
    )


def prepare(options: stages.Options) -> Path:
    """Data, model, warm start and pairs; returns the warm start's folder."""
    warm_start = arithmetic.prepare(options)
    stages.make_folder(options, "pairs", HERE / "pairs.py")
    return warm_start


def pair_settings(options: stages.Options, warm_start: Path) -> list[str]:
    """What training on pairs shares, whatever is trained."""
    return [
        f"data.train_files={options.out / 'pairs/train.parquet'}",
        f"data.val_files={options.out / 'pairs/val.parquet'}",
        "data.max_length=20",
        f"data.seed={options.seed}",
        f"model.path={warm_start}",
        "model.enable_gradient_checkpointing=False",
    ]


def dpo_settings(options: stages.Options, warm_start: Path, folder: Path) -> list[str]:
    """main_dpo: 64 pairs a step."""
    return [
        *pair_settings(options, warm_start),
        "data.train_batch_size=64",
        "optim.lr=2e-4",
        f"trainer.total_training_steps={options.num_steps}",
        "trainer.test_freq=25",
        *stages.trainer_settings(options, arithmetic.PROJECT, folder),
        *options.overrides,
    ]


def machine_settings(options: stages.Options) -> list[str]:
    """Of the user's settings those that say where to compute: they hold for every stage on pairs."""
    where = ("trainer.device", "trainer.backend", "trainer.n_gpus_per_node", "trainer.ray_init")
    return [text for text in options.overrides if text.startswith(where)]


def evaluate(options: stages.Options, model: Path, name: str) -> float:
    """Share of right answers to the validation problems, one sample each at temperature 1; what is there for this model is not
    done again."""
    folder = options.out / name
    if not is_evaluation_of(model, folder):
        settings = [
            f"data.val_files={options.out / 'data/val.parquet'}",
            "data.max_prompt_length=8",
            "data.max_response_length=10",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
            f"custom_reward_function.path={HERE.parent / 'arithmetic/reward.py'}",
            "reward_model.num_workers=1",
            *stages.trainer_settings(options, arithmetic.PROJECT, folder),
            *machine_settings(options),
        ]
        stages.train(f"evaluation, {name}", "main_eval", settings)
    return float(rows_of(folder)[0]["val/pass@1"])


def is_evaluation_of(model: Path, folder: Path) -> bool:
    """Whether the folder holds one of this very model: more steps leave another."""
    config = folder / "config.yaml"
    return (folder / "metrics.jsonl").is_file() and config.is_file() and f"path: {model}\n" in config.read_text(encoding="utf-8")


def model_of(folder: Path, step: int, role: str = "model") -> Path:
    """The model of a role in the checkpoint of `step`, for `from_pretrained`."""
    return folder / f"global_step_{step}" / role / "huggingface"


def rows_of(folder: Path) -> list[dict[str, float]]:
    """A run's metrics, one row a step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def summary(folder: Path) -> str:
    """Validation on pairs over the steps, one line each."""
    return "\n".join(
        f"step {row['step']:4d}   pairs right {row['val/accuracy']:.3f}   margin {row['val/margin']:.3f}   "
        f"loss {row['val/loss']:.3f}"
        for row in rows_of(folder)
        if "val/accuracy" in row
    )


if __name__ == "__main__":
    sys.exit(main())
