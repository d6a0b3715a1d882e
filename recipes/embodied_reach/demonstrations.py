"""Demonstrations of reach_color: a scripted expert whose actions sometimes slip, recorded as a LeRobot-style data set.

    python -m recipes.embodied_reach.demonstrations --out outputs/embodied_reach/demonstrations --episodes 2048 --seed 1

A slip executes a random action while the expert's own is recorded, so the data shows how to recover (DART, Laskey et al. 2017,
arXiv 1703.09327).  `main_sft` clones from the folder; VLA is its `model.vla`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recipes.tiny_smolvlm import IMAGE_TOKEN, SPECIAL, TOKENS_PER_IMAGE
from rlhub.config.sections.vla import VLAConfig
from rlhub.data.episodes import RecordedEpisode, write_episodes
from rlhub.envs.vector.lockstep import LockStep
from rlhub.envs.vector.reach_color import ReachColor

WORDS = ("touch", "red", "blue")
CHUNK, ACTION_DIM, BINS = 2, 2, 5
FIRST_WORD = len(SPECIAL)
FIRST_PLACE = FIRST_WORD + len(WORDS)
VLA = VLAConfig(
    chunk=CHUNK,
    action_dim=ACTION_DIM,
    bins=BINS,
    first_bin_id=FIRST_PLACE + CHUNK * ACTION_DIM,
    place_ids=list(range(FIRST_PLACE, FIRST_PLACE + CHUNK * ACTION_DIM)),
    image_token_id=SPECIAL.index(IMAGE_TOKEN),
    tokens_per_image=TOKENS_PER_IMAGE,
    value_head=True,
    value_scale=5.0,
)
"""The policy's actions, in the vocabulary of `write_model(folder, seed, WORDS, num_places=4, num_bins=5)`."""
STREAMS = ("demonstrations", "checks", "rollouts")
SLIP = 0.2
BATCH = 64  # episodes that are recorded together


def episode_seeds(stream: str, seed: int, count: int) -> list[int]:
    """Returns seeds of episodes; two streams, and two seeds, have none in common."""
    drawn: list[int] = np.random.default_rng([STREAMS.index(stream), seed]).integers(2**62, size=count).tolist()
    return drawn


def record(count: int, seed: int, slip: float = SLIP) -> Iterator[RecordedEpisode]:
    """Yields episodes of the expert, in which a share `slip` of the executed actions is random and the recorded one is not."""
    simulators = [ReachColor(slip=slip) for _ in range(min(BATCH, count))]
    unused = iter(simulators)
    env = LockStep(lambda: next(unused), len(simulators), chunk=1, auto_reset=False)
    seeds = episode_seeds("demonstrations", seed, count)
    for first in range(0, count, len(simulators)):
        chosen = seeds[first : first + len(simulators)]
        seen = env.reset(seeds=chosen + seeds[: len(simulators) - len(chosen)])
        steps = []
        for _ in range(env.spec.max_steps):
            actions = np.stack([simulator.expert_action() for simulator in simulators])
            result = env.chunk_step(actions[:, None])
            steps.append((seen.images[:, 0], seen.state, actions, result.valid[:, 0]))
            seen = result.obs
        images, states, actions, valid = (np.stack(column, axis=1) for column in zip(*steps, strict=True))
        for row, inside in enumerate(valid[: len(chosen)]):
            pictures = {env.spec.cameras[0]: images[row, inside]}
            yield RecordedEpisode(
                instruction=seen.instruction[row], images=pictures, actions=actions[row, inside], state=states[row, inside]
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--episodes", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slip", type=float, default=SLIP, help="share of the executed actions that are random")
    options = parser.parse_args()
    write_episodes(options.out, record(options.episodes, options.seed, options.slip))


if __name__ == "__main__":
    main()
