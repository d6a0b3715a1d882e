"""PPOTrainer, the fit loop around the training step, and how it is built from a resolved configuration: data, reward, workers.

resume -> (validate) -> for each step: train, [validate], [save], log
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhub.checkpoint.files import FileEntry
from rlhub.config.rules.asynchronous import is_async, is_collected, runs_ahead
from rlhub.config.rules.embodied import evaluate_envs
from rlhub.config.rules.placement import is_separate
from rlhub.config.rules.sources import algorithms_of, sources_of, val_sampling
from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.order import ResumableLoader
from rlhub.data.prompts import PromptDataset, PromptLoader, check_sources
from rlhub.errors import ConfigError
from rlhub.models.tokenizer import load_tokenizer, read_vocabulary
from rlhub.models.vision import image_reader
from rlhub.pipeline.graph import TaskGraph
from rlhub.pipeline.show import to_svg
from rlhub.protocol import DataProto
from rlhub.protocol.sequences import IMAGES
from rlhub.rewards import RewardManager
from rlhub.rewards.srpo import SelfReference
from rlhub.single_controller import ClassWithInitArgs, Launched
from rlhub.tracking.tracker import Metrics
from rlhub.trainer.launch import launch_workers
from rlhub.trainer.ppo.build_stream import build_evaluation_samples, build_stream
from rlhub.trainer.ppo.embodied import EpisodeGenerator, EpisodeValidator, place_simulators, scene_loader, validation_scenes
from rlhub.trainer.ppo.episode_stream import EpisodeStream
from rlhub.trainer.ppo.graph_step import GraphStep, own_shards
from rlhub.trainer.ppo.offline_source import RECORDINGS, RecordingSource, ReplaySource, build_collected
from rlhub.trainer.ppo.plan import step_graph
from rlhub.trainer.ppo.requirements import critic_mini_batches, num_mini_batches, requirements
from rlhub.trainer.ppo.scoring import build_scorer, configured_function, prepare_reward, reward_roles
from rlhub.trainer.ppo.step import SampleSource, StepParts, TrainingStep
from rlhub.trainer.ppo.stream_source import FILE as PROMPTS
from rlhub.trainer.ppo.stream_source import PromptLog
from rlhub.trainer.ppo.sync_source import SAMPLING, VALIDATION_ORDINALS, Generator, SyncSource
from rlhub.trainer.ppo.validation import (
    BlockingValidation,
    ConcurrentValidation,
    ValidationReport,
    ValidationSamples,
    ValidationSchedule,
    Validator,
)
from rlhub.trainer.ppo.worker_groups import CRITIC_ROLE, REFERENCE_ROLE, ROLLOUT_ROLE, WorkerGroups, actor_role, groups_of
from rlhub.trainer.run import Run
from rlhub.workers.actor import ActorWorker, ReferenceWorker
from rlhub.workers.memory_handover import WorkerRuntime
from rlhub.workers.roles import ActorRolloutRefWorker, CriticWorker, ScoringActorWorker
from rlhub.workers.rollout import RolloutWorker


@dataclass(slots=True, kw_only=True)
class PPOTrainer:
    """Owns the order of things; the parts do the work.  `fit` returns the last step taken."""

    config: PPOConfig
    run: Run
    loader: ResumableLoader
    train_step: StepParts
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
            metrics |= self.loader.sampler.metrics()
            metrics["training/epoch"] = float(self.loader.epoch)
            metrics["training/policy_version"] = float(self.source.policy_version)
            last = step == self.total_steps
            late = self.validate(step) if self.run.due(self.config.trainer.test_freq, step, last=last) else None
            stopping = self.run.stop_requested  # asked once a step, so that the step after which the run stops is saved
            self.run.end_step(step, metrics, save=self.save, state=self.state, last=last or stopping, late=late)
        return step

    def before_training(self) -> None:
        """Validates the untrained policy, as step 0."""
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
        """Writes every model that is trained, each rank its part, below `folder`."""
        return [*self.groups.save(folder), *self.source.save(folder)]

    def state(self) -> dict[str, Any]:
        """Returns what the driver must remember besides the workers' weights."""
        return {"kl_coef": self.train_step.kl_controller.value} | self.source.state()

    def restore(self) -> int:
        """Loads the checkpoint the run resumes from; returns its step, 0 for a fresh start."""
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            return 0
        self.groups.load(checkpoint.path)
        self.source.load_state(checkpoint.state, checkpoint.path)
        self.train_step.kl_controller.value = checkpoint.state["kl_coef"]
        return checkpoint.step


@dataclass(slots=True, kw_only=True)
class LateReport:
    """Is a step's validation, which may still run; see run.LateMetrics."""

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


def build_trainer(config: PPOConfig, data: PPOData, run: Run, stack: ExitStack) -> PPOTrainer:
    """Starts everything; what must be ended is put on `stack`."""
    parts = prepare_reward(config, data.tokenizer)
    stack.callback(parts.close)
    launched = stack.enter_context(start_workers(config, data.total_steps, run))
    graph = step_graph(config)
    trained = {node.trains for node in graph.nodes} & graph.roles.keys() if graph is not None else set()
    shards = own_shards(graph, launched.groups) if graph is not None else []
    reward, groups = parts.manager(launched.groups), groups_of(launched.groups, sorted(trained), shards)
    place_simulators(config, groups.rollout, str(run.folder.logs), stack)
    source, validation = build_source(config, data, groups, reward, run, stack)
    score = build_scorer(config, reward, run.timers)
    train_step = build_step(graph, launched, run, groups, config=config, source=source, score=score, sources=data.sources)
    return PPOTrainer(
        config=config,
        run=run,
        loader=data.loader,
        train_step=train_step,
        validation=validation,
        groups=groups,
        total_steps=data.total_steps,
    )


def build_step(graph: TaskGraph | None, launched: Launched, run: Run, groups: WorkerGroups, **parts: Any) -> StepParts:
    """Returns the plain step, or the one of a graph, whose picture goes to the run folder."""
    parts |= {"actor": groups.actor, "reference": groups.reference, "critic": groups.critic}
    parts |= {"dealing": groups.dealing(parts["config"]), "timers": run.timers}
    if graph is None:
        return TrainingStep(**parts)
    run.write_graph(to_svg(graph))
    return GraphStep(**parts, graph=graph, roles=launched.groups)


def build_source(
    config: PPOConfig, data: PPOData, groups: WorkerGroups, reward: RewardManager, run: Run, stack: ExitStack
) -> tuple[SampleSource, ValidationSchedule | None]:
    """Returns where samples come from, and what validates the policy; recorded on the way, where the configuration says so."""
    ranks = groups.actor if config.trainer.batches == "reference" else None
    if config.trainer.replay_from:
        return ReplaySource(Path(config.trainer.replay_from), data.loader, ranks, groups.dealing(config)), None
    source, validation = build_schedule(config, data, groups, reward, run, stack)
    if config.trainer.record_batches:
        source = RecordingSource(source, run.folder.path / RECORDINGS)
    return source, validation


def build_schedule(
    config: PPOConfig, data: PPOData, groups: WorkerGroups, reward: RewardManager, run: Run, stack: ExitStack
) -> tuple[SampleSource, ValidationSchedule | None]:
    """Returns the source of the configured schedule: another job's files, episodes that run all the time, or whole batches in
    turns with training."""

    def validator(samples: ValidationSamples) -> Validator:
        num_shown = config.trainer.log_val_generations
        return Validator(data.val_batches, samples, reward, data.tokenizer, run.timers, num_shown, config.reward_model)

    if is_collected(config):
        return build_collected(config, data.loader, data.tokenizer, groups.actor, run.timers), None
    if is_async(config):
        runtime = worker_runtime(config)
        stream, samples = build_stream(config, runtime, data.tokenizer, data.loader, groups, reward, run, stack)
        concurrent = ConcurrentValidation(validator(samples), samples, stream.publisher.wait, run.spans.record)
        stack.callback(concurrent.close)
        return stream, concurrent if data.val_batches else None
    if config.env.name is not None:
        return episode_schedule(config, data, groups, run, stack)
    by_reference = config.trainer.batches == "reference"
    generator = Generator(groups.rollout, config.actor_rollout_ref.rollout, by_reference)
    blocking = BlockingValidation(validator(generator))
    return SyncSource(config, data.loader, generator, groups.weights), blocking if data.val_batches else None


def episode_schedule(
    config: PPOConfig, data: PPOData, groups: WorkerGroups, run: Run, stack: ExitStack
) -> tuple[SampleSource, ValidationSchedule | None]:
    """Returns the source of episodes of simulators, in turns with training or ahead of it."""
    reference = SelfReference(config.env.srpo) if config.env.reward == "srpo" else None
    by_reference = config.trainer.batches == "reference"
    episodes = EpisodeGenerator(groups.rollout, config.actor_rollout_ref.rollout, by_reference, reference)
    validator = episode_validator(config, data.val_batches, data.tokenizer, episodes)
    source: SampleSource = SyncSource(config, data.loader, episodes, groups.weights)
    if runs_ahead(config):
        source = ahead = EpisodeStream(
            config=config,
            loader=data.loader,
            generator=episodes,
            groups=groups,
            log=PromptLog(run.folder.path / PROMPTS),
            timers=run.timers,
            last_step=data.total_steps,
        )
        stack.callback(ahead.close)
        validator.refresh = ahead.refresh
    return source, BlockingValidation(validator) if data.val_batches else None


def episode_validator(
    config: PPOConfig, scenes: Sequence[DataProto], tokenizer: Any, generator: EpisodeGenerator
) -> EpisodeValidator:
    """Returns the validation of episodes in simulators."""
    num_shown = config.trainer.log_val_generations
    return EpisodeValidator(scenes=scenes, generator=generator, tokenizer=tokenizer, num_shown=num_shown)


def start_workers(config: PPOConfig, total_steps: int, run: Run) -> Launched:
    """Launches the roles and builds their models."""
    return launch_workers(worker_roles(config, total_steps), config.trainer, run=run)


def worker_roles(config: PPOConfig, total_steps: int) -> dict[str, ClassWithInitArgs]:
    """Returns the policy's roles, the critic where the estimator requires values, and what scores."""
    needs, graph = requirements(config), step_graph(config)
    runtime = worker_runtime(config)
    actor, critic = config.actor_rollout_ref.actor, config.critic
    actor.optim.total_training_steps = total_steps * num_mini_batches(config) * actor.ppo_epochs
    used = {node.on for node in graph.nodes} if graph is not None else {REFERENCE_ROLE} if needs.reference else set()
    roles = policy_roles(config, runtime, needs_reference=REFERENCE_ROLE in used)
    for role, target in graph.roles.items() if graph is not None else ():
        roles[role] = ClassWithInitArgs(target, config, runtime)
    if needs.values:
        critic.optim.total_training_steps = total_steps * critic_mini_batches(config) * (critic.ppo_epochs or 1)
        roles[CRITIC_ROLE] = ClassWithInitArgs(CriticWorker, critic, runtime, loss_agg_mode=actor.loss_agg_mode)
    return roles | reward_roles(config, runtime)


def policy_roles(
    config: PPOConfig, runtime: WorkerRuntime, *, train: bool = True, needs_reference: bool = False
) -> dict[str, ClassWithInitArgs]:
    """Returns the roles of actor, rollout and, where it is read, reference: together, or apart on pools of their own."""
    section, trainer = config.actor_rollout_ref, config.trainer
    simulators = config.env if config.env.name is not None else None
    scores = config.reward_model.function_weight != 0 and simulators is None
    reward = configured_function(config) if scores else None
    own_rollout, own_reference = (is_separate(trainer, role) for role in (ROLLOUT_ROLE, REFERENCE_ROLE))
    serves = is_async(config) or bool(trainer.replay_from)  # what generates, if anything does, is no role of the workers'
    settings = {
        "train": train,
        "needs_reference": needs_reference and not own_reference,
        "algorithm": config.algorithm,
        "by_source": algorithms_of(config),
    }
    if is_collected(config):
        actor = ClassWithInitArgs(ScoringActorWorker, section, runtime, reward=reward, **settings)
    elif own_rollout or serves:
        actor = ClassWithInitArgs(ActorWorker, section, runtime, **settings)
    else:
        actor = ClassWithInitArgs(ActorRolloutRefWorker, section, runtime, reward=reward, env=simulators, **settings)
    roles = {actor_role(trainer): actor}
    if own_rollout and not serves:
        roles[ROLLOUT_ROLE] = ClassWithInitArgs(RolloutWorker, section, runtime, reward=reward, env=simulators)
    if needs_reference and own_reference:
        roles[REFERENCE_ROLE] = ClassWithInitArgs(ReferenceWorker, section, runtime)
    return roles


def worker_runtime(config: PPOConfig) -> WorkerRuntime:
    """Returns what every worker knows of the run."""
    return WorkerRuntime(
        device=config.trainer.device,
        seed=config.trainer.seed,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        deadline_s=config.trainer.deadline_s.update,
    )


@dataclass(slots=True, kw_only=True)
class PPOData:
    """Holds the driver's data: tokenizer, training prompts and validation batches.  sources: those of the training data of which
    metrics are reported, where there are several."""

    tokenizer: Any
    loader: ResumableLoader
    val_batches: Sequence[DataProto]
    total_steps: int
    sources: Sequence[str] = ()


def build_data(config: PPOConfig) -> PPOData:
    """Reads the files; DataError names file, row and column of what is unusable."""
    model, data = config.actor_rollout_ref.model, config.data
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    if config.env.name is not None:
        scenes = scene_loader(config)
        steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(scenes)
        val = validation_scenes(config.env, VALIDATION_ORDINALS)
        return PPOData(tokenizer=tokenizer, loader=scenes, val_batches=val, total_steps=steps)
    assert data.train_files is not None, "checked when the configuration is loaded"
    dataset = _prompts(config, data.train_files, tokenizer)
    loader = PromptLoader.training(dataset, data)
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(loader)
    validation = validation_data(config, tokenizer) if data.val_files else None
    check_sources(data, dataset, validation)
    val_batches = [] if validation is None else validation_batches(config, validation)
    sources = sorted(set(dataset.sources))
    reported = sources if len(sources) > 1 or data.sources else []
    return PPOData(tokenizer=tokenizer, loader=loader, val_batches=val_batches, total_steps=total_steps, sources=reported)


def validation_data(config: PPOConfig, tokenizer: Any) -> PromptDataset:
    """Reads the validation files."""
    assert config.data.val_files is not None, "the caller has asked"
    return _prompts(config, config.data.val_files, tokenizer)


def _prompts(config: PPOConfig, files: str | list[str], tokenizer: Any) -> PromptDataset:
    """Reads prompts from these files.  Raises ConfigError for pictures in them with a schedule that does not carry any."""
    model = config.actor_rollout_ref.model
    vocabulary, reader = read_vocabulary(model, tokenizer), image_reader(model)
    dataset = PromptDataset(config.data, files, tokenizer, vocab_size=vocabulary.size, reader=reader)
    if any(dataset.images) and is_async(config):
        raise ConfigError(
            f"actor_rollout_ref.rollout.mode=async: rows of {files} have pictures (column {IMAGES!r}), and episodes read text "
            "alone; set actor_rollout_ref.rollout.mode=sync"
        )
    return dataset


def validation_batches(config: PPOConfig, dataset: PromptDataset) -> list[DataProto]:
    """Returns the validation prompts in batches, with ordinals of their own.  Prompts whose data source has a sampling of its own
    are batches of their own, which carry it."""
    own, size = sources_of(config.data), config.data.val_batch_size or len(dataset)
    kinds = [source if source in own and own[source].val_kwargs else None for source in dataset.sources]
    batches = []
    for kind in dict.fromkeys(kinds):
        rows = np.array([row for row, other in enumerate(kinds) if other == kind])
        for chosen in (rows[first : first + size] for first in range(0, len(rows), size)):
            batch = dataset.batch(chosen)
            batch.batch["ordinal"] = torch.from_numpy(chosen) + VALIDATION_ORDINALS
            if kind is not None:
                batch.meta_info[SAMPLING] = val_sampling(config, kind)
            batches.append(batch)
    return batches


def build_evaluation(config: PPOConfig, run: Run, stack: ExitStack) -> Callable[[], ValidationReport]:
    """Returns a validator over data.val_files, or over the scenes of env.val_scenes, with workers that cannot train."""
    model = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    if config.env.name is not None:
        evaluate_envs(config)
        roles = policy_roles(config, worker_runtime(config), train=False)
        groups = groups_of(stack.enter_context(launch_workers(roles, config.trainer, run=run)).groups)
        place_simulators(config, groups.rollout, str(run.folder.logs), stack)
        groups.weights.sync(0)
        scenes = validation_scenes(config.env, VALIDATION_ORDINALS)
        return episode_validator(config, scenes, tokenizer, EpisodeGenerator(groups.rollout, config.actor_rollout_ref.rollout))
    prompts = validation_data(config, tokenizer)
    check_sources(config.data, None, prompts)
    batches = validation_batches(config, prompts)
    parts = prepare_reward(config, tokenizer)
    stack.callback(parts.close)
    runtime = worker_runtime(config)
    roles = reward_roles(config, runtime) | ({} if is_async(config) else policy_roles(config, runtime, train=False))
    launched = stack.enter_context(launch_workers(roles, config.trainer, run=run)).groups if roles else {}
    reward = parts.manager(launched)
    num_shown = config.trainer.log_val_generations or sum(len(batch) for batch in batches)
    samples: ValidationSamples
    if is_async(config):
        samples = build_evaluation_samples(config, runtime, tokenizer, reward, run, stack)
    else:
        groups = groups_of(launched)
        groups.weights.sync(0)
        samples = Generator(groups.rollout, config.actor_rollout_ref.rollout)
    return Validator(batches, samples, reward, tokenizer, run.timers, num_shown, config.reward_model)
