"""The bytes that a training step moves through its driver, and the memory that they take there, by trainer.batches.

    python scripts/bench/driver_traffic.py [--rows 256] [--prompt 512] [--response 512] [--ranks 2] [--only reference]
    python scripts/bench/driver_traffic.py --rows 4096 --prompt 1024 --response 1024 --steps 1     # the driver's memory
    python scripts/bench/driver_traffic.py --rows 64 --prompt 64 --response 64 --steps 200 --only reference       # what is kept
    python scripts/bench/driver_traffic.py --schedule async [...]                   # episodes on the rollout service

Each row of the table is a whole job of GRPO with a KL loss through Ray: a tiny policy, prompts and responses of full length,
eight samples a prompt, the fake rollout engine.  Counted are, of the second step, or the only one, and of the time since the
step before:

  bytes out, in      the step's metrics perf/driver_bytes_*, prompts apart
  pickled out, in    bytes that Ray serialises in the driver's process and deserialises there, arguments of calls included
  calls              calls of ranks
  growth             the largest resident memory of the driver after the first step began, less that before it

  kept               the most bytes of a batch that the ranks have after a step
  ranks' growth      from step 50 to the last of at least 100, of the rank that grows most, resident memory, in percent

Exit status 1 where reference moves more than 200 bytes a row and 128 KiB a step out and in, its driver grows by more than 50 MiB,
ranks keep anything after a step, or grow by more than 5 %; driver is the control, which is beyond the first two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MODES = ("driver", "reference")
SAMPLES, MEASURED_STEP = 8, 2
SETTLED_STEP, LONG_RUN = 50, 100
BYTES_A_ROW, BYTES_A_STEP, GROWTH_MIB, RANKS_GROWTH = 200, 128 * 1024, 50, 0.05
MIB = 2**20
SCHEDULES = ("sync", "async")
ASYNCHRONOUS = ("actor_rollout_ref.rollout.mode=async", "trainer.max_staleness=0")
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 7)
"""


def write_inputs(folder: Path, options: argparse.Namespace) -> None:
    """Writes the model, prompts of the full length, and the reward."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from scripts.bench.tiny_model import build

    build(folder / "model", hidden=16, layers=1, vocab_size=64, positions=options.prompt + options.response)
    rows = [
        {
            "prompt": " ".join(f"w{2 + (7 * row + 5 * word) % 60}" for word in range(options.prompt)),
            "data_source": "words",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": row},
        }
        for row in range(options.rows // SAMPLES)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)


def settings(folder: Path, mode: str, options: argparse.Namespace) -> list[str]:
    """Returns the job's command line."""
    prompts = options.rows // SAMPLES
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"data.train_files={folder / 'train.parquet'}",
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={options.prompt}",
        f"data.max_response_length={options.response}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"{actor}.ppo_mini_batch_size={prompts}",
        f"{actor}.use_kl_loss=True",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu={16 * (options.prompt + options.response)}",
        f"{rollout}.name=fake",
        f"{rollout}.n={SAMPLES}",
        f"{rollout}.ignore_eos=True",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.mismatch_stop=1e9",
        f"custom_reward_function.path={folder / 'reward.py'}",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={options.ranks}",
        f"trainer.batches={mode}",
        f"trainer.total_training_steps={options.steps}",
        "trainer.total_epochs=100",
        "trainer.logger=[]",
        f"trainer.default_local_dir={folder / mode}",
        *(ASYNCHRONOUS if options.schedule == "async" else ()),
    ]


class Pickled:
    """Counts what Ray serialises and deserialises in this process."""

    def __init__(self) -> None:
        self.out = self.into = 0

    def reset(self) -> None:
        self.out = self.into = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        from ray._private.serialization import SerializationContext

        serialize, deserialize = SerializationContext.serialize, SerializationContext.deserialize_objects

        def counted_out(context: Any, value: Any) -> Any:
            written = serialize(context, value)
            self.out += written.total_bytes
            return written

        def counted_in(context: Any, objects: Any, *args: Any, **more: Any) -> Any:
            self.into += sum(len(part) for data, metadata, *_ in objects for part in (data, metadata) if part is not None)
            return deserialize(context, objects, *args, **more)

        with (
            patch.object(SerializationContext, "serialize", counted_out),
            patch.object(SerializationContext, "deserialize_objects", counted_in),
        ):
            yield


class Memory:
    """The resident memory of this process, sampled."""

    def __init__(self) -> None:
        self.before = self.peak = 0
        self._end = threading.Event()

    @staticmethod
    def now(process: int | str = "self") -> int:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def begin(self) -> None:
        if not self.before:
            self.before = self.peak = self.now()
            threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self._end.wait(0.005):
            self.peak = max(self.peak, self.now())

    def end(self) -> int:
        self._end.set()
        return self.peak - self.before


def measure(arguments: list[str]) -> dict[str, float]:
    """Runs the job in this process, and returns what its driver moved and how it grew."""
    from rlhub.config.cli import prepare
    from rlhub.config.schema import to_dict
    from rlhub.config.sections.ppo import PPOConfig
    from rlhub.trainer.ppo.step import TrainingStep
    from rlhub.trainer.ppo.trainer import build_data, build_trainer
    from rlhub.trainer.run import Run

    config = prepare(PPOConfig, "ppo", arguments)
    data, take_step, found = build_data(config), TrainingStep.__call__, {"kept": 0.0, "ranks_growth": 0.0}
    memory, settled, pickled = Memory(), {}, Pickled()

    def measured(self: TrainingStep, step: int, prompts: Iterator[Any]) -> dict[str, float]:
        memory.begin()
        if step == 1:
            pickled.reset()
        metrics = take_step(self, step, prompts)
        if step <= MEASURED_STEP:
            found.update(pickled_out=pickled.out, pickled_in=pickled.into)
        found["kept"] = max(found["kept"], sum(self.actor.stored_bytes()))
        ranks = {worker.pid: memory.now(worker.pid) for worker in self.actor.workers}
        if step == SETTLED_STEP:
            settled.update(ranks)
        elif step == config.trainer.total_training_steps and step >= LONG_RUN:
            found["ranks_growth"] = max(ranks[pid] / settled[pid] - 1 for pid in ranks)
        pickled.reset()
        return metrics

    with ExitStack() as stack, pickled.counting(), patch.object(TrainingStep, "__call__", measured):
        run = stack.enter_context(Run(config.trainer, to_dict(config), data.total_steps))
        trainer = build_trainer(config, data, run, stack)
        run.start()
        trainer.fit()
        found["growth"] = memory.end()
    lines = (Path(config.trainer.default_local_dir) / "metrics.jsonl").read_text().splitlines()
    metrics = next(row for row in map(json.loads, lines) if row.get("step") == min(MEASURED_STEP, data.total_steps))
    return {**found, **{name: value for name, value in metrics.items() if name.startswith("perf/driver_")}}


def run_job(folder: Path, mode: str, options: argparse.Namespace) -> dict[str, float]:
    """Runs `measure` in a process of its own."""
    result = folder / f"{mode}.json"
    command = [sys.executable, __file__, "--measure", str(result), *settings(folder, mode, options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    start = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{mode} ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    found: dict[str, float] = json.loads(result.read_text())
    return {**found, "seconds": time.monotonic() - start}


def report(mode: str, found: dict[str, float], rows: int) -> bool:
    """Prints a line of the table; returns whether the bounds are kept."""
    prompts = found.get("perf/driver_bytes_prompts", 0.0)
    out, into = found["perf/driver_bytes_out"] - prompts, found["perf/driver_bytes_in"]
    growth = found["growth"] / MIB
    sys.stdout.write(
        f"{mode:<10} {out:>12,.0f} {into:>12,.0f} {(out + into) / rows:>10,.0f} {prompts:>12,.0f} {found['pickled_out']:>14,.0f} "
        f"{found['pickled_in']:>14,.0f} {found['perf/driver_calls']:>6.0f} {growth:>8.1f} {found['kept']:>6.0f} "
        f"{100 * found['ranks_growth']:>8.1f} {found['seconds']:>6.0f}\n"
    )
    pickled = found["pickled_out"] - prompts + found["pickled_in"]
    allowed = BYTES_A_ROW * rows + BYTES_A_STEP
    clean = found["kept"] == 0 and found["ranks_growth"] <= RANKS_GROWTH
    return max(out + into, pickled) <= allowed and growth <= GROWTH_MIB and clean


def main() -> int:
    if sys.argv[1:2] == ["--measure"]:
        Path(sys.argv[2]).write_text(json.dumps(measure(sys.argv[3:])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 256), ("prompt", 512), ("response", 512), ("ranks", 2), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedule", choices=SCHEDULES, default="sync")
    parser.add_argument("--only", choices=MODES)
    options = parser.parse_args()
    sys.stdout.write(
        f"{options.rows} rows of {options.prompt} + {options.response} tokens, {options.ranks} ranks, {options.schedule}\n"
    )
    sys.stdout.write(
        f"{'batches':<10} {'bytes out':>12} {'bytes in':>12} {'a row':>10} {'prompts':>12} {'pickled out':>14} "
        f"{'pickled in':>14} {'calls':>6} {'MiB more':>8} {'kept':>6} {'ranks +%':>8} {'s':>6}\n"
    )
    good = True
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name), options)
        for mode in MODES if options.only is None else [options.only]:
            kept = report(mode, run_job(Path(name), mode, options), options.rows)
            good = good and kept == (mode == "reference")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
