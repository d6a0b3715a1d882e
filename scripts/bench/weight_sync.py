"""Weight synchronisation against a plain copy of the same bytes, one process, one thread, CPU seconds.

    python scripts/bench/weight_sync.py [--layers 8] [--hidden 768] [--repeats 5]

`copy` copies every weight once into other memory, which no synchronisation can do without.  `sync` is the sharding manager
with the hf engine: stream, copy, two fingerprints of every byte, comparison.  `peak` is the extra resident memory of a sync.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhub.config.model import ModelConfig
from rlhub.config.rollout import RolloutConfig
from rlhub.engines.rollout.registry import build_rollout_engine
from rlhub.engines.training.base import TrainEngine
from rlhub.sharding_manager.manager import ShardingManager

MIB = 1 << 20


class StreamingOnly:
    """The part of a training engine that a sync uses, for a model in one process."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.device = torch.device("cpu")

    def named_weights(self, *, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        bucket: list[tuple[str, Tensor]] = []
        for name, parameter in self._model.named_parameters():
            bucket.append((name, parameter.detach()))
            if sum(tensor.nbytes for _, tensor in bucket) >= bucket_bytes:
                yield bucket
                bucket = []
        yield bucket

    def reduce(self, values: Tensor, op: str, *, every_rank: bool = False) -> Tensor:
        return values

    def onload(self) -> None: ...

    def offload(self) -> None: ...


def cpu_seconds(action: Callable[[], object], repeats: int) -> float:
    """Best of `repeats` after one warm-up."""
    action()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


def peak_extra_bytes(action: Callable[[], object]) -> int:
    """Highest resident memory during `action` above what it was before."""
    process = psutil.Process()
    before, peak, done = process.memory_info().rss, 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, process.memory_info().rss)
            done.wait(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    done.set()
    watcher.join()
    return max(0, peak - before)


def build(arguments: argparse.Namespace, folder: Path) -> tuple[torch.nn.Module, ShardingManager, ShardingManager]:
    config = Qwen2Config(
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        vocab_size=arguments.vocabulary,
    )
    config.save_pretrained(folder)
    model = Qwen2ForCausalLM(config)
    rollout = build_rollout_engine(
        RolloutConfig(name="hf"),
        ModelConfig(path=str(folder)),
        device=torch.device("cpu"),
        seed=0,
        max_prompt_length=32,
        max_response_length=32,
    )
    rollout.initialize()
    train: TrainEngine = StreamingOnly(model)  # type: ignore[assignment]
    size = arguments.bucket_mb * MIB
    return model, *(ShardingManager(train, rollout, bucket_bytes=size, check=check) for check in (True, False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 8), ("hidden", 768), ("vocabulary", 16_000), ("bucket-mb", 64), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model, checked, unchecked = build(arguments, Path(folder))
    sources = list(model.parameters())
    targets = [torch.empty_like(parameter) for parameter in sources]

    def copy() -> None:
        with torch.no_grad():
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)

    size = sum(parameter.nbytes for parameter in sources)
    copy_s = cpu_seconds(copy, arguments.repeats)
    print(f"{size / MIB:.0f} MiB in {len(sources)} weights")
    print(f"{'':24}{'CPU s':>8}{'GB/s':>8}{'of copy':>9}{'peak MiB':>10}")
    for label, action in (
        ("copy", copy),
        ("sync without check", lambda: unchecked.sync(0)),
        ("sync", lambda: checked.sync(0)),
    ):
        seconds = cpu_seconds(action, arguments.repeats)
        peak = peak_extra_bytes(action) / MIB
        print(f"{label:24}{seconds:8.3f}{size / seconds / 1e9:8.1f}{copy_s / seconds:9.2f}{peak:10.0f}")


if __name__ == "__main__":
    main()
