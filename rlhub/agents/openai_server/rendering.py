"""Chat messages -> token ids: whole for a first turn, and what is added between two answers for a later one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhub.agents.openai_server.bodies import Message
from rlhub.agents.openai_server.errors import ApiError
from rlhub.agents.workflows.turns import TurnTemplate
from rlhub.errors import ConfigError


class Renderer:
    """tokenizer: the policy's.  Without a chat template the contents are put together."""

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        # No roles: a template that cannot go on after an answer only means that each request is a segment of its own.
        self._turns = TurnTemplate(tokenizer, roles=(), kwargs=template_kwargs) if tokenizer.chat_template else None

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The whole conversation, up to where the answer begins.  ApiError where the template refuses it."""
        if self._turns is None:
            return self.text_ids("".join(message["content"] for message in messages), special=True)
        try:
            return self.text_ids(self._turns.prompt(self._plain(messages), tools), special=False)
        except ConfigError as error:
            raise ApiError(f"messages: {error}", param="messages") from error

    def added(self, new: Sequence[Message], *, turn_ended: bool) -> list[int] | None:
        """What comes between an answer and the next one; None: the template cannot be continued from an answer.

        turn_ended: the policy wrote the end-of-turn token itself.
        """
        if self._turns is None:
            return self.text_ids("".join(message["content"] for message in new), special=False)
        try:
            return self._turns.between(self._plain(new), turn_ended=turn_ended)
        except ConfigError:
            return None

    def _plain(self, messages: Sequence[Message]) -> list[Message]:
        """As templates know them: no developer's role, and a tool's output cannot end its own turn."""
        assert self._turns is not None
        made = []
        for message in messages:
            match message["role"]:
                case "developer":
                    made.append({**message, "role": "system"})
                case "tool":
                    made.append({**message, "content": self._turns.neutral(message["content"])})
                case _:
                    made.append(message)
        return made

    def text_ids(self, text: str, *, special: bool) -> list[int]:
        """special: with the tokens that the tokenizer puts around a text by itself."""
        return list(self._tokenizer([text], add_special_tokens=special)["input_ids"][0])

    def decode(self, ids: Sequence[int]) -> str:
        """Text for people and parsers: without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token(self, token_id: int) -> str:
        """One token as text."""
        return str(self._tokenizer.decode([token_id]))
