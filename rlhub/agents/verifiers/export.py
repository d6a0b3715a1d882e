"""Writes the tasks of an environment of verifiers as rows for data.train_files or data.val_files.

    python -m rlhub.agents.verifiers.export ID --python .venv-verifiers/bin/python --out train.parquet [--tasks 1000]

Each row has the task itself, so that its episode runs exactly this one, and `agent_name`, so that files of several environments
train together.  `--settings` is the [env] block of the library's configuration as JSON; a run needs the same in
rollout.agent.kwargs.verifiers_env.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhub.agents.verifiers.process import described, list_tasks
from rlhub.agents.verifiers.workflow import TASK
from rlhub.agents.workflows.knobs import VerifiersKnobs
from rlhub.errors import ConfigError


def rows_of(environment_id: str, tasks: Sequence[dict[str, Any]], first: int = 0) -> list[dict[str, Any]]:
    """Returns the rows of these tasks.  first: the number of the first one, which is its `index`."""
    return [
        {
            "prompt": task["prompt"],
            "data_source": f"verifiers/{environment_id}",
            "agent_name": f"verifiers:{environment_id}",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": first + number, "key": task["key"], TASK: task["task"]},
        }
        for number, task in enumerate(tasks)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("id", help="the environment, as in verifiers:<id>")
    parser.add_argument("--python", default="", help="the Python in which verifiers is installed")
    parser.add_argument("--out", type=Path, required=True, help="the parquet file")
    parser.add_argument("--skip", type=int, default=0, help="tasks that are left out at the beginning")
    parser.add_argument("--tasks", type=int, help="how many after them (default: all)")
    parser.add_argument("--settings", type=json.loads, default={}, help='the [env] block: {"taskset": {"split": "train"}}')
    parser.add_argument("--path", action="append", default=[], help="a folder with environments that are not installed")
    args = parser.parse_args(arguments)
    knobs = VerifiersKnobs(verifiers_python=args.python, verifiers_env=args.settings, verifiers_path=args.path)
    limit = None if args.tasks is None else args.skip + args.tasks
    try:
        tasks = list_tasks(knobs.verifiers_python, described(knobs, args.id), limit)[args.skip :]
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if not tasks:
        sys.stderr.write(f"verifiers:{args.id} has no tasks after the first {args.skip}\n")
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows_of(args.id, tasks, args.skip)), args.out)
    sys.stdout.write(f"{len(tasks)} tasks of verifiers:{args.id} in {args.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
