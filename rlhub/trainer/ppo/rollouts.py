"""Generation as the driver sees it: prompts go out once, samples come back as a training batch."""

from __future__ import annotations

import torch

from rlhub.config.sections.rollout import RolloutConfig, ValSamplingConfig
from rlhub.protocol import DataProto
from rlhub.single_controller import WorkerGroup
from rlhub.trainer.ppo.groups import WeightSync

VALIDATION_ORDINALS = 1 << 40  # validation prompts' ordinals start here, far from any training prompt's


class Generator:
    """Generates with the policy's newest weights: publishes them first when the rollout engine's are older."""

    def __init__(self, rollout: WorkerGroup, weights: WeightSync, config: RolloutConfig) -> None:
        self.rollout, self.weights, self.config = rollout, weights, config
        self.policy_version = 0
        self.published_version = -1

    def training(self, prompts: DataProto) -> DataProto:
        """n samples per prompt with their log-probs; rows of a prompt are neighbours and share a `uid`."""
        config = self.config
        sampling = ValSamplingConfig(
            n=config.n, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, do_sample=True
        )
        return self._generate(prompts, sampling, log_probs=True)

    def greedy(self, prompts: DataProto) -> DataProto:
        """The most likely response to each prompt, without log-probs."""
        return self._generate(prompts, ValSamplingConfig(n=1, do_sample=False), log_probs=False)

    def validation(self, prompts: DataProto) -> DataProto:
        """val_kwargs' samples per prompt, without log-probs."""
        return self._generate(prompts, self.config.val_kwargs, log_probs=False)

    def _generate(self, prompts: DataProto, sampling: ValSamplingConfig, *, log_probs: bool) -> DataProto:
        self.publish()
        asked = prompts.select(batch_keys=["prompts", "attention_mask", "ordinal"], non_tensor_batch_keys=[], meta_info_keys=[])
        asked.meta_info.update(
            n=sampling.n,
            temperature=sampling.temperature if sampling.do_sample else 0.0,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            log_probs=log_probs,
        )
        generated = self.rollout.generate_sequences(asked)
        kept = prompts.select(batch_keys=["ordinal"], meta_info_keys=[]).repeat(sampling.n, interleave=True)
        kept.batch["uid"] = torch.arange(len(prompts)).repeat_interleave(sampling.n)
        generated.meta_info.clear()
        return kept.union(generated)

    def publish(self) -> None:
        """Bring the rollout engine to the newest policy version (checked weight by weight); no-op when it is there."""
        if self.published_version != self.policy_version:
            self.weights.sync(self.policy_version)
            self.published_version = self.policy_version
