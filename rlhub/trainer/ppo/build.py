"""From a resolved configuration to a trainer: data, reward, workers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rlhub.config.ppo import PPOConfig
from rlhub.data.prompts import PromptDataset, PromptLoader
from rlhub.models.tokenizer import load_tokenizer
from rlhub.protocol import DataProto
from rlhub.single_controller import ClassWithInitArgs, Launched, WorkerGroup
from rlhub.trainer.ppo.learner import Learner
from rlhub.trainer.ppo.requirements import critic_mini_batches, num_mini_batches, requirements
from rlhub.trainer.ppo.reward import REWARD_DEADLINES, prepare_reward, reward_roles
from rlhub.trainer.ppo.rollouts import VALIDATION_ORDINALS, Generator
from rlhub.trainer.ppo.sampling import Sampler
from rlhub.trainer.ppo.trainer import PPOTrainer
from rlhub.trainer.ppo.validation import Validator
from rlhub.trainer.run import Run
from rlhub.trainer.workers import launch_workers
from rlhub.workers.actor_rollout_ref import ActorRolloutRefWorker
from rlhub.workers.critic import CriticWorker
from rlhub.workers.runtime import WorkerRuntime

ACTOR_DEADLINES = {
    "init_model": "start",
    "generate_sequences": "generate",
    "compute_log_prob": "infer",
    "compute_ref_log_prob": "infer",
    "update_actor": "update",
    "sync_weights": "sync",
    "save_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
}
CRITIC_DEADLINES = {
    "init_model": "start",
    "compute_values": "infer",
    "update_critic": "update",
    "save_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
}


@dataclass(slots=True, kw_only=True)
class PPOData:
    """The driver's data: tokenizer, training prompts and validation batches."""

    tokenizer: Any
    loader: PromptLoader
    val_batches: Sequence[DataProto]
    total_steps: int


def build_data(config: PPOConfig) -> PPOData:
    """Read the files; DataError names file, row and column of what is unusable."""
    model, data = config.actor_rollout_ref.model, config.data
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    dataset = PromptDataset(data, data.train_files, tokenizer)
    loader = PromptLoader(dataset, data.train_batch_size, seed=data.seed, shuffle=data.shuffle, drop_last=True)
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(loader)
    val_batches: Sequence[DataProto] = ()
    if data.val_files:
        val_batches = load_validation(config, tokenizer)
    return PPOData(tokenizer=tokenizer, loader=loader, val_batches=val_batches, total_steps=total_steps)


def load_validation(config: PPOConfig, tokenizer: Any) -> list[DataProto]:
    """The validation prompts in batches, with ordinals of their own."""
    data = config.data
    dataset = PromptDataset(data, data.val_files, tokenizer)
    size = data.val_batch_size or len(dataset)
    batches = list(PromptLoader(dataset, size, shuffle=False, drop_last=False))
    for batch in batches:
        batch.batch["ordinal"] = batch.batch["ordinal"] + VALIDATION_ORDINALS
    return batches


def worker_runtime(config: PPOConfig) -> WorkerRuntime:
    """What every worker knows of the run."""
    return WorkerRuntime(
        device=config.trainer.device,
        seed=config.trainer.seed,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        deadline_s=config.trainer.deadline_s.update,
    )


def build_evaluation(config: PPOConfig, run: Run, stack: ExitStack) -> Validator:
    """A validator over data.val_files, with workers that cannot train."""
    model = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    batches = load_validation(config, tokenizer)
    parts = prepare_reward(config, tokenizer)
    stack.callback(parts.close)
    runtime = worker_runtime(config)
    actor = ClassWithInitArgs(ActorRolloutRefWorker, config.actor_rollout_ref, runtime, train=False)
    roles = {"actor_rollout_ref": actor, **reward_roles(config, runtime)}
    deadlines = {"actor_rollout_ref": ACTOR_DEADLINES, **REWARD_DEADLINES}
    launched = stack.enter_context(launch_workers(roles, config.trainer, deadlines=deadlines, run=run))
    generator = Generator(launched.groups["actor_rollout_ref"], config.actor_rollout_ref.rollout)
    num_shown = config.trainer.log_val_generations or sum(len(batch) for batch in batches)
    return Validator(batches, generator, parts.manager(launched.groups), tokenizer, run.timers, num_shown)


def worker_roles(config: PPOConfig, total_steps: int) -> dict[str, ClassWithInitArgs]:
    """The actor (with rollout and, where read, the reference), the critic where the estimator needs values, and what scores."""
    needs = requirements(config)
    runtime = worker_runtime(config)
    actor, critic = config.actor_rollout_ref.actor, config.critic
    actor.optim.total_training_steps = total_steps * num_mini_batches(config) * actor.ppo_epochs
    roles = {
        "actor_rollout_ref": ClassWithInitArgs(
            ActorRolloutRefWorker,
            config.actor_rollout_ref,
            runtime,
            needs_reference=needs.reference,
            correction=config.algorithm.rollout_correction,
        )
    }
    if needs.values:
        critic.optim.total_training_steps = total_steps * critic_mini_batches(config) * (critic.ppo_epochs or 1)
        roles["critic"] = ClassWithInitArgs(CriticWorker, critic, runtime, loss_agg_mode=actor.loss_agg_mode)
    return roles | reward_roles(config, runtime)


def start_workers(config: PPOConfig, total_steps: int, run: Run) -> Launched:
    """Launch the roles and build their models."""
    return launch_workers(
        worker_roles(config, total_steps),
        config.trainer,
        deadlines={"actor_rollout_ref": ACTOR_DEADLINES, "critic": CRITIC_DEADLINES, **REWARD_DEADLINES},
        run=run,
    )


def build_trainer(config: PPOConfig, data: PPOData, run: Run, stack: ExitStack) -> PPOTrainer:
    """Start everything; what must be ended is put on `stack`."""
    parts = prepare_reward(config, data.tokenizer)
    stack.callback(parts.close)
    launched = stack.enter_context(start_workers(config, data.total_steps, run))
    reward = parts.manager(launched.groups)
    actor: WorkerGroup = launched.groups["actor_rollout_ref"]
    critic = launched.groups.get("critic")
    generator = Generator(actor, config.actor_rollout_ref.rollout)
    learner = Learner(config, actor, critic, reward, run.timers)
    validator = None
    if data.val_batches:
        num_shown = config.trainer.log_val_generations
        validator = Validator(data.val_batches, generator, reward, data.tokenizer, run.timers, num_shown)
    return PPOTrainer(
        config=config,
        run=run,
        loader=data.loader,
        generator=generator,
        sampler=Sampler(config, generator, learner.scorer),
        learner=learner,
        validator=validator,
        actor=actor,
        critic=critic,
        total_steps=data.total_steps,
    )
