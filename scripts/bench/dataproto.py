"""Moving a batch through Ray: DataProto beside a dict of numpy arrays with the same contents, in one run.

    python scripts/bench/dataproto.py

Batch: 1024 rows x 4k tokens, 9 tensor columns, 3 object columns, 188 MiB.  Figures are medians of alternating rounds.
  put    ray.put of the batch
  get    ray.get of it (a view of the store); RSS the reader gains by it
  echo   128 MiB cut over 2 workers that send their part back: put, call, get and join
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import ray
import torch

from rlhub.protocol import DataProto

ROWS, PROMPT, RESPONSE = 1024, 1024, 3072
MIB = 2**20
STORE_BYTES = 1536 * MIB


def make_batch() -> DataProto:
    """Columns of a training batch; int32 and bool stand where their range suffices, for 188 MiB in all."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 150_000, (ROWS, PROMPT + RESPONSE), generator=generator)
    tensors = {
        "input_ids": tokens,
        "responses": tokens[:, PROMPT:].to(torch.int32).contiguous(),
        "prompts": tokens[:, :PROMPT].contiguous(),
        "attention_mask": torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.int64),
        "response_mask": torch.ones(ROWS, RESPONSE, dtype=torch.int64),
        "old_log_probs": torch.rand(ROWS, RESPONSE, generator=generator),
        "advantages": torch.rand(ROWS, RESPONSE, generator=generator),
        "values": torch.rand(ROWS, RESPONSE, generator=generator),
    }
    used = sum(tensor.nbytes for tensor in tensors.values())
    tensors["ref_log_prob"] = torch.rand(ROWS, (188 * MIB - used) // (4 * ROWS), generator=generator)
    objects = {
        "data_source": ["gsm8k"] * ROWS,
        "ground_truth": [str(row) for row in range(ROWS)],
        "extra_info": [{"index": row, "split": "train"} for row in range(ROWS)],
    }
    return DataProto.from_dict(tensors, objects, meta_info={"step": 1})


def as_arrays(data: DataProto) -> dict[str, np.ndarray]:
    return {**{key: tensor.numpy() for key, tensor in data.tensors().items()}, **data.non_tensor_batch}


def split_arrays(arrays: dict[str, np.ndarray], parts: int) -> list[dict[str, np.ndarray]]:
    cut = {key: np.array_split(array, parts) for key, array in arrays.items()}
    return [{key: pieces[part] for key, pieces in cut.items()} for part in range(parts)]


def join_arrays(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


@ray.remote(num_cpus=0)
class Echo:
    """Sends back what it gets; reports the time and memory that reading takes."""

    def same(self, value: Any) -> Any:
        return value

    def read(self, box: list[Any]) -> tuple[float, float]:
        """Milliseconds and MiB of RSS of one get.  The object comes in a list so that Ray does not fetch it first."""
        before, start = psutil.Process().memory_info().rss, time.perf_counter()
        value = ray.get(box[0])
        elapsed = time.perf_counter() - start
        return elapsed * 1e3, (psutil.Process().memory_info().rss - before) / MIB + 0 * len(value)


def echo(workers: list[Any], parts: list[Any], join: Callable[[list[Any]], Any]) -> float:
    start = time.perf_counter()
    join(ray.get([worker.same.remote(ray.put(part)) for worker, part in zip(workers, parts, strict=True)]))
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, tuple[float, float]]:
    """Name -> (DataProto, dict of numpy arrays), medians."""
    batch = make_batch()
    arrays = as_arrays(batch)
    # Page the object store in: whoever writes to a fresh page first would pay for it (700 ms for this batch).
    ray.put(np.ones(int(STORE_BYTES * 0.9), dtype=np.uint8))
    workers = [Echo.remote() for _ in range(2)]  # type: ignore[attr-defined]
    small = batch.slice(0, ROWS * 128 // 188)
    ray.get([worker.same.remote(make_batch().slice(0, 2)) for worker in workers])  # imports, in every process
    kinds: dict[str, tuple[Any, list[Any], Callable[[list[Any]], Any]]] = {
        "rlhub": (batch, small.chunk(2), DataProto.concat),
        "numpy": (arrays, split_arrays(as_arrays(small), 2), join_arrays),
    }
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in ("put ms", "get ms", "get RSS MiB", "echo MiB/s")}
    for turn in range(rounds + 1):
        for kind, (whole, parts, join) in sorted(kinds.items(), reverse=turn % 2 == 0):
            start = time.perf_counter()
            reference = ray.put(whole)
            put_ms = (time.perf_counter() - start) * 1e3
            get_ms, rss = ray.get(workers[0].read.remote([reference]))
            del reference
            seconds = echo(workers, parts, join)
            for name, value in zip(figures, (put_ms, get_ms, rss, 128 / seconds), strict=True):
                figures[name].setdefault(kind, []).append(value)
    # The first round warms caches of both.
    return {name: (statistics.median(row["rlhub"][1:]), statistics.median(row["numpy"][1:])) for name, row in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=2 * 2**30,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        logging_level=logging.ERROR,
    )
    try:
        figures = measure(options.rounds)
    finally:
        ray.shutdown()
    targets = {"put ms": "ratio <= 1.5", "get ms": "<= 5", "get RSS MiB": "<= 5", "echo MiB/s": "ratio >= 0.7"}
    print(f"{'':14}{'DataProto':>12}{'numpy dict':>12}{'ratio':>8}   target")
    for name, (ours, bare) in figures.items():
        print(f"{name:14}{ours:12.2f}{bare:12.2f}{ours / bare if bare else float('nan'):8.2f}   {targets[name]}")


if __name__ == "__main__":
    main()
