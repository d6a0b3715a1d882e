"""Self-referential rewards of episodes: a failure is worth the more, the closer it came to what successes look like.

A success has the reward 1, a failure 0.6 sigmoid(10 (0.5 - d)), where d is its distance to the nearest centre of successes in an
embedding of the episode's pictures (SRPO, Fei et al. 2025, arXiv 2511.15605).

The distances are measured by the successes alone: eps is a quantile of the distances from successes to their nearest neighbour
of the same task, over all tasks.  Successes within eps of each other are one cluster, and d is a distance divided by 2 eps.  So a
failure that is as far from a centre as successes are from each other gets 0.3, whatever the embedding's number of dimensions,
and failures that are all far away get nearly nothing, the best of them too.

The successes are those of all ranks, and of earlier steps (`SuccessBank`).  Every result is the same in every bit for any order
of the episodes and any division over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from rlhub.algorithms.statistics import HERE, Gather
from rlhub.errors import ConfigError

FAILURE_SHARE, STEEPNESS, HALF = 0.6, 10.0, 0.5  # the paper's constants of a failure's reward
POOLED = (2, 4, 8)
"""The sizes to which a picture is averaged before its projection: coarse ones see how far two places are apart."""
PROJECTED = 64  # numbers of a projected frame
VIDEO_MEAN, VIDEO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of V-JEPA 2's video processor

Encoder = Callable[[Sequence[Tensor]], Tensor]
"""Returns the embeddings (episodes, numbers) float64 of episodes of (frames, cameras, 3, height, width) uint8."""


@dataclass(slots=True, kw_only=True)
class SRPOKnobs:
    """quantile: of the successes' distances to their nearest neighbours, which is eps.
    bank: successes of a task that are kept for later steps, the newest ones."""

    quantile: float = 0.5
    bank: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.quantile <= 1 or self.bank < 0:
            raise ValueError(f"quantile={self.quantile} must be in (0, 1] and bank={self.bank} at least 0")


@dataclass(slots=True, kw_only=True)
class SuccessBank:
    """Successes of earlier steps.  embeddings: (S, numbers) float64.  task: (S,) int64.  The newest ones are last."""

    embeddings: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    task: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def added(self, embeddings: Tensor, task: Tensor, size: int) -> SuccessBank:
        """Returns a bank with these successes too, and the newest `size` of each task."""
        every = torch.cat([self.embeddings, embeddings]) if len(self.task) else embeddings
        tasks = torch.cat([self.task, task])
        later = torch.tril(tasks[:, None] == tasks[None, :], -1).sum(0)  # successes of the same task that are newer
        kept = later < size
        return SuccessBank(embeddings=every[kept], task=tasks[kept])


def srpo_rewards(
    embeddings: Tensor, success: Tensor, task: Tensor, bank: SuccessBank, knobs: SRPOKnobs, gather: Gather = HERE
) -> tuple[Tensor, SuccessBank]:
    """Returns the rewards (own,) float64 of this rank's episodes, and the bank for the next step, which is equal on all ranks.

    embeddings: (own, numbers) float64.  success: (own,) bool.  task: (own,) int64; only successes of the same task are compared
    with, so episodes that begin in the same way should have the same number.  Every rank calls it.

    A task without a success has no centre, and its failures get 0.  So do all failures as long as no task has two successes,
    because there is no scale yet.
    """
    every = gather.each({"embeddings": embeddings, "success": success.long(), "task": task})
    solved = every["success"].bool()
    known, tasks = in_order(every["embeddings"][solved], every["task"][solved])
    found = bank.added(known, tasks, len(bank.task) + len(tasks))
    reached, reached_task = in_order(found.embeddings, found.task)
    eps = nearest_quantile(reached, reached_task, knobs.quantile)
    rewards = torch.ones(len(embeddings), dtype=torch.float64)
    for number in torch.unique(task[~success]).tolist():
        failed = (task == number) & ~success
        mine = reached[reached_task == number]
        rewards[failed] = failure_rewards(embeddings[failed], centers(mine, eps), eps) if eps > 0 and len(mine) else 0.0
    return rewards, bank.added(known, tasks, knobs.bank)


def failure_rewards(embeddings: Tensor, center: Tensor, eps: float) -> Tensor:
    """Returns 0.6 sigmoid(10 (0.5 - d)), (rows,), where d is the distance to the nearest centre divided by 2 eps.

    embeddings: (rows, numbers).  center: (centres, numbers).
    """
    nearest = distances(embeddings, center).amin(1) / (2 * eps)
    return FAILURE_SHARE * torch.sigmoid(STEEPNESS * (HALF - nearest))


def nearest_quantile(embeddings: Tensor, task: Tensor, quantile: float) -> float:
    """Returns the quantile of the distance from each success to its nearest neighbour of the same task; 0 without neighbours."""
    nearest = []
    for number in torch.unique(task).tolist():
        own = distances(mine := embeddings[task == number], mine)
        if len(mine) > 1:
            nearest.append(own.fill_diagonal_(torch.inf).amin(1))
    return float(torch.quantile(torch.cat(nearest), quantile)) if nearest else 0.0


def centers(successes: Tensor, eps: float) -> Tensor:
    """Returns the means (clusters, numbers) of the successes (S, numbers) that are linked by steps of at most eps: DBSCAN's
    clusters (Ester et al. 1996) where two points are dense; a success without a neighbour is a centre of its own."""
    near = distances(successes, successes) <= eps
    cluster = torch.arange(len(successes))
    while True:  # the smallest number among neighbours spreads through each cluster
        spread = torch.where(near, cluster, len(successes)).amin(1)
        if torch.equal(spread, cluster):
            break
        cluster = spread
    return torch.stack([successes[cluster == number].mean(0) for number in torch.unique(cluster).tolist()])


def distances(left: Tensor, right: Tensor) -> Tensor:
    """Returns Euclidean distances (left, right), each the same in every bit whatever the other rows are."""
    return torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")


def in_order(embeddings: Tensor, task: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows in an order that depends on their numbers alone."""
    order = torch.arange(len(task))
    for column in (*embeddings.unbind(1), task) if len(task) else ():
        order = order[column[order].argsort(stable=True)]
    return embeddings[order], task[order]


def episode_encoder(name: str, *, path: str | None = None, seed: int = 0) -> Encoder:
    """Returns the encoder: `pixels`, a random projection of pooled pictures, drawn from the seed, or `vjepa2`, the video model
    V-JEPA 2 (Assran et al. 2025, arXiv 2506.09985) in the folder `path`.  Raises ConfigError for another name."""
    if name == "pixels":
        return lambda episodes: torch.stack([_pixels(frames, seed) for frames in episodes])
    if name == "vjepa2" and path is not None:
        from transformers import AutoModel  # only jobs with this encoder load a model

        model = AutoModel.from_pretrained(path).eval()
        return lambda episodes: torch.stack([_video(model, frames) for frames in episodes])
    raise ConfigError([f"encoder {name!r} with path={path}: set pixels, or vjepa2 with the folder of a V-JEPA 2 model"])


def _pixels(frames: Tensor, seed: int) -> Tensor:
    """Returns the projected mean of all frames and the projected last one, (2 x PROJECTED,)."""
    pictures = frames.flatten(1, 2).double() / 255
    pooled = torch.cat([adaptive_avg_pool2d(pictures, size).flatten(1) for size in POOLED], 1)
    generator = torch.Generator().manual_seed(seed)
    projection = torch.randn(pooled.shape[1], PROJECTED, generator=generator, dtype=torch.float64) / PROJECTED**0.5
    return torch.cat([pooled.mean(0) @ projection, pooled[-1] @ projection])


@torch.no_grad()
def _video(model: Any, frames: Tensor) -> Tensor:
    """Returns the mean over all patches and cameras of the model's features, (hidden,).  An episode is one video, alone in its
    batch, so that no other episode changes it."""
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (VIDEO_MEAN, VIDEO_STD))
    size, videos = model.config.crop_size, (frames.float() / 255 - mean) / std
    videos = interpolate(videos.flatten(0, 1), size=(size, size), mode="bilinear", antialias=True)
    videos = videos.view(*frames.shape[:3], size, size).transpose(0, 1)  # (cameras, frames, 3, size, size)
    if missing := -videos.shape[1] % model.config.tubelet_size:
        videos = torch.cat([videos, videos[:, -1:].expand(-1, missing, -1, -1, -1)], 1)
    features: Tensor = model.get_vision_features(videos)
    return features.double().mean((0, 1))
