"""Conversations for supervised fine-tuning: with templates in the styles of well-known families, the loss is on exactly what
the assistant writes, to the token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhub.config.sections.sft import SFTDataConfig
from rlhub.data.supervised import SFTDataset
from rlhub.errors import DataError
from tests.unit.data import templates

QWEN = templates.byte_tokenizer(templates.CHATML, eos="<|im_end|>", specials=("<|im_start|>",))
QWEN_BASE = templates.byte_tokenizer(templates.CHATML, eos="<|endoftext|>", specials=("<|im_start|>", "<|im_end|>"))
LLAMA3 = templates.byte_tokenizer(
    templates.HEADERS, eos="<|eot_id|>", bos="<|begin_of_text|>", specials=("<|start_header_id|>", "<|end_header_id|>")
)
THINKING = templates.byte_tokenizer(templates.THINKING, eos="<|im_end|>", specials=("<|im_start|>",))


def says(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TWO_TURNS = [says("user", "1"), says("assistant", "one"), says("user", "2"), says("assistant", "two")]


def dataset(tmp_path: Path, tokenizer: Any, messages: list[dict[str, Any]], config: Any = None, **columns: Any) -> SFTDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages, **columns}) + "\n")
    return SFTDataset(SFTDataConfig(**(config or {})), str(path), tokenizer)


def spans(data: SFTDataset, tokenizer: Any) -> list[tuple[str, bool]]:
    """The conversation as stretches of `(text, learned)`, read from a batch as an engine reads it."""
    batch = data.batch(np.array([0])).batch
    ids = batch["input_ids"][0].tolist()
    learned = [0] * (len(ids) - batch["response_mask"].shape[1]) + batch["response_mask"][0].tolist()
    found: list[tuple[list[int], bool]] = []
    for token, flag in zip(ids, learned, strict=True):
        if not found or found[-1][1] != bool(flag):
            found.append(([], bool(flag)))
        found[-1][0].append(token)
    return [(tokenizer.decode(tokens), flag) for tokens, flag in found]


def learned(data: SFTDataset, tokenizer: Any) -> list[str]:
    return [text for text, flag in spans(data, tokenizer) if flag]


def test_system_prompts_given_and_by_default(tmp_path: Path) -> None:
    given = spans(dataset(tmp_path, QWEN, [says("system", "Be brief."), *TWO_TURNS]), QWEN)
    assert given == [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n", False),
        ("one<|im_end|>", True),
        ("\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n", False),
        ("two<|im_end|>", True),
    ]
    by_default = spans(dataset(tmp_path, QWEN, TWO_TURNS), QWEN)
    assert by_default[0][0].startswith("<|im_start|>system\nYou help.<|im_end|>\n") and by_default[1:] == given[1:]


def test_headers_and_a_beginning_of_text(tmp_path: Path) -> None:
    found = spans(dataset(tmp_path, LLAMA3, [TWO_TURNS[0], says("assistant", " one \n"), *TWO_TURNS[2:]]), LLAMA3)
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert found == [
        ("<|begin_of_text|>" + header.format("user") + "1<|eot_id|>" + header.format("assistant"), False),
        ("one<|eot_id|>", True),
        (header.format("user") + "2<|eot_id|>" + header.format("assistant"), False),
        ("two<|eot_id|>", True),
    ]


def test_consecutive_turns_of_one_role(tmp_path: Path) -> None:
    messages = [says("user", "1"), says("user", "2"), says("assistant", "a"), says("assistant", "b"), says("user", "bye")]
    assert learned(dataset(tmp_path, QWEN, messages), QWEN) == ["a<|im_end|>", "b<|im_end|>"]
    text = "".join(text for text, _ in spans(dataset(tmp_path, QWEN, messages), QWEN))
    assert "user\n1<|im_end|>\n<|im_start|>user\n2<|im_end|>" in text and "bye" not in text


def test_tool_calls_are_learned_and_tool_results_are_not(tmp_path: Path) -> None:
    call = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [
        says("user", "1+1"),
        says("assistant", None, tool_calls=call),
        says("tool", "2", tool_calls=None),
        says("tool", "two"),
        says("assistant", "It is 2."),
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    data = dataset(tmp_path, QWEN, messages, tools=tools)
    found = spans(data, QWEN)
    assert found[0][0].startswith("<|im_start|>system\nYou help.\nTool: ") and '"name": "add"' in found[0][0]
    assert [text for text, flag in found if flag] == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "It is 2.<|im_end|>",
    ]
    assert "<tool_response>\n2\n</tool_response><tool_response>\ntwo\n</tool_response><|im_end|>" in found[2][0]


def test_tools_of_another_form_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column 'tools': must be a list of JSON schemas, got str"):
        dataset(tmp_path, QWEN, TWO_TURNS, tools='[{"name": "add"}]')
    assert learned(dataset(tmp_path, QWEN, TWO_TURNS, tools=None), QWEN) == ["one<|im_end|>", "two<|im_end|>"]


def test_only_tool_calls_may_stand_without_content(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="message 1: 'content' must be text, got NoneType"):
        dataset(tmp_path, QWEN, [says("user", "1"), says("assistant", None)])


def test_a_turn_that_ends_in_another_token_than_the_text(tmp_path: Path) -> None:
    """A base model's tokenizer: turns end with a token of the template, the text with the end-of-sequence token."""
    found = learned(dataset(tmp_path, QWEN_BASE, TWO_TURNS), QWEN_BASE)
    assert found == ["one<|im_end|>", "two<|im_end|><|endoftext|>"]


WORDS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "one", "two", "three", "Be", "brief.")


def test_instructions_without_a_generation_prompt(tmp_path: Path) -> None:
    tokenizer = templates.spaced_tokenizer(templates.INSTRUCTIONS, words=WORDS)
    data = dataset(tmp_path, tokenizer, [says("system", "Be brief."), *_worded(TWO_TURNS)])
    item = data.demonstrations[0]
    tokens = tokenizer.convert_ids_to_tokens(item.tokens)
    assert [token for token, flag in zip(tokens, item.learned, strict=True) if flag] == ["▁one", "▁", "</s>", "▁two", "▁", "</s>"]
    whole = tokenizer.apply_chat_template([says("system", "Be brief."), *_worded(TWO_TURNS)], tokenize=False)
    assert item.tokens == tokenizer(whole, add_special_tokens=False)["input_ids"]
    # The control: an answer tokenized apart would begin with a space too many.
    apart = tokenizer(" one </s>", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(apart)[:2] == ["▁", "▁one"]


def _worded(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    words = {"1": "one", "2": "three"}
    return [says(m["role"], words.get(m["content"], m["content"])) for m in messages]


def test_a_strict_template_says_what_it_wants(tmp_path: Path) -> None:
    tokenizer = templates.spaced_tokenizer(templates.INSTRUCTIONS, words=WORDS)
    with pytest.raises(DataError, match="row 1, column 'messages': the chat template refuses.*must alternate"):
        dataset(tmp_path, tokenizer, [says("user", "one"), says("user", "two"), says("assistant", "three")])


def test_a_token_across_the_border_of_an_answer_is_cut_there(tmp_path: Path) -> None:
    """The prompt is what it is in generation; the answer's first token does not reach back into it."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = templates.spaced_tokenizer(template, words=("one", "two", "onetwo"))
    item = dataset(tmp_path, tokenizer, [says("user", "one"), says("assistant", "two")]).demonstrations[0]
    assert tokenizer.convert_ids_to_tokens(tokenizer("onetwo", add_special_tokens=False)["input_ids"]) == ["▁onetwo"]
    tokens = tokenizer.convert_ids_to_tokens(item.tokens)
    assert list(zip(tokens, item.learned, strict=True)) == [("▁one", 0), ("▁two", 1), ("</s>", 1)]


def test_thoughts_that_later_turns_drop(tmp_path: Path) -> None:
    data = dataset(tmp_path, THINKING, TWO_TURNS[:2])
    assert learned(data, THINKING) == ["<think>\n\n</think>\n\none<|im_end|>"]
    with pytest.raises(DataError, match="rewrites turns before message 1; give each answer a row"):
        dataset(tmp_path, THINKING, TWO_TURNS)


@pytest.mark.parametrize(
    ("truncation", "max_length", "expected"),
    [
        ("right", 44, ["one<|im_end|>"]),  # in the second question
        ("right", -2, ["one<|im_end|>", "tw"]),  # in the second answer
        ("left", -3, ["one<|im_end|>", "two<|im_end|>"]),  # in the system prompt
        ("left", 28, ["e<|im_end|>", "two<|im_end|>"]),  # in the first answer, whose first token nothing predicts
        ("left", 3, ["o<|im_end|>"]),  # in the second answer
    ],
)
def test_a_cut_anywhere_keeps_the_mask_on_its_tokens(
    tmp_path: Path, truncation: str, max_length: int, expected: list[str]
) -> None:
    whole = dataset(tmp_path, QWEN, TWO_TURNS).demonstrations[0]
    limit = max_length if max_length > 0 else len(whole.tokens) + max_length
    data = dataset(tmp_path, QWEN, TWO_TURNS, config={"truncation": truncation, "max_length": limit})
    item = data.demonstrations[0]
    kept = slice(len(whole.tokens) - limit, None) if truncation == "left" else slice(limit)
    assert item.tokens == whole.tokens[kept] and item.learned == whole.learned[kept]
    assert learned(data, QWEN) == expected
