"""Does a run with each sampler resume bit-exactly, and draw the same prompts however its processes run and however episodes do?

    python scripts/checks/resume_samplers.py [--only curriculum-sync mixture-async-ray ...]

A tiny main_ppo job on CPU of 6 steps (scripts/golden_runs.py has its model and reward), with two data sources.  A case is a
sampler, a mode and a way to run.  Samplers: uniform, curriculum, mixture, and sources: a mixture whose sources have an advantage
estimator and a reward function of their own.  Modes: rollout.mode=sync; filter, which is sync with dynamic sampling and a group
filter; mode=async with trainer.max_staleness=0; and stale, with 1.  Ways: in process; -ray, through Ray; -ranks, the loop on each
of two ranks.

    resumed    stopped after step 3 and gone on with: every tensor of the last checkpoint and every metric as without the stop
    order      stale, whose weights depend on what was ready in time: as without the stop every prompt has trained once, in order,
               and has the row that it had (which row a curriculum draws depends on what was scored in time)
    same       async as sync, through Ray as in process, on two ranks as under one driver with two ranks: every tensor
    control    stopped, and the sampler loses its state: the tensors, or the rows, must differ

The exit status is 1 where one of these fails.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import scripts.golden_runs as golden  # noqa: E402
from rlhub.data.samplers import CurriculumSampler, MixtureSampler, UniformSampler  # noqa: E402
from rlhub.trainer.ppo.offline_source import RECORDINGS, Recorded  # noqa: E402

STEPS, STOP = 6, 3
OWN = Path(__file__).resolve()
ASYNC = f"{golden.ROLLOUT}.mode=async"
MODES = {
    "sync": [],
    "filter": [
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "algorithm.group_filter=INPUTS/keep.py:keep",
    ],
    "async": [ASYNC, "trainer.max_staleness=0"],
    "stale": [*golden.STALE, "trainer.record_batches=True"],
}
KNOBS = "data.sampler_kwargs={low: 0.25, high: 0.75, revisit: 0.2}"
SAMPLERS = {
    "uniform": ["data.sampler=uniform"],
    "curriculum": ["data.sampler=curriculum", KNOBS],
    "mixture": ["data.sampler=mixture", "data.sources={words: {weight: 3}}"],
    "sources": [
        "data.sampler=mixture",
        "data.sources={words: {weight: 3, adv_estimator: rloo}, others: {reward: INPUTS/odd.py:odd}}",
    ],
}
RANKS = "trainer.n_gpus_per_node=2"
WAYS = {"": ("local", []), "-ray": ("ray", []), "-ranks": ("torchrun", [RANKS])}
"""Name -> backend of golden_runs.py, with settings."""
CASES = [
    f"{sampler}-{mode}{way}"
    for way in WAYS
    for sampler in SAMPLERS
    for mode in MODES
    if not way or (sampler != "uniform" and mode in (("sync", "async", "stale") if way == "-ray" else ("sync", "filter")))
]
"""On each rank there is no rollout.mode=async."""


FILES = {
    "odd.py": """
def odd(data_source, solution_str, ground_truth, extra_info):
    found = [word[-1:] in "13579" for word in solution_str.split()]
    return {"score": sum(found) / max(len(found), 1), "acc": bool(found) and found[0]}
""",
    "keep.py": """
def keep(group):
    return 0.1 < sum(group.rewards) / len(group.rewards) < 0.9
""",
}
"""A reward of one source, and a filter of groups."""


@dataclass
class Result:
    """What a run has left.  prompts: by ordinal the tokens of a prompt that has trained, each time that it has."""

    outcome: golden.Outcome
    prompts: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)


class ForgetfulUniform(UniformSampler):
    """Begins anew after a resume; so do the others."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ForgetfulCurriculum(CurriculumSampler):
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ForgetfulMixture(MixtureSampler):
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


FORGETFUL = {
    "uniform": ForgetfulUniform,
    "curriculum": ForgetfulCurriculum,
    "mixture": ForgetfulMixture,
    "sources": ForgetfulMixture,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=f"of {', '.join(CASES)}")
    options = parser.parse_args()
    golden.STEPS = STEPS
    inputs = Path(tempfile.mkdtemp(prefix="samplers-"))
    try:
        write_inputs(inputs)
        for name in golden.LIBRARIES:
            importlib.import_module(name)
        with golden.cluster(ROOT, needed=any("-ra" in case for case in options.only)) as joined:
            found = [check(case, inputs, joined) for case in options.only]
    finally:
        shutil.rmtree(inputs)
    print(f"{sum(found)} of {len(found)} cases hold")
    return 0 if all(found) else 1


def write_inputs(folder: Path) -> None:
    """Writes the job's files; rows are of two sources in turns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    golden.write_inputs(folder, ROOT)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    rows = [row | {"data_source": ("words", "others")[number % 2]} for number, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")


def check(case: str, inputs: Path, joined: Sequence[str]) -> bool:
    """Runs a case and prints its line."""
    started, (sampler, mode, *way) = time.monotonic(), case.split("-")
    backend, more = WAYS["".join(f"-{name}" for name in way)]
    given = [*SAMPLERS[sampler], *MODES[mode], *more, *(joined if backend == "ray" else ())]
    whole = run(inputs, given, [STEPS], backend)
    resumed = run(inputs, given, [STOP, STEPS], backend)
    lost = run(inputs, [*given, f"data.sampler={OWN}:{FORGETFUL[sampler].__name__}"], [STOP, STEPS], backend)
    if mode == "stale":
        results = {"order": in_order(whole, resumed, sampler), "control": whole.prompts != lost.prompts}
    else:
        results = {"resumed": as_before(whole, resumed, mode), "control": tensors_differ(whole, lost)}
    if mode == "async":
        results["same"] = not tensors_differ(run(inputs, SAMPLERS[sampler], [STEPS], "local"), whole)
    elif mode != "stale" and backend != "local":
        other = ("local", ()) if backend == "ray" else ("ray", joined)
        under_one = [*SAMPLERS[sampler], *MODES[mode], *more, *other[1]]
        results["same"] = not tensors_differ(run(inputs, under_one, [STEPS], other[0]), whole)
    shown = "".join(f"{name} {'holds' if right else 'FAILS':<8}" for name, right in results.items())
    print(f"{case:<24}{shown:<44}{time.monotonic() - started:4.0f} s", flush=True)
    return all(results.values())


def run(inputs: Path, given: list[str], stops: list[int], backend: str) -> Result:
    """Trains to each of these steps, one job after the other in one run folder; returns what the last one left."""
    scratch = Path(tempfile.mkdtemp(prefix="samplers-run-"))
    where = "trainer.controller=multi" if backend == "torchrun" else f"trainer.backend={backend}"
    start = golden.all_ranks if backend == "torchrun" else golden.main_ppo
    try:
        for steps in stops:
            more = [
                *(text.replace("INPUTS", str(inputs)) for text in given),
                f"trainer.total_training_steps={steps}",
                f"trainer.save_freq={STOP}",
                where,
            ]
            arguments = golden.settings("grpo", inputs, scratch / "run", more)
            status = golden.forked(partial(start, arguments, ROOT, scratch), scratch / "log")
            if status:
                sys.exit(f"status {status}:\n{(scratch / 'log').read_text(errors='replace')[-3000:]}")
        return Result(golden.Outcome.of_run(scratch / "run"), trained(scratch / "run" / RECORDINGS))
    finally:
        shutil.rmtree(scratch)


def trained(folder: Path) -> dict[int, list[tuple[int, ...]]]:
    """Returns the prompts that recorded batches trained, by ordinal."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for path in sorted(folder.glob("step-*.safetensors")):
        batch = Recorded.read(path).whole().batch
        rows = zip(batch["input_ids"], batch["attention_mask"].bool(), batch["prompt_length"].tolist(), strict=True)
        tokens = [tuple(row[mask][:length].tolist()) for row, mask, length in rows]
        for ordinal, prompt in dict(zip(batch["ordinal"].tolist(), tokens, strict=True)).items():
            found.setdefault(ordinal, []).append(prompt)
    return found


def as_before(whole: Result, resumed: Result, mode: str) -> bool:
    """Whether nothing differs; prints the first differences."""
    varying = (*golden.VARYING_OF["async_staleness_0"], "rollout/dropped_rows") if mode == "async" else ()  # since the start
    lines = golden.differences(whole.outcome, resumed.outcome, varying)
    print("".join(f"  {line}\n" for line in lines[:6]), end="")
    return not lines


def in_order(whole: Result, resumed: Result, sampler: str) -> bool:
    """Whether each prompt trained once in both runs, and of a sampler that learns nothing from scores with the same row."""
    once = all(sorted(one.prompts) == list(range(STEPS * golden.PROMPTS)) for one in (whole, resumed))
    once &= all(len(times) == 1 for one in (whole, resumed) for times in one.prompts.values())
    return once and (sampler == "curriculum" or whole.prompts == resumed.prompts)


def tensors_differ(one: Result, other: Result) -> bool:
    return any(line.startswith("tensor") for line in golden.differences(one.outcome, other.outcome))


if __name__ == "__main__":
    sys.exit(main())
