"""SFTTrainer: supervised fine-tuning on prompt-response pairs, with the same run folder, checkpoints and resume as RL."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhub.checkpoint.files import FileEntry
from rlhub.config.sft import SFTConfig
from rlhub.data.sft import SFTDataset, SFTLoader
from rlhub.models.tokenizer import load_tokenizer
from rlhub.protocol import DataProto
from rlhub.single_controller import ClassWithInitArgs, WorkerGroup
from rlhub.trainer.ppo.metrics import mean_metrics
from rlhub.trainer.run import Run
from rlhub.trainer.workers import launch_workers
from rlhub.workers.runtime import WorkerRuntime
from rlhub.workers.sft import SFTWorker

MODEL = ["input_ids", "attention_mask", "response_mask"]
DEADLINES = {
    "init_model": "start",
    "train_step": "update",
    "evaluate": "infer",
    "save_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
}


@dataclass(slots=True, kw_only=True)
class SFTTrainer:
    """`fit` trains to `total_steps` and returns the last step taken."""

    config: SFTConfig
    run: Run
    loader: SFTLoader
    val_batches: Sequence[DataProto]
    model: WorkerGroup
    total_steps: int

    def fit(self) -> int:
        """Each step is one optimizer step over data.train_batch_size rows."""
        step = self.restore()
        if step == 0 and self.val_batches and self.config.trainer.val_before_train:
            self.run.begin_step(0)
            self.run.log(0, self.validate())
        batches = self.loader.endless()
        stopping = self.run.stop_requested
        while step < self.total_steps and not stopping:
            step += 1
            self.run.begin_step(step)
            metrics = mean_metrics(self.model.train_step(next(batches).select(batch_keys=MODEL)).meta_info["metrics"])
            last = step == self.total_steps
            if self.val_batches and self.run.due(self.config.trainer.test_freq, step, last=last):
                metrics |= self.validate()
            stopping = self.run.stop_requested  # asked once a step, so that the step after which the run stops is saved
            self.run.end_step(step, metrics, save=self.save, state=self.state, last=last or stopping)
        return step

    def validate(self) -> dict[str, float]:
        """val/loss: mean negative log-likelihood per response token."""
        loss = tokens = 0.0
        for batch in self.val_batches:
            sums = mean_metrics(self.model.evaluate(batch.select(batch_keys=MODEL)).meta_info["metrics"])
            loss, tokens = loss + sums["loss"], tokens + sums["tokens"]
        return {"val/loss": loss / max(tokens, 1.0)}

    def save(self, folder: Path) -> list[FileEntry]:
        """Every rank writes its part below `folder`/model."""
        return [entry for rank in self.model.save_checkpoint(str(folder / "model")) for entry in rank]

    def state(self) -> dict[str, Any]:
        """What the driver must remember besides the model."""
        return {"loader": self.loader.state()}

    def restore(self) -> int:
        """Load the checkpoint the run resumes from; returns its step, 0 for a fresh start."""
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            return 0
        self.model.load_checkpoint(str(checkpoint.path / "model"))
        self.loader.load_state(checkpoint.state["loader"])
        return checkpoint.step


@dataclass(slots=True, kw_only=True)
class SFTData:
    """The driver's data."""

    loader: SFTLoader
    val_batches: Sequence[DataProto]
    total_steps: int


def build_data(config: SFTConfig) -> SFTData:
    """Read the files; DataError names file, row and column of what is unusable."""
    data = config.data
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    dataset = SFTDataset(data, data.train_files, tokenizer)
    loader = SFTLoader(dataset, data.train_batch_size, seed=data.seed, shuffle=data.shuffle, drop_last=True)
    val_batches: list[DataProto] = []
    if data.val_files:
        validation = SFTDataset(data, data.val_files, tokenizer)
        val_batches = list(SFTLoader(validation, data.train_batch_size, shuffle=False, drop_last=False))
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(loader)
    return SFTData(loader=loader, val_batches=val_batches, total_steps=total_steps)


def build_trainer(config: SFTConfig, data: SFTData, run: Run, stack: ExitStack) -> SFTTrainer:
    """Start the workers; what must be ended is put on `stack`."""
    config.optim.total_training_steps = data.total_steps
    runtime = WorkerRuntime(
        device=config.trainer.device,
        seed=config.trainer.seed,
        max_prompt_length=config.data.max_length,
        max_response_length=config.data.max_length,
        deadline_s=config.trainer.deadline_s.update,
    )
    roles = {"model": ClassWithInitArgs(SFTWorker, config, runtime)}
    launched = stack.enter_context(launch_workers(roles, config.trainer, deadlines={"model": DEADLINES}, run=run))
    return SFTTrainer(
        config=config,
        run=run,
        loader=data.loader,
        val_batches=data.val_batches,
        model=launched.groups["model"],
        total_steps=data.total_steps,
    )
