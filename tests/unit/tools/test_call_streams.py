"""However a reply comes in pieces, the same is told of it: what the format's parser finds, as early as it is sure."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.tools.call_streams import CallPart, PlainText, WholeReply, call_stream
from rlhub.tools.formats import ParsedReply, parse_hermes, parse_json
from rlhub.utils.tool_calls import ToolCall

FORMATS = {"hermes": parse_hermes, "json": parse_json}
Read = tuple[str, list[tuple[str, str]]]


def read(parse: Callable[[str], ParsedReply], pieces: list[str]) -> Read:
    """Text and calls, put together."""
    stream = call_stream(parse)
    text, calls = "", list[tuple[str, str]]()
    for part in [part for piece in pieces for part in stream.add(piece)] + stream.end():
        if isinstance(part, str):
            text += part
            continue
        assert (part.name is not None) == (part.index == len(calls))
        if part.name is not None:
            calls.append((part.name, ""))
        name, arguments = calls[part.index]
        calls[part.index] = (name, arguments + part.arguments)
    assert stream.num_closed == len(calls)
    return text, calls


def call(name: str, arguments: object, order: int = 0) -> str:
    """As models write it: in one of several orders, spaces and names."""
    forms = (
        json.dumps({"name": name, "arguments": arguments}),
        json.dumps({"name": name, "parameters": arguments}, indent=1),
        json.dumps({"arguments": arguments, "name": name}),
        json.dumps({"name": name, "arguments": json.dumps(arguments)}),
        json.dumps({"name": name, "arguments": arguments, "id": "{"}, separators=(",", ":"), ensure_ascii=False),
    )
    return forms[order]


def tagged(inner: str) -> str:
    return f"<tool_call>{inner}</tool_call>"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\{}\n\u00e9 ', max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text('k"}', max_size=2), inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(
    call,
    st.sampled_from(["add", "f{", 'q"u', "name"]),
    st.dictionaries(st.text("ab{", max_size=2), values, max_size=2),
    st.integers(0, 4),
)
prose = st.text("ab <>\n{}", max_size=6) | st.sampled_from(
    ["<tool_", "<tool_call", "</tool_call>", '{"a": 1}', '{"name": "x"}', "```json\n"]
)
broken = st.sampled_from(
    [
        "<tool_call>",
        "<tool_call>nothing</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}',
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        '{"name": "f", "arguments": {"a": ',
        '{"name": "f", "arguments": {}, "id"',
        '{"name": "f", "arguments": {}] or',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"a": {"name": "f", "arguments": {}}',
    ]
)


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@given(
    st.data(), st.lists(prose | calls | calls.map(tagged) | broken, max_size=5).map("".join), st.sampled_from(["hermes", "json"])
)
@settings(max_examples=30, deadline=None)
def test_how_a_reply_is_cut_changes_nothing(data: st.DataObject, text: str, form: str) -> None:
    whole = read(FORMATS[form], [text])
    assert read(FORMATS[form], data.draw(cut(text))) == whole
    assert read(FORMATS[form], list(text)) == whole
    if not whole[1]:
        assert whole[0] == text, "plain text is lost"


@given(
    st.lists(prose.filter(lambda text: "{" not in text and "<" not in text) | calls, max_size=5),
    st.sampled_from(["hermes", "json"]),
)
@settings(max_examples=20, deadline=None)
def test_whole_calls_are_read_as_the_parser_reads_them(parts: list[str], form: str) -> None:
    """A text in which every call is as it should be."""
    text = "".join(tagged(part) if form == "hermes" and part.startswith("{") else part for part in parts)
    parsed = FORMATS[form](text)
    said, found = read(FORMATS[form], list(text))
    assert parsed.problems == []
    assert [ToolCall(name=name, arguments=json.loads(arguments)) for name, arguments in found] == parsed.calls
    assert said.strip() == parsed.text


@pytest.mark.parametrize("form", ["hermes", "json"])
def test_all_is_told_as_soon_as_it_is_sure(form: str) -> None:
    inner = call("add", {"a": "some long text", "b": {"c": [1, 2]}})
    before, after = "So, {1} < {2}: ", " and so on"
    text = before + (tagged(inner) if form == "hermes" else inner) + after
    stream, said, arguments = call_stream(FORMATS[form]), "", ""
    for count, letter in enumerate(text, start=1):
        for part in stream.add(letter):
            said, arguments = (said + part, arguments) if isinstance(part, str) else (said, arguments + part.arguments)
        told = text[:count]
        if count <= len(before):
            assert len(told) - len(said) <= 2  # a space, and a brace or what may be a tag
        begins = text.index("{", text.index("arguments"))
        if begins < count < text.index("}}}"):
            assert told[begins:] == arguments
    assert said == before.strip() + " " + after and json.loads(arguments) == {"a": "some long text", "b": {"c": [1, 2]}}


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", "a <tool_calx", ("a <tool_calx", [])),
        ("hermes", "a <tool_call>{it", ("a <tool_call>{it", [])),
        ("hermes", tagged('{"name": "f"}'), ("", [("f", "{}")])),
        ("hermes", tagged('{"name": "f", "arguments": {"a": oops}}') + " b", ("b", [("f", '{"a": oops}')])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> b', ("b", [("f", '{"a": "')])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} ok', ("} ok", [("f", "{}")])),
        ("hermes", tagged("no") + tagged('{"name": "f"}'), ("<tool_call>no</tool_call>", [("f", "{}")])),
        ("json", "f(x) = {x | x > 0}", ("f(x) = {x | x > 0}", [])),
        ("json", ' {"name": "f"} ', (' {"name": "f"} ', [])),
        ("json", '{"name": "f", "arguments": {}] b', ("] b", [("f", "{}")])),
        ("json", '{"a": {"name": "f", "arguments": {}}', ('{"a":', [("f", "{}")])),
    ],
)
def test_what_is_no_call_is_text_and_a_call_that_breaks_stays_one(form: str, text: str, expected: Read) -> None:
    assert read(FORMATS[form], list(text)) == expected


def test_other_formats_are_read_at_the_end_and_text_without_calls_at_once() -> None:
    whole = WholeReply(lambda text: parse_hermes(text))
    assert whole.add(" a " + tagged(call("f", {}))) == [] and whole.num_closed == 0
    assert whole.end() == ["a", CallPart(index=0, name="f", arguments="{}")] and whole.num_closed == 1
    assert read(lambda text: parse_hermes(text), [" a "]) == (" a ", [])
    assert isinstance(call_stream(None), PlainText) and call_stream(None).add("<tool_call>") == ["<tool_call>"]
