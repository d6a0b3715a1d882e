"""Rows with pictures: their forms, their places in the messages, and errors that name row and column."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.tiny_vlm import build_tokenizer
from rlhub.config.sections.ppo import DataConfig
from rlhub.config.sections.sft import SFTDataConfig
from rlhub.data.prompts import PromptDataset
from rlhub.data.supervised import SFTDataset
from rlhub.errors import DataError
from rlhub.protocol.sequences import images_of, unpack_files

WORDS = ("how", "many", "red", "circles", "?", "3")
TOKENIZER = build_tokenizer(WORDS, "smolvlm")
IMAGE = TOKENIZER.convert_tokens_to_ids("<image>")
CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " how many red circles ?"}]}]
MARKED = [{"role": "user", "content": "<image> how many red circles ?"}]


class Reader:
    """Two image tokens for each byte of a file; b"?" is no picture."""

    def expand(self, text: str, files: Sequence[bytes]) -> str:
        if b"?" in files:
            raise ValueError("1 bytes are no image file")
        first, *others = text.split("<image>")
        assert len(others) == len(files)
        return first + "".join("<image>" * (2 * len(file)) + rest for file, rest in zip(files, others, strict=True))


def row(images: Any, prompt: Any = CHAT, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "images": images, "data_source": "count", **more}


def dataset(folder: Path, rows: list[dict[str, Any]], reader: Reader | None = None, **config: Any) -> PromptDataset:
    """Out of a parquet file, whose lists of structs have null where a part lacks an entry."""
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return PromptDataset(DataConfig(**config), str(folder / "rows.parquet"), TOKENIZER, reader=reader or Reader())


def test_pictures_travel_as_files_beside_their_tokens(tmp_path: Path) -> None:
    two = [{"role": "user", "content": [*CHAT[0]["content"], {"type": "image"}]}]
    rows = [row([{"bytes": b"a", "path": None}]), row([{"bytes": b"bc", "path": None}, {"bytes": b"d", "path": None}], two)]
    data = dataset(tmp_path, [*rows, row([], [{"role": "user", "content": [{"type": "text", "text": " how many ?"}]}])])
    batch = data.batch(np.array([1, 0, 2]))
    assert [unpack_files(packed) for packed in images_of(batch.batch["images"])] == [[b"bc", b"d"], [b"a"], []]
    assert (batch.batch["prompts"] == IMAGE).sum(1).tolist() == [6, 2, 0]
    assert batch.non_tensor_batch["raw_prompt"][1].count("<image>") == 1  # a report shows no picture's tokens
    parts = batch[np.array([1, 2])]
    assert [unpack_files(packed) for packed in images_of(parts.batch["images"])] == [[b"a"], []]


@pytest.mark.parametrize("prompt", [CHAT, MARKED], ids=["parts", "marks"])
def test_places_are_parts_or_marks(tmp_path: Path, prompt: Any) -> None:
    data = dataset(tmp_path, [row([{"bytes": b"a", "path": None}], prompt)])
    first = [token for token in data.prompt_ids[0] if token != IMAGE]
    assert TOKENIZER.convert_ids_to_tokens(first)[-8:-3] == ["how", "many", "red", "circles", "?"]
    assert data.prompt_ids[0].count(IMAGE) == 2


def test_paths_are_relative_to_the_data_file(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(b"abc")
    lines = [row(["one.png"]), row([str(tmp_path / "one.png")]), row(["lost.png"])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    data = PromptDataset(DataConfig(), str(tmp_path / "rows.jsonl"), TOKENIZER, reader=Reader())
    assert [unpack_files(images) for images in data.images] == [[b"abc"], [b"abc"]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=r"rows.jsonl, row 3, column 'images': picture 0 cannot be read: .*lost.png"):
        PromptDataset(DataConfig(), str(tmp_path / "rows.jsonl"), TOKENIZER, reader=Reader())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row([{"bytes": b"?", "path": None}]), "row 2, column 'images': 1 bytes are no image file"),
        (row([{"bytes": None, "path": None}]), "row 2, column 'images': picture 0 must be the bytes of an image file or a path"),
        (row([{"bytes": b"a", "path": None}] * 2), "row 2, column 'prompt': the messages have 1 places .* 'images' has 2"),
        (row([]), "row 2, column 'prompt': the messages have 1 places for pictures, and column 'images' has 0"),
    ],
)
def test_a_row_that_cannot_be_a_prompt_is_named(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        dataset(tmp_path, [row([{"bytes": b"a", "path": None}]), bad])


def test_a_part_of_another_kind_is_named(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": [{"type": "video"}]}]
    with pytest.raises(DataError, match=r"column 'prompt': message 0: a part of 'content' must be .*video"):
        dataset(tmp_path, [row([{"bytes": b"a", "path": None}], chat)])


def test_a_text_model_refuses_pictures(tmp_path: Path) -> None:
    dataset(tmp_path, [row([{"bytes": b"a", "path": None}])])
    with pytest.raises(DataError, match="row 1, column 'images': has pictures, but the model reads text alone"):
        PromptDataset(DataConfig(), str(tmp_path / "rows.parquet"), TOKENIZER)


def test_no_picture_is_cut(tmp_path: Path) -> None:
    rows = [row([{"bytes": b"a" * size, "path": None}]) for size in (1, 20)]
    with pytest.raises(DataError, match=r"row 2, column 'images': 5\d tokens exceed data.max_prompt_length=30.*cannot be cut"):
        dataset(tmp_path, rows, max_prompt_length=30, truncation="left")
    assert len(dataset(tmp_path, rows, max_prompt_length=30, filter_overlong_prompts=True)) == 1


def test_demonstrations_have_pictures(tmp_path: Path) -> None:
    rows = [row([{"bytes": b"a", "path": None}], response="3"), row([{"bytes": b"bb", "path": None}], response="3")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    data = SFTDataset(SFTDataConfig(max_length=64), str(tmp_path / "rows.parquet"), TOKENIZER, reader=Reader())
    batch = data.batch(np.array([1]))
    assert [unpack_files(packed) for packed in images_of(batch.batch["images"])] == [[b"bb"]]
    assert int((batch.batch["input_ids"] == IMAGE).sum()) == 4
    assert TOKENIZER.convert_ids_to_tokens(batch.batch["responses"][0].tolist()) == ["3", "<eos>"]
    other = SFTDataset(SFTDataConfig(max_length=64), str(tmp_path / "rows.parquet"), TOKENIZER, reader=Reader())
    assert data.fingerprint == other.fingerprint
