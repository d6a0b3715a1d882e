"""From a resolved configuration to a stream of training batches: the rollout service, the executor, and what is between."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rlhub.agents.openai_server.replicas import PATH as ADMIN_PATH
from rlhub.agents.openai_server.replicas import AdminEndpoint
from rlhub.agents.remote.environment_actors import EnvironmentActorOptions, EnvironmentActors, environment_actor_starter
from rlhub.agents.remote.episode_actor import EpisodeActorSettings
from rlhub.agents.remote.holders import Holders
from rlhub.agents.remote.workflow import EpisodeActorOptions, EpisodeActors, episode_actor_starter
from rlhub.agents.workflows.registry import workflow_kwargs
from rlhub.config.rules.asynchronous import takes_turns
from rlhub.config.rules.placement import is_separate
from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.order import ResumableLoader
from rlhub.engines.rollout.registry import replicas_sleep
from rlhub.errors import ConfigError
from rlhub.models.tokenizer import Vocabulary, load_tokenizer, read_vocabulary
from rlhub.rewards import RewardManager
from rlhub.rewards.managers import NaiveManager
from rlhub.rewards.pool import RewardFunction
from rlhub.rewards.rows import RowScorer, no_turn_scores
from rlhub.rollout_service.executor.batches import keep_nothing
from rlhub.rollout_service.executor.executor import ExecutorOptions, WorkflowExecutor
from rlhub.rollout_service.executor.ledger import PromptLedger
from rlhub.rollout_service.executor.staleness import Pacing, StalenessManager
from rlhub.rollout_service.service import RolloutService, service_options
from rlhub.trainer.ppo.episode_scoring import GroupScoring, OutcomeStore, SignalFilter, function_manager
from rlhub.trainer.ppo.episodes import (
    BASELINE,
    TRAINING,
    VALIDATION,
    EpisodeSamples,
    Workflows,
    samplings,
)
from rlhub.trainer.ppo.group_filter import load_group_filter
from rlhub.trainer.ppo.publication import Publisher
from rlhub.trainer.ppo.requirements import requirements
from rlhub.trainer.ppo.scoring import build_scorer, configured_function
from rlhub.trainer.ppo.stream_source import FILE as PROMPTS
from rlhub.trainer.ppo.stream_source import PromptLog, StreamSource
from rlhub.trainer.ppo.timelines import Timelines
from rlhub.trainer.ppo.worker_groups import ROLLOUT_ROLE, WorkerGroups
from rlhub.trainer.run import Run
from rlhub.utils.aio.task_runner import AsyncTaskRunner
from rlhub.utils.collector import heap_set_aside
from rlhub.workers.memory_handover import WorkerRuntime

logger = logging.getLogger(__name__)

ADMINISTRATION = "admin.json"
"""In the run folder, while the job runs: address and key of its administration."""


@dataclass(slots=True, kw_only=True)
class EpisodeRuntime:
    """The parts that run a job's episodes: event loop, rollout service, and the processes of agent.num_workers and num_env_hosts.

    manager, scorer: judge each row alone, and score those in this process; None: no function does.  holders: keep the tokens of
    training's episodes; None: the driver's executor has them.  stack: closes the parts when the job ends.
    """

    config: PPOConfig
    run: Run
    stack: ExitStack
    tokenizer: Any
    vocabulary: Vocabulary
    runner: AsyncTaskRunner
    service: RolloutService
    manager: NaiveManager | None
    scorer: RowScorer | None
    episode_actors: EpisodeActors | None
    environments: EnvironmentActors | None
    holders: Holders | None

    def workflows(self, purpose: str) -> Workflows:
        """Returns the job's workflows with the sampling of this purpose; the samples of validation come to the driver."""
        workflows = Workflows(
            self.config,
            self.tokenizer,
            samplings(self.config, self.vocabulary),
            no_turn_scores if self.scorer is None else self.scorer.score_text,
            purpose=purpose,
            episode_actors=self.episode_actors,
            environments=self.environments,
            holders=None if purpose == VALIDATION else self.holders,
        )
        self.stack.callback(close_on_loop, self.runner, workflows.aclose)
        return workflows

    def validation_samples(self) -> EpisodeSamples:
        """Returns what generates for validation: the same workflows with other sampling."""
        workflows = self.workflows(VALIDATION)
        return EpisodeSamples(
            self.config.actor_rollout_ref.rollout,
            self.service.router,
            workflows,
            self.runner.loop,
            seed=self.config.trainer.seed,
            pad_id=self.vocabulary.pad_id,
        )


def build_stream(
    config: PPOConfig,
    runtime: WorkerRuntime,
    tokenizer: Any,
    loader: ResumableLoader,
    groups: WorkerGroups,
    reward: RewardManager,
    run: Run,
    stack: ExitStack,
) -> tuple[StreamSource, EpisodeSamples]:
    """Starts the rollout service and what feeds it; what must be ended is put on `stack`.  Returns also what generates for
    validation."""
    runner = start_runner(stack)
    # Without a pool of their own replicas run on the devices of the actor's ranks.
    places = () if is_separate(config.trainer, ROLLOUT_ROLE) else groups.actor.device_places()
    options = service_options(
        config.actor_rollout_ref,
        config.trainer,
        run_folder=run.folder.path,
        actor_places=places,
        observers=[run.calls],
        record=run.spans.record,
    )
    service = RolloutService(config.actor_rollout_ref, runtime, options, loop=runner.loop)
    logger.info("starting the rollout service, replicas: %d", options.num_replicas)
    service.start()
    stack.callback(service.close)
    start_administration(service, runner, run, stack)
    keeps = config.trainer.batches == "reference"
    episodes = start_episodes(config, tokenizer, runner, service, reward, run, stack, keeps=keeps)
    scoring = GroupScoring(episodes.scorer, OutcomeStore(), episodes.holders)
    log = PromptLog(run.folder.path / PROMPTS)
    executor = build_executor(episodes, scoring, log)
    publisher = Publisher(
        service.control,
        service.loop,
        service.written_to,
        write=functools.partial(groups.actor.write_weights, full_every=service.full_every),
        fail=executor.fail,
        timers=run.timers,
        record=run.spans.record,
    )
    stack.callback(publisher.close)
    source = StreamSource(
        config=config,
        loader=loader,
        executor=executor,
        publisher=publisher,
        service=service,
        replicas_sleep=takes_turns(config) and replicas_sleep(config.actor_rollout_ref.rollout),
        outcomes=scoring.outcomes,
        vocabulary=episodes.vocabulary,
        log=log,
        timers=run.timers,
        holders=episodes.holders,
        ranks=groups.actor,
        dealing=groups.dealing(config),
        actor_pools=[found for found in (episodes.episode_actors, episodes.environments) if found is not None],
    )
    if isinstance(executor.keep, SignalFilter):
        executor.keep.note = source.turned_down
    samples = episodes.validation_samples()
    stack.enter_context(heap_set_aside())
    return source, samples


def start_administration(service: RolloutService, runner: AsyncTaskRunner, run: Run, stack: ExitStack) -> None:
    """Lets replicas be added and removed over HTTP, where there may be more than one."""
    if service.options.bounds.most == 1:
        return
    file = run.folder.path / ADMINISTRATION
    endpoint = AdminEndpoint(service.control, file)
    stack.callback(close_on_loop, runner, endpoint.aclose)
    logger.info("replicas are administered at %s%s, with the key in %s", on_loop(runner, endpoint.start()), ADMIN_PATH, file)


def build_evaluation_samples(
    config: PPOConfig, runtime: WorkerRuntime, tokenizer: Any, reward: RewardManager, run: Run, stack: ExitStack
) -> EpisodeSamples:
    """Returns episodes of a policy that nobody trains: replicas read the model's own files."""
    runner = start_runner(stack)
    options = service_options(config.actor_rollout_ref, config.trainer, run_folder=run.folder.path)
    service = RolloutService(config.actor_rollout_ref, runtime, dataclasses.replace(options, own_weights=True), loop=runner.loop)
    stack.callback(service.close)
    service.start()
    return start_episodes(config, tokenizer, runner, service, reward, run, stack).validation_samples()


def start_runner(stack: ExitStack) -> AsyncTaskRunner:
    """Returns the event loop of the episodes, in a thread of its own."""
    runner = AsyncTaskRunner(name="episodes")
    stack.callback(runner.close)
    return runner


def start_episodes(
    config: PPOConfig,
    tokenizer: Any,
    runner: AsyncTaskRunner,
    service: RolloutService,
    reward: RewardManager,
    run: Run,
    stack: ExitStack,
    *,
    keeps: bool = False,
) -> EpisodeRuntime:
    """Starts the processes that run parts of episodes, if any; after the service, which has connected the cluster.

    keeps: the tokens of training's episodes stay where they run.
    """
    vocabulary = read_vocabulary(config.actor_rollout_ref.model, tokenizer)
    environments = environment_hosts(config, run)
    manager = function_manager(reward)
    scorer = None if manager is None else RowScorer(manager.parts.pool, manager.parts.tokenizer)
    function = None if manager is None else configured_function(config)
    episode_actors = episode_hosts(config, vocabulary, run, function)
    for processes in (environments, episode_actors):
        if processes is not None:
            stack.callback(close_on_loop, runner, processes.close)
            on_loop(runner, processes.start())
    return EpisodeRuntime(
        config=config,
        run=run,
        stack=stack,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        runner=runner,
        service=service,
        manager=manager,
        scorer=scorer,
        episode_actors=episode_actors,
        environments=environments,
        holders=Holders(episode_actors, vocab_size=vocabulary.size, scorer=scorer) if keeps else None,
    )


def episode_hosts(config: PPOConfig, vocabulary: Vocabulary, run: Run, reward: RewardFunction | None) -> EpisodeActors | None:
    """Returns the processes that run the episodes' own code, where the configuration wants any; not yet started.

    reward: the function with the machine's processes, which they share evenly.
    """
    model, rollout, trainer = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.trainer
    assert rollout.agent.num_workers is not None, "derive first"
    if rollout.agent.num_workers == 0:
        return None
    if reward is not None and reward.num_workers is not None:
        reward = dataclasses.replace(reward, num_workers=max(1, reward.num_workers // rollout.agent.num_workers))
    settings = EpisodeActorSettings(
        tokenizer=functools.partial(load_tokenizer, model.path, trust_remote_code=model.trust_remote_code),
        samplings=samplings(config, vocabulary),
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        kwargs=workflow_kwargs(rollout),
        folder=os.getcwd(),
        lends_environments=rollout.agent.num_env_hosts > 0,
        vocab_size=vocabulary.size,
        reward=reward,
    )
    seconds = trainer.deadline_s
    options = EpisodeActorOptions(
        backend=trainer.backend,
        start_s=seconds.start,
        log_dir=str(run.folder.logs.absolute()),
        plugins=tuple(trainer.plugins),
        observers=[run.calls],
    )
    return EpisodeActors(
        episode_actor_starter(settings, options),
        rollout.agent.num_workers,
        restarts=rollout.replica_restarts,
        shutdown_s=seconds.shutdown,
    )


def environment_hosts(config: PPOConfig, run: Run) -> EnvironmentActors | None:
    """Returns the actors that run the episodes' environments, where the configuration wants any; not yet started."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    agent, seconds = rollout.agent, trainer.deadline_s
    if agent.num_env_hosts == 0:
        return None
    assert agent.episode_timeout_s is not None, "derive first"
    options = EnvironmentActorOptions(
        backend=trainer.backend,
        num_cpus=agent.env_host_cpus,
        num_gpus=agent.env_host_gpus,
        folder=os.getcwd(),
        start_s=seconds.start,
        log_dir=str(run.folder.logs.absolute()),
        plugins=tuple(trainer.plugins),
        observers=[run.calls],
    )
    return EnvironmentActors(
        environment_actor_starter(options),
        agent.num_env_hosts,
        idle_s=max(agent.episode_timeout_s, seconds.generate),  # no turn of the policy takes longer
        restarts=rollout.replica_restarts,
        shutdown_s=seconds.shutdown,
    )


def on_loop(runner: AsyncTaskRunner, work: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine on the episodes' loop and waits for it."""
    return asyncio.run_coroutine_threadsafe(work, runner.loop).result()


def close_on_loop(runner: AsyncTaskRunner, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Closes something that lives on the episodes' loop."""
    on_loop(runner, close())


def build_executor(episodes: EpisodeRuntime, scoring: GroupScoring, log: PromptLog) -> WorkflowExecutor:
    """Returns the executor with the bounds of the configuration."""
    config, router = episodes.config, episodes.service.router
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    workflows = episodes.workflows(TRAINING)
    baselines = episodes.workflows(BASELINE)
    timelines = Timelines(workflows.of, scoring, episodes.run.spans.episodes)
    executor = WorkflowExecutor(
        runner=episodes.runner,
        engine=router,
        workflow_for=timelines.workflow,
        staleness=StalenessManager(
            batch=config.data.train_batch_size,
            max_staleness=trainer.max_staleness,
            pipeline_depth=trainer.pipeline_depth,
            max_concurrent=rollout.agent.max_concurrent,
            pacing=Pacing(config.data.train_batch_size) if trainer.pacing == "adaptive" else None,
        ),
        ledger=PromptLedger(on_end=log.ended),
        options=ExecutorOptions(
            group_size=rollout.n,
            seed=trainer.seed,
            stale_policy=trainer.stale_policy,
            episode_timeout_s=rollout.agent.episode_timeout_s,
            episode_retries=rollout.agent.episode_retries,
            min_samples=rollout.agent.min_samples,
            max_failed_batches=rollout.agent.max_failed_batches,
        ),
        on_group=timelines.on_group,
        keep=signal_filter(episodes, scoring),
        interrupt=router.abort,
        baseline_for=baselines.of if requirements(config).baseline_rewards else None,
        release=keep_nothing if episodes.holders is None else episodes.holders.release,
    )
    if episodes.episode_actors is not None and episodes.holders is not None:
        episodes.episode_actors.on_lost = executor.lost
    episodes.stack.callback(executor.close)
    return executor


def signal_filter(episodes: EpisodeRuntime, scoring: GroupScoring) -> SignalFilter | None:
    """Returns the filter of dynamic sampling and of the user, where one is on."""
    config = episodes.config
    groups, own = config.algorithm.filter_groups, load_group_filter(config)
    if config.algorithm.filtering is None:
        return None
    assert episodes.manager is not None, "checked before start"
    if not episodes.manager.scores_rows:
        raise ConfigError(
            f"{config.algorithm.filtering} with rollout.mode=async filters finished groups by the outcomes of their rows, "
            f"but reward_model.reward_manager={config.reward_model.reward_manager} reads whole batches; choose one that scores "
            "row by row, or actor_rollout_ref.rollout.mode=sync"
        )
    return SignalFilter(
        scorer=build_scorer(config, episodes.manager.lenient(), episodes.run.timers),
        outcomes=scoring.outcomes,
        most=(groups.max_num_gen_batches - 1) * config.data.train_batch_size,
        differ=groups.enable,
        own=own,
    )
