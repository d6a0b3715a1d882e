"""Training in simulators as the driver sees it: the scenes that episodes begin with, episodes instead of answers, and validation.

A step has data.train_batch_size scenes of rollout.n episodes each; a row of its batch is one call of the policy, so the number of
rows differs from step to step.  Pictures and tokens stay with the ranks; the driver reads one number a call.
"""

from __future__ import annotations

import base64
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save

from rlhub.checkpoint.files import FileEntry, write_file
from rlhub.config.rules.placement import ENVIRONMENTS, PoolConfig, is_separate, pool_of
from rlhub.config.sections.env import EnvConfig
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.rollout import RolloutConfig, ValSamplingConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.data.episodes import png
from rlhub.data.order import ResumableLoader
from rlhub.data.prompts import fingerprint_of
from rlhub.errors import ConfigError
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.rewards.rows import rows_here
from rlhub.rewards.srpo import SelfReference, SuccessBank
from rlhub.single_controller import AsyncActorOptions, WorkerGroup
from rlhub.single_controller.placement import ActorPlaces
from rlhub.single_controller.worker_group import GroupMethod
from rlhub.tracking.tracker import GenerationRow
from rlhub.trainer.ppo.sync_source import sampling_meta, training_sampling
from rlhub.trainer.ppo.validation import ValidationReport
from rlhub.utils.seeding import sample_seed

Z_95 = 1.959964
"""The quantile of the normal distribution for an interval of 95 %."""
SUCCESSES = "successes.safetensors"
"""File of a checkpoint with the bank of SelfReference."""


class SceneData:
    """The starts of episodes: seeds, or the environment's fixed initial states."""

    def __init__(self, size: int, seed: int, *, fixed: bool) -> None:
        self.size, self.seed, self.fixed = size, seed, fixed
        self.fingerprint = fingerprint_of([size, seed, fixed])

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: np.ndarray) -> DataProto:
        """Returns those rows: `seed` of the environment, and `initial`, the fixed initial state, -1 for one drawn from the seed;
        (rows,) int64."""
        seeds = [sample_seed(self.seed, index, 0) for index in indices.tolist()]
        initial = torch.from_numpy(np.asarray(indices, np.int64)) if self.fixed else torch.full((len(indices),), -1)
        return DataProto.from_dict({"seed": torch.tensor(seeds), "initial": initial})


def scene_loader(config: PPOConfig) -> ResumableLoader:
    """Returns the scenes of training, in a resumable order."""
    data, env = config.data, config.env
    scenes = SceneData(env.num_scenes, data.seed, fixed=env.scenes == "fixed")
    return ResumableLoader(scenes, data.train_batch_size, seed=data.seed, shuffle=data.shuffle)


def validation_scenes(env: EnvConfig, first_ordinal: int) -> list[DataProto]:
    """Returns the scenes of validation as one batch: the fixed initial states, from the first; [] for no validation."""
    if not env.val_scenes:
        return []
    loader = ResumableLoader(SceneData(env.val_scenes, 0, fixed=True), env.val_scenes, shuffle=False)
    (batch,) = loader
    batch.batch["ordinal"] = batch.batch["ordinal"] + first_ordinal
    return [batch]


def place_simulators(config: PPOConfig, rollout: WorkerGroup, log_dir: str, stack: ExitStack) -> None:
    """Lets the rollout's ranks start their simulators in actors, where trainer.placement.environments names a pool for them; what
    the pool reserves is given back when `stack` closes.

    Raises ResourceError where the cluster cannot give it, and WorkerError where a simulator cannot start.
    """
    trainer = config.trainer
    if not is_separate(trainer, ENVIRONMENTS):
        return
    pool = pool_of(trainer, ENVIRONMENTS)
    counts = [pool.n_gpus_per_node] * pool.nnodes
    places = ActorPlaces(
        counts=counts, num_cpus=pool.process_cpus, num_gpus=pool.process_gpus, deadline_s=trainer.deadline_s.resources
    )
    stack.callback(places.release)
    places.reserve()
    rollout.place_simulators(
        [places.options(number, _simulators(trainer, pool, number, log_dir)) for number in range(pool.ranks)]
    )


def _simulators(trainer: TrainerConfig, pool: PoolConfig, number: int, log_dir: str) -> AsyncActorOptions:
    return AsyncActorOptions(
        name=f"simulators-{number}",
        device="cuda" if pool.process_gpus else "cpu",
        log_dir=log_dir,
        plugins=tuple(trainer.plugins),
        start_deadline_s=trainer.deadline_s.start,
    )


@dataclass(slots=True)
class EpisodeGenerator:
    """Runs episodes in the simulators of the rollout's ranks, with the weights that they have.

    reference: rewards the failures of training episodes; None where the simulators reward them.
    """

    rollout: WorkerGroup
    config: RolloutConfig
    by_reference: bool = False
    reference: SelfReference | None = None
    _numbers: Iterator[int] = field(init=False, default_factory=itertools.count)

    def training(self, scenes: DataProto) -> Batch:
        """Returns the calls of n episodes from each scene, with their log-probs."""
        return self.rewarded(self.submit(scenes, None)())

    def submit(self, scenes: DataProto, version: int | None) -> Callable[[], Batch]:
        """Begins the same and returns at once; what it returns waits for the calls, which are to be `rewarded`.

        version: that of the policy, for a column policy_version.
        """
        asked: dict[str, object] = {"policy_version": version, "embed": True if self.reference is not None else None}
        meta = {name: value for name, value in asked.items() if value is not None}
        request = self._request(scenes, training_sampling(self.config), log_probs=True, **meta)
        sent = self._method("episodes").submit(request)
        return functools.cache(lambda: _columns(sent.get()))

    def rewarded(self, calls: Batch) -> Batch:
        """Returns the calls of a step with the rewards that they train with.  Every step's are rewarded once, in order."""
        return calls if self.reference is None else self.reference(calls)

    def save(self, folder: Path) -> list[FileEntry]:
        """Writes the successes with which later failures are compared."""
        if self.reference is None:
            return []
        bank = self.reference.bank
        return [write_file(folder / SUCCESSES, save({"embeddings": bank.embeddings, "task": bank.task}))]

    def load(self, folder: Path) -> None:
        """Goes on with what `save` wrote; a checkpoint of other rewards has nothing of it."""
        if self.reference is not None and (folder / SUCCESSES).is_file():
            self.reference.bank = SuccessBank(**load_file(folder / SUCCESSES))

    def greedy(self, scenes: DataProto) -> Batch:
        """Raises ConfigError: no estimator compares episodes with greedy ones."""
        raise ConfigError("the advantage estimator compares with greedy responses, which env.name does not give")

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Returns the success rate and the mean return of a step's episodes."""
        return EpisodeOutcomes.of(batch).metrics("rollout")

    def validation(self, scenes: DataProto) -> Batch:
        """Returns the calls of val_kwargs' episodes from each scene."""
        return _columns(self._method("validation")(self._request(scenes, self.config.val_kwargs, log_probs=False)))

    def _request(self, scenes: DataProto, sampling: ValSamplingConfig, *, log_probs: bool, **meta: object) -> DataProto:
        request = scenes.select(batch_keys=["seed", "initial", "ordinal"], meta_info_keys=[])
        request.batch["uid"] = torch.arange(len(scenes))
        request.meta_info.update(sampling_meta(sampling, log_probs=log_probs), **meta)
        return request

    def _method(self, purpose: str) -> GroupMethod:
        method: GroupMethod = self.rollout.run_episodes
        return method.retain(key=f"{purpose}-{next(self._numbers)}") if self.by_reference else method


def _columns(episodes: Batch) -> Batch:
    episodes.meta_info.clear()
    return episodes


@dataclass(slots=True, kw_only=True, frozen=True)
class EpisodeOutcomes:
    """The outcomes of episodes, each (episodes,): the sum of the rewards, whether the task was solved, the number of calls, and
    whether the episode was lost with its environment."""

    returns: np.ndarray
    success: np.ndarray
    calls: np.ndarray
    lost: np.ndarray

    @classmethod
    def of(cls, batch: Batch) -> EpisodeOutcomes:
        """Returns the outcomes of a batch of calls."""
        names = ("episode", "scores", "success", "lost")
        episode, scores, success, lost = (batch.batch[name].numpy() for name in names)
        _, place = np.unique(episode, return_inverse=True)
        count = int(place.max()) + 1
        sums = [np.bincount(place, column.astype(np.float64), count) for column in (scores, success, lost)]
        return cls(returns=sums[0], success=sums[1] > 0, calls=np.bincount(place, minlength=count), lost=sums[2] > 0)

    def metrics(self, prefix: str) -> dict[str, float]:
        """Returns means over the episodes that were not lost, and the number of those that were."""
        kept = ~self.lost
        found = {f"{prefix}/lost_episodes": float(self.lost.sum())}
        if kept.any():
            found[f"{prefix}/success"] = float(self.success[kept].mean())
            found[f"{prefix}/return"] = float(self.returns[kept].mean())
            found[f"{prefix}/calls"] = float(self.calls[kept].mean())
        return found


def wilson_interval(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Returns the score interval of a success rate (Wilson 1927, Journal of the American Statistical Association 22)."""
    share, weight = successes / trials, z * z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials)) / (1 + weight)
    return centre - half, centre + half


@dataclass(slots=True, kw_only=True)
class EpisodeValidator:
    """Validates the policy on fixed scenes: the success rate with its interval of 95 %, and the mean return.

    refresh: gives the rollout's ranks the newest weights, where publications may wait.  num_shown: films of the first episodes
    that succeed and that fail; 0 for none.
    """

    scenes: Sequence[DataProto]
    generator: EpisodeGenerator
    tokenizer: Any
    num_shown: int = 0
    refresh: Callable[[], None] | None = None

    def __call__(self) -> ValidationReport:
        """Evaluates the current policy."""
        if self.refresh is not None:
            self.refresh()
        metrics: dict[str, float] = {}
        films: list[GenerationRow] = []
        for scenes in self.scenes:
            batch = self.generator.validation(scenes)
            outcomes = EpisodeOutcomes.of(batch)
            metrics = outcomes.metrics("val")
            kept = ~outcomes.lost
            low, high = wilson_interval(int(outcomes.success[kept].sum()), max(int(kept.sum()), 1))
            metrics |= {"val/success_low": low, "val/success_high": high, "val/num_episodes": float(kept.sum())}
            ordered = [np.flatnonzero(kept & (outcomes.success == solved)).tolist() for solved in (True, False)]
            shown = [number for pair in itertools.zip_longest(*ordered) for number in pair if number is not None]
            films += [self._film(batch, outcomes, number) for number in shown[: self.num_shown]]
            if isinstance(batch, BatchRef):
                batch.drop()
        return ValidationReport(metrics=metrics, samples=films)

    def _film(self, batch: Batch, outcomes: EpisodeOutcomes, number: int) -> GenerationRow:
        """Returns an episode as people see it: the pictures that the policy read, a column a call and a row a camera."""
        episode, solved = batch.batch["episode"].numpy(), bool(outcomes.success[number])
        rows = np.flatnonzero(episode == np.unique(episode)[number]).tolist()
        shown = rows_here(batch.select_idxs(rows).select(["input_ids", "attention_mask", "pixel_values"], [], []))
        pixels = shown.batch["pixel_values"]  # (calls, cameras, 3, height, width)
        film = pixels.permute(1, 3, 0, 4, 2).flatten(2, 3).flatten(0, 1).numpy()
        start = int(shown.batch["attention_mask"][0].argmax())
        prompt = shown.batch["input_ids"][0][start : start + int(batch.batch["prompt_length"][rows[0]])]
        return GenerationRow(
            prompt=self.tokenizer.decode(prompt, skip_special_tokens=True),
            response=f"{len(rows)} calls of the policy, {'solved' if solved else 'not solved'}",
            score=float(outcomes.returns[number]),
            finish_reason="success" if solved else "failure",
            extra={"film": base64.b64encode(png(film)).decode()},
        )
