"""SyncSource: whole-batch generation in turns with training (trainer.max_staleness=0 with rollout.mode=sync).

Prompts go out to the rollout's ranks once, and samples come back as a batch, all from the newest weights.  Dynamic sampling takes
several such generations for a training batch (dynamic_sampling.py).

Every prompt drawn has an ordinal of its own, also where it is drawn again in a later epoch, and seeds follow ordinals: no
sample is generated twice, and a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.rollout import RolloutConfig, ValSamplingConfig
from rlhub.data.order import ResumableLoader
from rlhub.errors import CheckpointError
from rlhub.protocol import Batch, DataProto
from rlhub.protocol.sequences import IMAGES
from rlhub.single_controller import WorkerGroup
from rlhub.single_controller.worker_group import GroupMethod
from rlhub.trainer.ppo.dynamic_sampling import DynamicSampling
from rlhub.trainer.ppo.feedback import SamplerFeedback
from rlhub.trainer.ppo.group_filter import load_group_filter
from rlhub.trainer.ppo.requirements import requirements
from rlhub.trainer.ppo.scoring import Samples
from rlhub.trainer.ppo.worker_groups import WeightSync

VALIDATION_ORDINALS = 1 << 40  # validation prompts' ordinals start here, far from any training prompt's
STREAMED = "rollouts"
"""Key of a checkpoint's state that is written by rollout.mode=async."""
PROMPTS_IN_WORK = (
    "the checkpoint was made with actor_rollout_ref.rollout.mode=async and holds prompts in work, which mode=sync "
    "cannot go on with; resume with mode=async (trainer.max_staleness=0 takes turns too), or start anew"
)


def training_sampling(config: RolloutConfig) -> ValSamplingConfig:
    """Returns how the samples that train are drawn."""
    return ValSamplingConfig(n=config.n, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, do_sample=True)


SAMPLING = "sampling"
"""Key of a validation batch's meta_info with the sampling of its prompts, where their data source has its own."""


def validation_sampling(prompts: DataProto, config: RolloutConfig) -> ValSamplingConfig:
    """Returns how the samples of these validation prompts are drawn."""
    own: ValSamplingConfig = prompts.meta_info.get(SAMPLING, config.val_kwargs)
    return own


def sampling_meta(sampling: ValSamplingConfig, *, log_probs: bool) -> dict[str, Any]:
    """Returns the meta_info by which the rollout's ranks sample; greedy is a temperature of 0."""
    return {
        "n": sampling.n,
        "temperature": sampling.temperature if sampling.do_sample else 0.0,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "log_probs": log_probs,
    }


class SampleGenerator(Protocol):
    """Generates with the weights that the rollout's ranks have."""

    def training(self, prompts: DataProto) -> Batch:
        """Returns the samples of these prompts, with their log-probs; those of a prompt are neighbours and share a `uid`."""
        ...

    def greedy(self, prompts: DataProto) -> Batch:
        """Returns the most likely response to each prompt, for estimators that compare with it."""
        ...

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Returns what it reports of its samples."""
        ...

    def save(self, folder: Path) -> list[FileEntry]:
        """Writes what it has to remember below a checkpoint's folder."""
        ...

    def load(self, folder: Path) -> None:
        """Goes on with what `save` wrote."""
        ...


@dataclass(slots=True)
class Generator:
    """Generation by the rollout's ranks as the driver sees it, with the weights that they have."""

    rollout: WorkerGroup
    config: RolloutConfig
    by_reference: bool = False
    _numbers: Iterator[int] = field(init=False, default_factory=itertools.count)

    def training(self, prompts: DataProto) -> Batch:
        """Returns n samples per prompt with their log-probs; rows of a prompt are neighbours and share a `uid`."""
        return self._generate(prompts, training_sampling(self.config), self._method("samples"), log_probs=True)

    def greedy(self, prompts: DataProto) -> Batch:
        """Returns the most likely response to each prompt, without log-probs."""
        return self._generate(prompts, ValSamplingConfig(n=1, do_sample=False), self._method("greedy"), log_probs=False)

    def validation(self, prompts: DataProto) -> Batch:
        """Returns val_kwargs' samples per prompt, or those of its data source, without log-probs."""
        return self._generate(prompts, validation_sampling(prompts, self.config), self._method("validation"), log_probs=False)

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Returns nothing: the rewards of answers are reported when they are scored."""
        return {}

    def save(self, folder: Path) -> list[FileEntry]:
        """Writes nothing: prompts have seeds of their own, and answers no history."""
        return []

    def load(self, folder: Path) -> None:
        """Needs nothing."""

    def _method(self, purpose: str) -> GroupMethod:
        """Returns the call that generates; by reference, the tokens of each generation stay with the ranks under a key of its
        own."""
        method: GroupMethod = self.rollout.generate_sequences
        return method.retain(key=f"{purpose}-{next(self._numbers)}") if self.by_reference else method

    def _generate(self, prompts: DataProto, sampling: ValSamplingConfig, method: GroupMethod, *, log_probs: bool) -> Batch:
        names = [name for name in ("prompts", "attention_mask", "ordinal", IMAGES) if name in prompts.batch.keys()]
        request = prompts.select(batch_keys=names, non_tensor_batch_keys=[], meta_info_keys=[])
        request.meta_info.update(sampling_meta(sampling, log_probs=log_probs))
        generated: Batch = method(request)
        generated.meta_info.clear()
        kept = prompts.select(batch_keys=["ordinal"], meta_info_keys=[]).repeat(sampling.n, interleave=True)
        kept.batch["uid"] = torch.arange(len(prompts)).repeat_interleave(sampling.n)
        return generated.union(kept)


@dataclass(slots=True)
class SyncSource:
    """Is the SampleSource of the synchronous schedule."""

    config: PPOConfig
    loader: ResumableLoader
    generator: SampleGenerator
    weights: WeightSync
    policy_version: int = field(init=False, default=0)
    metrics: dict[str, float] = field(init=False, default_factory=dict)
    _published: int | None = field(init=False, default=None)
    _with_greedy: bool = field(init=False)
    _dynamic_sampling: DynamicSampling | None = field(init=False, default=None)
    _feedback: SamplerFeedback = field(init=False)
    _drawn: list[tuple[Tensor, Samples]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._feedback = SamplerFeedback(self.loader)
        self._with_greedy = requirements(self.config).baseline_rewards
        if self.config.algorithm.filtering:
            self._dynamic_sampling = DynamicSampling(self.config, load_group_filter(self.config))

    def publish(self) -> None:
        """Sends the actor's present weights to the rollout engines, checked weight by weight; they then generate with them."""
        if self._published != self.policy_version:
            self.weights.sync(self.policy_version)
            self._published = self.policy_version

    def sample(self, prompts: Iterator[DataProto], step: int) -> Samples:
        """Generates once, for the next batch of prompts."""
        batch = next(prompts)
        sampled = self.generator.training(batch)
        self.metrics = self.generator.metrics(sampled)
        samples = Samples(batch=sampled, greedy=self.generator.greedy(batch) if self._with_greedy else None)
        if self._feedback.wanted:
            self._drawn.append((sampled.batch["ordinal"].clone(), samples))
        return samples

    def select(self, samples: Samples) -> Batch | None:
        """Returns the generation as it is, or what dynamic sampling makes of this one and those before it."""
        if self._dynamic_sampling is None:
            return samples.batch
        batch = self._dynamic_sampling.add(samples.scored())
        self.metrics = self._dynamic_sampling.metrics
        return batch

    def trained(self, step: int) -> None:
        """Gives the sampler what all samples of the step scored, also those that do not train.  While the critic warms up the
        policy, and so its version, stays what it is."""
        for ordinals, samples in self._drawn:
            assert samples.scoring is not None, "every sample of a step is scored"
            self._feedback.note(samples.scoring.columns, ordinals)
        self._feedback.trained(step)
        self._feedback.enter(step)
        self._drawn.clear()
        self.loader.forget(self.loader.consumed)
        if step > self.config.trainer.critic_warmup:
            self.policy_version = step

    def save(self, folder: Path) -> list[FileEntry]:
        """Writes what the generator has to remember."""
        return self.generator.save(folder)

    def state(self) -> dict[str, Any]:
        """Returns the loader's state, which stands where the next batch begins."""
        return {"loader": self.loader.state(), "policy_version": self.policy_version}

    def load_state(self, state: Mapping[str, Any], folder: Path) -> None:
        """Raises CheckpointError for what only a stream of episodes can go on with."""
        if STREAMED in state:
            raise CheckpointError(PROMPTS_IN_WORK)
        self.loader.load_state(state["loader"])
        self.generator.load(folder)
        self.policy_version = state["policy_version"]
