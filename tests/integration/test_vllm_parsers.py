"""vLLM's parsers behind the endpoint: a sample of scripts/checks/vllm_parsers.py, and a conversation that they read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhub.agents.workflows.tool_agent import ToolAgent
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.errors import ConfigError
from rlhub.tools.registry import reply_format
from scripts.checks.vllm_parsers import THOUGHT, TOOL, rows
from tests.support.chatml import chatml_tokenizer
from tests.support.episode_parts import parts, run
from tests.unit.agents.openai_server.endpoint import END, LIMITS, endpoint, tokenizer

pytest.importorskip("vllm")
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_a_sample_of_the_parsers_reads_whole_and_streamed_answers_alike() -> None:
    """One of each kind: tags, special tokens, code, a parser that reads whole answers only, and one that refuses."""
    found = {(row.kind, row.name): row for row in rows(["hermes", "deepseek_v3", "pythonic", "jamba", "openai", "deepseek_r1"])}
    verdicts = {name: row.verdict for (_, name), row in found.items()}
    assert verdicts.pop("openai") == "refuses" and set(verdicts.values()) == {"same"}, found


def test_a_stream_that_is_read_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhub.engines.rollout.vllm import parsers

    monkeypatch.setattr(parsers, "WHOLE_CALLS", {})
    assert [row.verdict for row in rows(["jamba"])] == ["differs"]


def test_an_unknown_parser_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no parser 'qwen3_xlm'; did you mean 'qwen3_xml'"):
        reply_format("vllm:qwen3_xlm", None, tokenizer())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("tool_format", ["vllm:hermes", "hermes"])
async def test_thoughts_and_calls_are_read_and_the_record_is_what_was_sampled(tool_format: str, stream: bool) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "SF"}}\n</tool_call>'
    first, second = f"<think>{THOUGHT}</think>{call}{END}", f"<think>{THOUGHT}</think>It rains.{END}"
    form = reply_format(tool_format, "deepseek_r1", thinker())
    async with endpoint([first, second], find_calls=form.find_calls, parser=form.parser) as at:
        session = at.server.open_session("a", seed=5, limits=LIMITS)
        client = at.client(session)
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]

        async def ask() -> Any:
            given: Any = {"model": "any", "messages": messages, "tools": [TOOL]}
            if not stream:
                return (await client.chat.completions.create(**given)).choices[0].message
            async with client.chat.completions.stream(**given) as events:
                return (await events.get_final_completion()).choices[0].message

        asked = await ask()
        assert asked.reasoning_content == THOUGHT and not asked.content
        assert [json.loads(made.function.arguments) for made in asked.tool_calls] == [{"city": "SF"}]
        messages += [
            asked.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "rain"},
        ]
        answered = await ask()
        assert (answered.reasoning_content, answered.content) == (THOUGHT, "It rains.")
        made = session.trajectory()
        assert made is not None and made.metrics["openai/mismatches"] == 0 and made.metrics["openai/segments"] == 1
        sampled = [token for token, mask in zip(made.response_ids, made.response_mask, strict=True) if mask]
        assert sampled == [*at.engine.ids(first), *at.engine.ids(second)]


def thinker() -> Any:
    made = tokenizer()
    made.add_tokens(["<think>", "</think>"])
    return made


XML = "<tool_call>\n<function=calculator>\n<parameter=expression>\n2+2\n</parameter>\n</function>\n</tool_call>"
HERMES = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("tool_format", "said"),
    [("vllm:qwen3_coder", XML), ("vllm:hermes", HERMES), ("hermes", HERMES)],
    ids=["xml", "hermes", "own"],
)
def test_the_tool_agent_reads_calls_and_thoughts_with_them(tool_format: str, said: str) -> None:
    """The control: without the reasoning parser, the call that the model only thinks of is made in rlhub's own format."""
    own = chatml_tokenizer()
    own.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    thought = f"<think>{HERMES.replace('2+2', '9*9')}</think>"
    made = parts(tools=["calculator"], format=tool_format, reasoning_parser="deepseek_r1")
    made.tokenizer = own
    found = run(ToolAgent(made), Says(own, [f"{thought}{said}", "4"]))
    text = own.decode(found.response_ids)
    assert found.metrics["tool_calls"] == 1 and "<tool_response>\n4\n" in text and "81" not in text
    if tool_format == "hermes":
        made.kwargs = {**made.kwargs, "reasoning_parser": None}
        assert run(ToolAgent(made), Says(own, [f"{thought}{said}", "4"])).metrics["tool_calls"] == 2


class Says:
    """An engine whose answers are given, with the tokens of one tokenizer."""

    def __init__(self, own: Any, replies: list[str]) -> None:
        self._own, self._replies = own, replies

    async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        ids = [*self._own(self._replies.pop(0), add_special_tokens=False)["input_ids"], self._own.eos_token_id]
        return Completion(token_ids=ids, log_probs=[-0.5] * len(ids), finish_reason="stop", versions=[0] * len(ids))
