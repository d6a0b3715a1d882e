"""PreferenceDataset: both answers of a pair behind the same prompt, what is refused, and what is left out."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlhub.config.sections.ppo import DataConfig
from rlhub.config.sections.preference import PreferenceDataConfig
from rlhub.data.order import ResumableLoader
from rlhub.data.prompts import PromptDataset
from rlhub.data.supervised import PreferenceDataset
from rlhub.errors import DataError

SPEC = importlib.util.spec_from_file_location("characters", Path(__file__).with_name("characters.py"))
characters = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(characters)
TOKENIZER = characters.character_tokenizer()
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "three"}


def write(tmp_path: Path, rows: list[dict]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    return str(path)


def dataset(tmp_path: Path, rows: list[dict], margin_key: str | None = None, **config: Any) -> PreferenceDataset:
    return PreferenceDataset(PreferenceDataConfig(**config), write(tmp_path, rows), TOKENIZER, margin_key=margin_key)


def text(ids: list[int]) -> str:
    return "".join(TOKENIZER.convert_ids_to_tokens(ids))


def texts(data: PreferenceDataset, index: int = 0) -> list[tuple[str, str]]:
    """(prompt, answer) of both rows of a pair, read from a batch as an engine reads it."""
    batch = data.batch(np.array([index])).batch
    found = []
    for side in range(2):
        ids, mask = batch["input_ids"][0, side], batch["attention_mask"][0, side].bool()
        start = ids.numel() - batch["response_mask"].shape[-1]
        answer = batch["response_mask"][0, side].bool()
        assert torch.equal(ids[start:], batch["responses"][0, side])
        found.append((text(ids[:start][mask[:start]].tolist()), text(ids[start:][answer].tolist())))
    return found


@pytest.mark.parametrize("column", ["prompt", "chosen", "rejected"])
def test_a_token_without_an_embedding_is_an_error_that_names_row_and_id(tmp_path: Path, column: str) -> None:
    plus, row = TOKENIZER.convert_tokens_to_ids("+"), {"prompt": "1", "chosen": "2", "rejected": "3"}
    path = write(tmp_path, [row, {**row, column: "1+"}])
    assert len(PreferenceDataset(PreferenceDataConfig(), path, TOKENIZER, vocab_size=plus + 1)) == 2
    with pytest.raises(DataError, match=rf"row 2, .* has id {plus}, and the model's embedding has {plus} rows"):
        PreferenceDataset(PreferenceDataConfig(), path, TOKENIZER, vocab_size=plus)


def test_a_pair_has_two_rows_behind_one_prompt(tmp_path: Path) -> None:
    data = dataset(tmp_path, [PAIR, {"prompt": "5=", "chosen": "five", "rejected": "4"}])
    batch = data.batch(np.array([0, 1])).batch
    assert batch["input_ids"].shape == (2, 2, 10) and batch["response_mask"].shape == (2, 2, 6)
    assert [text(ids) for ids in batch["input_ids"].flatten(0, 1).tolist()] == [
        "1+1=2<eos><pad><pad><pad><pad>",
        "1+1=three<eos>",
        "<pad><pad>5=five<eos><pad>",
        "<pad><pad>5=4<eos><pad><pad><pad><pad>",
    ]
    assert batch["attention_mask"].sum(-1).tolist() == [[6, 10], [7, 4]]
    assert batch["response_mask"].sum(-1).tolist() == [[2, 6], [5, 2]]
    assert {column.dtype for column in batch.values()} == {torch.int64}


def test_prompts_are_those_of_reinforcement_learning(tmp_path: Path) -> None:
    prompts = ["1+1=", [{"role": "user", "content": "1"}]]
    path = write(tmp_path, [{**PAIR, "prompt": prompt, "data_source": "s"} for prompt in prompts])
    ours = PreferenceDataset(PreferenceDataConfig(), path, TOKENIZER)
    theirs = PromptDataset(DataConfig(max_prompt_length=20), path, TOKENIZER).batch(np.array([0, 1])).batch
    kept = [ids[mask.bool()].tolist() for ids, mask in zip(theirs["prompts"], theirs["attention_mask"], strict=True)]
    assert [pair.prompt for pair in ours.pairs] == kept


def test_messages_in_every_usual_form_mean_the_same(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "1+1"}

    def says(content: str) -> dict[str, str]:
        return {"role": "assistant", "content": content}

    rows = [
        {"prompt": [asked], "chosen": "2", "rejected": "three"},
        {"prompt": [asked], "chosen": [says("2")], "rejected": [says("three")]},
        {"prompt": "not read", "chosen": [asked, says("2")], "rejected": [asked, says("three")]},
    ]
    for row in rows:
        assert texts(dataset(tmp_path, [row])) == [("[u]1+1<eos>\n[a]", "2<eos>"), ("[u]1+1<eos>\n[a]", "three<eos>")]
    alone = {name: value for name, value in rows[2].items() if name != "prompt"}
    assert texts(dataset(tmp_path, [alone]))[0] == ("[u]1+1<eos>\n[a]", "2<eos>")
    earlier = [asked, says("yes"), asked]
    long = dataset(tmp_path, [{"chosen": [*earlier, says("2")], "rejected": [*earlier, says("3")]}])
    assert texts(long)[1] == ("[u]1+1<eos>\n[a]yes<eos>\n[u]1+1<eos>\n[a]", "3<eos>")


@pytest.mark.parametrize(
    ("change", "column", "sentence"),
    [
        ({"chosen": None}, "chosen", "is null"),
        ({"rejected": "  "}, "rejected", "is empty"),
        ({"rejected": [{"role": "assistant", "content": "3"}]}, "rejected", "must have the form of 'chosen'"),
        ({"chosen": 2, "rejected": 3}, "chosen", "must be chat messages"),
        ({"prompt": ""}, "prompt", "is empty"),
        (
            {"chosen": [{"role": "user", "content": "3"}], "rejected": [{"role": "user", "content": "4"}]},
            "chosen",
            "must be one message of the assistant, or a conversation that ends with one",
        ),
        (
            {
                "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "4"}],
                "rejected": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "5"}],
            },
            "rejected",
            "must be the conversation of 'chosen' up to its last message",
        ),
    ],
)
def test_unusable_rows_are_named(tmp_path: Path, change: dict[str, Any], column: str, sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        dataset(tmp_path, [PAIR, {**PAIR, **change}])
    assert f"rows.jsonl, row 2, column '{column}'" in str(caught.value) and sentence in str(caught.value)


def test_a_missing_prompt_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column 'prompt': missing; did you mean 'promt'"):
        dataset(tmp_path, [{"promt": "1", "chosen": "1", "rejected": "2"}])


def test_over_long_pairs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 1: 10 tokens exceed data\.max_length=9.*data\.truncation"):
        dataset(tmp_path, [PAIR], max_length=9)
    assert texts(dataset(tmp_path, [PAIR], max_length=10)) == [("1+1=", "2<eos>"), ("1+1=", "three<eos>")]
    left = texts(dataset(tmp_path, [PAIR], max_length=8, truncation="left"))
    assert left == [("1=", "2<eos>"), ("1=", "three<eos>")]  # the same prompt for both, though one answer had room
    assert texts(dataset(tmp_path, [PAIR], max_length=7, truncation="right")) == [("1+1=", "2<eos>"), ("1+1=", "thr")]
    with pytest.raises(DataError, match="nothing of the prompt is left"):
        dataset(tmp_path, [PAIR], max_length=6, truncation="left")
    with pytest.raises(DataError, match="nothing of the answer is left"):
        dataset(tmp_path, [PAIR], max_length=4, truncation="right")
    with pytest.raises(DataError, match=r"data\.truncation is 'center'"):
        dataset(tmp_path, [PAIR], truncation="center")


def test_equal_answers_are_counted_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    same = {**PAIR, "rejected": PAIR["chosen"]}
    with caplog.at_level(logging.WARNING):
        data = dataset(tmp_path, [PAIR, same, PAIR, same])
    assert len(data) == 2
    assert "2 of 4 pairs have the same chosen and rejected answer (first:" in caplog.text and "row 2)" in caplog.text
    caplog.clear()
    dataset(tmp_path, [PAIR])
    assert not caplog.text
    with pytest.raises(DataError, match="nothing is left to learn from"):
        dataset(tmp_path, [same])
    cut = {"prompt": "1", "chosen": "aaaab", "rejected": "aaaac"}  # the answers differ only in what is cut away
    assert len(dataset(tmp_path, [PAIR, cut], max_length=5, truncation="right")) == 1


def test_margins(tmp_path: Path) -> None:
    data = dataset(tmp_path, [{**PAIR, "gap": 2}, {**PAIR, "gap": 0.5}], margin_key="gap")
    assert data.batch(np.array([1, 0])).batch["margin"].tolist() == [0.5, 2.0]
    assert "margin" not in dataset(tmp_path, [{**PAIR, "gap": 2}]).batch(np.array([0])).batch.keys()
    for value in ("2", None, True, float("nan")):
        with pytest.raises(DataError, match="column 'gap'"):
            dataset(tmp_path, [{**PAIR, "gap": value}], margin_key="gap")


def test_fingerprint_and_resume(tmp_path: Path) -> None:
    rows = [{**PAIR, "chosen": str(number), "gap": number} for number in range(7)]
    data = dataset(tmp_path, rows)
    assert data.fingerprint == dataset(tmp_path, rows).fingerprint
    changed = [{**rows[0], "rejected": "four"}, *rows[1:]]
    assert data.fingerprint != dataset(tmp_path, changed).fingerprint
    assert data.fingerprint != dataset(tmp_path, rows, margin_key="gap").fingerprint
    loader, other = ResumableLoader(data, 2), ResumableLoader(dataset(tmp_path, rows), 2)
    batches = loader.endless()
    next(batches)
    other.load_state(loader.state())
    ahead = other.endless()
    for _ in range(5):  # over the end of the epoch
        assert torch.equal(next(batches).batch["input_ids"], next(ahead).batch["input_ids"])


def test_parquet_rows_are_the_same(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1"}], "chosen": "2", "rejected": "3"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = PreferenceDataConfig()
    assert PreferenceDataset(config, str(tmp_path / "rows.parquet"), TOKENIZER).fingerprint == dataset(tmp_path, rows).fingerprint


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="end-of-sequence"):
        PreferenceDataset(PreferenceDataConfig(), write(tmp_path, [PAIR]), characters.character_tokenizer(eos=False))
