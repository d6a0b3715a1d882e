"""Self-referential rewards: against a slow reference, the same in every bit for any cut and order, and what failures get."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhub.algorithms.statistics import Gather
from rlhub.config.sections.env import SRPOConfig
from rlhub.errors import LoadError
from rlhub.protocol import DataProto
from rlhub.rewards.srpo import EMBEDDING, LARGEST_BANK, TASK, SelfReference, SuccessBank, episode_encoder, srpo_rewards
from tests.support.vla import write_video_model

CONFIG = SRPOConfig()


def batch(seed: int, rows: int = 40, tasks: int = 3, width: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings (rows, width), success (rows,) and task (rows,); successes of a task lie around two places."""
    generator = torch.Generator().manual_seed(seed)
    task = torch.randint(tasks, (rows,), generator=generator)
    success = torch.rand(rows, generator=generator) < 0.5
    place = torch.randn(tasks, 2, width, generator=generator, dtype=torch.float64) * 8
    side = torch.randint(2, (rows,), generator=generator)
    spread = torch.where(success, 1.0, 1.5)[:, None]
    noise = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return place[task, side] + spread * noise, success, task


def slow_rewards(embeddings: Tensor, success: Tensor, task: Tensor, quantile: float) -> list[float]:
    """The definition, pair by pair; clusters by walking from success to success."""
    rows, points = range(len(task)), embeddings.tolist()
    solved = {number: [i for i in rows if success[i] and task[i] == number] for number in set(task.tolist())}
    nearest = [
        min(math.dist(points[i], points[j]) for j in own if j != i) for own in solved.values() for i in own if len(own) > 1
    ]
    place = quantile * (len(nearest) - 1)
    ordered, low = sorted(nearest), math.floor(place)
    eps = ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])
    found = []
    for i in rows:
        if success[i]:
            found.append(1.0)
            continue
        left, middles = set(solved[int(task[i])]), []
        while left:
            walk, cluster = [left.pop()], []
            while walk:
                cluster.append(walk.pop())
                close = {j for j in left if math.dist(points[cluster[-1]], points[j]) <= eps}
                left -= close
                walk += close
            middles.append([math.fsum(column) / len(cluster) for column in zip(*(points[j] for j in cluster), strict=True)])
        d = min((math.dist(points[i], middle) / (2 * eps) for middle in middles), default=math.inf)
        found.append(0.6 / (1 + math.exp(min(10 * (d - 0.5), 700))))
    return found


def pooled(parts: Sequence[list[int]], columns: tuple[Tensor, Tensor, Tensor], bank: SuccessBank) -> tuple[Tensor, SuccessBank]:
    """The rewards of all rows, computed by ranks that have these rows each, and the bank of the last rank."""
    embeddings, success, task = columns
    rewards = torch.full((len(task),), math.nan, dtype=torch.float64)
    dealt = torch.tensor([row for part in parts for row in part])
    for part in parts:
        rows = torch.tensor(part, dtype=torch.int64)

        def collect(own: Tensor, rows: Tensor = rows) -> Tensor:
            """Stands for the exchange: every rank's columns, in the order of the ranks."""
            if own.dim() == 1:
                return dealt
            every = torch.cat([embeddings.view(torch.int64), success.long()[:, None], task[:, None]], 1)
            assert torch.equal(own, every[rows])
            return every[dealt]

        rewards[rows], found = srpo_rewards(embeddings[rows], success[rows], task[rows], bank, CONFIG, Gather.of(rows, collect))
    return rewards, found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("quantile", [0.5, 0.9, 1.0])
def test_it_is_the_slow_reference(seed: int, quantile: float) -> None:
    embeddings, success, task = batch(seed)
    rewards, _ = srpo_rewards(embeddings, success, task, SuccessBank(), SRPOConfig(quantile=quantile))
    expected = torch.tensor(slow_rewards(embeddings, success, task, quantile), dtype=torch.float64)
    torch.testing.assert_close(rewards, expected, rtol=1e-9, atol=1e-12)
    assert rewards[~success].max() < 0.6 and len(rewards.unique()) > 10


def test_ranks_and_order_change_no_bit() -> None:
    columns, (before, solved, kind) = batch(1), batch(2)
    _, bank = srpo_rewards(before, solved, kind, SuccessBank(), CONFIG)
    whole, kept = srpo_rewards(*columns, bank, CONFIG)
    rows = len(whole)
    for parts in ([range(7), range(7, rows)], [range(0, rows, 2), range(1, rows, 2)], [range(20, 20), range(rows)]):
        rewards, found = pooled([list(part) for part in parts], columns, bank)
        assert torch.equal(rewards, whole) and torch.equal(found.embeddings, kept.embeddings)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    moved, found = srpo_rewards(*(column[order] for column in columns), bank, CONFIG)
    assert torch.equal(moved, whole[order]) and torch.equal(found.embeddings, kept.embeddings)


def test_successes_of_one_shard_alone_would_be_another_reward() -> None:
    embeddings, success, task = batch(1)
    whole, _ = srpo_rewards(embeddings, success, task, SuccessBank(), CONFIG)
    half, _ = srpo_rewards(embeddings[:20], success[:20], task[:20], SuccessBank(), CONFIG)
    assert not torch.allclose(half, whole[:20])


def test_failures_far_away_get_nearly_nothing_the_best_too() -> None:
    for width in (2, 64, 1408):
        generator = torch.Generator().manual_seed(width)
        successes = torch.randn(32, width, generator=generator, dtype=torch.float64)
        failures = 40 + torch.randn(32, width, generator=generator, dtype=torch.float64)
        success, task = torch.arange(64) < 32, torch.zeros(64, dtype=torch.int64)
        far, _ = srpo_rewards(torch.cat([successes, failures]), success, task, SuccessBank(), CONFIG)
        near, _ = srpo_rewards(torch.cat([successes, failures - 40]), success, task, SuccessBank(), CONFIG)
        assert far[32:].max() < 0.1 and (far[:32] == 1).all()
        assert near[32:].median() > 0.25 and near[32:].max() < 0.6


def test_without_a_scale_or_a_success_of_its_task_a_failure_gets_nothing() -> None:
    embeddings = torch.tensor([[0.0], [0.0], [1.0], [9.0]], dtype=torch.float64)
    success, task = torch.tensor([True, False, False, False]), torch.tensor([0, 0, 0, 1])
    rewards, bank = srpo_rewards(embeddings, success, task, SuccessBank(), CONFIG)
    assert rewards.tolist() == [1.0, 0.0, 0.0, 0.0]
    rewards, _ = srpo_rewards(embeddings + 0.5, success, task, bank, CONFIG)  # the bank's success and this one have a distance
    assert rewards[1] > 0.3 and rewards[2] > 0.0 and rewards[3] == 0.0


def test_the_bank_keeps_the_newest_successes_of_each_task() -> None:
    bank, knobs = SuccessBank(), SRPOConfig(bank=2)
    for number in range(5):
        column = torch.full((2, 1), float(number), dtype=torch.float64)
        _, bank = srpo_rewards(column, torch.tensor([True, number == 0]), torch.tensor([0, 1]), bank, knobs)
    assert bank.task.tolist() == [1, 0, 0] and bank.embeddings[:, 0].tolist() == [0.0, 3.0, 4.0]
    many = torch.arange(LARGEST_BANK + 3)
    assert SuccessBank(embeddings=many[:, None].double(), task=many).newest(2).task.tolist() == many[3:].tolist()


def episode(seed: int, frames: int = 5, cameras: int = 1) -> Tensor:
    return torch.randint(0, 256, (frames, cameras, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["pixels", "vjepa2"])
def test_an_embedding_belongs_to_its_episode_alone(name: Any, tmp_path: Path) -> None:
    encode = episode_encoder(SRPOConfig(encoder=name, path=str(write_video_model(tmp_path))))
    episodes = [episode(1), episode(2, frames=4), episode(3, frames=1), episode(4, cameras=2)]
    whole = encode(episodes)
    assert whole.dtype == torch.float64 and len(torch.unique(whole, dim=0)) == 4
    for row, one in enumerate(episodes):
        assert torch.equal(encode([one])[0], whole[row])
    changed = episodes[0].clone()
    changed[-1, 0, :, :8, :8] ^= 255
    assert not torch.equal(encode([changed])[0], whole[0])


def test_the_distance_of_pictures_grows_with_the_way_of_what_moves() -> None:
    """Pixels alone differ as much from any way on that leaves no overlap."""

    def moved(by: int) -> Tensor:
        picture = torch.full((1, 1, 3, 32, 32), 120, dtype=torch.uint8)
        picture[..., 4 + by : 8 + by, 10:14] = 250
        return picture

    start, *others = episode_encoder(SRPOConfig())([moved(by) for by in (0, 2, 4, 8, 12, 16, 20)])
    far = [float((other - start).norm()) for other in others]
    assert far == sorted(far) and far[-1] > 1.8 * far[1] > 0


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=f"env.srpo.path={tmp_path}"):
        episode_encoder(SRPOConfig(encoder="vjepa2", path=str(tmp_path)))


# --- episodes of a step ------------------------------------------------------------------------------------------------------


def calls_of(columns: tuple[Tensor, Tensor, Tensor], lost: Sequence[int] = ()) -> DataProto:
    """Two calls of each episode, whose last has the embedding and, where the episode succeeded, the reward 1."""
    embeddings, success, task = columns
    rows = len(task)
    last = torch.arange(2 * rows) % 2 == 1
    twice = {name: column.repeat_interleave(2, 0) for name, column in (("success", success), (TASK, task))}
    return DataProto.from_dict(
        {
            "episode": torch.arange(rows).repeat_interleave(2) * 3,
            "call": last.long(),
            "success": twice["success"] & last,
            "lost": torch.isin(torch.arange(2 * rows), torch.tensor(lost) * 2 + 1) if lost else torch.zeros_like(last),
            "scores": (twice["success"] & last).float(),
            TASK: twice[TASK],
            EMBEDDING: torch.where(last[:, None], embeddings.repeat_interleave(2, 0), 0.0),
            "input_ids": torch.zeros(2 * rows, 3, dtype=torch.int64),
        }
    )


def test_failed_episodes_of_a_step_have_their_reward_in_the_last_call() -> None:
    columns, later = batch(1), batch(2)
    reference = SelfReference(SRPOConfig())
    found = reference(calls_of(columns))
    expected, bank = srpo_rewards(*columns, SuccessBank(), SRPOConfig())
    assert torch.equal(found.batch["scores"][1::2], expected.float()) and not found.batch["scores"][::2].any()
    assert torch.equal(reference.bank.embeddings, bank.embeddings) and {EMBEDDING, TASK}.isdisjoint(found.batch.keys())
    assert "input_ids" in found.batch.keys()
    second, alone = reference(calls_of(later)), SelfReference(SRPOConfig())(calls_of(later))
    assert not torch.equal(second.batch["scores"], alone.batch["scores"]), "earlier successes count"


def test_the_order_of_calls_changes_no_reward() -> None:
    rows, shuffled = calls_of(batch(1)), calls_of(batch(1))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    shuffled.reorder(order)
    found, moved = (SelfReference(SRPOConfig())(one).batch["scores"] for one in (rows, shuffled))
    assert torch.equal(found[order], moved) and len(found.unique()) > 10


def test_a_lost_episode_is_neither_a_success_nor_a_failure() -> None:
    embeddings, success, task = batch(1)
    kept = torch.arange(len(task)) != 4
    reference, without = SelfReference(SRPOConfig()), SelfReference(SRPOConfig())
    found = reference(calls_of((embeddings, success & kept, task), lost=[4])).batch["scores"].view(-1, 2)
    expected = without(calls_of((embeddings[kept], success[kept], task[kept]))).batch["scores"].view(-1, 2)
    assert torch.equal(found[kept], expected) and not found[4].any()
    assert torch.equal(reference.bank.embeddings, without.bank.embeddings)
