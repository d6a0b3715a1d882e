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

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from rlhub.algorithms.statistics import HERE, Gather
from rlhub.config.sections.env import SRPOConfig
from rlhub.errors import LoadError
from rlhub.protocol import Batch, BatchRef
from rlhub.rewards.rows import rows_here

FAILURE_SHARE, STEEPNESS, HALF = 0.6, 10.0, 0.5  # the paper's constants of a failure's reward
CELLS = 16  # of each axis, in which the brightness of a picture is summed up
PROJECTED = 64  # numbers of a projected frame
LARGEST_BANK = 2048  # where every scene is a task of its own, most never come again
VIDEO_MEAN, VIDEO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of V-JEPA 2's video processor

EMBEDDING, TASK = EMBEDDED = ("embedding", "task")
"""Columns of calls: of their episode the embedding, (rows, numbers) float64, and the number of its task, (rows,) int64."""

Encoder = Callable[[Sequence[Tensor]], Tensor]
"""Returns the embeddings (episodes, numbers) float64 of episodes of (frames, cameras, 3, height, width) uint8."""


@dataclass(slots=True, kw_only=True)
class SuccessBank:
    """Successes of earlier steps.  embeddings: (S, numbers) float64.  task: (S,) int64.  The newest ones are last."""

    embeddings: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    task: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def added(self, embeddings: Tensor, task: Tensor) -> SuccessBank:
        """Returns a bank with these successes too."""
        every = torch.cat([self.embeddings, embeddings]) if len(self.task) else embeddings
        return SuccessBank(embeddings=every, task=torch.cat([self.task, task]))

    def newest(self, size: int) -> SuccessBank:
        """Returns a bank with the newest `size` of each task, and of all at most LARGEST_BANK."""
        later = torch.tril(self.task[:, None] == self.task[None, :], -1).sum(0)  # successes of the same task that are newer
        kept = (later < size).nonzero().squeeze(1)[-LARGEST_BANK:]
        return SuccessBank(embeddings=self.embeddings[kept], task=self.task[kept])


def srpo_rewards(
    embeddings: Tensor, success: Tensor, task: Tensor, bank: SuccessBank, config: SRPOConfig, gather: Gather = HERE
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
    found = bank.added(known, tasks)
    reached, reached_task = in_order(found.embeddings, found.task)
    eps = nearest_quantile(reached, reached_task, config.quantile)
    rewards = torch.ones(len(embeddings), dtype=torch.float64)
    for number in torch.unique(task[~success]).tolist():
        failed = (task == number) & ~success
        mine = reached[reached_task == number]
        rewards[failed] = failure_rewards(embeddings[failed], centers(mine, eps), eps) if eps > 0 and len(mine) else 0.0
    return rewards, found.newest(config.bank)


@dataclass(slots=True)
class SelfReference:
    """Rewards the failures of each step's episodes.  bank: the successes of the steps before."""

    config: SRPOConfig
    bank: SuccessBank = field(default_factory=SuccessBank)

    def __call__(self, calls: Batch) -> Batch:
        """Returns the calls without the columns of EMBEDDED; in `scores` the last call of a failed episode has its reward.

        calls: all of a step, whose columns of EMBEDDED count in the last call of each episode.  The embeddings come to this
        process; pictures stay where they are.  An episode that was lost with its environment is no failure.
        """
        last = last_calls(calls.batch["episode"], calls.batch["call"])
        success, lost, task = (calls.batch[name][last] for name in ("success", "lost", TASK))
        embeddings = rows_here(calls.select([EMBEDDING], [], []).select_idxs(last)).batch[EMBEDDING]
        kept = ~lost
        rewards, self.bank = srpo_rewards(embeddings[kept], success[kept], task[kept], self.bank, self.config)
        names = calls.names() if isinstance(calls, BatchRef) else set(calls.batch.keys())
        rewarded: Batch = calls.select(sorted(names - set(EMBEDDED)))
        scores = rewarded.batch["scores"].clone()
        scores[last[kept]] = rewards.to(scores.dtype)
        rewarded.batch["scores"] = scores
        return rewarded


def last_calls(episode: Tensor, call: Tensor) -> Tensor:
    """Returns the row of the last call of each episode, (episodes,), by the episodes' numbers.  episode, call: (rows,) int64."""
    order = (episode * (call.max() + 1) + call).argsort()
    ended = torch.ones(len(order), dtype=torch.bool)
    ended[:-1] = episode[order][1:] != episode[order][:-1]
    return order[ended]


def failure_rewards(embeddings: Tensor, center: Tensor, eps: float) -> Tensor:
    """Returns 0.6 sigmoid(10 (0.5 - d)), (rows,), where d is the distance to the nearest centre divided by 2 eps.

    embeddings: (rows, numbers).  center: (centres, numbers).
    """
    nearest = distances(embeddings, center).amin(1) / (2 * eps)
    return FAILURE_SHARE * torch.sigmoid(STEEPNESS * (HALF - nearest))


def nearest_quantile(embeddings: Tensor, task: Tensor, quantile: float) -> float:
    """Returns the quantile of the distance from each success to its nearest neighbour of the same task; 0 without neighbours."""
    _, place, count = torch.unique(task, return_inverse=True, return_counts=True)
    order, nearest = place.argsort(stable=True), []
    for size in count[count > 1].unique().tolist():  # tasks of as many successes at once
        mine = embeddings[order[count[place[order]] == size]].view(-1, size, embeddings.shape[1])
        own = distances(mine, mine)
        own.diagonal(dim1=1, dim2=2).fill_(torch.inf)
        nearest.append(own.amin(2).flatten())
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
    """Returns Euclidean distances (..., left, right), each the same in every bit whatever the other rows are."""
    return torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")


def in_order(embeddings: Tensor, task: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows in an order that depends on their numbers alone."""
    order = torch.arange(len(task))
    for column in (*embeddings.unbind(1), task) if len(task) else ():
        order = order[column[order].argsort(stable=True)]
    return embeddings[order], task[order]


def episode_encoder(config: SRPOConfig, device: torch.device | str = "cpu") -> Encoder:
    """Returns the encoder: `pixels`, a random projection of where pictures are bright, or `vjepa2`, the video model V-JEPA 2
    (Assran et al. 2025, arXiv 2506.09985) on the device.  Raises LoadError where its folder has none."""
    if config.encoder == "pixels":
        return lambda episodes: torch.stack([_pixels(frames) for frames in episodes])
    from transformers import AutoModel  # only jobs with this encoder load a model

    try:
        model = AutoModel.from_pretrained(config.path).eval().to(device)
    except (OSError, ValueError) as error:
        raise LoadError(f"env.srpo.path={config.path}: no model can be loaded from it: {error}") from error
    return lambda episodes: torch.stack([_video(model, frames) for frames in episodes])


def _pixels(frames: Tensor) -> Tensor:
    """Returns the projected mean of all frames and the projected last one, (2 x PROJECTED,).

    A frame is the cumulated brightness along each axis, so that the distance of two frames grows with the way by which something
    has moved, as the earth mover's distance does (Rubner et al. 2000).  Pixels differ as much from any way on.
    """
    pooled = adaptive_avg_pool2d(frames.flatten(1, 2).double() / 255, CELLS)
    sums = torch.cat([pooled.mean(-1).cumsum(-1).flatten(1), pooled.mean(-2).cumsum(-1).flatten(1)], 1)
    projected = sums @ _projection(sums.shape[1])
    return torch.cat([projected.mean(0), projected[-1]])


@functools.cache
def _projection(width: int) -> Tensor:
    """Returns the same random matrix in every process, (width, PROJECTED)."""
    generator = torch.Generator().manual_seed(0)
    projection: Tensor = torch.randn(width, PROJECTED, generator=generator, dtype=torch.float64) / PROJECTED**0.5
    return projection


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
    features = model.get_vision_features(videos.to(model.device))
    embedding: Tensor = features.double().mean((0, 1)).cpu()
    return embedding
