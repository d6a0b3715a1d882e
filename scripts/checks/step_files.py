"""Counts the files of rlhub that one synchronous training step enters: what a reader has to open to follow it.

    python scripts/checks/step_files.py            # the count, and the files by folder
    python scripts/checks/step_files.py --calls    # with the number of calls into each file

The step is the third of a GRPO run in process (trainer.backend=local) with the hf engine: publication of the weights, sampling,
scoring and the update.  A file counts where a Python function of it is called on the main thread.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

PROFILED_STEP = 3
"""The first two make the plans and the caches that later ones use."""
SETTINGS = (
    "trainer.logger=[]",
    "trainer.save_freq=-1",
    "trainer.record_batches=False",
    f"trainer.total_training_steps={PROFILED_STEP}",
)


def count_step_files(folder: Path) -> Counter[str]:
    """Returns the number of calls into each file (its path below rlhub/), in a run whose files go to `folder`."""
    from rlhub.config.cli import prepare
    from rlhub.config.schema import to_dict
    from rlhub.config.sections.ppo import PPOConfig
    from rlhub.trainer.ppo.step import TrainingStep
    from rlhub.trainer.ppo.trainer import build_data, build_trainer
    from rlhub.trainer.run import Run
    from scripts.checks.jobs import Task

    config = prepare(PPOConfig, "ppo", Task(folder=folder, seconds=0.0).write().arguments(folder / "run", *SETTINGS))
    data, calls, take_step = build_data(config), Counter[str](), TrainingStep.__call__
    prefix = f"{ROOT / 'rlhub'}/"

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            calls[frame.f_code.co_filename.removeprefix(prefix)] += 1

    def profiled(self: TrainingStep, step: int, prompts: Iterator[Any]) -> dict[str, float]:
        sys.setprofile(count if step == PROFILED_STEP else None)
        try:
            return take_step(self, step, prompts)
        finally:
            sys.setprofile(None)

    with ExitStack() as stack, patch.object(TrainingStep, "__call__", profiled):
        run = stack.enter_context(Run(config.trainer, to_dict(config), data.total_steps))
        trainer = build_trainer(config, data, run, stack)
        run.start()
        trainer.fit()
    return calls


def report(calls: Mapping[str, int], *, with_calls: bool) -> str:
    """Returns the files by folder as text."""
    lines = [f"{len(calls)} files of rlhub in a synchronous step"]
    paths = sorted(map(Path, calls), key=lambda path: (str(path.parent), path.name))
    for folder, members in groupby(paths, key=lambda path: path.parent):
        names = [f"{path.name} ({calls[str(path)]})" if with_calls else path.name for path in members]
        lines.append(f"  {folder}: {len(names)}: {', '.join(names)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="with the number of calls into each file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(report(count_step_files(Path(folder)), with_calls=options.calls))


if __name__ == "__main__":
    main()
