"""DPO from preference pairs: the arithmetic task's warm start learns that right, worked answers are preferred.

    python recipes/dpo/run.py [--seed 1] [--out outputs/arithmetic] [key=value ...]

Stages: data, model and warm start of recipes/arithmetic (those that are there are used), preference pairs, evaluation of the
warm start, main_dpo, evaluation of what came out.  `key=value` settings go to main_dpo.
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
from rlhub.config.devices import count_gpus

logger = logging.getLogger("dpo")

HERE = Path(__file__).resolve().parent
STEPS = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are not done; returns the exit status of the one that failed, or 0."""
    parser = parser_of("Teach a tiny model by preference pairs: warm start, then DPO.", "dpo", STEPS)
    options, _ = parse(parser, arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.monotonic()
    run_folder = options.out / options.name
    try:
        warm_start = prepare(options)
        before = evaluate(options, warm_start, "before")
        settings = dpo_settings(options, warm_start, run_folder)
        arithmetic.call("DPO", [sys.executable, "-m", "rlhub.trainer.main_dpo", *settings])
        after = evaluate(options, model_of(run_folder, options.num_steps), f"{options.name}_after")
    except subprocess.CalledProcessError as error:
        logger.error("stopped: the command above ended with status %d", error.returncode)
        return int(error.returncode)
    logger.info("\n%s", summary(run_folder))
    logger.info("right answers: %.3f before, %.3f after", before, after)
    logger.info("done in %.0f s; report: %s", time.monotonic() - started, run_folder / "report.html")
    return 0


def parser_of(description: str, name: str, steps: int) -> argparse.ArgumentParser:
    """The command line.  name, steps: of the last training."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for everything (default: outputs/arithmetic/seed<seed>)")
    parser.add_argument("--seed", type=int, default=1, help="seed of pairs, weights, data order and sampling")
    parser.add_argument("--steps", type=int, default=steps, help="steps of the last training")
    parser.add_argument("--sft-steps", type=int, default=arithmetic.SFT_STEPS, help="steps of the warm start")
    parser.add_argument("--ranks", type=int, default=count_gpus() or arithmetic.NUM_RANKS_ON_CPU, help="worker processes")
    parser.add_argument("--name", default=name, help="name of the last stage's folder; choose another to compare settings")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the last training")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> tuple[arithmetic.Options, argparse.Namespace]:
    """What the command line says; what is not ours must look like key=value."""
    found = parser.parse_intermixed_args(arguments)
    if wrong := [text for text in found.overrides if "=" not in text]:
        parser.error(f"not understood: {' '.join(wrong)}; settings are given as key=value")
    options = arithmetic.Options(
        out=(found.out or Path("outputs/arithmetic") / f"seed{found.seed}").absolute(),
        seed=found.seed,
        num_steps=found.steps,
        num_sft_steps=found.sft_steps,
        num_ranks=found.ranks,
        name=found.name,
        overrides=found.overrides,
    )
    return options, found


def prepare(options: arithmetic.Options) -> Path:
    """Data, model, warm start and pairs; returns the warm start's folder."""
    task, seed = HERE.parent / "arithmetic", ["--seed", str(options.seed), "--out"]
    arithmetic.make_folder("data", [sys.executable, str(task / "generate.py"), *seed], options.out / "data")
    arithmetic.make_folder("model", [sys.executable, str(task / "build_model.py"), *seed], options.out / "model")
    arithmetic.make_folder("pairs", [sys.executable, str(HERE / "pairs.py"), *seed], options.out / "pairs")
    return arithmetic.train_sft(options)


def pair_settings(options: arithmetic.Options, warm_start: Path) -> list[str]:
    """What training on pairs shares, whatever is trained."""
    return [
        f"data.train_files={options.out / 'pairs/train.parquet'}",
        f"data.val_files={options.out / 'pairs/val.parquet'}",
        "data.max_length=20",
        f"data.seed={options.seed}",
        f"model.path={warm_start}",
        "model.enable_gradient_checkpointing=False",
    ]


def dpo_settings(options: arithmetic.Options, warm_start: Path, folder: Path) -> list[str]:
    """main_dpo: 64 pairs a step."""
    return [
        *pair_settings(options, warm_start),
        "data.train_batch_size=64",
        "optim.lr=2e-4",
        f"trainer.total_training_steps={options.num_steps}",
        "trainer.test_freq=25",
        *arithmetic.trainer_settings(options, folder),
        *options.overrides,
    ]


def machine_settings(options: arithmetic.Options) -> list[str]:
    """Of the user's settings those that say where to compute: they hold for every stage on pairs."""
    where = ("trainer.device", "trainer.backend", "trainer.n_gpus_per_node", "trainer.ray_init")
    return [text for text in options.overrides if text.startswith(where)]


def evaluate(options: arithmetic.Options, model: Path, name: str) -> float:
    """Share of right answers to the validation problems, one sample each at temperature 1; what is there is not done again."""
    folder = options.out / name
    if not (folder / "metrics.jsonl").is_file():
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
            *arithmetic.trainer_settings(options, folder),
            *machine_settings(options),
        ]
        arithmetic.call(f"evaluation, {name}", [sys.executable, "-m", "rlhub.trainer.main_eval", *settings])
    return float(rows_of(folder)[0]["val/pass@1"])


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
