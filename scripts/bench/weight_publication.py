"""The pause of an engine for new weights, and the bytes of a version, by the source of the weights, in one run.

    python scripts/bench/weight_publication.py [--millions 50] [--repeats 10] [--share 0.02] [--dtype float32] [--requests 0]
                                               [--engine hf]

One process has a trainer's model in float32 and, for each source, a replica of it: an engine of this dtype in a RolloutServer.
The vllm engine, of which a process has only one, serves all sources.  The sources take turns, one version each, after the first
two, which are full and in part float32 everywhere:

  copied   a folder of full versions, copied and compared while the engine is paused: for an engine without memory for standby
           weights, and what all engines did before there were any
  folder   the same folder, prepared in standby weights and exchanged
  deltas   a folder of versions that have only what changed
  memory   full versions in this machine's memory

Each step of the trainer changes a share of the values by the last bit that bfloat16 has, as small steps of an optimizer do.
pause: the replica's own figure (rollout/pause_s); with --requests, of requests that run, it has the rest of a step in it.  write:
what the trainer waits for.  read: waiting, reading, checking and placing in the replica.  bytes: what a version takes, of the
trainer's float32.  Medians over the repeats.  Every update's fingerprint is compared with the trainer's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tiny_model
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.engines.rollout.base import ExternalWeights, GenerationRequest, SamplingParams
from rlhub.rollout_service.server import RolloutServer
from rlhub.rollout_service.weights_folder import FolderReader
from rlhub.sharding_manager.files import SHARED_MEMORY, WeightWriter
from rlhub.sharding_manager.reader import MappedVersion, WeightReader
from rlhub.workers.memory_handover import WorkerRuntime
from tests.support.plain_train_engine import PlainTrainEngine

HIDDEN = 768
LAYER = 7.08e6  # parameters of one of that width
WARM_UP = 2
SOURCES = ("copied", "folder", "deltas", "memory")
BUCKET_BYTES = 64 << 20
RUNTIME = WorkerRuntime(device="cpu", seed=0, max_prompt_length=64, max_response_length=512, deadline_s=300.0)


@dataclass(slots=True, kw_only=True)
class Subject:
    """A source with its replica, and the figures of its versions."""

    name: str
    folder: str
    writer: WeightWriter
    server: RolloutServer
    readers: dict[str, FolderReader] = field(default_factory=dict)
    pause_s: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    async def publish(self, version: int, *, compare: bool) -> None:
        """Gives the replica the trainer's present weights."""
        written = await asyncio.to_thread(self.writer.write, version)
        self.server._readers = self.readers  # a server reads from one folder, and the only vllm engine from all
        report = await self.server.update_weights(self.folder, version)
        self.readers, self.server._readers = self.server._readers, {}
        if compare and report.fingerprint != written.fingerprint:
            raise SystemExit(f"{self.name}: version {version} has fingerprint {report.fingerprint}, not {written.fingerprint}")
        self.pause_s.append(report.pause_s)
        self.write_s.append(written.seconds)
        self.read_s.append(report.read_s)
        self.num_bytes.append(written.wire_bytes or 0)


class Copying:
    """Takes the standby weights away, in a worker of vLLM's."""

    def __init__(self, weights: Any) -> None:
        """Takes what every such object is built from, and does not use it."""

    def only(self) -> None:
        """Lets this worker copy."""
        from rlhub.engines.rollout.vllm.worker import WorkerWeights

        WorkerWeights.standby_weights = lambda self: None  # type: ignore[method-assign]


class CopyingReader(WeightReader):
    """A reader that sees no standby weights, in an engine that others read for too."""

    def _prepare(self, version: int) -> MappedVersion:
        with patch.object(self._rollout, "standby_weights", lambda: None):
            return super()._prepare(version)


def step(model: nn.Module, share: float, seed: int) -> None:
    """Changes a share of the values by the last bit of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            words = parameter.view(torch.int32)
            chosen = torch.rand(parameter.shape, generator=generator) < share
            words.add_(chosen, alpha=1 << 16)


async def replica(model: Path, arguments: argparse.Namespace, stack: ExitStack) -> RolloutServer:
    """Starts a replica."""
    config = ActorRolloutRefConfig()
    config.model.path = str(model)
    config.rollout.name, config.rollout.dtype, config.rollout.mode = arguments.engine, arguments.dtype, "async"
    config.rollout.max_num_seqs = 8
    server = RolloutServer(config, RUNTIME)
    await server.start()
    stack.callback(server.close)
    return server


def source(name: str, server: RolloutServer, train: PlainTrainEngine, arguments: argparse.Namespace, stack: ExitStack) -> Subject:
    """Returns a source with this replica."""
    memory = str(SHARED_MEMORY) if name == "memory" else arguments.folder
    folder = stack.enter_context(tempfile.TemporaryDirectory(dir=memory, prefix="rlhub-bench-"))
    writer = WeightWriter(train, Path(folder), bucket_bytes=BUCKET_BYTES, full_every=1000 if name == "deltas" else 1)
    stack.callback(writer.close)
    found = Subject(name=name, folder=folder, writer=writer, server=server)
    if name == "copied" and isinstance(server.engine, ExternalWeights):
        server.engine.call_workers(f"{Path(__file__).stem}:{Copying.__name__}", "only")
    elif name == "copied":
        found.readers[folder] = CopyingReader(server.engine, Path(folder), bucket_bytes=BUCKET_BYTES)
    return found


async def measure(subjects: list[Subject], model: nn.Module, arguments: argparse.Namespace) -> None:
    """Publishes versions, the sources in turns, each time beginning with another."""
    running: list[asyncio.Task[object]] = []
    for version in range(WARM_UP + arguments.repeats):
        step(model, arguments.share, version)
        for place in range(len(subjects)):
            subject = subjects[(version + place) % len(subjects)]
            if arguments.requests and version >= WARM_UP:
                request = GenerationRequest(prompt_ids=[5, 6, 7], seed=1)
                params = SamplingParams(max_new_tokens=500, ignore_eos=True)
                running = [asyncio.create_task(subject.server.agenerate(request, params)) for _ in range(arguments.requests)]
                await asyncio.sleep(0.2)
            await subject.publish(version, compare=version >= 1)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def report(subjects: list[Subject], num_bytes: int) -> None:
    """Prints the table."""
    slowest = statistics.median(subjects[0].pause_s[WARM_UP:])
    print(f"{'source':8} {'pause ms':>9} {'of copied':>10} {'write ms':>9} {'read ms':>9} {'MB':>8} {'of float32':>11}")
    for subject in subjects:
        measured = (subject.pause_s, subject.write_s, subject.read_s, subject.num_bytes)
        pause, write, read, stored = (statistics.median(values[WARM_UP:]) for values in measured)
        print(
            f"{subject.name:8} {1e3 * pause:9.2f} {pause / slowest:10.3f} {1e3 * write:9.0f} {1e3 * read:9.0f} "
            f"{stored / 1e6:8.1f} {stored / num_bytes:11.4f}"
        )


async def run(arguments: argparse.Namespace) -> None:
    """Measures all sources."""
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tiny_model.build(path, hidden=HIDDEN, layers=max(1, round(arguments.millions * 1e6 / LAYER)))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float()
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{count / 1e6:.1f} million parameters, {arguments.engine} in {arguments.dtype}, {arguments.repeats} versions each")
        train = PlainTrainEngine(model)
        shared = await replica(path, arguments, stack) if arguments.engine == "vllm" else None
        servers = [shared or await replica(path, arguments, stack) for _ in SOURCES]
        subjects = [source(name, server, train, arguments, stack) for name, server in zip(SOURCES, servers, strict=True)]
        await measure(subjects, model, arguments)
        report(subjects, 4 * count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=50, help="parameters (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="versions of each source (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.02, help="of the values that change (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the engines")
    parser.add_argument("--engine", default="hf", choices=["hf", "vllm", "vllm_async"], help="of the replicas")
    parser.add_argument("--requests", type=int, default=0, help="that run meanwhile (default: %(default)s)")
    parser.add_argument("--folder", default=None, help="on whose disk the folders are (default: the temporary one)")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
