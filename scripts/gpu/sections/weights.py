"""Sections F and G: moving the policy's weights into the rollout engine, on the same device and through a folder."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

import torch

from rlhub.engines.rollout.base import RolloutEngine
from rlhub.engines.training.base import TrainEngine
from rlhub.sharding_manager.files import WeightWriter
from rlhub.sharding_manager.manager import ShardingManager
from rlhub.sharding_manager.reader import WeightReader
from scripts.gpu.engines import BUCKET_BYTES, need_vllm, rollout_engine, rollout_setup, train_engine
from scripts.gpu.measure import GIB, Context, apart, median_s, seconds_of, used_bytes
from scripts.gpu.models import model_folder
from scripts.gpu.rows import NotThere
from scripts.gpu.sections.hardware import GIGA, host_rate

SYNCED, WRITTEN = "1.5B", "0.5B"
"""The models of F and of G, whose files need three times its float32 weights in host memory."""
REPEATS = 20
SETTLED = 3
"""Repeats after which memory must not grow any more."""
GROWTH_GB = 0.0625
VERSIONS_AT_ONCE = 3
"""Versions in the folder while one is written."""
HOST_MEMORY = Path("/dev/shm")


def sync(context: Context) -> None:
    """Section F."""
    with context.rows.trying("weight sync"):
        need_vllm()
        apart(measure_sync, context, model_folder(context, SYNCED), limit_s=context.left_s)


def _pair(context: Context, folder: Path, **settings: object) -> tuple[TrainEngine, RolloutEngine]:
    """Returns a training engine without an optimizer and a rollout engine, as one process of a run has them."""
    train = train_engine(folder, context.device, max_tokens=1024, train=False)
    setup = rollout_setup(folder, context.device, prompt=64, response=64, **settings)
    return train, rollout_engine(setup)


def measure_sync(context: Context, folder: Path) -> None:
    """Measures syncs with and without the check of every weight, sleeping, waking, and memory over many repeats."""
    train, rollout = _pair(context, folder)
    version = 0
    for check in (True, False):
        manager = ShardingManager(train, rollout, bucket_bytes=BUCKET_BYTES, check=check)
        reports = [manager.sync(version + number) for number in range(4)]
        version += len(reports)
        num_bytes = reports[0].bytes
        copy = _copy_s(context, num_bytes)
        for when, seconds in (
            ("first", reports[0].seconds),
            ("later", statistics.median(report.seconds for report in reports[1:])),
        ):
            what = f"{SYNCED}: {when} sync, check {'on' if check else 'off'}"
            note = f"{num_bytes / GIB:.2f} GiB, {num_bytes / seconds / GIGA:.1f} GB/s; baseline: a copy of these bytes"
            context.rows.measured(what, seconds, "s", baseline=copy, note=note)
    manager = ShardingManager(train, rollout, bucket_bytes=BUCKET_BYTES)
    with context.rows.trying(f"{SYNCED}: sleep and wake"):
        _sleep(context, rollout)
    _repeats(context, manager, rollout, version)
    rollout.shutdown()


def _copy_s(context: Context, num_bytes: int) -> float:
    """Returns the seconds of copying so many bytes on the device."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    return median_s(lambda: target.copy_(source), context.device)


def _sleep(context: Context, rollout: RolloutEngine) -> None:
    """Measures what the rollout engine gives to training, and how long that takes."""
    if not context.on_gpu:
        raise NotThere("vLLM does not sleep on a CPU")
    torch.cuda.empty_cache()
    before = used_bytes(context.device)
    asleep = seconds_of(rollout.sleep, context.device)
    freed = before - used_bytes(context.device)
    context.rows.measured(f"{SYNCED}: sleep", asleep, "s", note=f"{freed / GIB:.1f} GiB became free")
    weights = seconds_of(lambda: rollout.wake_up(weights_only=True), context.device)
    context.rows.measured(f"{SYNCED}: wake for the weights", weights, "s")
    context.rows.measured(f"{SYNCED}: wake the rest", seconds_of(rollout.wake_up, context.device), "s")


def _repeats(context: Context, manager: ShardingManager, rollout: RolloutEngine, version: int) -> None:
    """Checks that memory does not grow over many syncs, each after a sleep."""
    used = []
    for number in range(REPEATS + SETTLED):
        rollout.sleep()
        manager.sync(version + number)
        if context.on_gpu:
            torch.cuda.empty_cache()
        used.append(used_bytes(context.device))
    growth = (used[-1] - used[SETTLED]) / GIB
    what = f"{SYNCED}: growth of memory over {REPEATS} rounds of sleep and sync"
    context.rows.check(what, growth, "GiB", at_most=GROWTH_GB, note="on a CPU: of the process's RSS")


def folder(context: Context) -> None:
    """Section G."""
    with context.rows.trying("weights through a folder"):
        need_vllm()
        apart(measure_folder, context, model_folder(context, WRITTEN), limit_s=context.left_s)


def measure_folder(context: Context, model: Path) -> None:
    """Measures the writer's half, and the reader's two: before generation pauses, and while it does."""
    train, rollout = _pair(context, model, mode="async")
    weights_folder = _weights_folder(context, train)
    try:
        writer = WeightWriter(train, weights_folder, bucket_bytes=BUCKET_BYTES)
        reader = WeightReader(rollout, weights_folder, bucket_bytes=BUCKET_BYTES)
        for version in range(3):
            when = ("first", "second", "later")[version]
            written = writer.write(version)
            _rate(context, f"write, {when}", written.seconds, written.bytes, "from")
            mapped, seconds = None, 0.0

            def prepare(version: int = version) -> None:
                nonlocal mapped
                mapped = reader.prepare(version)

            seconds = seconds_of(prepare, context.device)
            assert mapped is not None
            _rate(context, f"map and check while generating, {when}", seconds, written.bytes, None)
            placed = reader.place(mapped)
            _rate(context, f"place while generation pauses, {when}", placed.seconds, placed.bytes, "to")
    finally:
        shutil.rmtree(weights_folder, ignore_errors=True)
        rollout.shutdown()


def _weights_folder(context: Context, train: TrainEngine) -> Path:
    """Returns a new folder in host memory, where a run has it, or in the work folder where that is too small."""
    needed = VERSIONS_AT_ONCE * sum(piece.tensor.nbytes for piece in train.local_weights() or ())
    has_room = HOST_MEMORY.is_dir() and shutil.disk_usage(HOST_MEMORY).free > needed
    if not has_room:
        context.rows.add(
            "weights in host memory", status="not there", note=f"{HOST_MEMORY} lacks {needed / GIB:.1f} GiB: on disk"
        )
    return Path(tempfile.mkdtemp(prefix="rlhub-acceptance-", dir=HOST_MEMORY if has_room else context.work))


def _rate(context: Context, what: str, seconds: float, num_bytes: int, direction: str | None) -> None:
    """Writes one half of a weight update.  direction: of the copy between host and device that it has; None for none."""
    baseline = num_bytes / GIGA / host_rate(context, direction) if direction and context.on_gpu else None
    note = f"{num_bytes / GIB:.2f} GiB, {num_bytes / seconds / GIGA:.2f} GB/s" + "; baseline: a pinned copy" * (
        baseline is not None
    )
    context.rows.measured(f"{WRITTEN}: {what}", seconds, "s", baseline=baseline, note=note)
