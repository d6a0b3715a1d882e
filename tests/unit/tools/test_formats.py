"""Calls in the two formats, and what only looks like one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.tools.formats import parse_hermes, parse_json
from rlhub.tools.registry import TOOL_FORMATS
from rlhub.utils.tool_calls import ToolCall

GOOD = '{"name": "add", "arguments": {"a": 1}}'
CALL = ToolCall(name="add", arguments={"a": 1})


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        (f"<tool_call>{GOOD}</tool_call>", [CALL], ""),
        (f"So:\n<tool_call>\n{GOOD}\n</tool_call>\nand <tool_call>{GOOD}</tool_call>.", [CALL, CALL], "So:\n\nand ."),
        ("no call", [], "no call"),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [CALL], ""),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall(name="now", arguments={})], ""),
        (GOOD, [], GOOD),
    ],
)
def test_hermes(text: str, calls: list[ToolCall], rest: str) -> None:
    reply = parse_hermes(text)
    assert reply.calls == calls and reply.text == rest and not reply.problems


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"<tool_call>{GOOD}", "not closed"),
        ("<tool_call>{'name': 'add'}</tool_call>", "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "not a list"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'needs a "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'needs a "name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object, not a list"),
        ('<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', "not valid JSON: Expecting value: line 1 column 1"),
        (r'<tool_call>{"name": "add", "arguments": "{\"a\": 1 \"b\": 2}"}</tool_call>', "delimiter: line 1 column 9 (char 8)"),
        (r'<tool_call>{"name": "add", "arguments": "\"a\""}</tool_call>', "must be an object, not a str"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "not valid JSON"),
    ],
)
def test_hermes_problems(text: str, problem: str) -> None:
    reply = parse_hermes(text)
    assert not reply.calls and len(reply.problems) == 1 and problem in reply.problems[0]


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        (GOOD, [CALL], ""),
        (f"```json\n{GOOD}\n```", [CALL], "```json\n\n```"),
        ('{"name": "add", "parameters": {"a": 1}}', [CALL], ""),
        (f'The set {{1, 2}} and {{"x": 1}}; {GOOD}', [CALL], 'The set {1, 2} and {"x": 1};'),
        ('{"name": "Ada"}', [], '{"name": "Ada"}'),
        ("{" * 50, [], "{" * 50),
        ("f{", [], "f{"),
    ],
)
def test_json(text: str, calls: list[ToolCall], rest: str) -> None:
    reply = parse_json(text)
    assert reply.calls == calls and reply.text == rest and not reply.problems


def test_json_problems() -> None:
    reply = parse_json('{"name": "add", "arguments": {"a": 1}')
    assert not reply.calls and "not a valid JSON object" in reply.problems[0]
    assert "must be an object" in parse_json('{"name": "add", "arguments": 3}').problems[0]


@pytest.mark.parametrize("text", ['{"a":' * 20_000, "{" * 100_000, '{"name": ' * 10_000, "<tool_call>" * 20_000])
def test_no_text_takes_long(text: str) -> None:
    started = time.thread_time()  # what they compute, however long others had the core
    for name in TOOL_FORMATS.names():
        TOOL_FORMATS.get(name)(text)
    assert time.thread_time() - started < 2.0


@settings(max_examples=30, deadline=None)
@given(st.text(alphabet='{}[]",:ntame1 <>/_cl', max_size=80))
def test_any_text_is_parsed(text: str) -> None:
    for name in TOOL_FORMATS.names():
        reply = TOOL_FORMATS.get(name)(text)
        assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in reply.calls)
