"""Finds the first checkpoint of a cloning that solves enough episodes, and writes its model folder into weak.txt beside them.

    python recipes/embodied_reach/choose.py outputs/embodied_reach/seed1/sft --seed 1 --at-least 0.30

Each checkpoint acts greedily in 256 states that neither training nor validation uses.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes.embodied_reach.demonstrations import episode_seeds
from recipes.embodied_reach.plain_loop import Policy, environments, success
from recipes.stages import CHECKPOINTED_MODEL

NUM_STATES = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="run folder of the cloning")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-least", type=float, default=0.30, help="share of solved episodes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy, env = Policy(options.seed), environments(NUM_STATES)
    seeds = episode_seeds("checks", options.seed, NUM_STATES)
    found = sorted((int(re.sub(r"\D", "", path.name)), path) for path in options.folder.glob("global_step_*"))
    share = 0.0
    for step, path in found:
        load(policy, path / CHECKPOINTED_MODEL)
        share = float(success(policy, env, env.reset(seeds=seeds)).mean())
        print(f"after {step} updates: success {share:.3f}", flush=True)
        if share >= options.at_least:
            (options.folder / "weak.txt").write_text(f"{path / CHECKPOINTED_MODEL}\n")
            return 0
    print(f"no checkpoint solves {options.at_least} of the episodes, the last one {share:.3f}: clone longer (--sft-steps)")
    return 1


def load(policy: Policy, folder: Path) -> None:
    """Loads a checkpoint's model into the plain policy."""
    weights = {name: weight for path in sorted(folder.glob("*.safetensors")) for name, weight in load_file(path).items()}
    heads = {name: weight for name, weight in weights.items() if name.startswith("v_head")}
    policy.v_head.load_state_dict({name.removeprefix("v_head."): weight for name, weight in heads.items()})
    policy.model.load_state_dict({name: weight for name, weight in weights.items() if name not in heads})


if __name__ == "__main__":
    sys.exit(main())
