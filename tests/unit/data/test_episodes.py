"""Recorded episodes written and read back, and the demonstrations made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet

from recipes.tiny_smolvlm import build_tokenizer
from rlhub.config.sections.vla import VLAConfig
from rlhub.data.episodes import (
    ActionTokenizer,
    EpisodeDataset,
    EpisodeReader,
    RecordedEpisode,
    prompts_with_images,
    write_episodes,
)
from rlhub.data.files import check_episode_folders
from rlhub.errors import DataError

LENGTHS = (3, 1, 4)
VLA = VLAConfig(
    chunk=2, action_dim=2, bins=5, first_bin_id=11, place_ids=[7], image_token_id=3, tokens_per_image=4, action_low=[-1.0, 0.0]
)
TOKENIZER: Any = build_tokenizer(("reach", "red", "blue"), num_places=4, num_bins=5)


def episodes(seed: int = 0) -> list[RecordedEpisode]:
    draw = np.random.default_rng(seed)
    return [
        RecordedEpisode(
            instruction=f"reach {'red' if number % 2 else 'blue'}",
            images={name: draw.integers(0, 256, (length, 8, 6, 3), dtype=np.uint8) for name in ("top", "hand")},
            actions=draw.uniform(-1, 1, (length, 2)).astype(np.float32),
            state=draw.normal(size=(length, 3)).astype(np.float32),
        )
        for number, length in enumerate(LENGTHS)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_episodes(tmp_path / "set", episodes())
    return tmp_path / "set"


def test_what_is_written_is_read(folder: Path) -> None:
    reader, written = EpisodeReader(str(folder)), episodes()
    assert reader.cameras == ["hand", "top"] and reader.instructions == [one.instruction for one in written]
    np.testing.assert_array_equal(reader.actions, np.concatenate([one.actions for one in written]))
    order = [7, 0, 3, 3]
    found = reader.images(order)
    assert found.dtype == torch.uint8 and found.shape == (4, 2, 3, 8, 6) and found.is_contiguous()
    for row, (number, frame) in zip(found, [(2, 3), (0, 0), (1, 0), (1, 0)], strict=True):
        for camera, pixels in zip(reader.cameras, row, strict=True):
            np.testing.assert_array_equal(pixels.permute(1, 2, 0).numpy(), written[number].images[camera][frame])


def test_the_files_have_the_formats_names(folder: Path) -> None:
    info = json.loads((folder / "meta" / "info.json").read_text())
    assert (info["codebase_version"], info["total_episodes"], info["total_frames"]) == ("v2.1", 3, sum(LENGTHS))
    assert info["features"]["observation.images.top"] == {"dtype": "image", "shape": [3, 8, 6], "names": ["c", "h", "w"]}
    table = parquet.read_table(folder / "data" / "chunk-000" / "episode_000002.parquet")
    assert table["index"].to_pylist() == [4, 5, 6, 7] and table["frame_index"].to_pylist() == [0, 1, 2, 3]
    assert table["task_index"].to_pylist() == [0] * 4 and set(table["episode_index"].to_pylist()) == {2}
    assert table["observation.images.top"][0].as_py()["bytes"].startswith(b"\x89PNG")


def test_demonstrations(folder: Path) -> None:
    """By the definition, row by row: behind the end of an episode nothing of the next is learned."""
    data, written = EpisodeDataset(str(folder), TOKENIZER, VLA, vocab_size=64), episodes()
    assert len(data) == sum(LENGTHS)
    batch, tokens = data.batch(np.arange(len(data))), ActionTokenizer(VLA)
    row = 0
    for one in written:
        for t in range(len(one.actions)):
            wanted = [tokens.encode(one.actions[min(t + i, len(one.actions) - 1)]).tolist() for i in range(2)]
            assert batch.batch["responses"][row].tolist() == sum(wanted, [])
            assert batch.batch["response_mask"][row].tolist() == [1, 1, *([1, 1] if t + 1 < len(one.actions) else [0, 0])]
            word = 6 if one.instruction.endswith("blue") else 5
            assert batch.batch["prompts"][row].tolist() == [4, word] + [3] * 8
            row += 1
    assert batch.batch["frame"].tolist() == list(range(len(data)))
    assert batch.batch["input_ids"].shape == batch.batch["attention_mask"].shape == (8, 14)


def test_another_data_set_has_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    write_episodes(tmp_path / "other", episodes(1))
    same, other = (EpisodeDataset(str(one), TOKENIZER, VLA).fingerprint for one in (folder, tmp_path / "other"))
    assert same == EpisodeDataset(str(folder), TOKENIZER, VLA).fingerprint != other
    both = EpisodeDataset([str(folder), str(tmp_path / "other")], TOKENIZER, VLA)
    assert len(both) == 2 * len(EpisodeDataset(str(folder), TOKENIZER, VLA))


@pytest.mark.parametrize("numbers", [[-1.0, 0.0], [1.0, 1.0], [0.3, 0.5], [-7.0, 9.0]])
def test_bins_stand_for_their_centres(numbers: list[float]) -> None:
    tokens = ActionTokenizer(VLA)
    (back,) = tokens.decode(tokens.encode(numbers))
    limited = np.clip(numbers, [-1, 0], [1, 1])
    assert (np.abs(back - limited) <= np.array([0.2, 0.1]) + 1e-6).all()
    assert tokens.decode([[11, 15, 13, 11]]).tolist() == pytest.approx(np.array([[[-0.8, 0.9], [0.0, 0.1]]]))
    assert (tokens.encode(tokens.decode([11, 15, 13, 12])) == [[11, 15], [13, 12]]).all()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ActionTokenizer(VLA).encode([0.0, np.nan]), "not finite numbers of 2 axes"),
        (lambda: ActionTokenizer(VLA).encode([0.0]), r"of shape \(1,\)"),
        (lambda: ActionTokenizer(VLA).decode([11, 16]), "token ids 11 to 16: action tokens are 11 to 15"),
        (lambda: ActionTokenizer(VLA).decode([11, 12, 13]), "3 tokens are no whole number of actions"),
        (lambda: ActionTokenizer(VLAConfig(action_low=[1.0])), "is not below action_high"),
        (lambda: prompts_with_images(TOKENIZER, ["reach <image>"], 1, VLA), "has the image token 3"),
    ],
)
def test_wrong_actions_and_instructions(call: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        call()


def test_wrong_data_sets(folder: Path, tmp_path: Path) -> None:
    assert check_episode_folders([str(folder), str(tmp_path)], "train") == [
        f"data.train_files: {tmp_path} has no meta/info.json; with model.vla name folders of LeRobot data sets"
    ]
    with pytest.raises(DataError, match="has a data set already"):
        write_episodes(folder, episodes())
    with pytest.raises(DataError, match="no episode is given"):
        write_episodes(tmp_path / "empty", [])
    narrow = episodes()
    narrow[1].actions = narrow[1].actions[:, :1]
    with pytest.raises(DataError, match="episode 1 has"):
        write_episodes(tmp_path / "narrow", narrow)
    with pytest.raises(DataError, match="the last bin of model.vla is token 15, but the vocabulary has 12"):
        EpisodeDataset(str(folder), TOKENIZER, VLA, vocab_size=12)
    info = folder / "meta" / "info.json"
    info.write_text(info.read_text().replace('"dtype": "image"', '"dtype": "video"'))
    with pytest.raises(DataError, match="camera 'hand' is a video"):
        EpisodeReader(str(folder))
    with pytest.raises(DataError, match="info.json cannot be read"):
        EpisodeReader(str(tmp_path))


def test_a_damaged_picture_is_named(folder: Path) -> None:
    reader = EpisodeReader(str(folder))
    path = reader.files[0]
    path.write_bytes(path.read_bytes().replace(b"IHDR", b"IXDR"))
    with pytest.raises(DataError, match="episode_000000.parquet"):
        EpisodeReader(str(folder)).images([0])
