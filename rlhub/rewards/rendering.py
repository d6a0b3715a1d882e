"""Renders the texts of a batch for a model with another tokenizer: questions, answers, and conversations in its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jinja2
import torch

from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.rewards.rows import Decoder, response_texts

Prompt = str | Sequence[Mapping[str, Any]]
"""A row's prompt as the data has it (column `raw_chat`): text, or chat messages."""


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any
    pad_token_id: int | None
    eos_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


def messages_of(prompt: Prompt) -> list[dict[str, Any]]:
    """Returns the prompt as chat messages; a text becomes a user's message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def question_of(prompt: Prompt) -> str:
    """Returns the prompt as text: the content of a single message, or several contents with their roles."""
    messages = messages_of(prompt)
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def render(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], *, generation: bool) -> list[int]:
    """Returns the token ids of a conversation by the tokenizer's chat template.

    Without a template the contents are joined, and a whole conversation ends with the end-of-sequence token.  Raises RewardError
    where the template refuses the conversation.
    """
    if not tokenizer.chat_template:
        text = "".join(str(message["content"]) for message in messages)
        ids = list(tokenizer([text], add_special_tokens=True)["input_ids"][0])
        ended = generation or tokenizer.eos_token_id is None or ids[-1:] == [tokenizer.eos_token_id]
        return ids if ended else [*ids, int(tokenizer.eos_token_id or 0)]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise RewardError(f"the scoring model's chat template refuses messages of the roles {roles}: {error}") from error
    return list(tokenizer([text], add_special_tokens=False)["input_ids"][0])


class Rendering:
    """Renders the rows of a rollout batch for another model.

    max_length: tokens of the longest row; longer rows lose their beginning; None: no limit.
    """

    def __init__(self, policy: Decoder, tokenizer: ChatTokenizer, max_length: int | None) -> None:
        self.policy, self.tokenizer, self.max_length = policy, tokenizer, max_length

    def __call__(self, batch: DataProto) -> DataProto:
        """Returns input_ids and attention_mask (rows, longest), right padded."""
        texts = response_texts(batch, self.policy)
        prompts = batch.non_tensor_batch["raw_chat"]
        rows = [
            render(self.tokenizer, [*messages_of(prompt), {"role": "assistant", "content": text}], generation=False)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return padded([row[-self.max_length :] if self.max_length else row for row in rows])


def padded(rows: Sequence[Sequence[int]]) -> DataProto:
    """Returns input_ids and attention_mask, both (rows, longest) int64, padded on the right with 0."""
    width = max(map(len, rows), default=1)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.int64)
        mask[row, : len(tokens)] = 1
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask})
