"""Which workflow runs a prompt's episodes, and what happens to a finished group: scoring, and the filter of dynamic sampling."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhub.agents.remote.environment_actors import EnvironmentActorOptions, EnvironmentActors, environment_actor_starter
from rlhub.agents.remote.episode_actor import EpisodeActorSettings, WorkflowKey
from rlhub.agents.remote.episode_actors import EpisodeActorOptions, EpisodeActors, episode_actor_starter
from rlhub.agents.remote.workflow import RemoteWorkflow
from rlhub.agents.workflows.base import RolloutWorkflow, Score, WorkflowParts, build_workflow
from rlhub.agents.workflows.registry import default_workflow, workflow_class, workflow_kwargs
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.rollout import ValSamplingConfig
from rlhub.data import AGENT_NAME
from rlhub.engines.rollout.base import SamplingParams
from rlhub.models.tokenizer import Vocabulary, load_tokenizer
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rewards.naive import OUTCOMES
from rlhub.rollout_service.executor.batches import to_batch
from rlhub.rollout_service.executor.episode_groups import Group
from rlhub.trainer.ppo.sampling import groups_with_signal
from rlhub.trainer.ppo.scoring import Scorer
from rlhub.trainer.ppo.scoring_ahead import AheadScorer, KeptOutcomes

logger = logging.getLogger(__name__)


TRAINING, VALIDATION, BASELINE = "training", "validation", "baseline"
"""What episodes are for: their sampling follows from it."""


def training_sampling(config: PPOConfig, vocabulary: Vocabulary) -> SamplingParams:
    """Of the episodes that are trained on."""
    rollout = config.actor_rollout_ref.rollout
    own = ValSamplingConfig(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, do_sample=True)
    return sampling_params(config, vocabulary, own, log_probs=True)


def validation_sampling(config: PPOConfig, vocabulary: Vocabulary) -> SamplingParams:
    """Of the episodes that measure."""
    return sampling_params(config, vocabulary, config.actor_rollout_ref.rollout.val_kwargs, log_probs=True)


def baseline_sampling(config: PPOConfig, vocabulary: Vocabulary) -> SamplingParams:
    """Of the episode to which the others of a prompt are compared: greedy."""
    return sampling_params(config, vocabulary, ValSamplingConfig(do_sample=False), log_probs=True)


def sampling_params(config: PPOConfig, vocabulary: Vocabulary, sampling: ValSamplingConfig, *, log_probs: bool) -> SamplingParams:
    """As whole-batch generation passes them to the engine."""
    return SamplingParams(
        temperature=sampling.temperature if sampling.do_sample else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=config.data.max_response_length,
        stop_token_ids=vocabulary.stop_token_ids,
        ignore_eos=config.actor_rollout_ref.rollout.ignore_eos,
        log_probs=log_probs,
    )


@dataclass(slots=True)
class Workflows:
    """One workflow of each name, built when the first row asks for it.  Used on the event loop that runs the episodes.

    hosts: run the episodes' own code in place of this loop, with the sampling of `purpose`.  environments: lend them theirs.
    """

    config: PPOConfig
    tokenizer: Any
    sampling: SamplingParams
    score: Score
    purpose: str = TRAINING
    hosts: EpisodeActors | None = None
    environments: EnvironmentActors | None = None
    _built: dict[str, RolloutWorkflow] = field(init=False, default_factory=dict)

    def of(self, row: Mapping[str, Any]) -> RolloutWorkflow:
        """The workflow of this prompt."""
        name = row.get(AGENT_NAME) or default_workflow(self.config.actor_rollout_ref.rollout)
        if name not in self._built:
            self._built[name] = self._build(name)
        return self._built[name]

    def _build(self, name: str) -> RolloutWorkflow:
        if self.hosts is None:
            return build_workflow(name, self._parts())
        workflow_class(name)  # a wrong name ends the run, as without hosts, not only each of its episodes
        return RemoteWorkflow(self._parts(), WorkflowKey(self.purpose, name), self.hosts)

    def _parts(self) -> WorkflowParts:
        return WorkflowParts(
            tokenizer=self.tokenizer,
            sampling=self.sampling,
            max_prompt_length=self.config.data.max_prompt_length,
            max_response_length=self.config.data.max_response_length,
            score=self.score,
            kwargs=workflow_kwargs(self.config.actor_rollout_ref.rollout),
            environments=self.environments,
        )

    async def aclose(self) -> None:
        """Release what they hold, when no episode runs any more."""
        await asyncio.gather(*(workflow.aclose() for workflow in self._built.values()))
        self._built.clear()


def episode_hosts(config: PPOConfig, vocabulary: Vocabulary, *, log_dir: Path) -> EpisodeActors | None:
    """The processes that run the episodes' own code, where the configuration wants any; not yet started."""
    model, rollout, trainer = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.trainer
    if rollout.agent.num_workers == 0:
        return None
    settings = EpisodeActorSettings(
        tokenizer=functools.partial(load_tokenizer, model.path, trust_remote_code=model.trust_remote_code),
        samplings={
            TRAINING: training_sampling(config, vocabulary),
            VALIDATION: validation_sampling(config, vocabulary),
            BASELINE: baseline_sampling(config, vocabulary),
        },
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        kwargs=workflow_kwargs(rollout),
        folder=os.getcwd(),
        lends_environments=rollout.agent.num_env_hosts > 0,
    )
    seconds = trainer.deadline_s
    options = EpisodeActorOptions(
        backend=trainer.backend, start_s=seconds.start, log_dir=str(log_dir.absolute()), plugins=tuple(trainer.plugins)
    )
    return EpisodeActors(
        episode_actor_starter(settings, options),
        rollout.agent.num_workers,
        restarts=rollout.replica_restarts,
        shutdown_s=seconds.shutdown,
    )


def environment_hosts(config: PPOConfig, *, log_dir: Path) -> EnvironmentActors | None:
    """The actors that run the episodes' environments, where the configuration wants any; not yet started."""
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
        log_dir=str(log_dir.absolute()),
        plugins=tuple(trainer.plugins),
    )
    return EnvironmentActors(
        environment_actor_starter(options),
        agent.num_env_hosts,
        idle_s=max(agent.episode_timeout_s, seconds.generate),  # no turn of the policy takes longer
        restarts=rollout.replica_restarts,
        shutdown_s=seconds.shutdown,
    )


@dataclass(slots=True)
class GroupScoring:
    """The executor's hook: scores a group's samples as soon as all of them are there.  None scores nothing ahead."""

    ahead: AheadScorer | None
    outcomes: KeptOutcomes

    async def __call__(self, group: Group) -> None:
        if self.ahead is not None and any(trajectory.rewards is None for trajectory in group.scored):
            self.outcomes.put(group.ordinal, await self.ahead.outcomes(group))


@dataclass(slots=True)
class SignalFilter:
    """The executor's filter for dynamic sampling (see sampling.py): whether a group's samples differ.

    scorer: of one group, from what its samples were scored ahead; failures pass as samples without a score.
    most: groups without signal in a row that are turned down; the next ones train, as whole batches are filled up.
    """

    scorer: Scorer
    outcomes: KeptOutcomes
    pad_id: int
    most: int
    _without: int = 0

    def __call__(self, group: Group) -> bool:
        batch: DataProto = to_batch([group], pad_id=self.pad_id)
        batch.non_tensor_batch[OUTCOMES] = object_array(list(self.outcomes.take(group)))
        self.scorer(batch)
        if bool(groups_with_signal(batch, len(group.trajectories))[0]):
            self._without = 0
            return True
        self._without += 1
        if self._without == self.most + 1:
            logger.warning(
                "dynamic sampling: %d groups in a row had no signal (algorithm.filter_groups.max_num_gen_batches); those that "
                "follow fill the batch. The problems may be too easy or too hard for the policy: raise the bound or "
                "actor_rollout_ref.rollout.n, or change the data",
                self.most,
            )
        return self._without > self.most
