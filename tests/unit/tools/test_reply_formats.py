"""The names of reply formats: rlhub's own, and those of a library, which need not be installed to be refused."""

from __future__ import annotations

import pytest

from rlhub.tools import registry
from rlhub.tools.formats import parse_hermes
from rlhub.tools.registry import library_format, reply_format, reply_problems


def test_own_formats_need_no_library() -> None:
    form = reply_format("hermes", None, tokenizer=None)
    assert form.find_calls is parse_hermes and form.parser is None
    assert library_format("vllm:qwen3_coder") == ("vllm", "qwen3_coder") and library_format("json") == ("", "json")


def test_problems_are_found_before_a_library_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    (unknown,) = reply_problems("server.tool_format", "hermse", None)
    assert unknown.startswith("server.tool_format: ") and "hermes" in unknown
    (library,) = reply_problems("server.tool_format", "vlm:hermes", None)
    assert "vllm" in library
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert reply_problems("server.tool_format", "json", None) == []
    for form, reasoning in (("vllm:hermes", None), ("json", "qwen3")):
        (missing,) = reply_problems("server.tool_format", form, reasoning)
        assert "vllm is not installed" in missing
