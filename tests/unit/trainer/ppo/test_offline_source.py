"""Training on what another job collects: batches in the order of the files, weights for the collector, and going on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhub.agents.trajectory import Trajectory
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import WorkflowError
from rlhub.models.tokenizer import Vocabulary
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
from rlhub.rollout_service.trajectory_files import TrajectoryReader, TrajectoryWriter
from rlhub.trainer.ppo.offline_source import OfflineSource
from rlhub.utils.timing import PhaseTimer


def group(ordinal: int) -> Group:
    made = Trajectory(
        prompt_ids=[1, 2],
        response_ids=[ordinal, 4],
        response_mask=[1, 1],
        rollout_log_probs=[-0.1, -0.3],
        versions=[0, 0],
        metrics={"num_turns": 1.0},
    )
    return Group(item=PromptItem(prompt_ids=(1, 2), ordinal=ordinal, row={"ground_truth": "4"}), trajectories=[made])


def settings(folder: Path) -> PPOConfig:
    config = PPOConfig()
    config.data.train_batch_size = 2
    config.trainer.stale_policy = "correct"
    config.actor_rollout_ref.rollout.trajectories_folder = str(folder / "trajectories")
    config.actor_rollout_ref.rollout.weights_folder = str(folder / "weights")
    return config


def source(folder: Path, written: list[int]) -> OfflineSource:
    config = settings(folder)
    loader: Any = SimpleNamespace(state=lambda: {"consumed": 0}, load_state=lambda state: None)
    return OfflineSource(
        config=config,
        loader=loader,
        reader=TrajectoryReader(str(folder / "trajectories")),
        vocabulary=Vocabulary(size=10, stop_token_ids=(2,), pad_id=0),
        write=lambda where, version: written.append(version),
        timers=PhaseTimer(),
    )


def test_batches_come_in_the_order_of_the_files_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    writer = TrajectoryWriter(str(tmp_path / "trajectories"))
    for start in (0, 3):
        writer.write([group(start + index) for index in range(3)])
    writer.end()
    written: list[int] = []
    first = source(tmp_path, written)
    assert first_tokens(first, 1) == [0, 1]
    state = first.state()
    first.publish()
    first.sample(iter(()), 2)  # lost with the process
    again = source(tmp_path, written)
    again.load_state(state, tmp_path)
    assert first_tokens(again, 2) == [2, 3]
    assert first_tokens(again, 3) == [4, 5]
    assert written == [0, 1, 1, 2]
    with pytest.raises(WorkflowError, match="the job that collects has ended"):
        again.sample(iter(()), 4)


def first_tokens(source: OfflineSource, step: int) -> list[int]:
    """Takes a step, as the trainer does; returns what it trained on."""
    source.publish()
    source.publish()  # the weights are there: nothing is written
    samples = source.sample(iter(()), step)
    batch = source.select(samples)
    source.trained(step)
    return [int(token) for token in batch.batch["responses"][:, 0]]
