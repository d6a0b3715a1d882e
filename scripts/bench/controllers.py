"""What a step costs its driver, with batches that travel and with batches by reference, in one run.

    python scripts/bench/controllers.py [--ranks 64 256 1024] [--repeats 5] [--launcher 8 16 32]

Each rank has 16 rows of 512 + 512 tokens.  The functions are those of a step of GRPO with a reference model; the ranks are not
there: their results were pickled before the clock starts, and what is sent to them is pickled and counted.  Prompts go out alike
in both and are left out, and so is the arithmetic of rewards and advantages.

  today      results read and joined, arranged, cut and sent for old and reference log-probs and the update
  reference  small columns read and joined, arranged, ONE exchange planned, (key, places) cut and sent for the same calls

CPU s and MiB are of the driver, medians; `arrange` is within CPU s.  The last table moves 512 rows of which one is 32 times as
long as the others: bytes of the exchange beside those of the tokens that change rank, and of the same rows padded to the longest.

--launcher adds the CPU time of the process that starts the ranks, of all its threads (RUSAGE_SELF), for so many Ray actors that
sleep, and for 1,024 ranks of which 128 sleep in each of 8 other processes: the calls are real, the ranks are not.

  one driver          makes five calls a rank and step; seconds of a step
  loop on every rank  has made one call to each rank, waits for them as `rlhub.trainer.launch` does, and copies a line of rank 0's
                      log a step; calls made and results read from the moment when all ranks have begun to that in which they
                      have taken 20 steps of a second, and seconds of all 20 steps

Exit status 1 where the loop on 1,024 ranks makes the launcher call any of them, or takes more than 0.1 s of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import io
import pickle
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhub.protocol import BatchRef, ColumnStore, DataProto, Retain
from rlhub.protocol.columns import take_rows
from rlhub.protocol.exchange import pack, plan_exchange, unpack
from rlhub.protocol.layout import Layout
from rlhub.trainer.ppo.dealing import arrange, deal, mini_batch_ids

ROWS_PER_RANK, PROMPT, RESPONSE, SAMPLES = 16, 512, 512, 8
MINI_BATCHES = 4
MIB = 2**20
MODEL = ["input_ids", "attention_mask", "response_mask"]
UPDATE = [*MODEL, "mini_batch", "advantages", "old_log_probs", "ref_log_prob"]


@dataclass(slots=True)
class Wire:
    """What goes to the ranks and comes from them, as pickle protocol 5 with out-of-band buffers, which are copied once on their
    way out, as into an object store.  num_bytes: both ways."""

    num_bytes: int = 0

    def send(self, values: Iterable[Any]) -> None:
        """Pickles one value for each rank."""
        for value in values:
            body, buffers = packed(value)
            copies = [bytes(buffer) for buffer in buffers]
            self.num_bytes += len(body) + sum(map(len, copies))

    def receive(self, messages: Sequence[Message]) -> list[Any]:
        """Reads the ranks' results."""
        self.num_bytes += sum(map(len_of, messages))
        return [pickle.loads(body, buffers=buffers) for body, buffers in messages]


Message = tuple[bytes, list[Any]]


def packed(value: Any) -> Message:
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return body, [buffer.raw() for buffer in buffers]


def len_of(message: Message) -> int:
    return len(message[0]) + sum(buffer.nbytes for buffer in message[1])


@dataclass(slots=True)
class Results:
    """The ranks' results of a step, pickled: samples, old and reference log-probs, metrics of the update."""

    num_ranks: int
    samples: list[Message] = field(default_factory=list)
    log_probs: dict[str, list[Message]] = field(default_factory=dict)
    update: list[Message] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return self.num_ranks * ROWS_PER_RANK

    @property
    def rows_per_mini_batch(self) -> int:
        return self.num_rows // MINI_BATCHES


def rank_samples(rng: np.random.Generator, num_rows: int = ROWS_PER_RANK) -> DataProto:
    """What a rank's generation returns."""
    lengths = torch.from_numpy(rng.integers(16, RESPONSE + 1, num_rows))
    mask = (torch.arange(RESPONSE)[None, :] < lengths[:, None]).long()
    ids = torch.from_numpy(rng.integers(0, 150_000, (num_rows, PROMPT + RESPONSE)))
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": torch.cat([torch.ones(num_rows, PROMPT, dtype=torch.int64), mask], 1),
            "responses": ids[:, PROMPT:].contiguous(),
            "response_mask": mask,
            "response_length": lengths,
            "finish_reason": torch.zeros(num_rows, dtype=torch.int64),
            "rollout_log_probs": torch.zeros(num_rows, RESPONSE),
        }
    )


def make_results(num_ranks: int, *, by_reference: bool) -> Results:
    """The same results of the same ranks, whole or with their wide columns left in stores."""
    rng, results = np.random.default_rng(0), Results(num_ranks)
    results.log_probs = {"old_log_probs": [], "ref_log_prob": []}
    for rank in range(num_ranks):
        store = ColumnStore(rank)
        samples = rank_samples(rng)
        results.samples.append(packed(Retain("step").keep(samples, store) if by_reference else samples))
        for name, messages in results.log_probs.items():
            output = DataProto.from_dict({name: torch.zeros(ROWS_PER_RANK, RESPONSE)})
            messages.append(packed(Retain("step+1", (name,)).keep(output, store) if by_reference else output))
        results.update.append(packed(DataProto(meta_info={"metrics": {f"actor/metric{index}": 0.5 for index in range(8)}})))
    return results


def drivers_columns(num_rows: int) -> DataProto:
    """What the driver knows of each row before anything is generated, and what scoring adds."""
    return DataProto.from_dict(
        {
            "ordinal": torch.arange(num_rows) // SAMPLES,
            "uid": torch.arange(num_rows) // SAMPLES,
            "scores": torch.zeros(num_rows),
            "valid": torch.ones(num_rows, dtype=torch.bool),
        }
    )


def step_today(results: Results) -> tuple[int, float]:
    """Returns bytes, and CPU seconds of `arrange`."""
    wire = Wire()
    batch = drivers_columns(results.num_rows).union(DataProto.concat(wire.receive(results.samples)))
    start = time.process_time()
    arrange(batch, rows_per_mini_batch=results.rows_per_mini_batch, num_ranks=results.num_ranks, balance=True)
    arranging = time.process_time() - start
    for messages in results.log_probs.values():
        wire.send(batch.select(MODEL, [], []).chunk(results.num_ranks))
        batch.union(DataProto.concat(wire.receive(messages)))
    batch.batch["advantages"] = torch.zeros(results.num_rows, RESPONSE)
    wire.send(batch.select(UPDATE, [], []).chunk(results.num_ranks))
    DataProto.concat(wire.receive(results.update))
    return wire.num_bytes, arranging


def step_by_reference(results: Results) -> tuple[int, float]:
    """Returns bytes, and CPU seconds of dealing the rows."""
    wire, num_ranks, rows = Wire(), results.num_ranks, results.num_rows
    ref = BatchRef.concat(wire.receive(results.samples)).union(drivers_columns(rows))
    start = time.process_time()
    ids = mini_batch_ids(rows, results.rows_per_mini_batch, None)
    ref.union(DataProto.from_dict({"mini_batch": ids}))
    lengths = (ref.small.batch["response_length"] + PROMPT).tolist()
    ref.reorder(deal(lengths, ids, num_ranks, balance=True))
    arranging = time.process_time() - start
    after = Layout.even(rows, num_ranks)
    wire.send(plan_exchange(ref, after, num_ranks))
    ref = BatchRef(("step+1",), ref.small, ref.columns, after)
    for messages in results.log_probs.values():
        wire.send(ref.select(MODEL, [], []).chunk(num_ranks))
        ref.union(BatchRef.concat(wire.receive(messages)))
    ref.union(DataProto.from_dict({"advantages": torch.zeros(rows)}))
    wire.send(ref.select(UPDATE, [], []).chunk(num_ranks))
    DataProto.concat(wire.receive(results.update))
    return wire.num_bytes, arranging


def measured(step: Callable[[Results], tuple[int, float]], results: Results) -> tuple[float, int, float]:
    gc.collect()
    start = time.process_time()
    num_bytes, arranging = step(results)
    return time.process_time() - start, num_bytes, arranging


def table(num_ranks: int, repeats: int) -> str:
    """One line: medians of both, alternating, and their ratios."""
    kinds = {
        "today": (step_today, make_results(num_ranks, by_reference=False)),
        "reference": (step_by_reference, make_results(num_ranks, by_reference=True)),
    }
    runs: dict[str, list[tuple[float, int, float]]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, (step, results) in kinds.items():
            runs[name].append(measured(step, results))
    (old, old_bytes, _), (new, new_bytes, deal_s) = (
        [statistics.median(column) for column in zip(*runs[name], strict=True)] for name in kinds
    )
    return (
        f"| {num_ranks:5d} | {num_ranks * ROWS_PER_RANK:6d} x {PROMPT + RESPONSE} | {old:.3f} | {old_bytes / MIB:.0f} "
        f"| {new:.3f} | {deal_s:.3f} | {new_bytes / MIB:.2f} | {old / new:.1f} | {old_bytes / new_bytes:.0f} |"
    )


def long_tail(num_rows: int = 512, num_ranks: int = 8, mean: int = 256, longest: int = 32) -> str:
    """One line: what an exchange of ragged rows costs where one is `longest` times as long as the others."""
    rng = np.random.default_rng(0)
    lengths = np.full(num_rows, mean)
    lengths[rng.integers(num_rows)] = longest * mean
    tokens = torch.nested.as_nested_tensor([torch.zeros(length, dtype=torch.int32) for length in lengths], layout=torch.jagged)
    stores, before = [ColumnStore(rank) for rank in range(num_ranks)], Layout.even(num_rows, num_ranks)
    refs = []
    for rank, store in enumerate(stores):
        rows = torch.from_numpy(np.flatnonzero(before.rank == rank))
        part = DataProto.from_dict({"input_ids": take_rows(tokens, rows), "length": torch.from_numpy(lengths)[rows]})
        refs.append(Retain("k").keep(part, store))
    ref = BatchRef.concat(refs)
    ref.reorder(deal(lengths.tolist(), torch.zeros(num_rows, dtype=torch.int64), num_ranks, balance=True))
    changing = ref.layout.rank != before.rank
    exact = int(ref.small.batch["length"].numpy()[changing].sum()) * tokens.dtype.itemsize
    plan = plan_exchange(ref, before, num_ranks)
    sent = [pack(store, moves) for store, moves in zip(stores, plan, strict=True)]
    total = sum(len(part) for _, pieces in sent for piece in pieces.values() for part in piece)
    for rank, moves in enumerate(plan):
        came = {source: torch.cat(list(pieces[rank])) for source, (_, pieces) in enumerate(sent) if rank in pieces}
        unpack(sent[rank][0], came, moves)
    padded = int(changing.sum()) * longest * mean * tokens.dtype.itemsize
    return f"| {num_rows} | {changing.sum()} | {exact / MIB:.3f} | {total / MIB:.3f} | {total / exact:.4f} | {padded / MIB:.1f} |"


LAUNCHED_STEPS, STEP_S, CALLS_A_STEP, FAKE_RANKS, FAKE_PROCESSES = 20, 1.0, 5, 1024, 8
LAUNCHER_S = 0.1
MARGIN_S = 2.0
"""After the ranks have begun, and after their last step."""


class Ranks:
    """Ranks that only sleep, in other processes.  num_calls, num_results: those of this process so far."""

    def __init__(self, num_ranks: int, num_processes: int) -> None:
        import ray

        class Sleeper:
            async def work(self, seconds: float) -> None:
                await asyncio.sleep(seconds)

            async def train(self, ends: float, log: str) -> float:
                """Takes steps until then, and returns when it began.  log: "" for ranks other than 0."""
                began = time.time()
                while (left := ends - time.time()) > 0:
                    if log:
                        with open(log, "a") as lines:
                            lines.write("step: 1 - actor/loss: 0.5\n")
                    await asyncio.sleep(min(left, STEP_S))
                return began

        remote = ray.remote(Sleeper).options(num_cpus=0, max_concurrency=2 * num_ranks // num_processes)
        self._actors = [remote.remote() for _ in range(num_processes)]
        self._num_ranks, self.num_calls, self.num_results = num_ranks, 0, 0
        self.call("work", 0.0)

    def call(self, method: str, *args: Any) -> dict[int, Any]:
        """Calls every rank once, as the launcher does, and waits.  `train` gives only rank 0 the log."""
        from rlhub.single_controller.calls import Deadline, WorkerInfo
        from rlhub.single_controller.ray.pending import Gather

        references = {}
        for rank in range(self._num_ranks):
            given = (*args[:-1], args[-1] if rank == 0 else "") if method == "train" else args
            references[rank] = getattr(self._actors[rank % len(self._actors)], method).remote(*given)
            self.num_calls += 1
        workers = {rank: WorkerInfo(rank=rank, node="127.0.0.1", pid=0) for rank in references}
        found = Gather("loop", method, references, workers, Deadline(seconds=600.0), lambda: None).wait()
        self.num_results += len(found)
        return found

    def end(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)  # type: ignore[arg-type]


def own_cpu_s() -> float:
    """Returns the CPU seconds of all threads of this process, and of no other."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def one_driver(ranks: Ranks, steps: int) -> tuple[int, float]:
    """Returns calls and seconds of a step, on the average of so many."""
    calls, start = ranks.num_calls, own_cpu_s()
    for _ in range(steps * CALLS_A_STEP):
        ranks.call("work", 0.0)
    return (ranks.num_calls - calls) // steps, (own_cpu_s() - start) / steps


def every_rank(ranks: Ranks, num_ranks: int) -> tuple[int, float]:
    """Returns calls and results, and seconds, from the moment when all ranks have begun to the end of their last step."""
    from rlhub.trainer.launch import shown

    begin = time.time() + MARGIN_S + 0.01 * num_ranks
    end = begin + LAUNCHED_STEPS * STEP_S
    seen = list[tuple[int, float]]()

    def look() -> None:
        for moment in (begin, end):
            time.sleep(max(0.0, moment - time.time()))
            seen.append((ranks.num_calls + ranks.num_results, own_cpu_s()))

    with tempfile.NamedTemporaryFile("r", suffix=".log") as log, contextlib.redirect_stderr(io.StringIO()), shown(Path(log.name)):
        looking = threading.Thread(target=look)
        looking.start()
        began = ranks.call("train", end + MARGIN_S, log.name)
        looking.join()
    if max(began.values()) > begin:
        raise RuntimeError(f"a rank began {max(began.values()) - begin:.1f} s too late: the machine is too busy to measure")
    (before, start_s), (after, end_s) = seen
    return after - before, end_s - start_s


def launcher_table(counts: Sequence[int]) -> tuple[str, bool]:
    """Returns lines for so many actors, and the last for many ranks, and whether that is within the bounds."""
    from rlhub.single_controller.ray.cluster import connect

    settings = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    connection = connect(settings, device="cpu", num_ranks=2)
    lines, within = [], True
    try:
        for num_ranks, processes, steps in [
            *((count, count, LAUNCHED_STEPS) for count in counts),
            (FAKE_RANKS, FAKE_PROCESSES, 2),
        ]:
            ranks = Ranks(num_ranks, processes)
            calls, step_s = one_driver(ranks, steps)
            messages, cpu_s = every_rank(ranks, num_ranks)
            ranks.end()
            where = "" if processes == num_ranks else f" in {processes}"
            lines.append(f"| {num_ranks}{where} | {calls} | {step_s:.3f} | {messages} | {cpu_s:.3f} |")
            within = messages == 0 and cpu_s <= LAUNCHER_S < step_s
    finally:
        connection.close()
    return "\n".join(lines), within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--launcher", type=int, nargs="*", default=None, metavar="ACTORS")
    options = parser.parse_args()
    write = sys.stdout.write
    write("| ranks | rows x tokens | today CPU s | MiB | reference CPU s | of it arrange | MiB | CPU ratio | MiB ratio |\n")
    write("|---:|---|---:|---:|---:|---:|---:|---:|---:|\n")
    for num_ranks in options.ranks:
        write(table(num_ranks, options.repeats) + "\n")
        sys.stdout.flush()
    write(
        "\n| rows | that change rank | MiB of their tokens | MiB sent | ratio | MiB padded |\n|---:|---:|---:|---:|---:|---:|\n"
    )
    write(long_tail() + "\n")
    if options.launcher is None:
        return 0
    write(
        f"\n| ranks | one driver: calls a step | CPU s | loop on every rank: calls in {LAUNCHED_STEPS} steps | CPU s of them |\n"
    )
    write("|---:|---:|---:|---:|---:|\n")
    lines, within = launcher_table(options.launcher)
    write(lines + "\n")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
