"""Self-referential rewards: against a slow reference, the same in every bit for any cut and order, and what failures get."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhub.algorithms.statistics import Gather
from rlhub.errors import ConfigError
from rlhub.rewards.srpo import SRPOKnobs, SuccessBank, episode_encoder, srpo_rewards

KNOBS = SRPOKnobs()


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

        rewards[rows], found = srpo_rewards(embeddings[rows], success[rows], task[rows], bank, KNOBS, Gather.of(rows, collect))
    return rewards, found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("quantile", [0.5, 0.9, 1.0])
def test_it_is_the_slow_reference(seed: int, quantile: float) -> None:
    embeddings, success, task = batch(seed)
    rewards, _ = srpo_rewards(embeddings, success, task, SuccessBank(), SRPOKnobs(quantile=quantile))
    expected = torch.tensor(slow_rewards(embeddings, success, task, quantile), dtype=torch.float64)
    torch.testing.assert_close(rewards, expected, rtol=1e-9, atol=1e-12)
    assert rewards[~success].max() < 0.6 and len(rewards.unique()) > 10


def test_ranks_and_order_change_no_bit() -> None:
    columns, (before, solved, kind) = batch(1), batch(2)
    _, bank = srpo_rewards(before, solved, kind, SuccessBank(), KNOBS)
    whole, kept = srpo_rewards(*columns, bank, KNOBS)
    rows = len(whole)
    for parts in ([range(7), range(7, rows)], [range(0, rows, 2), range(1, rows, 2)], [range(20, 20), range(rows)]):
        rewards, found = pooled([list(part) for part in parts], columns, bank)
        assert torch.equal(rewards, whole) and torch.equal(found.embeddings, kept.embeddings)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    moved, found = srpo_rewards(*(column[order] for column in columns), bank, KNOBS)
    assert torch.equal(moved, whole[order]) and torch.equal(found.embeddings, kept.embeddings)


def test_successes_of_one_shard_alone_would_be_another_reward() -> None:
    embeddings, success, task = batch(1)
    whole, _ = srpo_rewards(embeddings, success, task, SuccessBank(), KNOBS)
    half, _ = srpo_rewards(embeddings[:20], success[:20], task[:20], SuccessBank(), KNOBS)
    assert not torch.allclose(half, whole[:20])


def test_failures_far_away_get_nearly_nothing_the_best_too() -> None:
    for width in (2, 64, 1408):
        generator = torch.Generator().manual_seed(width)
        successes = torch.randn(32, width, generator=generator, dtype=torch.float64)
        failures = 40 + torch.randn(32, width, generator=generator, dtype=torch.float64)
        success, task = torch.arange(64) < 32, torch.zeros(64, dtype=torch.int64)
        far, _ = srpo_rewards(torch.cat([successes, failures]), success, task, SuccessBank(), KNOBS)
        near, _ = srpo_rewards(torch.cat([successes, failures - 40]), success, task, SuccessBank(), KNOBS)
        assert far[32:].max() < 0.1 and (far[:32] == 1).all()
        assert near[32:].median() > 0.25 and near[32:].max() < 0.6


def test_without_a_scale_or_a_success_of_its_task_a_failure_gets_nothing() -> None:
    embeddings = torch.tensor([[0.0], [0.0], [1.0], [9.0]], dtype=torch.float64)
    success, task = torch.tensor([True, False, False, False]), torch.tensor([0, 0, 0, 1])
    rewards, bank = srpo_rewards(embeddings, success, task, SuccessBank(), KNOBS)
    assert rewards.tolist() == [1.0, 0.0, 0.0, 0.0]
    rewards, _ = srpo_rewards(embeddings + 0.5, success, task, bank, KNOBS)  # the bank's success and this one have a distance
    assert rewards[1] > 0.3 and rewards[2] > 0.0 and rewards[3] == 0.0


def test_the_bank_keeps_the_newest_successes_of_each_task() -> None:
    bank, knobs = SuccessBank(), SRPOKnobs(bank=2)
    for number in range(5):
        column = torch.full((2, 1), float(number), dtype=torch.float64)
        _, bank = srpo_rewards(column, torch.tensor([True, number == 0]), torch.tensor([0, 1]), bank, knobs)
    assert bank.task.tolist() == [1, 0, 0] and bank.embeddings[:, 0].tolist() == [0.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="quantile"):
        SRPOKnobs(quantile=0.0)


def episode(seed: int, frames: int = 5, cameras: int = 1) -> Tensor:
    return torch.randint(0, 256, (frames, cameras, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["pixels", "vjepa2"])
def test_an_embedding_belongs_to_its_episode_alone(name: str, tmp_path: Path) -> None:
    encode = episode_encoder(name, path=video_model(tmp_path), seed=3)
    episodes = [episode(1), episode(2, frames=4), episode(3, frames=1), episode(4, cameras=2)]
    whole = encode(episodes)
    assert whole.dtype == torch.float64 and len(torch.unique(whole, dim=0)) == 4
    for row, one in enumerate(episodes):
        assert torch.equal(encode([one])[0], whole[row])
    changed = episodes[0].clone()
    changed[-1, 0, :, :8, :8] ^= 255
    assert not torch.equal(encode([changed])[0], whole[0])


def test_an_unknown_encoder_is_named() -> None:
    with pytest.raises(ConfigError, match="dino"):
        episode_encoder("dino")
    with pytest.raises(ConfigError, match="folder"):
        episode_encoder("vjepa2")


def video_model(folder: Path) -> str:
    """A tiny V-JEPA 2 of random weights."""
    from transformers import VJEPA2Config, VJEPA2Model

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "mlp_ratio": 2.0}
    predictor = {"pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1, "pred_mlp_ratio": 2.0}
    model = VJEPA2Model(VJEPA2Config(patch_size=8, crop_size=16, frames_per_clip=4, num_pooler_layers=1, **sizes, **predictor))
    model.save_pretrained(folder)
    return str(folder)
