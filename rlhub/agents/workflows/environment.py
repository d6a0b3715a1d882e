r"""environment: episodes in a step environment or in a tool environment.

The observations of a step environment become user turns, and each turn of the policy is an action; the rewards are credited to
the turns that earned them.  The tools of a tool environment are called as in tool_agent.  The environment starts from a seed that
depends on the prompt, so that all samples of a prompt start in the same state.

    python -m rlhub.trainer.main_ppo ... actor_rollout_ref.rollout.mode=async \
        actor_rollout_ref.rollout.agent.default_agent_loop=environment \
        actor_rollout_ref.rollout.agent.kwargs.environment=grid_walk \
        actor_rollout_ref.rollout.agent.kwargs.num_env_workers=8        # killable processes, which episodes lease
        actor_rollout_ref.rollout.agent.num_env_hosts=2                 # 2 actors on the cluster's machines, with 8 each

An episode leases its environment through `WorkflowParts.environments`, from this process or from actors on other machines; the
episode is the same.  An environment whose process or actor dies fails only the episode that leased it.  So does a call that
hangs: its process is killed.  Without processes (num_env_workers=0) such a call is abandoned, but code that it runs in a thread
continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts
from rlhub.agents.workflows.knobs import EnvironmentKnobs
from rlhub.agents.workflows.registry import WHERE, fill_knobs
from rlhub.agents.workflows.tool_agent import ToolLoop
from rlhub.agents.workflows.turns import Message, Transcript, TurnTemplate
from rlhub.envs.base import EnvDiedError, EnvError, Environment, EnvironmentLimits, Observation, StepEnvironment
from rlhub.envs.registry import environment_factory
from rlhub.envs.source import EnvironmentSpec, LocalEnvironmentSource, offers_tools
from rlhub.errors import ConfigError, DeadlineError, LoadError
from rlhub.tools.base import ToolError
from rlhub.tools.schemas import checked_arguments
from rlhub.utils.tool_calls import ToolCall, ToolResult, ToolSchema, as_result, schema_name


class EnvironmentEpisodes(RolloutWorkflow):
    """Runs episodes in the environment that the settings `environment` and `environment_kwargs` describe."""

    def __init__(self, parts: WorkflowParts) -> None:
        super().__init__(parts)
        self._knobs = fill_knobs(EnvironmentKnobs, parts.kwargs)
        self._factory = _factory(self._knobs.environment)
        self._spec = environment_spec(self._knobs, self._factory)
        self._own = LocalEnvironmentSource()
        self._environments = parts.environments or self._own
        if self._spec.offers_tools:
            self._tools = ToolLoop(parts=parts, knobs=self._knobs, scored=True)
            self._template = self._tools.template
        else:
            self._template = TurnTemplate(parts.tokenizer, roles=["user"], kwargs=self._knobs.chat_template_kwargs)

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        async with self._environments.lease(self._spec, data.session) as environment:
            if isinstance(environment, Environment):
                return await self._with_tools(engine, data, environment)
            return await self._with_steps(engine, data, environment)

    async def aclose(self) -> None:
        await self._own.aclose()

    async def _with_tools(self, engine: EpisodeEngine, data: EpisodeData, environment: Environment) -> Trajectory:
        async with self._deadline("initialization", self._knobs.reset_timeout_s):
            await environment.ainitialize(seed=environment_seed(data), options=environment_options(data))
            calls = EnvironmentCalls(environment, await environment.list_tools(), self._knobs.tool_timeout_s)
        return await self._tools.run(engine, data, calls)

    async def _with_steps(self, engine: EpisodeEngine, data: EpisodeData, environment: StepEnvironment) -> Trajectory:
        observation, _ = await environment.reset(seed=environment_seed(data), options=environment_options(data))
        prompt = self._template.prompt(opening(data, words(observation)))
        ids = self._template.limited_ids(prompt, self.parts.max_prompt_length)
        transcript = Transcript(prompt_ids=ids, budget=self.parts.max_response_length, scored=True)
        ended = ""
        while not ended:
            completion = await transcript.generate(engine, data, self.parts.sampling, most=self._knobs.max_turn_tokens)
            if completion.finish_reason != "stop" and not transcript.remaining:
                break
            action = self._template.text(completion.token_ids)
            observation, reward, terminated, truncated, _ = await environment.step(action)
            transcript.add_reward(reward)
            ended = "terminated" if terminated else "truncated" if truncated else ""
            if ended or not self._knobs.may_go_on(transcript.num_turns):
                break
            answer: list[Message] = [{"role": "user", "content": self._template.neutral(words(observation))}]
            closed = self._template.ended(completion.token_ids)
            if not transcript.add_context(self._template.between(answer, turn_ended=closed)):
                break
        return transcript.trajectory({f"env_{end}": float(ended == end) for end in ("terminated", "truncated")})

    @asynccontextmanager
    async def _deadline(self, what: str, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise DeadlineError(f"environment {what}", seconds) from error


class EnvironmentCalls:
    """Executes an episode's tool calls in a tool environment, as a ToolExecutor."""

    def __init__(self, environment: Environment, schemas: list[ToolSchema], timeout_s: float) -> None:
        self._environment, self.schemas, self._timeout_s = environment, schemas, timeout_s
        self._known = {schema_name(schema): schema for schema in schemas}
        self._one_at_a_time = asyncio.Lock()  # calls of one turn change one state, in their order

    async def execute(self, call: ToolCall) -> ToolResult:
        schema = self._known.get(call.name)
        if schema is None:
            text = f"Error: there is no tool {call.name!r:.80}; known: {', '.join(self._known) or 'none'}"
            return ToolResult(text=text, failed=True)
        try:
            arguments = checked_arguments(schema, call.arguments)
            async with self._one_at_a_time, asyncio.timeout(self._timeout_s):
                result = as_result(await self._environment.aexecute(call.name, arguments))
        except ToolError as error:
            return ToolResult(text=f"Error: {error}", failed=True)
        except EnvDiedError:
            raise  # nothing is left that could answer another call
        except TimeoutError:
            return ToolResult(text=f"Error: {call.name} was not done after {self._timeout_s:g} s", failed=True)
        except Exception as error:  # noqa: BLE001  # boundary to the user's code: the policy reads its error
            return ToolResult(text=f"Error: {type(error).__name__}: {error}", failed=True)
        return result


def environment_spec(knobs: EnvironmentKnobs, factory: Any) -> EnvironmentSpec:
    """Returns the specification by which episodes lease the environment of these settings."""
    tools = offers_tools(factory)
    limits = EnvironmentLimits(
        reset_timeout_s=knobs.reset_timeout_s,
        step_timeout_s=knobs.tool_timeout_s if tools else knobs.step_timeout_s,
        memory_gb=knobs.env_memory_gb,
    )
    return EnvironmentSpec(
        name=knobs.environment,
        settings=knobs.environment_kwargs,
        num_workers=knobs.num_env_workers,
        limits=limits,
        offers_tools=tools,
        env=tuple(knobs.env),
    )


def environment_seed(data: EpisodeData) -> int:
    """Returns `extra_info.env_seed` of the row, or else the prompt's ordinal, which all samples of a prompt share."""
    return int((data.row.get("extra_info") or {}).get("env_seed", data.ordinal))


def environment_options(data: EpisodeData) -> dict[str, Any] | None:
    """Returns `extra_info.env_options` of the row, without entries that are None."""
    options = (data.row.get("extra_info") or {}).get("env_options")
    return None if options is None else {key: value for key, value in options.items() if value is not None}


def words(observation: Observation) -> str:
    """Returns the text of an observation.  Raises EnvError for an image without text."""
    if isinstance(observation, str):
        return observation
    if not observation.text:
        raise EnvError("the environment gave an image without text, and this workflow's policy reads only text")
    return observation.text


def opening(data: EpisodeData, observation: str) -> list[Mapping[str, Any]]:
    """Returns the row's conversation with the first observation at its end, appended to the user's last turn if there is one."""
    chat = data.row.get("raw_chat")
    if isinstance(chat, str):
        chat = [{"role": "user", "content": chat}]
    messages = [{key: value for key, value in message.items() if value is not None} for message in chat or []]
    if messages and messages[-1]["role"] == "user":
        said = messages.pop()
        observation = f"{said['content']}\n\n{observation}"
    return [*messages, {"role": "user", "content": observation}]


def _factory(name: str) -> Any:
    if not name:
        raise ConfigError(f"the environment workflow needs {WHERE}.environment: a registered name, or path/to/file.py:ClassName")
    try:
        return environment_factory(name)
    except LoadError as error:
        raise ConfigError(f"{WHERE}.environment: {error}") from error
