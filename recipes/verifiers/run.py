"""Trains a tiny model of random weights, asynchronously, on an environment of the library verifiers.

    bash recipes/verifiers/setup_env.sh
    python recipes/verifiers/run.py [--environment vowels|guess|adder] [--steps 40] [--out outputs/verifiers] [key=value ...]

Further arguments are settings of main_ppo.  The environments run in the Python that setup_env.sh makes; an interrupted training
goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / "recipes" / "verifiers" / "environments"
BATCH, SAMPLES, TURN_TOKENS = 8, 8, 12
ROLE = {"vowels": "agent", "guess": "player", "adder": "agent"}
PROMPT_TOKENS, RESPONSE_TOKENS = 48, 160


def overrides(environment: str, python: Path, out: Path, steps: int) -> list[str]:
    """Returns the settings of the run."""
    rollout, role = "actor_rollout_ref.rollout", ROLE[environment]
    return [
        f"data.train_files={out / 'train.parquet'}",
        f"data.train_batch_size={BATCH}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={RESPONSE_TOKENS}",
        f"actor_rollout_ref.model.path={out / 'model'}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        "actor_rollout_ref.actor.optim.lr=2e-3",
        f"{rollout}.name=hf",
        f"{rollout}.mode=async",
        f"{rollout}.n={SAMPLES}",
        f"{rollout}.agent.default_agent_loop=verifiers:{environment}",
        f"{rollout}.agent.kwargs.verifiers_python={python.absolute()}",
        f"{rollout}.agent.kwargs.verifiers_path=[{ENVIRONMENTS}]",
        f"{rollout}.agent.kwargs.verifiers_env={{{role}: {{sampling: {{max_tokens: {TURN_TOKENS}}}, max_turns: 4}}}}",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.max_staleness=1",
        "trainer.device=cpu",
        "trainer.backend=local",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=10",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={out / 'run'}",
    ]


def prepare(environment: str, python: Path, out: Path) -> None:
    """Writes the model and the environment's tasks, where they are not there."""
    model, tasks = [str(ROOT / "recipes/verifiers/build_model.py"), "--out", str(out / "model")], str(out / "train.parquet")
    if not (out / "model").is_dir():
        subprocess.run([sys.executable, *model], check=True)
    if not Path(tasks).is_file():
        where = ["--python", str(python.absolute()), "--path", str(ENVIRONMENTS), "--out", tasks]
        subprocess.run([sys.executable, "-m", "rlhub.agents.verifiers.export", environment, *where], check=True, cwd=ROOT)


def rewards(metrics: Path) -> list[float]:
    """Returns the mean reward of each step."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [row["critic/rewards/mean"] for row in rows if "critic/rewards/mean" in row]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", choices=sorted(ROLE), default="vowels")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-verifiers/bin/python")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="folder of everything (default: outputs/verifiers/<environment>)")
    parser.add_argument("more", nargs="*", help="further settings of main_ppo")
    args = parser.parse_args(arguments)
    if not args.python.exists():
        parser.error(f"there is no {args.python}: bash recipes/verifiers/setup_env.sh")
    out = (args.out or Path("outputs/verifiers") / args.environment).absolute()
    prepare(args.environment, args.python, out)
    settings = overrides(args.environment, args.python, out, args.steps)
    status = subprocess.run([sys.executable, "-m", "rlhub.trainer.main_ppo", *settings, *args.more], check=False).returncode
    if status == 0:
        first, *_, last = rewards(out / "run" / "metrics.jsonl")
        sys.stdout.write(f"mean reward: {first:.3f} in the first step, {last:.3f} in the last one\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
