"""PPOTrainer: the synchronous fit loop around `Learner.learn`.

resume -> (validate) -> for each step: sample, learn, [validate], [save], log
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhub.checkpoint.files import FileEntry
from rlhub.config.ppo import PPOConfig
from rlhub.data.prompts import PromptLoader
from rlhub.protocol import DataProto
from rlhub.trainer.ppo.groups import Groups
from rlhub.trainer.ppo.learner import Learner
from rlhub.trainer.ppo.rollouts import Generator
from rlhub.trainer.ppo.sampling import Sampler
from rlhub.trainer.ppo.validation import Validator
from rlhub.trainer.run import Run


@dataclass(slots=True, kw_only=True)
class PPOTrainer:
    """Owns the order of things; the parts do the work.  `fit` returns the last step taken."""

    config: PPOConfig
    run: Run
    loader: PromptLoader
    generator: Generator
    sampler: Sampler
    learner: Learner
    validator: Validator | None
    groups: Groups
    total_steps: int

    def fit(self) -> int:
        """Train to `total_steps`, from the newest checkpoint if the run has one."""
        step = self.restore()
        if step == 0:
            self.before_training()
        prompts = self.loader.endless()
        stopping = self.run.stop_requested
        while step < self.total_steps and not stopping:
            step += 1
            self.run.begin_step(step)
            metrics = self.train_step(step, prompts)
            last = step == self.total_steps
            if self.validator is not None and self.run.due(self.config.trainer.test_freq, step, last=last):
                metrics |= self.validate(step)
            stopping = self.run.stop_requested  # asked once a step, so that the step after which the run stops is saved
            self.run.end_step(step, metrics, save=self.save, state=self.state, last=last or stopping)
        return step

    def before_training(self) -> None:
        """Step 0: what the untrained policy can do."""
        self.run.begin_step(0)
        metrics = self.validate(0) if self.validator is not None and self.config.trainer.val_before_train else {}
        if metrics:
            self.run.log(0, metrics)

    def train_step(self, step: int, prompts: Iterator[DataProto]) -> dict[str, float]:
        """One training batch, from as many prompts as sampling takes."""
        batch = self.sampler.sample(prompts)
        metrics = self.sampler.metrics | self.learner.learn(batch, step)
        if step > self.config.trainer.critic_warmup:
            self.generator.policy_version = step
        return metrics | {
            "training/epoch": float(self.loader.epoch),
            "training/policy_version": float(self.generator.policy_version),
        }

    def validate(self, step: int) -> dict[str, float]:
        """Validation metrics of the current policy; its samples go to the run folder."""
        assert self.validator is not None
        report = self.validator()
        self.run.log_generations(step, report.samples)
        return report.metrics

    def save(self, folder: Path) -> list[FileEntry]:
        """Every rank of every model that is trained writes its part below `folder`."""
        return self.groups.save(folder)

    def state(self) -> dict[str, Any]:
        """What the driver must remember besides the workers' weights."""
        return {
            "loader": self.loader.state(),
            "kl_coef": self.learner.kl_controller.value,
            "policy_version": self.generator.policy_version,
        }

    def restore(self) -> int:
        """Load the checkpoint the run resumes from; returns its step, 0 for a fresh start."""
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            return 0
        self.groups.load(checkpoint.path)
        self.loader.load_state(checkpoint.state["loader"])
        self.learner.kl_controller.value = checkpoint.state["kl_coef"]
        self.generator.policy_version = checkpoint.state["policy_version"]
        return checkpoint.step
