"""Weight files that transformers can load, from a stream whose buckets are reused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from rlhub.checkpoint.files import entry_of
from rlhub.checkpoint.hf import write_hf_weights

WEIGHTS = {f"layer.{i}.weight": torch.randn(10, 10) for i in range(5)}


def stream() -> Iterator[list[tuple[str, Tensor]]]:
    """Overwrites its one buffer for each bucket, as an engine may."""
    buffer = torch.empty(10, 10)
    for name, tensor in WEIGHTS.items():
        buffer.copy_(tensor)
        yield [(name, buffer)]


def test_one_file(tmp_path: Path) -> None:
    entries = write_hf_weights(tmp_path / "hf", stream())
    assert [Path(entry.path).name for entry in entries] == ["model.safetensors"]
    assert entry_of(tmp_path / "hf" / "model.safetensors") == entries[0]
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    assert loaded.keys() == WEIGHTS.keys() and all(torch.equal(loaded[name], WEIGHTS[name]) for name in WEIGHTS)


def test_several_files_and_their_index(tmp_path: Path) -> None:
    entries = write_hf_weights(tmp_path, stream(), max_shard_bytes=900)
    names = [Path(entry.path).name for entry in entries]
    assert names == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)] + ["model.safetensors.index.json"]
    assert all(entry_of(Path(entry.path)) == entry for entry in entries)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 400
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], WEIGHTS[name])
    assert index["weight_map"].keys() == WEIGHTS.keys()


def test_cast_and_ranks_that_only_walk(tmp_path: Path) -> None:
    write_hf_weights(tmp_path, iter([[("w", torch.randn(2)), ("ids", torch.arange(2))]]), dtype=torch.bfloat16)
    loaded = load_file(tmp_path / "model.safetensors")
    assert (loaded["w"].dtype, loaded["ids"].dtype) == (torch.bfloat16, torch.int64)
    walked: list[int] = []
    assert write_hf_weights(None, ([("w", torch.zeros(1))] for i in range(3) if walked.append(i) is None)) == []
    assert walked == [0, 1, 2]


def test_transformers_loads_it(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    weights = [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]
    write_hf_weights(tmp_path, ([pair] for pair in weights), max_shard_bytes=2000)
    config.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
