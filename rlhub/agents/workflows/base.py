"""RolloutWorkflow: one episode as an asyncio coroutine, written against nothing but an engine that generates.

class Echo(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        completion = await engine.agenerate(self.request(data), self.parts.sampling)
        ...
        return Trajectory(...)          # or None: this episode must not train
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.registry import workflow_class
from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, SamplingParams
from rlhub.envs.source import EnvironmentSource
from rlhub.errors import ConfigError


class EpisodeEngine(Protocol):
    """What generates for an episode: a rollout engine in this process, or the router over a service's replicas."""

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        """One completion.  Requests of one `session` go to the same replica, where their common prefix is cached.  `follow` is
        told of its tokens as they come, on this event loop."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class EpisodeData:
    """One episode to run: sample number `sample` of the prompt with this `ordinal` (running number in the run).

    prompt_ids: the prompt as tokens.  row: the prompt's other columns (raw_prompt, raw_chat, data_source, ground_truth,
    extra_info).  seed: of the episode's first generation; `turn_seed` gives the later ones'.
    partial: what the first generation had written when the run was stopped; finish_reason "abort": it was not at its end.
    """

    prompt_ids: tuple[int, ...]
    ordinal: int
    sample: int
    seed: int
    row: Mapping[str, Any] = field(default_factory=dict)
    partial: Completion | None = None

    @property
    def session(self) -> str:
        """Name of the episode for sticky routing and records."""
        return f"{self.ordinal}-{self.sample}"


Score = Callable[[Mapping[str, Any], str], Awaitable[tuple[float, dict[str, float]]]]
"""`await score(row, response_text)` -> (reward, the scorer's other numbers), by the run's configured reward function."""


@dataclass(slots=True, kw_only=True)
class WorkflowParts:
    """What a workflow is built from.  kwargs: its own settings, from the configuration.

    sampling: temperature, stop tokens and so on; max_new_tokens is the budget of the whole response.
    environments: who lends environments to its episodes; None: each workflow runs its own in this process.
    """

    tokenizer: Any
    sampling: SamplingParams
    max_prompt_length: int
    max_response_length: int
    score: Score
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    environments: EnvironmentSource | None = None


class RolloutWorkflow(ABC):
    """One instance runs many episodes at the same time: it keeps no state of an episode in itself."""

    def __init__(self, parts: WorkflowParts) -> None:
        self.parts = parts

    @abstractmethod
    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        """Run one episode.  None, or raising Reject, leaves its prompt's group out; any other error is counted as a failure."""

    async def aclose(self) -> None:  # noqa: B027  most workflows hold nothing
        """Release what the workflow holds (environments, clients); called once, when no episode runs any more."""

    def request(self, data: EpisodeData) -> GenerationRequest:
        """The episode's first generation."""
        return GenerationRequest(prompt_ids=data.prompt_ids, seed=data.seed, session=data.session)


def build_workflow(name: str, parts: WorkflowParts) -> RolloutWorkflow:
    """The workflow of this name.  ConfigError for a name or setting that does not fit."""
    workflow = workflow_class(name)(parts)
    if not isinstance(workflow, RolloutWorkflow):
        raise ConfigError(f"workflow {name}: made a {type(workflow).__name__}, which is no RolloutWorkflow")
    return workflow
