from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.engines.training.micro_batch import (
    MicroBatchConfig,
    cut,
    cut_units,
    even_cut,
    extend_cut,
    on_device,
    put_rows,
    rows_of,
    take_rows,
    trim,
)

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


def test_cut_by_rows() -> None:
    assert cut([1] * 5, MicroBatchConfig(rows=2)) == [[0, 1], [2, 3], [4]]
    assert cut([1] * 5, MicroBatchConfig()) == [[0, 1, 2, 3, 4]]
    assert cut([], MicroBatchConfig(rows=2)) == []


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(10, 80))
def test_cut_by_tokens(lengths: list[int], budget: int) -> None:
    bins = cut(lengths, MicroBatchConfig(max_tokens=budget))
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in rows) for rows in bins]
    assert all(load <= budget or len(rows) == 1 for load, rows in zip(loads, bins, strict=True))
    assert all(a + b > budget for i, a in enumerate(loads) for b in loads[:i])  # no two passes could have been one


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(1, 3), st.sampled_from([{"rows": 1}, {"rows": 5}, {"max_tokens": 60}, {}]))
def test_units_are_never_cut(lengths: list[int], rows_per_unit: int, limits: dict[str, int]) -> None:
    lengths = lengths[: len(lengths) // rows_per_unit * rows_per_unit]
    config = MicroBatchConfig(**limits)
    passes = [rows_of(units, rows_per_unit) for units in cut_units(lengths, config, rows_per_unit)]
    assert sorted(row for rows in passes for row in rows) == list(range(len(lengths)))
    for rows in passes:
        assert all(row // rows_per_unit * rows_per_unit + step in rows for row in rows for step in range(rows_per_unit))
        assert len(rows) <= max(limits.get("rows", len(lengths)), rows_per_unit)
        total = sum(lengths[row] for row in rows)
        assert total <= limits.get("max_tokens", total) or len(rows) == rows_per_unit
    if rows_per_unit == 1:
        assert passes == cut(lengths, config)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 6))
def test_extend_keeps_rows_and_reaches_the_count(lengths: list[int], more: int) -> None:
    bins = cut(lengths, MicroBatchConfig(rows=4))
    longer = extend_cut(bins, len(bins) + more)
    assert len(longer) == len(bins) + more
    assert sorted(row for rows in longer for row in rows) == list(range(len(lengths)))
    if any(len(rows) > 1 for rows in longer):
        assert all(longer)  # no rank idles while a pass could still be split


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(10, 80), st.integers(0, 4), st.sampled_from([None, 1, 3]), st.sampled_from([1, 2]))
def test_even_cut_keeps_rows_number_and_limits(
    lengths: list[int], budget: int, more: int, max_rows: int | None, rows_per_unit: int
) -> None:
    lengths = lengths[: len(lengths) // rows_per_unit * rows_per_unit]
    totals = [sum(lengths[i : i + rows_per_unit]) for i in range(0, len(lengths), rows_per_unit)]
    limits = MicroBatchConfig(rows=max_rows, max_tokens=budget)
    config = MicroBatchConfig(rows=max_rows and max_rows * rows_per_unit, max_tokens=budget)
    before = cut(totals, limits)
    bins = extend_cut(before, max(len(before), 1) + more)
    even = even_cut(bins, lengths, config, rows_per_unit)
    assert len(even) == len(bins)
    assert sorted(unit for units in even for unit in units) == list(range(len(totals)))
    assert all(len(units) < 2 or sum(totals[unit] for unit in units) <= budget for units in even)
    assert max_rows is None or max(map(len, even)) <= max_rows
    assert [bool(units) for units in even].count(True) == min(len(even), len(totals))  # no pass idles that need not


def test_passes_are_equally_full() -> None:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(50, 1000, (64,), generator=generator).tolist()
    config = MicroBatchConfig(max_tokens=4096)
    bins = cut(lengths, config)
    even = even_cut(bins, lengths, config)

    def loads(passes: list[list[int]]) -> list[int]:
        return [sum(lengths[row] for row in rows) for rows in passes]

    assert min(loads(bins)) < 0.8 * max(loads(bins))  # the control: first-fit leaves its last pass half empty
    assert min(loads(even)) > 0.99 * max(loads(even))
    assert even == even_cut(bins, lengths, config)


def test_without_a_token_budget_the_cut_stays() -> None:
    bins = cut([9, 1, 1, 1, 1], MicroBatchConfig(rows=2))
    assert even_cut(bins, [9, 1, 1, 1, 1], MicroBatchConfig(rows=2)) is bins


def test_take_rows() -> None:
    rows = {"a": torch.arange(6).view(3, 2), "b": torch.tensor([5.0, 6.0, 7.0])}
    assert take_rows(rows, [2, 0])["a"].tolist() == [[4, 5], [0, 1]]
    idle = take_rows(rows, [])
    assert idle["a"].tolist() == [[0, 0]] and idle["b"].tolist() == [0.0]
    assert take_rows(rows, [], fillers=2)["a"].tolist() == [[0, 0], [0, 0]]


def test_on_device_leaves_the_rows_as_they_are() -> None:
    rows = {"a": torch.arange(6).view(3, 2)}
    moved = on_device(rows, torch.device("meta"))["a"]
    assert moved.is_meta and moved.shape == (3, 2) and moved.dtype == torch.int64 and not rows["a"].is_meta


def padded_rows(prompts: list[int], responses: list[int], prompt: int, response: int) -> dict[str, torch.Tensor]:
    columns = torch.arange(prompt + response)
    starts, ends = (torch.tensor(lengths)[:, None] for lengths in (prompts, responses))
    attended = (columns >= prompt - starts) & (columns < prompt + ends)
    ids = torch.where(attended, columns - prompt + 100, 0)
    mask = attended[:, prompt:]
    return {"input_ids": ids, "attention_mask": attended.long(), "response_mask": mask, "uid": torch.tensor(prompts)}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4), st.integers(0, 4), st.integers(0, 4))
def test_a_pass_does_not_depend_on_the_width_of_its_padding(rows: list[tuple[int, int]], left: int, right: int) -> None:
    prompts, responses = [a for a, _ in rows], [b for _, b in rows]
    prompt, response = max([1, *prompts]), max([1, *responses])
    wide = trim(padded_rows(prompts, responses, prompt + left, response + right))
    tight = padded_rows(prompts, responses, prompt, response)
    assert all(torch.equal(wide[name], column) for name, column in tight.items())


def test_results_of_a_trimmed_pass_go_to_their_rows() -> None:
    target, numbers = torch.zeros(3, 4), torch.zeros(3)
    put_rows(target, [2, 0], torch.ones(2, 2))
    put_rows(numbers, [1], torch.tensor([7.0]))
    assert target.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]] and numbers.tolist() == [0, 7, 0]


def test_rows_without_a_response_of_their_own_are_trimmed_too() -> None:
    rows = {"input_ids": torch.tensor([[0, 5, 6, 0]]), "attention_mask": torch.tensor([[0, 1, 1, 0]])}
    assert trim(rows)["input_ids"].tolist() == [[0, 5, 6]]
