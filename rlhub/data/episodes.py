"""Recorded episodes of robots: a reader and a writer of LeRobot's data sets (format 2.1, pictures in parquet), and the
demonstrations of a vision-language-action policy, with actions as tokens.

    meta/info.json                                 sizes, cameras and the paths of the files
    meta/tasks.jsonl                               the instructions, by task_index
    meta/episodes.jsonl                            length and instruction of each episode
    data/chunk-000/episode_000000.parquet          a row for each frame: observation.images.<camera>, observation.state, action,
                                                   timestamp, frame_index, episode_index, index, task_index

Pictures are PNG files inside the parquet file, so a picture is read where it trains: the driver reads instructions and actions,
and a batch names frames by number.  Videos are not read.

The range of each number of an action is divided into equal bins, and each bin is a token (RT-2, Brohan et al. 2023, arXiv
2307.15818; OpenVLA, Kim et al. 2024, arXiv 2406.09246).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from rlhub.config.sections.vla import FLOW, VLAConfig
from rlhub.data.files import file_list
from rlhub.data.prompts import fingerprint_of
from rlhub.data.tokenizing import Tokenizer, encode, left_padded, pad_id
from rlhub.errors import DataError
from rlhub.protocol import DataProto

FRAME = "frame"
"""The column of a batch with the number of each row's frame, from which a worker reads its pictures."""
IMAGES, STATE, ACTION = "observation.images.", "observation.state", "action"
EPISODES_PER_CHUNK = 1000
DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
OPEN_EPISODES = 256
"""The episodes whose compressed pictures a reader keeps in memory."""


@dataclass(slots=True, kw_only=True)
class RecordedEpisode:
    """One recorded episode of T frames.

    images: by camera (T, height, width, 3) uint8.  actions: (T, action_dim), each taken at its frame.  state: (T, size), or None.
    """

    instruction: str
    images: dict[str, NDArray[np.uint8]]
    actions: NDArray[np.float32]
    state: NDArray[np.float32] | None = None


def write_episodes(folder: Path, episodes: Iterable[RecordedEpisode], *, fps: int = 10) -> None:
    """Writes a data set into a new folder.  Raises DataError for episodes of different form, and for a folder that has one."""
    if (folder / "meta").exists():
        raise DataError(f"{folder} has a data set already; name another folder")
    tasks: dict[str, int] = {}
    lengths: list[dict[str, Any]] = []
    features: dict[str, Any] = {}
    for number, episode in enumerate(episodes):
        columns, form = _columns(episode)
        if features and form != features:
            raise DataError(f"episode {number} has {form}, the first one {features}; all episodes of a data set have one form")
        features = form
        task, count, first = tasks.setdefault(episode.instruction, len(tasks)), len(episode.actions), _total(lengths)
        columns |= {
            "timestamp": (np.arange(count) / fps).astype(np.float32),
            "frame_index": np.arange(count),
            "episode_index": np.full(count, number),
            "index": np.arange(first, first + count),
            "task_index": np.full(count, task),
        }
        _write_parquet(folder / _path(DATA_PATH, number, EPISODES_PER_CHUNK), columns)
        lengths.append({"episode_index": number, "tasks": [episode.instruction], "length": count})
    if not lengths:
        raise DataError(f"no episode is given for {folder}")
    info = {
        "codebase_version": "v2.1",
        "fps": fps,
        "total_episodes": len(lengths),
        "total_frames": _total(lengths),
        "total_tasks": len(tasks),
        "chunks_size": EPISODES_PER_CHUNK,
        "data_path": DATA_PATH,
        "features": features,
    }
    (folder / "meta").mkdir(parents=True)
    named = [{"task_index": number, "task": task} for task, number in tasks.items()]
    for name, rows in (("tasks", named), ("episodes", lengths)):
        (folder / "meta" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "meta" / "info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")


def _total(lengths: Sequence[dict[str, Any]]) -> int:
    return sum(int(row["length"]) for row in lengths)


def _path(pattern: str, number: int, per_chunk: int) -> str:
    return pattern.format(episode_chunk=number // per_chunk, episode_index=number)


def _columns(episode: RecordedEpisode) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the columns of an episode, and the features that describe them in info.json."""
    count = len(episode.actions)
    columns: dict[str, Any] = {ACTION: list(np.asarray(episode.actions, np.float32))}
    features: dict[str, Any] = {ACTION: {"dtype": "float32", "shape": [int(episode.actions.shape[1])]}}
    if episode.state is not None:
        columns[STATE] = list(np.asarray(episode.state, np.float32))
        features[STATE] = {"dtype": "float32", "shape": [int(episode.state.shape[1])]}
    for camera, frames in episode.images.items():
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or len(frames) != count:
            raise DataError(
                f"camera {camera!r} has {frames.dtype} {frames.shape}; {count} frames of uint8 (height, width, 3) are needed"
            )
        columns[IMAGES + camera] = [{"bytes": png(frame), "path": None} for frame in frames]
        features[IMAGES + camera] = {"dtype": "image", "shape": [3, *map(int, frames.shape[1:3])], "names": ["c", "h", "w"]}
    return columns, features


def png(frame: NDArray[np.uint8]) -> bytes:
    """Returns a picture (height, width, 3) as the bytes of a PNG file."""
    from PIL import Image  # only jobs with pictures need it

    out = io.BytesIO()
    Image.fromarray(frame).save(out, format="png")
    return out.getvalue()


def _write_parquet(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow as pa  # 0.3 s
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table({name: pa.array(column) for name, column in columns.items()}), path)


class EpisodeReader:
    """Reads data sets of one form as one row of frames; actions and instructions at once, pictures when they are asked for.

    cameras: their names.  actions: (frames, action_dim).  states: (frames, numbers), None where not all have one.  episode:
    (frames,) the number of each frame's episode over all data sets.  instructions: of each episode.  Raises DataError, which
    names the file, for what cannot be read.
    """

    def __init__(self, folders: str | Sequence[str]) -> None:
        self.cameras: list[str] = []
        self.files: list[Path] = []
        self.instructions: list[str] = []
        actions, states, sizes = [], list[NDArray[np.float32]](), []
        for folder in file_list(folders):
            for path, instruction in self._episodes(folder):
                table = _table(path, [ACTION, *([STATE] if self._has_state else [])])
                actions.append(np.stack(table[ACTION].to_pylist()).astype(np.float32))
                if self._has_state:
                    states.append(np.stack(table[STATE].to_pylist()).astype(np.float32))
                self.files.append(path)
                self.instructions.append(instruction)
                sizes.append(len(actions[-1]))
        if not sizes:
            raise DataError(f"{folders} has no episodes")
        self.actions = np.concatenate(actions)
        self.states = np.concatenate(states) if len(states) == len(actions) else None
        self.episode = np.repeat(np.arange(len(sizes)), sizes)
        self.first = np.concatenate([[0], np.cumsum(sizes)])
        self._pictures = lru_cache(OPEN_EPISODES)(self._read_pictures)

    def _episodes(self, folder: Path) -> list[tuple[Path, str]]:
        """Returns file and instruction of each episode of one data set."""
        info = _json(folder / "meta" / "info.json")
        features = info.get("features", {})
        self._has_state = STATE in features
        cameras = sorted(name.removeprefix(IMAGES) for name in features if name.startswith(IMAGES))
        videos = [name for name in cameras if features[IMAGES + name].get("dtype") != "image"]
        if not cameras or videos:
            found = f"camera {videos[0]!r} is a {features[IMAGES + videos[0]].get('dtype')}" if videos else "there is no camera"
            raise DataError(f"{folder}: {found}; pictures must be in the parquet files, as images {IMAGES}<camera>")
        if self.cameras and cameras != self.cameras:
            raise DataError(f"{folder} has cameras {cameras}, the data sets before it {self.cameras}; train on data of one form")
        self.cameras = cameras
        rows = _json_lines(folder / "meta" / "episodes.jsonl")
        pattern, per_chunk = info.get("data_path", DATA_PATH), int(info.get("chunks_size", EPISODES_PER_CHUNK))
        return [(folder / _path(pattern, int(row["episode_index"]), per_chunk), str(row["tasks"][0])) for row in rows]

    def chunks(self, frames: NDArray[np.int64], chunk: int) -> NDArray[np.float32]:
        """Returns the next actions from each frame on, (rows, chunk, action_dim); behind an episode's end the last one again."""
        last = self.first[self.episode[frames] + 1][:, None] - 1
        found: NDArray[np.float32] = self.actions[np.minimum(frames[:, None] + np.arange(chunk), last)]
        return found

    def images(self, frames: Sequence[int]) -> Tensor:
        """Returns the pictures of frames, (rows, cameras, 3, height, width) uint8."""
        rows = []
        for frame in frames:
            number = int(self.episode[frame])
            pictures = self._pictures(number)
            rows.append([_pixels(pictures[camera][frame - self.first[number]], self.files[number]) for camera in self.cameras])
        return torch.from_numpy(np.asarray(rows)).permute(0, 1, 4, 2, 3).contiguous()

    def _read_pictures(self, number: int) -> dict[str, list[bytes]]:
        table = _table(self.files[number], [IMAGES + camera for camera in self.cameras])
        return {camera: [one["bytes"] for one in table[IMAGES + camera].to_pylist()] for camera in self.cameras}


def _pixels(png: bytes, file: Path) -> NDArray[np.uint8]:
    from PIL import Image, UnidentifiedImageError  # only jobs with pictures need it

    try:
        return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    except (UnidentifiedImageError, OSError, TypeError) as error:
        raise DataError(f"{file} has a picture that cannot be read: {error}") from error


def _table(path: Path, columns: list[str]) -> Any:
    import pyarrow as pa  # 0.3 s
    from pyarrow import parquet

    try:
        return parquet.read_table(path, columns=columns)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); name the folder of a LeRobot data set") from error
    return found


def _json_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); name the folder of a LeRobot data set") from error


class EpisodeDataset:
    """Demonstrations: from each frame, the instruction and the pictures are the prompt, and the next chunk of actions the answer.

    Behind the episode's end the last action is repeated and not learned.  Pictures stay in the files: a batch has `frame`.
    """

    def __init__(
        self, folders: str | Sequence[str], tokenizer: Tokenizer, vla: VLAConfig, *, vocab_size: int | None = None
    ) -> None:
        self.reader, self.vla, self.pad_id = EpisodeReader(folders), vla, pad_id(tokenizer)
        if vla.decoding != FLOW and (last := vla.first_bin_id + vla.bins - 1) >= (vocab_size or last + 1):
            raise DataError(f"the last bin of model.vla is token {last}, but the vocabulary has {vocab_size} tokens")
        self.prompts = prompts_with_images(tokenizer, self.reader.instructions, len(self.reader.cameras), vla)
        self.tokens = ActionTokenizer(vla).encode(self.reader.actions)
        self.fingerprint = fingerprint_of(self.prompts, [self.tokens.tobytes().hex()], self.reader.episode.tolist())

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: np.ndarray) -> DataProto:
        """Returns those rows, int64: `prompts` (rows, P) left padded, `responses` and `response_mask` (rows, chunk x action_dim),
        `input_ids` and `attention_mask` (rows, P + response), and `frame` (rows,)."""
        episode, rows = self.reader.episode[indices], len(indices)
        ends = self.reader.first[episode + 1][:, None]
        frames = indices[:, None] + np.arange(self.vla.chunk)
        responses = self.tokens[np.minimum(frames, ends - 1)].reshape(rows, -1)
        learned = np.repeat(frames < ends, self.vla.action_dim, axis=1).astype(np.int64)
        own = [self.prompts[number] for number in episode]
        prompts = left_padded(own, self.pad_id)
        attended = left_padded([[1] * len(prompt) for prompt in own], 0)
        columns = {
            "prompts": prompts,
            "responses": responses,
            "response_mask": learned,
            "input_ids": np.concatenate([prompts, responses], axis=1),
            "attention_mask": np.concatenate([attended, np.ones_like(responses)], axis=1),
            FRAME: np.asarray(indices, np.int64),
        }
        return DataProto.from_dict({name: torch.from_numpy(column) for name, column in columns.items()})


class ActionTokenizer:
    """Maps actions to tokens and back: bin i of an axis is token first_bin_id + i, and stands for the bin's centre."""

    def __init__(self, vla: VLAConfig) -> None:
        self.bins, self.first, self.dim = vla.bins, vla.first_bin_id, vla.action_dim
        self.low, self.high = (np.broadcast_to(np.asarray(x, np.float64), self.dim) for x in (vla.action_low, vla.action_high))
        if not (self.low < self.high).all():
            raise DataError(f"model.vla.action_low={vla.action_low} is not below action_high={vla.action_high}")

    def encode(self, actions: ArrayLike) -> NDArray[np.int64]:
        """Returns token ids (..., action_dim) of actions (..., action_dim); numbers outside the range get its end's bin.

        Raises DataError for numbers that are not finite, or another number of axes.
        """
        wide = np.asarray(actions, np.float64)
        if wide.shape[-1:] != (self.dim,) or not np.isfinite(wide).all():
            raise DataError(f"actions of shape {wide.shape} are not finite numbers of {self.dim} axes (model.vla.action_dim)")
        share = (wide - self.low) / (self.high - self.low)
        return self.first + np.clip(np.floor(share * self.bins), 0, self.bins - 1).astype(np.int64)

    def decode(self, tokens: ArrayLike) -> NDArray[np.float32]:
        """Returns the actions (..., chunk, action_dim) of responses (..., chunk x action_dim).  Raises DataError for a token that
        is no bin, and for a response that is no whole number of actions."""
        ids = np.asarray(tokens, np.int64)
        last = self.first + self.bins - 1
        if ids.size and (ids.min() < self.first or ids.max() > last):
            raise DataError(f"token ids {ids.min()} to {ids.max()}: action tokens are {self.first} to {last}")
        if ids.shape[-1] % self.dim:
            raise DataError(f"{ids.shape[-1]} tokens are no whole number of actions of {self.dim} axes (model.vla.action_dim)")
        bins = ids.reshape(*ids.shape[:-1], -1, self.dim) - self.first
        actions: NDArray[np.float32] = (self.low + (bins + 0.5) / self.bins * (self.high - self.low)).astype(np.float32)
        return actions


def prompts_with_images(tokenizer: Tokenizer, instructions: Sequence[str], num_images: int, vla: VLAConfig) -> list[list[int]]:
    """Returns the token ids of prompts: the instruction, and then vla.tokens_per_image image tokens for each of its images.

    Raises DataError for an instruction whose text has an image token.
    """
    places = [vla.image_token_id] * (vla.tokens_per_image * num_images)
    known: dict[str, list[int]] = dict.fromkeys(instructions, [])
    for text, ids in zip(known, encode(tokenizer, list(known), add_special_tokens=False), strict=True):
        if vla.image_token_id in ids:
            raise DataError(f"the instruction {text!r} has the image token {vla.image_token_id}, which stands for pictures only")
        known[text] = [*ids, *places]
    return [known[text] for text in instructions]
