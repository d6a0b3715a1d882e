"""PPOTrainer: the fit loop around `Learner.learn`, the same for every schedule: what differs is where batches come from.

resume -> (validate) -> for each step: sample, learn, publish, [validate], [save], log
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.prompts import PromptLoader
from rlhub.protocol import DataProto
from rlhub.tracking.tracker import Metrics
from rlhub.trainer.ppo.batch_source import BatchSource
from rlhub.trainer.ppo.groups import Groups
from rlhub.trainer.ppo.learner import Learner
from rlhub.trainer.ppo.metrics import timing_per_token
from rlhub.trainer.ppo.validation import ValidationReport
from rlhub.trainer.ppo.validation_schedule import ValidationSchedule
from rlhub.trainer.run import Run


@dataclass(slots=True, kw_only=True)
class PPOTrainer:
    """Owns the order of things; the parts do the work.  `fit` returns the last step taken."""

    config: PPOConfig
    run: Run
    loader: PromptLoader
    batches: BatchSource
    learner: Learner
    validation: ValidationSchedule | None
    groups: Groups
    total_steps: int

    def fit(self) -> int:
        """Train to `total_steps`, from the newest checkpoint if the run has one."""
        step = self.restore()
        self.batches.start()
        if step == 0:
            self.before_training()
        prompts = self.loader.endless()
        stopping = self.run.stop_requested
        while step < self.total_steps and not stopping:
            step += 1
            self.run.begin_step(step)
            metrics = self.train_step(step, prompts)
            last = step == self.total_steps
            late = self.validate(step) if self.run.due(self.config.trainer.test_freq, step, last=last) else None
            stopping = self.run.stop_requested  # asked once a step, so that the step after which the run stops is saved
            self.run.end_step(step, metrics, save=self.save, state=self.state, last=last or stopping, late=late)
        return step

    def before_training(self) -> None:
        """Step 0: what the untrained policy can do."""
        self.run.begin_step(0)
        report = self.validate(0) if self.config.trainer.val_before_train else None
        if report is not None:
            self.run.log(0, report.result())

    def train_step(self, step: int, prompts: Iterator[DataProto]) -> dict[str, float]:
        """One training batch, from as many prompts as sampling takes."""
        batch = self.batches.sample(prompts, step)
        metrics = self.batches.metrics | self.learner.learn(batch, step)
        metrics |= timing_per_token(self.run.timers.so_far(), batch)  # before a validation generates too
        self.batches.publish(step)
        return metrics | {
            "training/epoch": float(self.loader.epoch),
            "training/policy_version": float(self.batches.policy_version),
        }

    def validate(self, step: int) -> LateReport | None:
        """Validate the current policy, now or beside the next steps; None where there is nothing to validate on."""
        if self.validation is None:
            return None
        return LateReport(step=step, run=self.run, future=self.validation.begin(self.batches.policy_version))

    def save(self, folder: Path) -> list[FileEntry]:
        """Every rank of every model that is trained writes its part below `folder`."""
        return [*self.groups.save(folder), *self.batches.save(folder)]

    def state(self) -> dict[str, Any]:
        """What the driver must remember besides the workers' weights."""
        return {"kl_coef": self.learner.kl_controller.value} | self.batches.state()

    def restore(self) -> int:
        """Load the checkpoint the run resumes from; returns its step, 0 for a fresh start."""
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            return 0
        self.groups.load(checkpoint.path)
        self.batches.load_state(checkpoint.state, checkpoint.path)
        self.learner.kl_controller.value = checkpoint.state["kl_coef"]
        return checkpoint.step


@dataclass(slots=True, kw_only=True)
class LateReport:
    """A step's validation, which may still run; see run.LateMetrics."""

    step: int
    run: Run
    future: Future[ValidationReport]

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> Metrics:
        """Its metrics; the samples go to the run folder."""
        report = self.future.result()
        self.run.log_generations(self.step, report.samples)
        return report.metrics
