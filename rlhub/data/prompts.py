"""Prompts for reinforcement learning: left-padded token ids, and the columns that rewards read."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlhub.config.rules.sources import SourceConfig, sources_of
from rlhub.config.sections.ppo import DataConfig
from rlhub.data.files import AGENT_NAME, DataRow, load_rows
from rlhub.data.images import ImagePrompts, check_whole
from rlhub.data.order import ResumableLoader
from rlhub.data.samplers import SamplerData, build_sampler
from rlhub.data.tokenizing import Tokenizer, check_policy, check_vocabulary, encode_prompts, left_padded, pad_id, truncate
from rlhub.errors import ConfigError, DataError
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.protocol.sequences import IMAGES, images_column
from rlhub.registry import suggest

logger = logging.getLogger(__name__)


class PromptDataset:
    """All usable prompts of the files, tokenized.

    A row has `config.prompt_key` (text or chat messages), `data_source`, and optionally `reward_model` (`ground_truth` in it),
    `extra_info` and `agent_name`, the workflow that runs its episodes.  Prompts longer than `config.max_prompt_length` tokens
    are dropped (`filter_overlong_prompts`), cut (`truncation`) or an error.  Every problem is a DataError that names file, row
    and column, raised here and not mid-run.  vocab_size: rows of the model's embedding, which must have each token;
    None: not known.  reader: of pictures, for a model that reads them; the column `images` has a row's.
    """

    def __init__(
        self,
        config: DataConfig,
        files: str | Sequence[str],
        tokenizer: Tokenizer,
        *,
        vocab_size: int | None = None,
        reader: ImagePrompts | None = None,
    ) -> None:
        check_policy(config.truncation)
        rows = load_rows(files)
        encoded = encode_prompts(tokenizer, rows, config.prompt_key, config.apply_chat_template_kwargs, reader)
        texts, ids = encoded.texts, encoded.ids
        check_vocabulary(rows, config.prompt_key, ids, vocab_size)
        kept = _within_limit(config, rows, ids)
        for index in kept:
            check_whole(rows[index], len(ids[index]), encoded.images[index], "data.max_prompt_length", config.max_prompt_length)
        self.images = [encoded.images[index] for index in kept]
        self.pad_id = pad_id(tokenizer)
        self.prompt_ids = [truncate(ids[index], config.max_prompt_length, config.truncation) for index in kept]
        self._columns = {
            "data_source": [_data_source(rows[index]) for index in kept],
            "ground_truth": [_ground_truth(rows[index]) for index in kept],
            "extra_info": [_extra_info(rows[index]) for index in kept],
            "raw_prompt": [texts[index] for index in kept],
            "raw_chat": [rows[index].get(config.prompt_key) for index in kept],
        }
        if any(AGENT_NAME in row.values for row in rows):
            self._columns[AGENT_NAME] = [_agent_name(rows[index]) for index in kept]
        self.num_filtered = len(rows) - len(kept)
        columns = [self.prompt_ids, self._columns["data_source"], self._columns["ground_truth"]]
        self.fingerprint = fingerprint_of(*columns, *([self.images] if any(self.images) else []))
        self.extras_fingerprint = fingerprint_of(self._columns["extra_info"], self._columns.get(AGENT_NAME, ()))

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def sources(self) -> list[str]:
        """Returns the data_source of each row."""
        return self._columns["data_source"]

    def sampler_data(self, config: DataConfig) -> SamplerData:
        """Returns what a sampler reads of the rows."""
        return SamplerData(
            num_rows=len(self),
            sources=self.sources,
            extra_info=self._columns["extra_info"],
            seed=config.seed,
            shuffle=config.shuffle,
            batch_size=config.train_batch_size,
            weights={name: source.weight for name, source in sources_of(config).items()},
        )

    def batch(self, indices: np.ndarray) -> DataProto:
        """Returns those rows: `prompts` and `attention_mask` (rows, longest) int64, left padded; object columns `data_source`,
        `ground_truth`, `extra_info`, `raw_prompt` (the text the tokens came from), `raw_chat` (the prompt as the file has it);
        `agent_name` where the files have it; `images` where rows have pictures (see `images_column`)."""
        tokens = [self.prompt_ids[index] for index in indices]
        tensors = {
            "prompts": torch.from_numpy(left_padded(tokens, self.pad_id)),
            "attention_mask": torch.from_numpy(left_padded([[1] * len(row) for row in tokens], 0)),
        }
        if any(self.images):
            tensors[IMAGES] = images_column([self.images[index] for index in indices])
        return DataProto.from_dict(
            tensors, {key: object_array(column[index] for index in indices) for key, column in self._columns.items()}
        )


class PromptLoader(ResumableLoader):
    """Batches of prompts in a resumable order; see ResumableLoader and PromptDataset.batch."""

    dataset: PromptDataset

    @property
    def extras_fingerprint(self) -> str:
        return self.dataset.extras_fingerprint

    @classmethod
    def training(cls, dataset: PromptDataset, config: DataConfig) -> PromptLoader:
        """Returns the loader of training, with the configured sampler.  Raises ConfigError for knobs that it does not have."""
        sampler = build_sampler(config, dataset.sampler_data(config))
        return cls(dataset, config.train_batch_size, seed=config.seed, shuffle=config.shuffle, sampler=sampler)


def check_sources(config: DataConfig, training: PromptDataset | None, validation: PromptDataset | None) -> None:
    """Raises ConfigError for settings of sources (data.sources) that no row has, or no row that would read them.

    training: None where nothing trains, and all names may be those of training.
    """
    problems, rows = [], {"train": training, "val": validation}
    every = {source for dataset in rows.values() if dataset is not None for source in dataset.sources}
    for name, source in sources_of(config).items():
        if name not in every and training is not None:
            problems.append(_no_rows(f"data.sources.{name}", "row", name, every))
            continue
        for split, dataset in rows.items():
            set_here = [key for key in READ_BY[split] if getattr(source, key) != getattr(SourceConfig(), key)]
            if dataset is not None and name not in dataset.sources and set_here:
                where = f"data.sources.{name}.{set_here[0]}"
                problems.append(_no_rows(where, f"row of data.{split}_files", name, set(dataset.sources)))
    if problems:
        raise ConfigError(problems)


READ_BY = {"train": ("weight", "adv_estimator", "adv_kwargs"), "val": ("val_kwargs",)}
"""Settings of sources that rows of one kind of files alone read."""


def _no_rows(key: str, rows: str, name: str, known: set[str]) -> str:
    return f"{key}: no {rows} has this data_source{suggest(name, sorted(known))}; known: {', '.join(sorted(known))}"


def fingerprint_of(*columns: Any) -> str:
    """Returns a hash of JSON-able columns (other values enter by their repr)."""
    digest = hashlib.blake2b(digest_size=16)
    for column in columns:
        for value in column:
            digest.update(json.dumps(value, default=repr, separators=(",", ":")).encode() + b"\n")
        digest.update(b"\0")
    return digest.hexdigest()


def _within_limit(config: DataConfig, rows: Sequence[DataRow], ids: Sequence[Sequence[int]]) -> list[int]:
    """Returns the indices of the rows to keep."""
    limit = config.max_prompt_length
    long = [index for index, tokens in enumerate(ids) if len(tokens) > limit]
    if not long:
        return list(range(len(rows)))
    if config.filter_overlong_prompts:
        if len(long) == len(rows):
            raise DataError(
                f"all {len(rows)} prompts are longer than data.max_prompt_length={limit} tokens and were filtered out; "
                f"the shortest has {min(map(len, ids))}"
            )
        logger.info("%d of %d prompts are longer than %d tokens and are left out", len(long), len(rows), limit)
        dropped = set(long)
        return [index for index in range(len(rows)) if index not in dropped]
    if config.truncation == "error":
        raise rows[long[0]].problem(
            config.prompt_key,
            f"{len(ids[long[0]])} tokens exceed data.max_prompt_length={limit}; so do {len(long) - 1} other rows. Raise "
            "the limit, leave such rows out (data.filter_overlong_prompts=True) or cut them (data.truncation=left)",
        )
    logger.warning("%d of %d prompts are longer than %d tokens and are cut (%s)", len(long), len(rows), limit, config.truncation)
    return list(range(len(rows)))


def _data_source(row: DataRow) -> str:
    value = row.get("data_source")
    if not isinstance(value, str):
        raise row.problem("data_source", f"must be text, got {type(value).__name__}")
    return value


def _ground_truth(row: DataRow) -> Any:
    """Returns the row's ground truth; None without a `reward_model` column: a reward function may not need one."""
    if "reward_model" not in row.values:
        return None
    spec = row.get("reward_model")
    if not isinstance(spec, Mapping) or spec.get("ground_truth") is None:
        raise row.problem("reward_model", f"must be an object with 'ground_truth', got {spec!r:.80}")
    if _has_nan(spec["ground_truth"]):
        raise row.problem(
            "reward_model", "its 'ground_truth' is, or has in it, NaN, which no answer equals; give a value or drop the row"
        )
    return spec["ground_truth"]


def _has_nan(value: Any) -> bool:
    """Returns whether NaN is anywhere in nested lists and mappings."""
    open_values = [value]
    while open_values:
        match open_values.pop():
            case float() as number if math.isnan(number):
                return True
            case dict() as mapping:
                open_values.extend(mapping.values())
            case list() as items:
                open_values.extend(items)
    return False


def _agent_name(row: DataRow) -> str | None:
    value = row.values.get(AGENT_NAME)
    if value is not None and not isinstance(value, str):
        raise row.problem(AGENT_NAME, f"must be the name of a workflow, got {value!r:.80}")
    return value


def _extra_info(row: DataRow) -> dict[str, Any]:
    value = row.values.get("extra_info")
    if value is not None and not isinstance(value, Mapping):
        raise row.problem("extra_info", f"must be an object, got {type(value).__name__}")
    return dict(value or {})
