"""PPOTrainer: the fit loop around the training step.

resume -> (validate) -> for each step: train, [validate], [save], log
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.prompts import PromptLoader
from rlhub.tracking.tracker import Metrics
from rlhub.trainer.ppo.step import SampleSource, TrainingStep
from rlhub.trainer.ppo.validation import ValidationReport
from rlhub.trainer.ppo.validation_schedule import ValidationSchedule
from rlhub.trainer.ppo.worker_groups import WorkerGroups
from rlhub.trainer.run import Run


@dataclass(slots=True, kw_only=True)
class PPOTrainer:
    """Owns the order of things; the parts do the work.  `fit` returns the last step taken."""

    config: PPOConfig
    run: Run
    loader: PromptLoader
    train_step: TrainingStep
    validation: ValidationSchedule | None
    groups: WorkerGroups
    total_steps: int

    @property
    def source(self) -> SampleSource:
        return self.train_step.source

    def fit(self) -> int:
        """Trains to `total_steps`, from the newest checkpoint if the run has one."""
        step = self.restore()
        if step == 0:
            self.before_training()
        prompts = self.loader.endless()
        stopping = self.run.stop_requested
        while step < self.total_steps and not stopping:
            step += 1
            self.run.begin_step(step)
            metrics = self.train_step(step, prompts)
            self.source.trained(step)
            metrics["training/epoch"] = float(self.loader.epoch)
            metrics["training/policy_version"] = float(self.source.policy_version)
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

    def validate(self, step: int) -> LateReport | None:
        """Validates the policy as it is after this step; None where there is nothing to validate on."""
        if self.validation is None:
            return None
        self.source.publish()
        return LateReport(step=step, run=self.run, future=self.validation.begin(self.source.policy_version))

    def save(self, folder: Path) -> list[FileEntry]:
        """Every rank of every model that is trained writes its part below `folder`."""
        return [*self.groups.save(folder), *self.source.save(folder)]

    def state(self) -> dict[str, Any]:
        """Returns what the driver must remember besides the workers' weights."""
        return {"kl_coef": self.train_step.compute_advantages.kl_controller.value} | self.source.state()

    def restore(self) -> int:
        """Loads the checkpoint the run resumes from; returns its step, 0 for a fresh start."""
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            return 0
        self.groups.load(checkpoint.path)
        self.source.load_state(checkpoint.state, checkpoint.path)
        self.train_step.compute_advantages.kl_controller.value = checkpoint.state["kl_coef"]
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
        """Returns its metrics; the samples go to the run folder."""
        report = self.future.result()
        self.run.log_generations(self.step, report.samples)
        return report.metrics
