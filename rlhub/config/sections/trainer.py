"""Section `trainer`: length of the run, devices and placement, checkpoints, validation, asynchrony and trackers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.config.schema import IntOrOff, NonNegativeInt, PositiveFloat, PositiveInt, Seed


@dataclass(slots=True, kw_only=True)
class DeadlineConfig:
    """Deadlines in seconds, one for each kind of work.  A missed deadline is an error that names the wait."""

    resources: PositiveFloat = 120.0
    """Seconds to wait for the Ray cluster to answer, or to start, and to grant the ranks."""
    cluster: PositiveFloat = 30.0
    """Seconds without an answer of the Ray cluster's head after which the run ends; at most 50, since Ray itself gives up after
    60."""
    start: PositiveFloat = 1800.0
    """Seconds for all workers to build their models and engines."""
    generate: PositiveFloat = 7200.0
    """Seconds for one generation of a batch, and for the rewards of one that are waited for."""
    infer: PositiveFloat = 3600.0
    """Seconds for one pass of log-probs or values over a batch, with the passes that the same ranks do before it."""
    update: PositiveFloat = 7200.0
    """Seconds for one update of the actor or the critic, or of both where the same ranks do them."""
    sync: PositiveFloat = 1800.0
    """Seconds for one weight update of the rollout engine."""
    checkpoint: PositiveFloat = 3600.0
    """Seconds for saving or loading a checkpoint."""
    shutdown: PositiveFloat = 60.0
    """Seconds for the workers to end before they are killed."""


@dataclass(slots=True, kw_only=True)
class TrainerConfig:
    project_name: str = "rlhub"
    """Name of the project, which groups runs in trackers and folders."""
    experiment_name: str = "run"
    """Name of the run in trackers and folders."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Trackers: console, tensorboard, wandb, mlflow, swanlab, trackio; metrics.jsonl and report.html are always written."""
    total_epochs: PositiveInt = 1
    """Passes over the training prompts."""
    total_training_steps: PositiveInt | None = None
    """Training steps after which the run ends; null: total_epochs decides."""
    seed: Seed = 1
    """Seed of sampling and initialisation; data.seed is that of the order of prompts."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device on which workers compute; auto: cuda if this machine has GPUs. Set it if the driver's machine has no GPUs and the
    workers' machines do."""
    backend: Literal["ray", "local"] = "ray"
    """ray: worker processes; local: everything in this process, with one rank."""
    controller: Literal["single", "multi"] = "single"
    """single: one process, the driver, runs the training loop and calls the ranks; multi: every rank runs the loop and calls its
    own workers, under Ray or under torchrun (main_ppo)."""
    plugins: list[str] = field(default_factory=list)
    """Python modules that register your own parts; the driver and every worker import them."""
    nnodes: PositiveInt = 1
    """Number of machines."""
    n_gpus_per_node: PositiveInt | None = None
    """Worker ranks per machine: GPUs, or on CPU processes; null: the machine's GPUs, on CPU 1."""
    pools: dict[str, Any] = field(default_factory=dict)
    """Further pools of ranks, for roles that should not share the actor's: name -> {nnodes: 1, n_gpus_per_node: 1}; one of
    simulators also says what each of its processes reserves, process_cpus and process_gpus."""
    batches: Literal["reference", "driver"] = "reference"
    """reference: columns of tokens stay with the processes that made them and move once a step, to the ranks that train them;
    driver: they travel through this process with every call."""
    pipeline: str | None = None
    """The training step as a graph: ppo, dapo, or a function of your own that returns a rlhub.pipeline.graph.Pipeline, as
    module:function or path.py:function; null: the same algorithm as one function (main_ppo), or the built-in graph of main_sft,
    main_dpo and main_rm."""
    placement: dict[str, Any] = field(default_factory=dict)
    """Pools of roles, role -> pool, for rollout, reference, critic, reward_model, judge, environments (the simulators of
    env.name, in processes of a pool of their own) and the roles of a pipeline of your own; others share the actor's processes."""
    save_freq: IntOrOff = -1
    """Steps between checkpoints; -1: only the last step is saved."""
    test_freq: IntOrOff = -1
    """Steps between validations; -1: none after the one before the first step."""
    val_before_train: bool = True
    """Validate before the first step, if there are validation files."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto: resume from the newest checkpoint of the run folder, if there is one; disable: start a new run and move the old one
    aside; resume_path: resume from resume_from_path."""
    resume_from_path: str | None = None
    """Checkpoint folder for resume_mode=resume_path."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Run folder, with metrics, report, logs and checkpoints."""
    max_actor_ckpt_to_keep: PositiveInt | None = None
    """Number of newest checkpoints that are kept; null: all."""
    keep_best: str | None = None
    """Metric (for example val/pass@1) whose best step's checkpoint is kept besides the newest; null: none."""
    max_skipped_steps: PositiveInt | None = 3
    """Number of training steps in a row whose every optimizer step was skipped (loss or gradient not finite) after which the run
    is saved as it is and ends; null: no limit."""
    critic_warmup: NonNegativeInt = 0
    """Steps in which only the critic is updated."""
    max_staleness: NonNegativeInt = 0
    """rollout.mode=async: largest number of policy versions by which a sample may be behind when it is trained; 0 waits for each
    version. With env.name so many batches of episodes run ahead of the one that trains."""
    pipeline_depth: NonNegativeInt | None = None
    """rollout.mode=async: batches by which generation may run ahead of training; null: max_staleness. A smaller number keeps
    samples fresher than that bound."""
    stale_policy: Literal["drop", "mask", "correct"] = "drop"
    """rollout.mode=async: for samples beyond max_staleness, drop: drop the group; mask: mask its old tokens; correct: train on
    them with the correction."""
    replay_from: str | None = None
    """Folder of recorded batches (trainer.record_batches) to train on again, without rollout engines; null: generate."""
    record_batches: bool = False
    """Write every training batch to the run folder, for replay_from."""
    balance_batch: bool = True
    """Give each rank about the same number of tokens."""
    log_val_generations: NonNegativeInt = 0
    """Number of validation samples that trackers show."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """Faults to inject, to prove that a run survives them: rows of {kind, place, rank: 0, step: 1, seconds: 60}, each of which
    strikes once in a run folder. rlhub/utils/faults.py lists the places and the kinds of each; so does the error for an
    unknown place."""
    deadline_s: DeadlineConfig = field(default_factory=DeadlineConfig)
    ray_init: dict[str, Any] = field(default_factory=dict)
    """Arguments of ray.init: address, num_cpus, runtime_env, include_dashboard (default false), ..."""
