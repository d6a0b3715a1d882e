from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.protocol.columns import num_bytes
from rlhub.protocol.sequences import stored_names, with_padding, without_padding

LENGTHS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=5)


def token_columns(lengths: list[tuple[int, int]], prompt: int, response: int) -> dict[str, torch.Tensor]:
    """Padded columns as generation makes them, with a pad id of 0."""
    places = torch.arange(prompt + response)
    starts, ends = (torch.tensor([pair[side] for pair in lengths], dtype=torch.int64)[:, None] for side in (0, 1))
    attended = (places >= prompt - starts) & (places < prompt + ends)
    ids = torch.randint(1, 50_000, attended.shape) * attended
    written = attended[:, prompt:]
    return {
        "input_ids": ids,
        "attention_mask": attended.long(),
        "responses": ids[:, prompt:],
        "response_mask": (written & (torch.rand(written.shape) < 0.7)).long(),
        "policy_version": torch.randint(0, 9, written.shape) * written,
        "rollout_log_probs": torch.randn(written.shape) * written,
        "image": torch.randn(len(lengths), 2, 3),
    }


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 3), st.integers(0, 3))
def test_padding_comes_back_as_wide_as_the_longest_row(lengths: list[tuple[int, int]], left: int, right: int) -> None:
    prompt, response = (max([1, *(pair[side] for pair in lengths)]) for side in (0, 1))
    wide = token_columns(lengths, prompt + left, response + right)
    read = with_padding(without_padding(wide))
    assert read.keys() == wide.keys()
    for name, column in wide.items():
        whole = column[:, left : left + prompt + response] if name in ("input_ids", "attention_mask") else column
        whole = whole if name == "image" else whole[:, : prompt + response if whole is not column else response]
        assert torch.equal(read[name], whole) and read[name].dtype == column.dtype, name


def test_stored_columns_are_narrow_and_follow_the_tokens() -> None:
    lengths = [(3, 2)] * 9 + [(3, 64)]
    stored = without_padding(token_columns(lengths, 3, 64))
    assert {name: column.dtype for name, column in stored.items() if name != "image"} == {
        "prompts": torch.int32,
        "responses": torch.int32,
        "response_mask": torch.bool,
        "policy_version": torch.int32,
        "rollout_log_probs": torch.float32,
    }
    tokens = sum(response for _, response in lengths)
    assert num_bytes(stored["responses"]) == 4 * tokens + 8 * len(lengths)


def test_later_columns_of_a_batch_are_cut_to_its_responses() -> None:
    values, other = torch.tensor([[1.0, 0.0], [2.0, 3.0]]), torch.ones(2, 2)
    stored = without_padding({"values": values, "features": other}, torch.tensor([1, 2]))
    assert [row.tolist() for row in stored["values"].unbind()] == [[1.0], [2.0, 3.0]]
    assert stored["features"] is other
    assert torch.equal(with_padding({"values": stored["values"]})["values"], values)


def test_a_batch_without_responses_is_stored_as_it_is() -> None:
    values = torch.ones(2, 3)
    assert without_padding({"values": values})["values"] is values


def test_tokens_are_read_from_prompts_and_responses() -> None:
    assert stored_names(["attention_mask", "values", "input_ids", "responses"]) == ["prompts", "responses", "values"]
    assert stored_names(["values"]) == ["values"]
