"""tool_agent: the policy calls tools, reads their results, and continues until it answers without a call.

Calls stand in the policy's text in a registered format.  Results of tools enter as tokens with response_mask 0.  A call that
cannot be parsed, or that a tool refuses, is answered with an error message, so that the policy can learn from it; both are
counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts
from rlhub.agents.workflows.knobs import ToolKnobs
from rlhub.agents.workflows.registry import WHERE, fill_knobs
from rlhub.agents.workflows.turns import Message, Transcript, TurnTemplate
from rlhub.errors import ConfigError
from rlhub.tools.call_streams import CallPart
from rlhub.tools.formats import ParsedReply
from rlhub.tools.registry import ReplyFormat, reply_format
from rlhub.tools.toolbox import Toolbox, load_tools, read_tool_file
from rlhub.utils.tool_calls import ToolCall, ToolResult, ToolSchema

ELLIPSIS = "\n... (left out) ...\n"


class ToolExecutor(Protocol):
    """The interface that executes the calls of one episode: a session of the toolbox, or an environment."""

    @property
    def schemas(self) -> list[ToolSchema]:
        """Returns the schemas of all tools that the policy may call."""
        ...

    async def execute(self, call: ToolCall) -> ToolResult:
        """Executes a call and returns its result; an error of the call is a result with text too."""
        ...


@dataclass(slots=True, kw_only=True)
class CallCounts:
    """Counts the calls of one episode.  malformed: could not be parsed.  failed: the tool returned an error.  own: the metrics
    that tools return with their results."""

    calls: int = 0
    failed: int = 0
    malformed: int = 0
    truncated: int = 0
    seconds: float = 0.0
    own: dict[str, list[float]] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Returns the counts as metrics. tool_called is 1 if a call succeeded, so that its mean is a share of the episodes.
        tool/<name> is the mean of a tool's own metric over the calls that reported it."""
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
    """Runs episodes with tools, for any ToolExecutor.

    scored: the executor gives the rewards.  If False, the run's reward function scores the response, and the rewards of tools are
    added.
    """

    parts: WorkflowParts
    knobs: ToolKnobs
    scored: bool = False
    form: ReplyFormat = field(init=False)
    template: TurnTemplate = field(init=False)

    def __post_init__(self) -> None:
        knobs, tokenizer = self.knobs, self.parts.tokenizer
        self.form = reply_format(knobs.format, knobs.reasoning_parser, tokenizer, knobs.chat_template_kwargs)
        self.template = TurnTemplate(tokenizer, roles=["tool"], kwargs=knobs.chat_template_kwargs)

    async def run(self, engine: EpisodeEngine, data: EpisodeData, executor: ToolExecutor) -> Trajectory:
        """Runs one episode on the row's prompt, with the tools described in it."""
        ids = self.template.prompt_ids(data, executor.schemas, self.parts.max_prompt_length)
        transcript = Transcript(prompt_ids=ids, budget=self.parts.max_response_length, scored=self.scored)
        counts = CallCounts()
        while await self._turn(engine, data, executor, transcript, counts):
            pass
        return transcript.trajectory(counts.metrics())

    async def _turn(
        self, engine: EpisodeEngine, data: EpisodeData, executor: ToolExecutor, transcript: Transcript, counts: CallCounts
    ) -> bool:
        """Generates one turn and executes its calls; returns whether the policy continues."""
        read = [*transcript.prompt_ids, *transcript.response_ids]
        completion = await transcript.generate(engine, data, self.parts.sampling, most=self.knobs.max_turn_tokens)
        if completion.finish_reason != "stop" and not transcript.remaining:
            return False
        reply = read_reply(self.form, self.template.text(completion.token_ids), executor.schemas, read)
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
        """Returns the results of the calls, which run concurrently, followed by an error for each part that could not be parsed
        as a call."""
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


def read_reply(form: ReplyFormat, text: str, tools: Sequence[ToolSchema], prompt_ids: Sequence[int]) -> ParsedReply:
    """Returns a whole reply with its calls; thoughts that a reasoning parser finds are no part of its text.

    A library's parser takes a malformed call for text, so that only rlhub's own formats report problems.
    """
    if form.parser is None:
        assert form.find_calls is not None, "a format has one of the two"
        return form.find_calls(text)
    parts = form.parser.stream([] if form.find_calls else list(tools), prompt_ids).whole(text)
    said = "".join(part for part in parts if isinstance(part, str))
    if form.find_calls is not None:
        return form.find_calls(said)
    reply, calls = ParsedReply(text=said.strip()), dict[int, dict[str, str]]()
    for part in parts:
        if isinstance(part, CallPart):
            call = calls.setdefault(part.index, {"name": part.name or "", "arguments": ""})
            call["arguments"] += part.arguments
    for call in calls.values():
        reply.add({**call, "arguments": call["arguments"] or "{}"})
    return reply


def shortened(text: str, limit: int) -> str:
    """Returns the beginning and the end of a text, together at most `limit` characters, with a note between them."""
    kept = max(0, limit - len(ELLIPSIS))
    return text[: kept - kept // 2] + ELLIPSIS[:limit] + (text[-(kept // 2) :] if kept >= 2 else "")


class ToolAgent(RolloutWorkflow):
    """Runs episodes with the tools of rollout.multi_turn.tool_config_path and of the workflow's setting `tools`."""

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
    """Returns the entries of all tools that the settings name.  Raises ConfigError if there are none."""
    entries = [*(read_tool_file(knobs.tool_config_path) if knobs.tool_config_path else []), *knobs.tools]
    if not entries:
        raise ConfigError(
            "the tool workflow has no tools: name a file in actor_rollout_ref.rollout.multi_turn.tool_config_path, or list them "
            f"in {WHERE}.tools"
        )
    return entries
