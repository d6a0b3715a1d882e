"""Chat messages -> token ids, whole for a first turn and as what is added for a later one.

What is added is read off a rendered conversation whose answer is a marker: everything after the marker is the template's.  So
a template may write earlier answers otherwise than the last (thoughts left out, contents trimmed), and the tokens that the
policy sampled are never made from text again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2

from rlhub.workflows.openai_server.bodies import Message
from rlhub.workflows.openai_server.errors import ApiError

MARKER = "Q7answerQ7"
QUESTION: Message = {"role": "user", "content": "Q7questionQ7"}


class Renderer:
    """tokenizer: the policy's.  Without a chat template the contents are put together."""

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> None:
        self._tokenizer, self._kwargs = tokenizer, dict(template_kwargs or {})

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The whole conversation, up to where the answer begins.  ApiError where the template refuses it."""
        if not self._tokenizer.chat_template:
            return self.text_ids("".join(message["content"] for message in messages), special=True)
        try:
            return self.text_ids(self._render(messages, tools), special=False)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ApiError(f"messages: the model's chat template refuses them: {error}", param="messages") from error

    def added(self, new: Sequence[Message], tools: Sequence[dict[str, Any]], last: int | None) -> list[int] | None:
        """What comes between an answer that ended in the token `last` and the next one.

        last: None where the answer was cut off.  None: the template cannot be continued from an answer.
        """
        if not self._tokenizer.chat_template:
            return self.text_ids("".join(message["content"] for message in new), special=False)
        conversation = [QUESTION, {"role": "assistant", "content": MARKER}, *new]
        try:
            before, found, text = self._render(conversation, tools).rpartition(MARKER)
        except (jinja2.TemplateError, TypeError, ValueError):
            return None
        if not found or QUESTION["content"] not in before:
            return None
        ending = self._tokenizer.decode([last]) if last is not None else ""
        return self.text_ids(text.removeprefix(ending), special=False)

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        plain = [{**message, "role": "system"} if message["role"] == "developer" else dict(message) for message in messages]
        text = self._tokenizer.apply_chat_template(
            plain, tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **self._kwargs
        )
        return str(text)

    def text_ids(self, text: str, *, special: bool) -> list[int]:
        """special: with the tokens that the tokenizer puts around a text by itself."""
        return list(self._tokenizer([text], add_special_tokens=special)["input_ids"][0])

    def decode(self, ids: Sequence[int]) -> str:
        """Text for people and parsers: without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token(self, token_id: int) -> str:
        """One token as text."""
        return str(self._tokenizer.decode([token_id]))
