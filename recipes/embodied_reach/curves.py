"""Curves and controls over seeds, and a table of what was asked and what came out.

    python recipes/embodied_reach/curves.py --seeds 1 2 3 [--cases black srpo ...]
    python recipes/embodied_reach/curves.py --through-engines --out outputs/embodied_reach --seeds 1 2 3

The first command runs the plain loop: each seed is cloned once, and every case begins with that clone.  The second one runs
main_ppo through Ray by run.py, from the clones in the folders <out>/seed<number>; results that are there already count.  A case
has settings for both and a condition on success over the 512 fixed episodes.  The last column says whether it holds, and the exit
status is 0 where all do.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages
from recipes.cpu_time import CPUTime
from recipes.embodied_reach.plain_loop import Curve, Policy, Settings, clone, run
from recipes.embodied_reach.run import ACTIONS

NO_GAIN, GAIN, MEAN_GAIN, LEAST = 0.08, 0.25, 0.20, 0.55
"""What a control may gain, what a clone and the mean of GRPO must gain, and where PPO must end."""
MISLED, FROZEN, CLONED, FROM_SCRATCH = 0.20, 0.05, 0.50, 0.45
WHOLE = 2.0
"""More than any share: cloning goes on until its updates are over."""
SHORT = 75  # iterations of a control, in which PPO gains most of what it will
LONG = 250  # of GRPO: from one of three clones it gains nothing in the first 175
IN_GROUPS = {"group": 8, "episodes": 256, "minibatches": 4, "iterations": 100}
"""Settings where episodes of a scene are compared; a sparse reward needs as many episodes, because most scenes say nothing."""
IN_GROUPS_TOO = (
    "--steps=100",
    "actor_rollout_ref.rollout.n=8",
    "data.train_batch_size=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
)
HERE = Path(__file__).resolve().parent
CONTROLS = HERE / "controls.py"

Found = Mapping[str, Sequence[Curve]]
"""The curves of each case, one of each seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A curve of each seed.

    asked: the condition in words.  holds: whether it does, of the case's curves and of those of all cases.
    settings: of the plain loop; overrides: of main_ppo, or options of run.py; None for what main_ppo does not do.
    cloned: it begins with the weak clone.
    """

    asked: str
    holds: Callable[[Sequence[Curve], Found], bool]
    settings: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[str] | None = ()
    cloned: bool = True


def last(curve: Curve) -> float:
    """Returns success at the end."""
    return curve.success[max(curve.success)]


def gains(curves: Sequence[Curve]) -> list[float]:
    """Returns what each seed gained from its start to its end."""
    return [last(curve) - curve.success[0] for curve in curves]


def speed(curves: Sequence[Curve]) -> float:
    """Returns the mean success over seeds and checks after the start: the higher, the faster."""
    after = [share for curve in curves for iteration, share in curve.success.items() if iteration]
    return sum(after) / max(len(after), 1)


def learns(curves: Sequence[Curve], _: Found) -> bool:
    misled = max(max(curve.other_color, curve.blindfolded) for curve in curves)
    return min(gains(curves)) >= GAIN and min(map(last, curves)) >= LEAST and misled <= MISLED


def no_gain(curves: Sequence[Curve], _: Found) -> bool:
    return max(gains(curves)) <= NO_GAIN


def recorded(curves: Sequence[Curve], _: Found) -> bool:
    return True


AT_MOST = f"gains at most {NO_GAIN}"
BLACK = (f"env.name={CONTROLS}:BlackPictures", f"--steps={SHORT}")
CASES = {
    "ppo": Case(asked=f"gains {GAIN}, ends at {LEAST}, misled at most {MISLED}", holds=learns),
    "clone": Case(
        asked=f"at least {CLONED}",
        holds=lambda curves, _: min(map(last, curves)) >= CLONED,
        settings={"clone_until": WHOLE, "iterations": 0},
        overrides=None,
        cloned=False,
    ),
    "frozen": Case(
        asked=f"within {FROZEN}",
        holds=lambda curves, _: max(map(abs, gains(curves))) <= FROZEN,
        settings={"frozen": True, "iterations": 5},
        overrides=("actor_rollout_ref.actor.optim.lr=0", "--steps=5"),
    ),
    "black": Case(
        asked=AT_MOST,
        holds=no_gain,
        settings={"black_pictures": True, "iterations": SHORT},
        overrides=BLACK,
    ),
    "black-sparse": Case(
        asked=AT_MOST,
        holds=no_gain,
        settings={"black_pictures": True, "sparse": True, "iterations": SHORT},
        overrides=(*BLACK, "env.reward=success"),
    ),
    "shuffled": Case(
        asked=AT_MOST,
        holds=no_gain,
        settings={"shuffle_rewards": True, "iterations": SHORT},
        overrides=(
            f"--steps={SHORT}",
            "trainer.plugins=[recipes.embodied_reach.controls]",
            "algorithm.adv_estimator=shuffled_chunk_gae",
        ),
    ),
    "grpo": Case(
        asked=f"gains {MEAN_GAIN} in the mean",
        holds=lambda curves, _: sum(gains(curves)) / len(curves) >= MEAN_GAIN,
        settings={"grpo": True, **IN_GROUPS, "iterations": LONG},
        overrides=(
            "algorithm.adv_estimator=chunk_grpo",
            "actor_rollout_ref.actor.value_loss_coef=0",
            *IN_GROUPS_TOO,
            f"--steps={LONG}",
        ),
    ),
    "sparse": Case(
        asked="recorded",
        holds=recorded,
        settings={"sparse": True, **IN_GROUPS},
        overrides=("env.reward=success", *IN_GROUPS_TOO),
    ),
    "srpo": Case(
        asked="as fast as sparse: mean of the checks",
        holds=lambda curves, found: speed(curves) >= speed(found.get("sparse", ())),
        settings={"srpo": True, **IN_GROUPS},
        overrides=("env.reward=srpo", *IN_GROUPS_TOO),
    ),
    "gamma": Case(
        asked="recorded",
        holds=recorded,
        settings={"gamma": 0.99, "lam": 0.95},
        overrides=("algorithm.gamma=0.99", "algorithm.lam=0.95"),
    ),
    "scratch": Case(
        asked=f"at least {FROM_SCRATCH}",
        holds=lambda curves, _: min(map(last, curves)) >= FROM_SCRATCH,
        settings={"from_scratch": True, "episodes": 256, "minibatches": 4},
        overrides=("--from-scratch",),
        cloned=False,
    ),
}


def table(found: Found) -> tuple[str, bool]:
    """Returns the table, and whether all conditions hold."""
    heads = ("case", "start, end of each seed", "mean of the checks", "other colour", "blindfolded", "asked", "holds")
    lines, verdicts = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)], []
    for name, curves in found.items():
        case = CASES[name]
        verdicts.append(case.holds(curves, found))
        ends = ", ".join(f"{curve.success[0]:.3f} to {last(curve):.3f}" for curve in curves)
        misled = (
            ", ".join(f"{share:.3f}" for share in column)
            for column in zip(*((curve.other_color, curve.blindfolded) for curve in curves), strict=True)
        )
        mean = f"{speed(curves):.3f}" if max(curves[0].success) else ""
        cells = (name, ends, mean, *misled, case.asked, "yes" if verdicts[-1] else "NO")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines), all(verdicts)


# --- the plain loop ----------------------------------------------------------------------------------------------------------


def plain_curves(seed: int, names: Sequence[str], changed: Mapping[str, Any]) -> dict[str, Curve]:
    """Runs the cases of a seed by the plain loop.  changed: settings for all of them."""
    torch.set_num_threads(1)
    weak = cloned(Settings(seed=seed, **changed)) if any(CASES[name].cloned for name in names) else None
    found = {}
    for name in names:
        print(f"\nseed {seed}, {name}", flush=True)
        settings = Settings(seed=seed, **{**CASES[name].settings, **changed})
        found[name] = run(settings, copy.deepcopy(weak) if CASES[name].cloned else cloned(settings))
    return found


def cloned(settings: Settings) -> Policy:
    """Returns a policy that has been cloned as the settings say."""
    policy = Policy(settings.seed)
    if not settings.from_scratch:
        clone(policy, settings)
    return policy


# --- through engines ---------------------------------------------------------------------------------------------------------


def engine_curve(seed: int, name: str, out: Path, more: Sequence[str]) -> Curve:
    """Runs a case by run.py, unless its results are there.  more: settings of main_ppo for all cases."""
    folder = out / f"seed{seed}"
    asked = [*(CASES[name].overrides or ()), *more]
    options, overrides = ([text for text in asked if text.startswith("--") is wanted] for wanted in (True, False))
    command = [sys.executable, str(HERE / "run.py"), f"--seed={seed}", f"--out={folder}", f"--name={name}", *options]
    with CPUTime() as cpu:
        stages.call(f"seed {seed}, {name}", [*command, *overrides])
    print(f"seed {seed}, {name}: {cpu.seconds / 60:.1f} minutes of CPU", flush=True)
    success = checks(folder / name)
    model = folder / name / f"global_step_{max(success)}" / "actor/huggingface"
    other, blind = (evaluated(model, folder / f"{name}-{control}", control, more) for control in ("OtherColor", "BlackPictures"))
    return Curve(success=success, other_color=other, blindfolded=blind)


def checks(folder: Path) -> dict[int, float]:
    """Returns the success of each validation of a run, by its step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["val/success"] for row in rows if "val/success" in row}


def evaluated(model: Path, folder: Path, control: str, more: Sequence[str]) -> float:
    """Returns the success of a model in the environment of controls.py."""
    settings = [
        f"env.name={CONTROLS}:{control}",
        "env.val_scenes=512",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.model.vla={ACTIONS}",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.backend=local",
        *(text for text in more if text.startswith("env.")),
        f"trainer.default_local_dir={folder}",
    ]
    if not (folder / "metrics.jsonl").is_file():
        stages.train(f"{model.parents[2].name}, {control}", "main_eval", settings)
    return checks(folder)[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=None, help="all unless said")
    parser.add_argument("--through-engines", action="store_true", help="main_ppo instead of the plain loop")
    parser.add_argument("--out", type=Path, default=Path("outputs/embodied_reach"), help="folder of run.py's folders by seed")
    parser.add_argument("--set", nargs="+", default=[], metavar="name=value", help="settings of the plain loop or of main_ppo")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    names = options.cases or [name for name, case in CASES.items() if not options.through_engines or case.overrides is not None]
    found: dict[str, list[Curve]] = {name: [] for name in names}
    for seed in options.seeds:
        if options.through_engines:
            curves = {name: engine_curve(seed, name, options.out.resolve(), options.set) for name in names}
        else:
            curves = plain_curves(seed, names, settings_of(options.set))
        for name, curve in curves.items():
            found[name].append(curve)
    text, good = table(found)
    print(f"\n{text}")
    return 0 if good else 1


def settings_of(texts: Sequence[str]) -> dict[str, Any]:
    """Returns settings of the plain loop as they are written on a command line."""
    kinds: dict[str, Any] = {one.name: type(one.default) for one in dataclasses.fields(Settings)}
    return {name: kinds[name](value) for name, value in (text.split("=") for text in texts)}


if __name__ == "__main__":
    sys.exit(main())
