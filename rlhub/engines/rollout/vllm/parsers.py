"""vLLM's parsers of tool calls and reasoning, by the names of vLLM's own registries, as parsers of the endpoint's answers.

Imports vLLM: see `environment`.  Source: vllm/parser/AGENTS.md, where a Parser composes a reasoning and a tool parser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import Parser, ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from rlhub.errors import ConfigError
from rlhub.registry import suggest
from rlhub.tools.call_streams import CallPart, CallStream, ReasoningPart, ReplyPart

WHOLE_CALLS = {
    "hunyuan_a13b": "a stream has the calls' opening mark as text",
    "jamba": "a streamed call's arguments lack characters",
    "minicpm5": "a stream has the first call as text, too",
    "phi4_mini_json": "no calls are found in a stream",
}
WHOLE_THOUGHTS = {
    "granite": "a streamed thought has the first word of the answer's mark",
    "hunyuan_a13b": "a stream has thoughts and marks as text",
}
"""Tool and reasoning parsers of vLLM 0.32 that read whole answers right and streams wrong: what they read is sent at the answer's
end.  `scripts/checks/vllm_parsers.py --streams` shows them."""
TRIED = {"type": "function", "function": {"name": "tried", "description": "", "parameters": {"type": "object", "properties": {}}}}


class VllmReplies:
    """Parses replies with one of vLLM's tool parsers, one of its reasoning parsers, or both; "" for none.

    Raises ConfigError for a name that vLLM does not have, or that refuses the tokenizer.
    """

    def __init__(
        self, tool_format: str, reasoning_parser: str, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        _check("tool_format", tool_format, ToolParserManager.list_registered())
        _check("reasoning_parser", reasoning_parser, ReasoningParserManager.list_registered())
        self._tokenizer, self._calls = tokenizer, bool(tool_format)
        self._kwargs = {"chat_template_kwargs": dict(template_kwargs or {})}
        self._whole_only = tool_format in WHOLE_CALLS or reasoning_parser in WHOLE_THOUGHTS
        added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._special = frozenset(tokenizer.all_special_tokens)
        told = " and ".join(filter(None, (tool_format, reasoning_parser)))
        try:
            self._parser_class = self._composed(tool_format, reasoning_parser)
            self.stream([TRIED], []).whole("x")
        except Exception as error:
            raise ConfigError(f"vLLM's parser {told} cannot be used here: {_root(error)}") from error

    def _composed(self, tool_format: str, reasoning_parser: str) -> type[Parser]:
        found: type[Parser] | None = ParserManager.get_parser(
            tool_format or None, reasoning_parser or None, True, tokenizer=self._tokenizer
        )
        assert found is not None, "a parser is named"
        return found

    def stream(self, tools: Sequence[dict[str, Any]], prompt_ids: Sequence[int]) -> CallStream:
        """Returns the parser of one reply."""
        chosen = {"tools": list(tools), "tool_choice": "auto"} if tools and self._calls else {}
        request = ChatCompletionRequest(model="", messages=[{"role": "user", "content": ""}], **chosen)
        parser = self._parser_class(self._tokenizer, request.tools, **self._kwargs)
        read = _VllmStream(self, parser, parser.adjust_request(request), list(prompt_ids))
        return _Whole(read) if self._whole_only else read

    def pieces(self, text: str) -> list[tuple[str, list[int]]]:
        """Returns a text in pieces with their tokens, in which each added token is alone."""
        found, start = [], 0
        for match in self._added.finditer(text):
            found += [text[start : match.start()], match[0]]
            start = match.end()
        return [(piece, self._ids(piece)) for piece in (*found, text[start:]) if piece]

    def shown(self, piece: str, request: ChatCompletionRequest) -> str:
        """Returns the text of a piece that a parser sees, which leaves special tokens out unless it has asked for them."""
        return "" if request.skip_special_tokens and piece in self._special else piece

    def _ids(self, piece: str) -> list[int]:
        return list(self._tokenizer.encode(piece, add_special_tokens=False))


class _VllmStream(CallStream):
    """Parses one reply.  The last piece waits for the next one, because vLLM's parsers are told with it that the reply ends."""

    def __init__(self, replies: VllmReplies, parser: Parser, request: ChatCompletionRequest, prompt_ids: list[int]) -> None:
        super().__init__()
        self._replies, self._parser, self._request, self._prompt_ids = replies, parser, request, prompt_ids
        self._waiting: tuple[str, list[int]] = ("", [])
        self._indices: dict[int, int] = {}  # vLLM's number of a call -> ours, without gaps

    def add(self, text: str) -> list[ReplyPart]:
        parts: list[ReplyPart] = []
        for piece in self._replies.pieces(text):
            if self._waiting[0]:
                parts += self._delta(finished=False)
            self._waiting = piece
        return parts

    def end(self) -> list[ReplyPart]:
        parts = self._delta(finished=True)
        self.num_closed = len(self._indices)
        return parts

    def _delta(self, *, finished: bool) -> list[ReplyPart]:
        piece, ids = self._waiting
        delta = self._parser.parse_delta(
            self._replies.shown(piece, self._request), ids, self._request, self._prompt_ids, finished=finished
        )
        if delta is None:
            return []
        parts: list[ReplyPart] = [ReasoningPart(text=delta.reasoning)] if delta.reasoning else []
        parts += [delta.content] if delta.content else []
        for call in delta.tool_calls:
            parts += self._call(call.index, call.function.name if call.function else None, call.function)
        return parts

    def _call(self, index: int, name: str | None, function: Any) -> list[ReplyPart]:
        new = name is not None and index not in self._indices
        if new:
            self._indices[index] = len(self._indices)
        if index not in self._indices:
            return []
        arguments = (function.arguments or "") if function is not None else ""
        return [CallPart(index=self._indices[index], name=name if new else None, arguments=arguments)]

    def whole(self, text: str) -> list[ReplyPart]:
        """Parses with vLLM's parser of whole replies."""
        pieces = self._replies.pieces(text)
        shown = "".join(self._replies.shown(piece, self._request) for piece, _ in pieces)
        self._parser.set_prompt_token_ids(self._prompt_ids)
        ids = [token for _, piece_ids in pieces for token in piece_ids]
        reasoning, content, calls = self._parser.parse(shown, self._request, True, ids)
        self.num_closed = len(calls or ())
        parts: list[ReplyPart] = [ReasoningPart(text=reasoning)] if reasoning else []
        parts += [content] if content else []
        return parts + [CallPart(index=n, name=call.name, arguments=call.arguments) for n, call in enumerate(calls or ())]


class _Whole(CallStream):
    """Reads a reply with a parser that reads whole ones only."""

    def __init__(self, read: _VllmStream) -> None:
        super().__init__()
        self._read, self._text = read, ""

    def add(self, text: str) -> list[ReplyPart]:
        self._text += text
        return []

    def end(self) -> list[ReplyPart]:
        parts = self._read.whole(self._text)
        self.num_closed = self._read.num_closed
        return parts


def _root(error: BaseException) -> BaseException:
    """Returns the first error of a chain, which vLLM's own hide."""
    while (before := error.__cause__) is not None:
        error = before
    return error


def _check(setting: str, name: str, known: Sequence[str]) -> None:
    if name and name not in known:
        raise ConfigError(f"{setting}: vLLM has no parser {name!r}{suggest(name, known) or ';'} it has: {', '.join(known)}")
