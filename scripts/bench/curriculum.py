"""How many samples does a curriculum save?  The arithmetic task with problems of mixed difficulty, over several seeds.

    python scripts/bench/curriculum.py [--seeds 1 2 3] [--only uniform curriculum] [--steps 100] [--out FOLDER]

The policy adds dice.  Its warm start imitates a teacher who is careful, hasty or lost, by the number of dice:

    easy     4 dice   always worked out, without slips: the policy starts near 1.0, and its groups have no advantage
    medium   5 dice   two in five worked out, else a guess within 3: it starts near 0.45
    hard     6 dice   one in five worked out, else a guess within 6: it starts near 0.17

Four training rows in five are easy, one in ten is medium, one in ten hard: a curriculum can save only where uniform generates
many groups that have no advantage, here three in four.  Validation has a third of each, since a mean over the training rows
would begin above the target, and one sample of each problem at temperature 1.  Validation problems are in no other file, but for
the easy ones, of which there are 1,296 in all.  Batches and learning rate are the quickstart's.  Every variant starts from the
same warm start of its seed, ends when it has reached the target, and differs in data.sampler alone:

    uniform       every row once an epoch
    curriculum    data.sampler=curriculum with by=level: the measured pass rate of a level decides
    blind         control: the same class, whose `observe` does nothing
    shuffled      control: the same class, which is told the pass rates of other prompts of the batch

Compared are the samples that were generated until validation accuracy, over all difficulties, reached 0.8: between two checks it
is interpolated.  Wanted: at most 0.75 of uniform's in the mean over the seeds and below 1.0 for each, and no such gain for the
controls.  The exit status is 1 where that fails.  A run that is done is not repeated.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import random
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

from recipes import stages  # noqa: E402
from recipes.arithmetic.build_model import build_tokenizer  # noqa: E402
from recipes.arithmetic.generate import LARGEST_NUMBER, NUM_FACES, Problem, Teacher, demonstrate, to_prompt, to_row  # noqa: E402
from recipes.tiny_qwen2 import write_model  # noqa: E402
from rlhub.data.samplers import CurriculumSampler, Observation  # noqa: E402

DICE = {"easy": 4, "medium": 5, "hard": 6}
TEACHERS = {
    "easy": Teacher(worked_share=1.0, slip_rate=0.0),
    "medium": Teacher(slip_rate=0.02),
    "hard": Teacher(worked_share=0.2, slip_rate=0.02, guess_spread=6),
}
DEMONSTRATIONS = {"easy": 12000, "medium": 7000, "hard": 32000}
TRAINING = {"easy": 1600, "medium": 200, "hard": 200}
NUM_VALIDATION, SFT_STEPS = 512, 1500
PROMPTS, SAMPLES, TEST_FREQ, TARGET = 32, 8, 4, 0.8
WANTED_MEAN, WANTED_EACH = 0.75, 1.0
KNOBS = "data.sampler_kwargs={by: level, retire_after: 0}"
VARIANTS: dict[str, list[str]] = {
    "uniform": [],
    "curriculum": ["data.sampler=curriculum", KNOBS],
    "blind": [f"data.sampler={Path(__file__).resolve()}:Blind", KNOBS],
    "shuffled": [f"data.sampler={Path(__file__).resolve()}:Shuffled", KNOBS],
}


class Blind(CurriculumSampler):
    """A curriculum that learns nothing."""

    def observe(self, seen: Observation) -> None: ...


class Shuffled(CurriculumSampler):
    """A curriculum that is told the pass rates of other prompts."""

    def observe(self, seen: Observation) -> None:
        order = np.random.Generator(np.random.Philox(seen.step)).permutation(len(seen.indices))
        super().observe(replace(seen, pass_rates=seen.pass_rates[order]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants; uniform is always run")
    parser.add_argument("--steps", type=int, default=100, help="training steps at most (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "curriculum", help="folder of all runs")
    options = parser.parse_args()
    names = [name for name in VARIANTS if name == "uniform" or name in options.only]
    found: dict[str, list[float]] = {name: [] for name in names}
    for library in ("hydra", "torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2", "rlhub.trainer.ppo.trainer"):
        importlib.import_module(library)
    for seed in options.seeds:
        folder = options.out.absolute() / f"seed{seed}"
        prepare(folder, seed)
        for name in names:
            curve = train(folder, seed, name, options.steps)
            found[name].append(samples_to_target(curve))
            print(f"seed {seed}  {name:<11}", "  ".join(f"{step}:{accuracy:.3f}" for step, accuracy in curve), flush=True)
    return report(options.seeds, found)


def prepare(folder: Path, seed: int) -> None:
    """Writes data and model, and trains the warm start, unless they are there."""
    if not (folder / "data").is_dir():
        write_data(folder / "data", seed)
        write_model(folder / "model", seed, build_tokenizer())
    if not (warm_start(folder)).is_dir():
        settings = stages.sft_settings(stage_options(folder, seed), "curriculum", max_length=24)
        run("main_sft", [*settings, "trainer.backend=local"], folder / "sft.log")


def warm_start(folder: Path) -> Path:
    return folder / f"sft/global_step_{SFT_STEPS}" / stages.CHECKPOINTED_MODEL


def stage_options(folder: Path, seed: int) -> stages.Options:
    return stages.Options(out=folder, seed=seed, num_steps=0, num_sft_steps=SFT_STEPS, num_ranks=1, name="grpo", overrides=[])


def write_data(folder: Path, seed: int) -> None:
    """Writes sft.parquet, train.parquet and val.parquet."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    tables: dict[str, list[dict[str, Any]]] = {"sft": [], "train": [], "val": []}
    for level, dice in DICE.items():
        sizes = {"val": NUM_VALIDATION, "train": TRAINING[level], "sft": DEMONSTRATIONS[level]}
        problems = itertools.cycle(draw_problems(rng, dice, sum(sizes.values())))
        val, train, shown = ([next(problems) for _ in range(size)] for size in sizes.values())
        tables["val"] += [row_of(problem, "val", level) for problem in val]
        tables["train"] += [row_of(problem, "train", level) for problem in train]
        tables["sft"] += [{"prompt": to_prompt(problem), "response": shown_by(level, problem, rng)} for problem in shown]
    for name, rows in tables.items():
        rng.shuffle(rows)
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def draw_problems(rng: random.Random, dice: int, most: int) -> list[Problem]:
    """Returns different problems of so many dice, as many as there are, at most `most`."""
    numbers = rng.sample(range(NUM_FACES**dice), min(most, NUM_FACES**dice))
    return [tuple(number // NUM_FACES**place % NUM_FACES + 1 for place in range(dice)) for number in numbers]


def row_of(problem: Problem, split: str, level: str) -> dict[str, Any]:
    row = to_row(problem, split, 0) | {"data_source": level}
    row["extra_info"]["level"] = level
    return row


def shown_by(level: str, problem: Problem, rng: random.Random) -> str:
    """Returns the teacher's response, in numbers that the tokenizer has."""
    numbers = demonstrate(problem, TEACHERS[level], rng).split()
    return " ".join(str(min(int(number), LARGEST_NUMBER)) for number in numbers)


def train(folder: Path, seed: int, name: str, steps: int) -> list[tuple[int, float]]:
    """Runs a variant until it has reached the target, unless that is done; returns validation accuracy by step."""
    done, found = folder / f"{name}.json", folder / name / "metrics.jsonl"
    if done.is_file():
        return [(step, accuracy) for step, accuracy in json.loads(done.read_text())]
    settings = [
        f"data.train_files={folder / 'data/train.parquet'}",
        f"data.val_files={folder / 'data/val.parquet'}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=10",
        "data.max_response_length=10",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={warm_start(folder)}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.rollout.name=hf",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={ROOT / 'recipes/arithmetic/reward.py'}",
        "reward_model.num_workers=1",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={TEST_FREQ}",
        "trainer.save_freq=-1",
        *stages.trainer_settings(stage_options(folder, seed), "curriculum", folder / name),
        "trainer.backend=local",
        "trainer.logger=[]",
        *VARIANTS[name],
    ]
    run("main_ppo", settings, folder / f"{name}.log", lambda: any(accuracy >= TARGET for _, accuracy in curve_in(found)))
    done.write_text(json.dumps(curve_in(found)))
    return curve_in(found)


def curve_in(metrics: Path) -> list[tuple[int, float]]:
    """Returns validation accuracy by step, as far as a run has written it."""
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [(row["step"], row["val/pass@1"]) for row in rows if "val/pass@1" in row]


def run(command: str, settings: list[str], log: Path, enough: Callable[[], bool] = lambda: False) -> None:
    """Runs a command of the package in a fork of this process, which has loaded its libraries; its output goes to a file.

    enough: asked now and then whether the run may be ended.
    """
    started = time.monotonic()
    child = multiprocessing.get_context("fork").Process(target=execute, args=(command, settings, log))
    child.start()
    while child.is_alive():
        child.join(2.0)
        if child.is_alive() and enough():
            child.terminate()
            child.join()
    if child.exitcode and not enough():
        sys.exit(f"{command} ended with status {child.exitcode}; see {log}")
    print(f"{log.stem}: {time.monotonic() - started:.0f} s", flush=True)


def execute(command: str, settings: list[str], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [command, *settings]
    runpy.run_module(f"rlhub.trainer.{command}", run_name="__main__")


def samples_to_target(curve: list[tuple[int, float]]) -> float:
    """Returns the samples until the accuracy first reached the target, interpolated between two checks; infinity if never."""
    for (before, low), (after, high) in zip(curve, curve[1:], strict=False):
        if high >= TARGET:
            return (before + (after - before) * max(TARGET - low, 0) / (high - low)) * PROMPTS * SAMPLES
    return float("inf")


def report(seeds: list[int], found: dict[str, list[float]]) -> int:
    """Prints the table; returns the exit status."""
    print(f"\nsamples until validation accuracy {TARGET}, and as a share of uniform's")
    print(f"{'':<12}" + "".join(f"{f'seed {seed}':>17}" for seed in seeds) + f"{'mean ratio':>14}")
    ratios = {name: [one / base for one, base in zip(found[name], found["uniform"], strict=True)] for name in found}
    for name, samples in found.items():
        cells = "".join(f"{one:>10.0f} ({ratio:.2f})" for one, ratio in zip(samples, ratios[name], strict=True))
        print(f"{name:<12}{cells}{statistics.mean(ratios[name]):>14.2f}")
    gains = [name for name in ratios if statistics.mean(ratios[name]) <= WANTED_MEAN and max(ratios[name]) < WANTED_EACH]
    right = "curriculum" not in found or gains == ["curriculum"]
    print(f"wanted: curriculum at most {WANTED_MEAN}, each below {WANTED_EACH}, no control so: {'holds' if right else 'FAILS'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
