"""The matrix products of generation alone, in one process and in two: what two ranks can gain at most on this machine.

Every decoding step reads all weights, whatever the number of rows, and both processes read them through one memory.  The
products are computed as the hf engine computes them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import PreTrainedConfig

from rlhub.models.products import linear

Shape = tuple[int, int]


def weight_shapes(config: PreTrainedConfig) -> list[Shape]:
    """(outputs, inputs) of a step's products: per layer query, key and value; output; gate and up; down.  Then the head."""
    hidden, middle = config.hidden_size, config.intermediate_size
    head_width = hidden // config.num_attention_heads
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    layer = [(heads * head_width, hidden), (hidden, hidden), (2 * middle, hidden), (hidden, middle)]
    return [*(layer * config.num_hidden_layers), (config.vocab_size, hidden)]


class BareProducts:
    """Two processes that wait for work; a context manager."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(2):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=_serve, args=(theirs, list(shapes)), daemon=True))
            self._pipes.append(ours)

    def __enter__(self) -> BareProducts:
        for process in self._processes:
            process.start()
        return self

    def measure(self, num_processes: int, rows: Sequence[int]) -> tuple[float, float]:
        """(wall clock, CPU time of the slowest process) in seconds of a step for each entry of `rows` in every process."""
        pipes = self._pipes[:num_processes]
        start = time.perf_counter()
        for pipe in pipes:
            pipe.send(list(rows))
        cpu = max([pipe.recv() for pipe in pipes])
        return time.perf_counter() - start, cpu

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send([])
            process.join()


def _serve(pipe: Connection, shapes: list[Shape]) -> None:
    """Multiply until an empty list comes."""
    torch.set_num_threads(1)
    weights = [torch.randn(shape) for shape in shapes]
    while rows := pipe.recv():
        inputs = {(count, width): torch.randn(count, width) for count in set(rows) for _, width in set(shapes)}
        start = time.process_time()
        for count in rows:
            for weight in weights:
                linear(weight, inputs[count, weight.shape[1]])
        pipe.send(time.process_time() - start)
