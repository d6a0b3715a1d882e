"""tool_agent: the policy calls tools, reads what they answer, and goes on until it answers without a call.

Calls stand in its text in a registered format.  What tools answer enters as tokens with response_mask 0.  A call that cannot
be read, or that a tool refuses, is answered by an error message, so that the policy can learn to do better; both are counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts
from rlhub.agents.workflows.knobs import ToolKnobs
from rlhub.agents.workflows.registry import WHERE, fill_knobs
from rlhub.agents.workflows.turns import Message, Transcript, TurnTemplate
from rlhub.errors import ConfigError
from rlhub.tools.formats import ParsedReply
from rlhub.tools.registry import TOOL_FORMATS
from rlhub.tools.toolbox import Toolbox, load_tools, read_tool_file
from rlhub.utils.tool_calls import ToolCall, ToolResult, ToolSchema

ELLIPSIS = "\n... (left out) ...\n"


class ToolExecutor(Protocol):
    """What answers one episode's calls: a session of the toolbox, or an environment."""

    @property
    def schemas(self) -> list[ToolSchema]: ...

    async def execute(self, call: ToolCall) -> ToolResult:
        """The result; what goes wrong with a call is text too."""
        ...


@dataclass(slots=True, kw_only=True)
class CallCounts:
    """What happened to one episode's calls.  malformed: could not be read; failed: the tool answered with an error;
    own: the numbers that tools return with their answers."""

    calls: int = 0
    failed: int = 0
    malformed: int = 0
    truncated: int = 0
    seconds: float = 0.0
    own: dict[str, list[float]] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """tool_called: 1 if a call was answered without error, so that its mean is a share of the episodes.  tool/<name>: the
        mean of a tool's own number over the calls that gave it."""
        return {
            "tool_calls": float(self.calls),
            "tool_called": float(self.calls > self.failed),
            "tool_failed": float(self.failed),
            "tool_malformed": float(self.malformed),
            "tool_truncated": float(self.truncated),
            "tool_seconds": self.seconds,
            **{f"tool/{name}": sum(values) / len(values) for name, values in self.own.items()},
        }


@dataclass(slots=True, kw_only=True)
class ToolLoop:
    """How episodes with tools run, whoever answers the calls.

    scored: what answers the calls gives the rewards; else the run's reward function scores the response, and what tools give is
    added to that.
    """

    parts: WorkflowParts
    knobs: ToolKnobs
    scored: bool = False
    parse: Callable[[str], ParsedReply] = field(init=False)
    template: TurnTemplate = field(init=False)

    def __post_init__(self) -> None:
        self.parse = TOOL_FORMATS.get(self.knobs.format)
        self.template = TurnTemplate(self.parts.tokenizer, roles=["tool"], kwargs=self.knobs.chat_template_kwargs)

    async def run(self, engine: EpisodeEngine, data: EpisodeData, executor: ToolExecutor) -> Trajectory:
        """One episode on the row's prompt with the tools described."""
        ids = self.template.prompt_ids(data, executor.schemas, self.parts.max_prompt_length)
        transcript = Transcript(prompt_ids=ids, budget=self.parts.max_response_length, scored=self.scored)
        counts = CallCounts()
        while await self._turn(engine, data, executor, transcript, counts):
            pass
        return transcript.trajectory(counts.metrics())

    async def _turn(
        self, engine: EpisodeEngine, data: EpisodeData, executor: ToolExecutor, transcript: Transcript, counts: CallCounts
    ) -> bool:
        """One generation and the answers to its calls; whether the policy goes on."""
        completion = await transcript.generate(engine, data, self.parts.sampling, most=self.knobs.max_turn_tokens)
        if completion.finish_reason != "stop" and not transcript.room:
            return False
        reply = self.parse(self.template.text(completion.token_ids))
        if not reply.calls and not reply.problems:
            return False
        counts.malformed += len(reply.problems)
        if not self.knobs.may_go_on(transcript.num_turns):
            return False
        results = await self._answers(executor, reply, counts)
        transcript.add_reward(sum(result.reward for result in results))
        if any(result.done for result in results):
            return False
        messages = [self._message(number, result, counts) for number, result in enumerate(results)]
        ended = self.template.ended(completion.token_ids)
        return transcript.add_context(self.template.between(messages, turn_ended=ended))

    async def _answers(self, executor: ToolExecutor, reply: ParsedReply, counts: CallCounts) -> list[ToolResult]:
        """Returns the results of the calls, which run concurrently, and then those of what could not be read as a call."""
        calls, most = reply.calls, self.knobs.max_parallel_calls
        started = time.monotonic()
        results = list(await asyncio.gather(*(executor.execute(call) for call in calls[:most])))
        counts.seconds += time.monotonic() - started
        counts.calls += len(calls[:most])
        counts.failed += sum(result.failed for result in results)
        for name, value in (item for result in results for item in result.metrics.items()):
            counts.own.setdefault(name, []).append(value)
        problems = [*reply.problems]
        if len(calls) > most:
            problems.append(f"{len(calls) - most} calls were not done: at most {most} a turn")
        return results + [ToolResult(text=f"Error: {problem}", failed=True) for problem in problems[:most]]

    def _message(self, number: int, result: ToolResult, counts: CallCounts) -> Message:
        text = self.template.neutral(result.text)
        limit = self.knobs.max_tool_response_length
        if len(text) > limit:
            counts.truncated += 1
            text = shortened(text, limit)
        return {"role": "tool", "content": text, "tool_call_id": f"call_{number}"}


def shortened(text: str, limit: int) -> str:
    """The beginning and the end of a text, together at most `limit` characters, with a note between them."""
    kept = max(0, limit - len(ELLIPSIS))
    return text[: kept - kept // 2] + ELLIPSIS[:limit] + (text[-(kept // 2) :] if kept >= 2 else "")


class ToolAgent(RolloutWorkflow):
    """Tools from rollout.multi_turn.tool_config_path, or `tools` among the workflow's settings."""

    def __init__(self, parts: WorkflowParts) -> None:
        super().__init__(parts)
        knobs = fill_knobs(ToolKnobs, parts.kwargs)
        self._loop = ToolLoop(parts=parts, knobs=knobs)
        self._toolbox = Toolbox(load_tools(entries_of(knobs), where=f"{WHERE}.tools"), timeout_s=knobs.tool_timeout_s)

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        await self._toolbox.aopen()
        async with self._toolbox.session(data.session, data.row) as session:
            return await self._loop.run(engine, data, session)

    async def aclose(self) -> None:
        await self._toolbox.aclose()


def entries_of(knobs: ToolKnobs) -> Sequence[object]:
    """The tools that the settings name; ConfigError for none."""
    entries = [*(read_tool_file(knobs.tool_config_path) if knobs.tool_config_path else []), *knobs.tools]
    if not entries:
        raise ConfigError(
            "the tool workflow has no tools: name a file in actor_rollout_ref.rollout.multi_turn.tool_config_path, or list them "
            f"in {WHERE}.tools"
        )
    return entries
