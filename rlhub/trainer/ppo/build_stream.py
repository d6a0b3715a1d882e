"""From a resolved configuration to a stream of training batches: the rollout service, the executor, and what is between."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from contextlib import ExitStack
from typing import Any

from rlhub.agents.remote.environment_actors import EnvironmentActors
from rlhub.agents.remote.episode_actors import EpisodeActors
from rlhub.agents.workflows.base import Score
from rlhub.config.rules.placement import is_separate
from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.prompts import PromptLoader
from rlhub.models.tokenizer import Vocabulary, read_vocabulary
from rlhub.rewards import RewardManager
from rlhub.rollout_service.executor.executor import ExecutorOptions, WorkflowExecutor
from rlhub.rollout_service.executor.ledger import PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.rollout_service.router import Router
from rlhub.rollout_service.service import RolloutService, service_options
from rlhub.trainer.ppo.episode_samples import EpisodeSamples
from rlhub.trainer.ppo.episodes import (
    BASELINE,
    VALIDATION,
    GroupScoring,
    SignalFilter,
    Workflows,
    baseline_sampling,
    environment_hosts,
    episode_hosts,
    training_sampling,
    validation_sampling,
)
from rlhub.trainer.ppo.groups import ROLLOUT_ROLE, Groups
from rlhub.trainer.ppo.prompt_log import FILE as PROMPTS
from rlhub.trainer.ppo.prompt_log import PromptLog
from rlhub.trainer.ppo.publishing import Publisher
from rlhub.trainer.ppo.requirements import requirements
from rlhub.trainer.ppo.scoring import Scorer, build_scorer
from rlhub.trainer.ppo.scoring_ahead import AheadScorer, KeptOutcomes, function_manager, no_turn_scores
from rlhub.trainer.ppo.seen import SeenPublication
from rlhub.trainer.ppo.streaming import StreamSampler
from rlhub.trainer.run import Run
from rlhub.utils.aio.task_runner import AsyncTaskRunner
from rlhub.utils.collector import heap_set_aside
from rlhub.workers.runtime import WorkerRuntime

logger = logging.getLogger(__name__)


def build_stream(
    config: PPOConfig,
    runtime: WorkerRuntime,
    tokenizer: Any,
    loader: PromptLoader,
    groups: Groups,
    scorer: Scorer,
    run: Run,
    stack: ExitStack,
) -> tuple[StreamSampler, EpisodeSamples]:
    """Start the rollout service and what feeds it; what must be ended is put on `stack`.  Also what generates for validation."""
    vocabulary = read_vocabulary(config.actor_rollout_ref.model, tokenizer)
    runner = AsyncTaskRunner(name="episodes")
    stack.callback(runner.close)
    service = start_service(config, runtime, groups, run, runner)
    stack.callback(service.close)
    environments = start_environments(config, run, runner, stack)
    hosts = start_hosts(config, vocabulary, run, runner, stack)
    scoring = build_scoring(scorer.reward)
    score = no_turn_scores if scoring.ahead is None else scoring.ahead.score_text
    sampling = training_sampling(config, vocabulary)
    workflows = Workflows(config, tokenizer, sampling, score, hosts=hosts, environments=environments)
    stack.callback(lambda: on_loop(runner, workflows.aclose()))
    baselines = dataclasses.replace(workflows, sampling=baseline_sampling(config, vocabulary), purpose=BASELINE)
    stack.callback(lambda: on_loop(runner, baselines.aclose()))
    log = PromptLog(run.folder.path / PROMPTS)
    ledger = PromptLedger(on_end=log.ended)
    executor = build_executor(config, runner, service.router, workflows, baselines, scoring, vocabulary, ledger, run)
    stack.callback(executor.close)
    publisher = Publisher(
        SeenPublication(service.router, run.spans.record),
        service.loop,
        str(service.folder),
        write=groups.actor.write_weights,
        fail=executor.fail,
        timers=run.timers,
    )
    stack.callback(publisher.close)
    batches = StreamSampler(
        config=config,
        loader=loader,
        executor=executor,
        publisher=publisher,
        outcomes=scoring.outcomes,
        scorer=scorer,
        vocabulary=vocabulary,
        log=log,
        timers=run.timers,
        hosts=[found for found in (hosts, environments) if found is not None],
    )
    samples = build_samples(config, service, runner, tokenizer, vocabulary, score, stack, hosts, environments)
    stack.enter_context(heap_set_aside())
    return batches, samples


def build_evaluation_samples(
    config: PPOConfig, runtime: WorkerRuntime, tokenizer: Any, reward: RewardManager, run: Run, stack: ExitStack
) -> EpisodeSamples:
    """Episodes of a policy that nobody trains: replicas read the model's own files."""
    runner = AsyncTaskRunner(name="episodes")
    stack.callback(runner.close)
    options = service_options(config.actor_rollout_ref, config.trainer, run_folder=run.folder.path)
    service = RolloutService(config.actor_rollout_ref, runtime, dataclasses.replace(options, own_weights=True), loop=runner.loop)
    stack.callback(service.close)
    service.start()
    vocabulary = read_vocabulary(config.actor_rollout_ref.model, tokenizer)
    environments = start_environments(config, run, runner, stack)
    hosts = start_hosts(config, vocabulary, run, runner, stack)
    ahead = build_scoring(reward).ahead
    score = no_turn_scores if ahead is None else ahead.score_text
    return build_samples(config, service, runner, tokenizer, vocabulary, score, stack, hosts, environments)


def start_hosts(
    config: PPOConfig, vocabulary: Vocabulary, run: Run, runner: AsyncTaskRunner, stack: ExitStack
) -> EpisodeActors | None:
    """The processes of agent.num_workers, if any; after the service, which has connected the cluster."""
    hosts = episode_hosts(config, vocabulary, log_dir=run.folder.logs)
    if hosts is not None:
        stack.callback(lambda: on_loop(runner, hosts.close()))
        on_loop(runner, hosts.start())
    return hosts


def start_environments(config: PPOConfig, run: Run, runner: AsyncTaskRunner, stack: ExitStack) -> EnvironmentActors | None:
    """The actors of agent.num_env_hosts, if any; after the service, which has connected the cluster."""
    hosts = environment_hosts(config, log_dir=run.folder.logs)
    if hosts is not None:
        stack.callback(lambda: on_loop(runner, hosts.close()))
        on_loop(runner, hosts.start())
    return hosts


def start_service(config: PPOConfig, runtime: WorkerRuntime, groups: Groups, run: Run, runner: AsyncTaskRunner) -> RolloutService:
    """One replica a rank of the rollout's pool; without such a pool beside the actor's ranks."""
    beside = () if is_separate(config.trainer, ROLLOUT_ROLE) else groups.actor.device_places()
    options = service_options(config.actor_rollout_ref, config.trainer, run_folder=run.folder.path, beside=beside)
    service = RolloutService(config.actor_rollout_ref, runtime, options, loop=runner.loop)
    logger.info("starting the rollout service, replicas: %d", options.num_replicas)
    service.start()
    return service


def on_loop(runner: AsyncTaskRunner, work: Any) -> Any:
    """Run a coroutine on the episodes' loop and wait for it."""
    return asyncio.run_coroutine_threadsafe(work, runner.loop).result()


def build_scoring(reward: RewardManager) -> GroupScoring:
    """What scores groups as they finish, where a function judges each row alone."""
    manager = function_manager(reward)
    return GroupScoring(ahead=None if manager is None else AheadScorer(manager), outcomes=KeptOutcomes())


def build_executor(
    config: PPOConfig,
    runner: AsyncTaskRunner,
    router: Router,
    workflows: Workflows,
    baselines: Workflows,
    scoring: GroupScoring,
    vocabulary: Vocabulary,
    ledger: PromptLedger,
    run: Run,
) -> WorkflowExecutor:
    """The executor with the bounds of the configuration."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    staleness = StalenessManager(
        batch=config.data.train_batch_size,
        max_staleness=trainer.max_staleness,
        pipeline_depth=trainer.pipeline_depth,
        max_concurrent=rollout.agent.max_concurrent,
    )
    options = ExecutorOptions(
        group_size=rollout.n,
        seed=trainer.seed,
        stale_policy=trainer.stale_policy,
        episode_timeout_s=rollout.agent.episode_timeout_s,
        max_failed_batches=rollout.agent.max_failed_batches,
    )
    return WorkflowExecutor(
        runner=runner,
        engine=router,
        workflow_for=workflows.of,
        staleness=staleness,
        ledger=ledger,
        options=options,
        on_group=scoring,
        keep=signal_filter(config, scoring, vocabulary, run),
        interrupt=router.abort,
        baseline_for=baselines.of if requirements(config).baseline_rewards else None,
    )


def signal_filter(config: PPOConfig, scoring: GroupScoring, vocabulary: Vocabulary, run: Run) -> SignalFilter | None:
    """Of dynamic sampling, where it is on."""
    groups = config.algorithm.filter_groups
    if not groups.enable:
        return None
    assert scoring.ahead is not None, "checked before start"
    return SignalFilter(
        scorer=build_scorer(config, scoring.ahead.manager.lenient(), run.timers),
        outcomes=scoring.outcomes,
        pad_id=vocabulary.pad_id,
        most=(groups.max_num_gen_batches - 1) * config.data.train_batch_size,
    )


def build_samples(
    config: PPOConfig,
    service: RolloutService,
    runner: AsyncTaskRunner,
    tokenizer: Any,
    vocabulary: Vocabulary,
    score: Score,
    stack: ExitStack,
    hosts: EpisodeActors | None,
    environments: EnvironmentActors | None,
) -> EpisodeSamples:
    """Validation's episodes: the same workflows with other sampling."""
    rollout = config.actor_rollout_ref.rollout
    sampling = validation_sampling(config, vocabulary)
    workflows = Workflows(config, tokenizer, sampling, score, VALIDATION, hosts, environments)
    stack.callback(lambda: on_loop(runner, workflows.aclose()))
    return EpisodeSamples(rollout, service.router, workflows, runner.loop, seed=config.trainer.seed, pad_id=vocabulary.pad_id)
