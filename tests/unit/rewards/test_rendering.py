"""Rows rendered anew for a model with another tokenizer."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from rlhub.errors import RewardError
from rlhub.rewards.rendering import Rendering, padded, render
from tests.unit.rewards.test_combine_judge import ChatLetters, batch_of
from tests.unit.rewards.test_managers import Letters

SYSTEM = {"role": "system", "content": "s"}


def texts_of(rendered: Any) -> list[str]:
    rows, mask = rendered.batch["input_ids"].tolist(), rendered.batch["attention_mask"].sum(1).tolist()
    return ["".join(map(chr, ids[:length])) for ids, length in zip(rows, mask, strict=True)]


def test_conversations_by_the_other_models_template() -> None:
    """The policy's end token (0) is no text; the prompt comes from the data, not from the policy's tokens."""
    batch = batch_of(["ab\0", "c"], ["q", [SYSTEM, {"role": "user", "content": "u"}]])
    rendered = Rendering(Letters(), ChatLetters(), None)(batch)
    assert texts_of(rendered) == ["<user>q<assistant>ab", "<system>s<user>u<assistant>c"]
    assert rendered.batch["attention_mask"][0].tolist() == [1] * 20 + [0] * (rendered.batch["input_ids"].shape[1] - 20)


def test_long_rows_lose_their_beginning() -> None:
    assert texts_of(Rendering(Letters(), ChatLetters(), 5)(batch_of(["abc", "d"]))) == ["t>abc", "ant>d"]


def test_without_a_template_texts_are_joined_and_ended() -> None:
    plain = ChatLetters()
    plain.chat_template, plain.eos_token_id = None, ord("$")
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert "".join(map(chr, render(plain, messages, generation=False))) == "1+1=2$"
    assert "".join(map(chr, render(plain, messages[:1], generation=True))) == "1+1="
    messages[1]["content"] = "2$"
    assert "".join(map(chr, render(plain, messages, generation=False))) == "1+1=2$"


def test_a_template_that_refuses_the_roles() -> None:
    class Strict(ChatLetters):
        def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
            raise jinja2.TemplateError("no system messages")

    with pytest.raises(RewardError, match="roles system: no system messages"):
        render(Strict(), [SYSTEM], generation=True)


def test_rows_are_padded_on_the_right() -> None:
    batch = padded([[1, 2], [3]]).batch
    assert batch["input_ids"].tolist() == [[1, 2], [3, 0]] and batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert padded([]).batch["input_ids"].shape == (0, 1)
