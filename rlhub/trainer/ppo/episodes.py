"""Episodes as the trainer asks for them: which workflow runs a prompt's episodes, with what sampling, and validation by episodes.

Validation runs the same workflows on one version of the policy, while training goes on: a replica is pinned to the version, and
what runs there counts in no bound on staleness.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlhub.agents.remote.environment_actors import EnvironmentActors
from rlhub.agents.remote.episode_actor import WorkflowKey
from rlhub.agents.remote.holders import Holders, KeepingWorkflow
from rlhub.agents.remote.workflow import EpisodeActors, RemoteWorkflow
from rlhub.agents.trajectory import NOT_SAMPLED, Trajectory, answer_of
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, Score, WorkflowParts, build_workflow
from rlhub.agents.workflows.registry import default_workflow, workflow_class, workflow_kwargs
from rlhub.config.rules.sources import SourceConfig, sources_of, val_sampling
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.rollout import RolloutConfig, ValSamplingConfig
from rlhub.data import AGENT_NAME
from rlhub.engines.rollout.base import SamplingParams
from rlhub.errors import RewardError
from rlhub.models.tokenizer import Vocabulary
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rewards import RewardFailure, RewardOutcome
from rlhub.rewards.base import OUTCOMES
from rlhub.rollout_service.executor.batches import to_batch
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
from rlhub.rollout_service.router import Pin, Router
from rlhub.trainer.ppo.stream_source import prompt_items
from rlhub.trainer.ppo.sync_source import training_sampling, validation_sampling
from rlhub.utils.aio.results import Reject
from rlhub.utils.seeding import sample_seed

TRAINING, VALIDATION, BASELINE = "training", "validation", "baseline"
"""The purposes of episodes, from which their sampling follows."""


def samplings(config: PPOConfig, vocabulary: Vocabulary) -> dict[str, SamplingParams]:
    """Returns the sampling of the episodes of each purpose: of training, of validation, also by data source, and greedy for the
    episode to which the others of a prompt are compared."""
    rollout = config.actor_rollout_ref.rollout
    own = {name: val_sampling(config, name) for name, source in sources_of(config.data).items() if source.val_kwargs}
    found = {
        TRAINING: training_sampling(rollout),
        VALIDATION: rollout.val_kwargs,
        BASELINE: ValSamplingConfig(do_sample=False),
        **{f"{VALIDATION}/{name}": sampling for name, sampling in own.items()},
    }
    return {purpose: sampling_params(config, vocabulary, sampling) for purpose, sampling in found.items()}


def sampling_params(config: PPOConfig, vocabulary: Vocabulary, sampling: ValSamplingConfig) -> SamplingParams:
    """Returns what whole-batch generation passes to the engine."""
    return SamplingParams(
        temperature=sampling.temperature if sampling.do_sample else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=config.data.max_response_length,
        stop_token_ids=vocabulary.stop_token_ids,
        ignore_eos=config.actor_rollout_ref.rollout.ignore_eos,
        log_probs=True,
    )


@dataclass(slots=True)
class Workflows:
    """One workflow of each name, built when the first row asks for it.  Used on the event loop that runs the episodes.

    samplings: by purpose.  episode_actors: run the episodes' own code instead of this loop.  environments: leases
    environments to them.  holders: keep the tokens of the episodes; None: these come to the driver.
    """

    config: PPOConfig
    tokenizer: Any
    samplings: Mapping[str, SamplingParams]
    score: Score
    purpose: str = TRAINING
    episode_actors: EpisodeActors | None = None
    environments: EnvironmentActors | None = None
    holders: Holders | None = None
    _built: dict[WorkflowKey, RolloutWorkflow] = field(init=False, default_factory=dict)
    _sources: dict[str, SourceConfig] = field(init=False)

    def __post_init__(self) -> None:
        self._sources = sources_of(self.config.data)

    def of(self, row: Mapping[str, Any]) -> RolloutWorkflow:
        """Returns the workflow of this prompt."""
        name = row.get("data_source", "")
        source, own = self._sources.get(name), f"{self.purpose}/{name}"
        workflow = row.get(AGENT_NAME) or (None if source is None else source.agent_name)
        purpose = own if own in self.samplings else self.purpose
        key = WorkflowKey(purpose, workflow or default_workflow(self.config.actor_rollout_ref.rollout))
        if key not in self._built:
            self._built[key] = self._build(key)
        return self._built[key]

    def _build(self, key: WorkflowKey) -> RolloutWorkflow:
        name, parts, remote = key.name, self._parts(self.samplings[key.purpose]), None
        found = workflow_class(name)  # a wrong name ends the run, not only each of its episodes
        build = partial(build_workflow, name, parts)
        if self.episode_actors is not None:
            remote = RemoteWorkflow(parts, key, self.episode_actors, keeps=self.holders is not None, direct=True)
        made = remote or build() if self.holders is None else KeepingWorkflow(name, self.holders.own, remote, build)
        made.keeps_time = isinstance(found, type) and issubclass(found, RolloutWorkflow) and found.keeps_time
        return made

    def _parts(self, sampling: SamplingParams) -> WorkflowParts:
        return WorkflowParts(
            tokenizer=self.tokenizer,
            sampling=sampling,
            max_prompt_length=self.config.data.max_prompt_length,
            max_response_length=self.config.data.max_response_length,
            score=self.score,
            kwargs=workflow_kwargs(self.config.actor_rollout_ref.rollout),
            environments=self.environments,
        )

    async def aclose(self) -> None:
        """Closes the workflows, when no episode runs any more."""
        await asyncio.gather(*(workflow.aclose() for workflow in self._built.values()))
        self._built.clear()


@dataclass(frozen=True, slots=True)
class _Sample:
    """One episode's result.  failed: why it has no reward; None where it has one, or the run's reward scores it."""

    trajectory: Trajectory
    failed: RewardOutcome | None = None


def settle_rewards(samples: Sequence[_Sample]) -> list[RewardOutcome | None]:
    """Returns what is known of each sample's score besides the rewards in its trajectory.

    Where workflows set rewards of their own, an episode that gave nothing has a reward of 0.  Where only some do (rows name
    their workflows), their sums go with the outcomes, and the run's reward scores the others, as in training.
    """
    trajectories = [sample.trajectory for sample in samples]
    outcomes = [sample.failed for sample in samples]
    if all(trajectory.rewards is None for trajectory in trajectories):
        return outcomes
    mixed = any(trajectory.rewards is None and any(trajectory.response_mask) for trajectory in trajectories)
    for index, trajectory in enumerate(trajectories):
        if trajectory.rewards is None and not any(trajectory.response_mask):
            trajectory.set_reward(0.0)
        if mixed and trajectory.rewards is not None:
            outcomes[index] = outcomes[index] or RewardOutcome(score=float(sum(trajectory.rewards)))
            trajectory.rewards = None
    return outcomes


class EpisodeSamples:
    """The ValidationSamples of an asynchronous run, of the version pinned between `pin` and `release`, else of the newest."""

    def __init__(
        self,
        config: RolloutConfig,
        router: Router,
        workflows: Workflows,
        loop: asyncio.AbstractEventLoop,
        *,
        seed: int,
        pad_id: int,
    ) -> None:
        self.config, self.router, self.workflows, self.loop = config, router, workflows, loop
        self.seed, self.pad_id = seed, pad_id
        self._pin: Pin | None = None

    def pin(self, version: int) -> None:
        """Keeps a replica at this version, which must be the newest."""
        self._pin = self._on_loop(self.router.pin(version))

    def release(self) -> None:
        """Lets the replica take newer versions again."""
        pin, self._pin = self._pin, None
        if pin is not None:
            self.loop.call_soon_threadsafe(pin.release)

    def validation(self, prompts: DataProto) -> DataProto:
        """Returns val_kwargs' samples per prompt, or those of its data source, neighbours in prompt order."""
        n = validation_sampling(prompts, self.config).n
        episodes = self._on_loop(self._episodes(self._pin or self.router, list(prompt_items(prompts)), range(n)))
        outcomes = settle_rewards([sample for _, samples in episodes for sample in samples])
        groups = [Group(item=item, trajectories=[sample.trajectory for sample in samples]) for item, samples in episodes]
        batch = to_batch(groups, pad_id=self.pad_id)
        batch.non_tensor_batch[OUTCOMES] = object_array(outcomes)
        return batch

    def _on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _episodes(
        self, engine: EpisodeEngine, items: list[PromptItem], samples: range
    ) -> list[tuple[PromptItem, list[_Sample]]]:
        results = await asyncio.gather(*(self._episode(engine, item, sample) for item in items for sample in samples))
        return [(item, results[len(samples) * row : len(samples) * (row + 1)]) for row, item in enumerate(items)]

    async def _episode(self, engine: EpisodeEngine, item: PromptItem, sample: int) -> _Sample:
        """Runs one episode.  One that gives nothing counts as an empty answer, since leaving it out would flatter the policy; one
        in which a reward failed is a sample whose scoring failed, as any other."""
        seed = sample_seed(self.seed, item.ordinal, sample)
        data = EpisodeData(prompt_ids=item.prompt_ids, ordinal=item.ordinal, sample=sample, seed=seed, row=item.row)
        running = self.workflows.of(item.row).arun_episode(engine, data)
        try:
            found = await asyncio.wait_for(running, self.config.agent.episode_timeout_s)
        except (Reject, TimeoutError):
            found = None
        except RewardError as error:
            return _Sample(self._empty(item), RewardOutcome(error=RewardFailure(kind="raised", message=str(error))))
        answer = None if found is None else answer_of(found)  # an episode of several trajectories is one sample
        return _Sample(answer if isinstance(answer, Trajectory) else self._empty(item))

    def _empty(self, item: PromptItem) -> Trajectory:
        return Trajectory(
            prompt_ids=list(item.prompt_ids),
            response_ids=[self.pad_id],
            response_mask=[0],
            rollout_log_probs=[0.0],
            versions=[NOT_SAMPLED],
            finish_reason="abort",
        )
