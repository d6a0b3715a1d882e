"""A device for optimizer states where there is none: what is brought to it is another copy, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from rlhub.engines.training.base import Rows, TrainEngine
from rlhub.models.device_copies import CopyQueue


@contextmanager
def counted_moves() -> Iterator[list[int]]:
    """Yields the sizes of all tensors that were brought to the device, in elements."""
    sizes: list[int] = []

    def fetch(queue: CopyQueue, tensors: Sequence[Tensor]) -> list[Tensor]:
        sizes.extend(tensor.numel() for tensor in tensors)
        return [tensor.clone() for tensor in tensors]

    with mock.patch.object(CopyQueue, "fetch", fetch):
        yield sizes


def moves_of_each_use(engine: TrainEngine, rows: Rows, take_step: Callable[[], object]) -> dict[str, int]:
    """How many optimizer states each use of an engine brings to the device; `take_step`: passes and one optimizer step."""
    uses: dict[str, Callable[[], object]] = {
        "infer": lambda: engine.infer(rows, outputs=("log_probs",)),
        "stream": lambda: list(engine.named_weights()),
        "sync": lambda: (engine.onload(), list(engine.local_weights() or ()), engine.offload()),
        "save": lambda: [piece.tensor.sum() for piece in engine.state_shards()],
        "step": take_step,
    }
    counts = {}
    for name, use in uses.items():
        with counted_moves() as sizes:
            use()
        counts[name] = len(sizes)
    return counts
