"""The step's time when episodes of simulators run while the policy trains, against taking turns.

    python scripts/bench/episodes_ahead.py [--sleep-ms 30] [--steps 6] [--scenes 16]

Trains a tiny action policy on reach_color, whose every action waits for --sleep-ms (waits, not CPU), with the rollout on a pool
of its own: with trainer.max_staleness=0, where a step is the sum of episodes and training, with 1 and with 2.  Prints medians
over the steps after the first, of the step, of the wait for episodes and of the rest.  Exit status 1 where running ahead saves
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
TOKENS, BINS = 4, 5
SLOW = """
import time
from rlhub.envs.vector.reach_color import ReachColor

class Slow(ReachColor):
    def step(self, action):
        time.sleep({seconds})
        return super().step(action)
"""
VLA = (
    "{chunk: 2, action_dim: 2, bins: 5, first_bin_id: 11, place_ids: [7,8,9,10], image_token_id: 3, tokens_per_image: 4, "
    "value_head: true, action_low: [-1.0], action_high: [1.0]}"
)


def train(folder: Path, staleness: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """Runs main_ppo; returns the metrics of its steps."""
    out = folder / f"staleness-{staleness}"
    overrides = [
        f"env.name={folder / 'slow.py'}:Slow",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"actor_rollout_ref.model.vla={VLA}",
        *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.mode=async"),
        *("algorithm.adv_estimator=chunk_gae", "algorithm.rollout_correction.rollout_is=token"),
        *("actor_rollout_ref.actor.log_prob_level=chunk", "actor_rollout_ref.actor.value_loss_coef=0.5"),
        *("actor_rollout_ref.actor.ppo_epochs=4", f"actor_rollout_ref.actor.ppo_mini_batch_size={args.scenes // 4}"),
        *(f"data.train_batch_size={args.scenes}", "data.max_prompt_length=16", "data.max_response_length=8"),
        *("trainer.device=cpu", "trainer.pools.gen={}", "trainer.placement.rollout=gen"),
        *(f"trainer.max_staleness={staleness}", f"trainer.total_training_steps={args.steps}"),
        *("trainer.save_freq=-1", "trainer.logger=[]", f"trainer.default_local_dir={out}"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "rlhub.trainer.main_ppo", *overrides]
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def medians(rows: list[dict[str, float]]) -> tuple[float, float, float]:
    """Returns seconds of a step, of its wait for episodes and of the rest, without the first step, which warms up."""
    steps = [(row["timing_s/step"], row["timing_s/wait_for_episodes"]) for row in rows if row["step"] > 1]
    step = statistics.median(step for step, _ in steps)
    waited = statistics.median(waited for _, waited in steps)
    return step, waited, statistics.median(step - waited for step, waited in steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sleep-ms", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--scenes", type=int, default=16)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from recipes.tiny_smolvlm import write_model

    table = Table("max_staleness", "step (s)", "waits for episodes (s)", "the rest (s)", "largest staleness")
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", 1, ("touch", "red", "blue"), num_places=TOKENS, num_bins=BINS)
        (folder / "slow.py").write_text(SLOW.format(seconds=args.sleep_ms / 1000))
        for staleness in (0, 1, 2):
            rows = train(folder, staleness, args)
            found[staleness] = medians(rows)
            oldest = max(row.get("rollout/staleness", 0.0) for row in rows)
            table.add_row(str(staleness), *(f"{seconds:.2f}" for seconds in found[staleness]), f"{oldest:g}")
    Console().print(table)
    print(f"ahead / in turns: {found[1][0] / found[0][0]:.2f}")
    return int(found[1][0] >= found[0][0])


if __name__ == "__main__":
    sys.exit(main())
