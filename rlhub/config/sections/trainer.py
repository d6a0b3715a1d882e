"""Section `trainer`: how long, where, how often to save and validate, and what to show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.config.schema import IntOrOff, NonNegativeInt, PositiveFloat, PositiveInt, Seed


@dataclass(slots=True, kw_only=True)
class DeadlineConfig:
    """Longest wait for each kind of work, in seconds; a passed deadline is an error that names the wait."""

    resources: PositiveFloat = 120.0
    """Seconds to wait for the Ray cluster to answer, or to start, and to grant the ranks."""
    cluster: PositiveFloat = 30.0
    """Seconds that the Ray cluster's head may be silent before the run ends; at most 50, since Ray itself gives up after 60."""
    start: PositiveFloat = 1800.0
    """Seconds for all workers to build their models and engines."""
    generate: PositiveFloat = 7200.0
    """Seconds for one generation of a batch."""
    infer: PositiveFloat = 3600.0
    """Seconds for one pass of log-probs or values over a batch, with those that the same ranks do before it."""
    update: PositiveFloat = 7200.0
    """Seconds for one update of actor or critic; of both, where the same ranks do them."""
    sync: PositiveFloat = 1800.0
    """Seconds for moving the weights to the rollout engine."""
    checkpoint: PositiveFloat = 3600.0
    """Seconds for saving or loading a checkpoint."""
    shutdown: PositiveFloat = 60.0
    """Seconds for ending the workers before they are killed."""


@dataclass(slots=True, kw_only=True)
class TrainerConfig:
    project_name: str = "rlhub"
    """Groups runs in trackers and folders."""
    experiment_name: str = "run"
    """The run's name in trackers and folders."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Trackers: console, tensorboard, wandb, mlflow, swanlab, trackio; metrics.jsonl and report.html are always written."""
    total_epochs: PositiveInt = 1
    """Passes over the training prompts."""
    total_training_steps: PositiveInt | None = None
    """Stop after so many steps; null: total_epochs decides."""
    seed: Seed = 1
    """Seed of sampling and initialisation; the order of prompts has data.seed."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where workers compute; auto: cuda if this machine has GPUs. Set it if the driver's machine has none but the workers' do."""
    backend: Literal["ray", "local"] = "ray"
    """ray: worker processes; local: everything in this process, one rank."""
    plugins: list[str] = field(default_factory=list)
    """Python modules that register your own parts; imported here and by every worker."""
    nnodes: PositiveInt = 1
    """Number of machines."""
    n_gpus_per_node: PositiveInt | None = None
    """Worker ranks per machine: GPUs, or on CPU processes; null: the GPUs found, on CPU 1."""
    pools: dict[str, Any] = field(default_factory=dict)
    """Further pools of ranks, for roles that should not share the actor's: name -> {nnodes: 1, n_gpus_per_node: 1}."""
    placement: dict[str, Any] = field(default_factory=dict)
    """Role -> pool, of rollout, reference, critic, reward_model, judge; a role not named shares the actor's processes."""
    save_freq: IntOrOff = -1
    """Steps between checkpoints; -1: none but the last."""
    test_freq: IntOrOff = -1
    """Steps between validations; -1: none after the start."""
    val_before_train: bool = True
    """Validate before the first step, where there are validation files."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto: go on from the newest checkpoint of the run folder; disable: start anew; resume_path: from resume_from_path."""
    resume_from_path: str | None = None
    """Checkpoint folder for resume_mode=resume_path."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """The run folder: metrics, report, logs, checkpoints."""
    max_actor_ckpt_to_keep: PositiveInt | None = None
    """Newest checkpoints to keep; null: all."""
    keep_best: str | None = None
    """Metric (for example val/pass@1) whose best step's checkpoint is kept besides the newest; null: none."""
    max_skipped_steps: PositiveInt | None = 3
    """So many training steps in a row whose every optimizer step was skipped (loss or gradient not finite) end the run, which is
    saved as it is; null: no limit."""
    critic_warmup: NonNegativeInt = 0
    """Steps in which only the critic learns."""
    max_staleness: NonNegativeInt = 0
    """rollout.mode=async: how many policy versions a sample may be behind when it is trained; 0 waits for each version."""
    pipeline_depth: NonNegativeInt | None = None
    """Batches that generation may run ahead of training; null: max_staleness. Less keeps samples fresher than the bound."""
    stale_policy: Literal["drop", "mask", "correct"] = "drop"
    """What becomes of samples beyond max_staleness: drop the group, mask its old tokens, or train with the correction."""
    replay_from: str | None = None
    """Folder of recorded batches (trainer.record_batches) to train on again, without rollout engines."""
    record_batches: bool = False
    """Keep every training batch below the run folder, for replay."""
    balance_batch: bool = True
    """Give each rank about the same number of tokens."""
    log_val_generations: NonNegativeInt = 0
    """Validation samples to show in trackers."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """Faults to inject, to prove that a run survives them: rows of {kind, place, rank: 0, step: 1, seconds: 60}, each of which
    strikes once in a run folder. rlhub/utils/faults.py has the places and what can happen there; so has the message for a
    place that is not among them."""
    deadline_s: DeadlineConfig = field(default_factory=DeadlineConfig)
    ray_init: dict[str, Any] = field(default_factory=dict)
    """Arguments of ray.init: address, num_cpus, runtime_env, include_dashboard (default false), ..."""
