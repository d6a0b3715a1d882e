"""Asynchronous training without staleness by every source of the replicas' weights, against synchronous training, bit for bit.

    python scripts/checks/weight_sources.py [--dtypes float32 bfloat16] [--only NAME ...] [--backend local]

Each run trains a tiny policy for a few steps with the hf engine in that dtype.  Sources: this machine's memory, a folder in full
versions, a folder with deltas, and connections to the training ranks with deltas; then the last two with a delta that is damaged
once it is written, with a trainer that is killed when a version is there and started again, and with a replica that is killed
while it reads (--backend ray only).  All must end with the weights of the
synchronous run of that dtype; another seed must not.  Columns: the smallest share of a full version's bytes that a version took,
the versions that replicas had to get in full instead of a delta, the replicas that died, and whether the weights are the same.
Ends with status 1 where a run is not as it must be.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts import golden_runs
from scripts.golden_runs import ROLLOUT, Outcome, digest, train, write_inputs

ROOT = Path(__file__).resolve().parents[2]
golden_runs.STEPS = STEPS = 7
SLOW = (f"{golden_runs.ACTOR}.optim.lr=1e-6", f"trainer.save_freq={STEPS}")  # in bfloat16 few values change
DELTAS = f"{ROLLOUT}.weights_full_every=100"
FOLDER, COLLECTIVE = f"{ROLLOUT}.weights=folder", f"{ROLLOUT}.weights=collective"
RUNS: Mapping[str, Sequence[str]] = {
    "memory": (f"{ROLLOUT}.weights=memory",),
    "folder, full": (FOLDER, f"{ROLLOUT}.weights_full_every=1"),
    "folder": (FOLDER, DELTAS),
    "collective": (COLLECTIVE, DELTAS),
    "folder, flipped": (FOLDER, DELTAS, "trainer.faults=[{kind: flip, place: weights.written, step: 5}]"),
    "collective, cut": (COLLECTIVE, DELTAS, "trainer.faults=[{kind: truncate, place: weights.written, step: 5}]"),
    "folder, killed": (FOLDER, DELTAS, "trainer.faults=[{kind: kill, place: replica.update_weights, step: 5}]"),
    "collective, killed": (COLLECTIVE, DELTAS, "trainer.faults=[{kind: kill, place: replica.update_weights, step: 5}]"),
    "folder, resumed": (FOLDER, DELTAS),
    "collective, resumed": (COLLECTIVE, DELTAS),
    "another seed": (f"{ROLLOUT}.weights=memory", "trainer.seed=5"),
}
DAMAGED, KILLED, OTHER = ("folder, flipped", "collective, cut"), ("folder, killed", "collective, killed"), "another seed"
RESUMED = ("folder, resumed", "collective, resumed")
KILL_TRAINER = "trainer.faults=[{kind: kill, place: weights.written, step: 5}]"


def bits(outcome: Outcome) -> dict[str, str]:
    """The digests of the last checkpoint's tensors."""
    return {name: digest(tensor) for name, tensor in outcome.tensors.items()}


def resumed(name: str, backend: str, inputs: Path, more: Sequence[str]) -> Outcome:
    """Trains with the trainer killed in a publication, and goes on with the same command."""
    with_saves = (f"trainer.backend={backend}", *more, "trainer.save_freq=2")
    folder = Path(tempfile.mkdtemp(prefix="weight-sources-run-"))
    for faults, ends_well in (((KILL_TRAINER,), False), ((), True)):
        arguments = golden_runs.settings(name, inputs.resolve(), folder / "run", (*with_saves, *faults))
        status = golden_runs.forked(partial(golden_runs.main_ppo, arguments, ROOT, folder), folder / "log")
        if (status == 0) != ends_well:
            raise RuntimeError(f"{name} ended with status {status}:\n{(folder / 'log').read_text(errors='replace')[-3000:]}")
    outcome = Outcome.of_run(folder / "run")
    shutil.rmtree(folder)
    return outcome


def row(name: str, dtype: str, outcome: Outcome, synchronous: Outcome) -> tuple[str, bool]:
    """The line of a run, and whether it is as it must be."""
    last = outcome.metrics[-1]
    share = min(line.get("rollout/published_share", 1.0) for line in outcome.metrics)
    fallbacks, deaths = last.get("rollout/full_fallbacks", 0.0), last.get("rollout/replica_deaths", 0.0)
    same = bits(outcome) == bits(synchronous)
    good = same == (name != OTHER) and (fallbacks > 0) == (name in DAMAGED)
    good = good and (deaths > 0) == (name in KILLED)
    return f"{name:20} {dtype:9} {share:6.3f} {fallbacks:10.0f} {deaths:7.0f} {'same' if same else 'other':>8}", good


def outcome_of(name: str, dtype: str, backend: str, inputs: Path, more: Sequence[str], synchronous: Outcome) -> tuple[str, bool]:
    """Trains as the run's name says; returns its line, and whether it is as it must be."""
    more = (*more, *RUNS[name])
    try:
        if name in RESUMED:
            outcome = resumed("async_staleness_0", backend, inputs, more)
        else:
            outcome = train("async_staleness_0", backend, inputs, ROOT, more)
    except RuntimeError as error:
        return f"{name:20} {dtype:9} {error}", False
    return row(name, dtype, outcome, synchronous)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of the engines (default: both)")
    parser.add_argument("--only", nargs="+", default=None, choices=list(RUNS), help="of the runs")
    parser.add_argument("--backend", default="local", choices=["local", "ray"])
    options = parser.parse_args()
    names = options.only or [name for name in RUNS if options.backend == "ray" or name not in KILLED]
    failed = 0
    inputs = Path(tempfile.mkdtemp(prefix="weight-sources-"))  # a TemporaryDirectory would end with a run, which is forked
    write_inputs(inputs, ROOT)
    print(f"{'source':20} {'dtype':9} {'share':>6} {'fallbacks':>10} {'deaths':>7} {'weights':>8}")
    with golden_runs.cluster(ROOT, options.backend == "ray") as joined:
        for dtype in options.dtypes:
            more = (*joined, *SLOW, f"{ROLLOUT}.dtype={dtype}")
            synchronous = train("grpo", options.backend, inputs, ROOT, more)
            for name in names:
                line, good = outcome_of(name, dtype, options.backend, inputs, more, synchronous)
                print(line + ("" if good else "  NOT AS IT MUST BE"), flush=True)
                failed += not good
    shutil.rmtree(inputs)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
