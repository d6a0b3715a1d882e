"""Trains a tiny vision-language-action policy for two steps on one LIBERO task: that everything is connected, not that it learns.

    bash recipes/embodied_libero/setup_env.sh
    python recipes/embodied_libero/run.py [--python .venv-libero/bin/python] [--out outputs/embodied_libero] [key=value ...]

Further arguments are settings of main_ppo.  The simulators run in the Python environment that setup_env.sh makes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUITE, TASK = "libero_spatial", 0
INSTRUCTION = "pick up the black bowl between the plate and the ramekin and place it on the plate"
CAMERAS, ACTION_DIM, CHUNK, BINS, PICTURE = 2, 7, 2, 5, 32
SCENES, EPISODE = 2, 4
"""Episodes of a step, and actions of an episode: rendering costs half a CPU second a chunk."""


def overrides(python: Path, out: Path, first_bin: int) -> list[str]:
    """Returns the settings of the run.  first_bin: the token of the lowest bin, behind that of the places."""
    actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    tokens = CHUNK * ACTION_DIM
    vla = {"chunk": CHUNK, "action_dim": ACTION_DIM, "bins": BINS, "first_bin_id": first_bin, "place_ids": f"[{first_bin - 1}]"}
    vla |= {"image_token_id": 3, "tokens_per_image": 4, "value_head": "true"}
    env = {"suite": SUITE, "task": TASK, "size": PICTURE, "max_steps": EPISODE, "chunk": CHUNK, "settle": 1}
    return [
        f"env.name={ROOT / 'recipes/embodied_libero/libero_env.py'}:LiberoSimulator",
        f"env.settings={_mapping(env)}",
        f"env.manager={{processes: {SCENES}, timeout_s: 300, python: {python.absolute()}}}",
        "env.scenes=fixed",
        "env.num_scenes=50",
        f"{model}.path={out / 'model'}",
        f"{model}.vla={_mapping(vla)}",
        f"{rollout}.name=hf",
        f"data.train_batch_size={SCENES}",
        "data.max_prompt_length=32",
        f"data.max_response_length={tokens}",
        "algorithm.adv_estimator=chunk_gae",
        f"{actor}.ppo_mini_batch_size={SCENES}",
        f"{actor}.log_prob_level=chunk",
        f"{actor}.value_loss_coef=0.5",
        f"{actor}.entropy_coeff=0.003",
        f"{actor}.optim.lr=3e-4",
        "trainer.device=cpu",
        "trainer.backend=local",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={out / 'run'}",
    ]


def _mapping(settings: dict[str, object]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in settings.items()) + "}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-libero/bin/python")
    parser.add_argument("--out", type=Path, default=Path("outputs/embodied_libero"))
    parser.add_argument("more", nargs="*", help="further settings of main_ppo")
    args = parser.parse_args(arguments)
    if not args.python.exists():
        parser.error(f"there is no {args.python}: bash recipes/embodied_libero/setup_env.sh")
    sys.path.insert(0, str(ROOT))
    from recipes.tiny_smolvlm import SPECIAL, write_model

    words = list(dict.fromkeys(INSTRUCTION.split()))
    write_model(args.out / "model", 1, words, num_places=1, num_bins=BINS)
    settings = overrides(args.python, args.out, len(SPECIAL) + len(words) + 1)
    command = [sys.executable, "-m", "rlhub.trainer.main_ppo", *settings, *args.more]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
