"""RolloutWorkflow: one episode as an asyncio coroutine, written against nothing but an engine that generates.

    class Echo(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            completion = await engine.agenerate(self.request(data), self.parts.sampling)
            ...
            return Trajectory(...)          # or Episode(trajectories=[...]), or None: this episode must not train

The checks before a run inspect a workflow without running an episode: `class_problems` says whether it can be built, `knobs_of`
and `settings_read` which settings it reads.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

from rlhub.agents.trajectory import Sampled
from rlhub.agents.workflows.registry import fill_knobs, workflow_class
from rlhub.engines.rollout.base import Completion, FinishReason, Follow, GenerationRequest, SamplingParams
from rlhub.envs.source import EnvironmentSource
from rlhub.errors import ConfigError

if TYPE_CHECKING:
    from rlhub.single_controller.async_actor import AsyncActor


class EpisodeEngine(Protocol):
    """The interface through which an episode generates: a rollout engine in this process, or the router over a service's
    replicas."""

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        """Generates one completion.  Requests of one `session` go to the same replica, which caches their common prefix.

        `follow` is called with each new piece of tokens, on this event loop.
        """
        ...


class Generated(NamedTuple):
    """The numbers of a completion whose tokens are in another process."""

    num_tokens: int
    finish_reason: FinishReason


@dataclass(slots=True, kw_only=True, frozen=True)
class RemoteGeneration:
    """A generation that another process asks of a replica by itself, so that its tokens do not come here.

    session, request_id: as in GenerationRequest.  cost: prompt tokens and the maximum that may be sampled.

    send: gives that process the replica, the request's id and the maximum wait in seconds, and waits for what it sampled there.
    It raises the error of the replica.  Sent once more, the generation continues after the tokens that it has.  written: returns
    the tokens of the episode's first generation so far, for a checkpoint.
    """

    session: str
    cost: int
    send: Callable[[AsyncActor, str, float | None], Awaitable[Generated]]
    written: Callable[[], Awaitable[Completion | None]]
    request_id: str = ""


class PlacingEngine(EpisodeEngine, Protocol):
    """An engine over replicas that other processes reach."""

    async def aplace(self, generation: RemoteGeneration) -> Generated:
        """Chooses a replica and lets the other process generate there, again on another one where it dies."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class EpisodeData:
    """One episode to run: sample number `sample` of the prompt with number `ordinal` in the run.

    prompt_ids: the tokens of the prompt.  row: the other columns of the prompt (raw_prompt, raw_chat, data_source, ground_truth,
    extra_info).  seed: the seed of the first generation; `turn_seed` derives those of later ones.

    partial: what the first generation had sampled when the run stopped; with finish_reason "abort" it was not complete.
    """

    prompt_ids: tuple[int, ...]
    ordinal: int
    sample: int
    seed: int
    row: Mapping[str, Any] = field(default_factory=dict)
    partial: Completion | None = None

    @property
    def session(self) -> str:
        """Returns the name of the episode for sticky routing and records."""
        return f"{self.ordinal}-{self.sample}"


Score = Callable[[Mapping[str, Any], str], Awaitable[tuple[float, dict[str, float]]]]
"""`await score(row, response_text)` returns (reward, the scorer's other numbers) of the run's configured reward function."""


@dataclass(slots=True, kw_only=True)
class WorkflowParts:
    """The parts from which a workflow is built.

    sampling: temperature, stop tokens and so on; its max_new_tokens is the budget of the whole response.  score: the configured
    reward function.  kwargs: the workflow's own settings from the configuration.  environments: leases environments to the
    episodes; None: each workflow runs its own in this process.
    """

    tokenizer: Any
    sampling: SamplingParams
    max_prompt_length: int
    max_response_length: int
    score: Score
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    environments: EnvironmentSource | None = None


class RolloutWorkflow(ABC):
    """Runs episodes.  One instance runs many of them at the same time, so it keeps no state of an episode in itself.

    keeps_time: the workflow itself ends episodes that take too long, and rollout.agent.episode_timeout_s does not.
    """

    keeps_time = False

    def __init__(self, parts: WorkflowParts) -> None:
        self.parts = parts

    @abstractmethod
    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
        """Runs one episode and returns its Trajectory, or an Episode of several.  Returning None or raising Reject leaves the
        prompt's group out; any other error counts as a failure."""

    async def aclose(self) -> None:  # noqa: B027  most workflows hold nothing
        """Releases the resources of the workflow (environments, clients).  It is called once, after the last episode."""

    def request(self, data: EpisodeData) -> GenerationRequest:
        """Returns the request of the episode's first generation."""
        return GenerationRequest(prompt_ids=data.prompt_ids, seed=data.seed, session=data.session)


def build_workflow(name: str, parts: WorkflowParts) -> RolloutWorkflow:
    """Builds the workflow of this name.  Raises ConfigError for an unknown name or an unfit setting."""
    workflow = workflow_class(name)(parts)
    if not isinstance(workflow, RolloutWorkflow):
        raise ConfigError(f"workflow {name}: made a {type(workflow).__name__}, which is no RolloutWorkflow")
    return workflow


def class_problems(found: Callable[..., Any]) -> list[str]:
    """Returns the reasons why `found` cannot be built from WorkflowParts.  For a function only its parameters can be checked."""
    if isinstance(found, type):
        if not issubclass(found, RolloutWorkflow):
            return ["no subclass of RolloutWorkflow (rlhub.agents.workflows.base)"]
        if found.__abstractmethods__:
            return [f"lacks {', '.join(sorted(found.__abstractmethods__))}"]
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        return [f"is made from its parts alone, and does not take them so: {error}"]
    except ValueError:  # a callable without a signature
        return []
    return []


def knobs_of(found: Callable[..., Any]) -> type | None:
    """Returns the dataclass that the workflow fills with its settings when it is built, by `fill_knobs(Knobs, parts.kwargs)`.

    None: its source does not show one such call, so it may read its settings in another way.
    """
    maker = inspect.unwrap(found.__init__ if isinstance(found, type) else found)  # type: ignore[misc]
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(maker)))
    except (OSError, TypeError, SyntaxError):
        return None
    names = [
        call.args[0].id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and maker.__globals__.get(call.func.id) is fill_knobs
        and call.args
        and isinstance(call.args[0], ast.Name)
    ]
    classes = [maker.__globals__.get(name) for name in names]
    only = classes[0] if len(classes) == 1 else None
    return only if isinstance(only, type) and dataclasses.is_dataclass(only) else None


def settings_read(found: Callable[..., Any]) -> frozenset[str] | None:
    """Returns the names that a class without knobs reads from its parts' `kwargs`, in its own code and that of its bases.

    None where the source does not show them: the class passes its kwargs or parts on, or `found` is no class.
    """
    if not isinstance(found, type):
        return None
    read: set[str] = set()
    for base in found.__mro__:
        if base in (RolloutWorkflow, ABC, object):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            return None
        names = _names_read(tree)
        if names is None:
            return None
        read |= names
    return frozenset(read)


def _names_read(tree: ast.AST) -> set[str] | None:
    """Returns the constants in `parts.kwargs["name"]` and `parts.kwargs.get("name")`; None if kwargs or parts have any other
    use."""
    parent = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    given = {node.args.args[1].arg for node in ast.walk(tree) if _is_init(node) and len(node.args.args) > 1}
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "kwargs":
            key = _key(parent[node], parent[parent[node]])
            if key is None:
                return None
            names.add(key)
        elif (isinstance(node, ast.Attribute) and node.attr == "parts") or (isinstance(node, ast.Name) and node.id in given):
            user = parent[node]
            inherited = isinstance(user, ast.Call) and isinstance(user.func, ast.Attribute) and user.func.attr == "__init__"
            if not isinstance(user, ast.Attribute) and not inherited:
                return None
    return names


def _is_init(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def _key(user: ast.AST, beyond: ast.AST) -> str | None:
    """Returns the name that the two nodes around `kwargs` look up, or None."""
    match user, beyond:
        case (ast.Subscript(slice=ast.Constant(value=str() as key)), _):
            return key
        case (ast.Attribute(attr="get"), ast.Call(args=[ast.Constant(value=str() as key), *_])):
            return key
    return None
