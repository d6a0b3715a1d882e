"""Trainer and inference as two jobs with nothing between them but HTTP and a folder, on the quickstart's task.

    python recipes/disaggregated/run.py [options and key=value settings of recipes/arithmetic/run.py]

Starts both here, to show it.  The two commands are printed: run each on a machine of its own, under whatever scheduler, as long
as the folder has the same path on both.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlhub.utils.user_code import module_from_file

logger = logging.getLogger("disaggregated")

ARITHMETIC = Path(__file__).resolve().parents[1] / "arithmetic"
START_S = 300.0
SETTINGS = (
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.rollout_is=token",
    "actor_rollout_ref.rollout.name=remote",
    "actor_rollout_ref.rollout.mode=async",
    "trainer.max_staleness=1",
)


def main(arguments: Sequence[str]) -> int:
    """Warm start, then server and trainer; returns the trainer's exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    quickstart = module_from_file(str(ARITHMETIC / "run.py"))
    engine, rest = serving_engine(arguments)
    options = quickstart.parse(["--name=disaggregated", *SETTINGS, *rest])
    out = options.out
    seed = ["--seed", str(options.seed), "--out"]
    quickstart.make_folder("data", [sys.executable, str(ARITHMETIC / "generate.py"), *seed], out / "data")
    quickstart.make_folder("model", [sys.executable, str(ARITHMETIC / "build_model.py"), *seed], out / "model")
    warm_start = quickstart.train_sft(options)
    shared, folder = out / "shared", out / options.name
    shared.mkdir(parents=True, exist_ok=True)
    with server(shared, warm_start, engine, out / "server.log") as address:
        remote = "actor_rollout_ref.rollout.remote"
        settings = [
            f"{remote}.urls=['{address}']",
            f"{remote}.api_key_file={shared / 'key'}",
            f"{remote}.weights_folder={shared}",
        ]
        settings = [*quickstart.rl_settings(options, warm_start, folder), *settings]
        command = [sys.executable, "-m", "rlhub.trainer.main_ppo", *settings]
        logger.info("\ntrainer:\n  %s", shlex.join(command))
        status = subprocess.run(command, env=environment()).returncode
    logger.info("\n%s", quickstart.summary(folder / "metrics.jsonl"))
    return status


def serving_engine(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """--engine NAME: of the server (default auto); and what is not ours."""
    rest = list(arguments)
    if "--engine" not in rest:
        return "auto", rest
    place = rest.index("--engine")
    name = rest[place + 1]
    del rest[place : place + 2]
    return name, rest


@contextmanager
def server(shared: Path, model: Path, engine: str, log: Path) -> Iterator[str]:
    """The inference job; gives its address, and ends it."""
    ready = shared / "address"
    ready.unlink(missing_ok=True)
    settings = [f"model.path={model}", f"rollout.name={engine}", "server.port=0"]
    settings += [f"server.api_key_file={shared / 'key'}", f"server.ready_file={ready}"]
    command = [sys.executable, "-m", "rlhub.trainer.main_serve", *settings]
    logger.info("\ninference (log in %s):\n  %s", log, shlex.join(command))
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment())
    try:
        deadline = time.monotonic() + START_S
        while not ready.is_file():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield ready.read_text()
    finally:
        process.terminate()
        process.wait()


def environment() -> dict[str, str]:
    """One thread a process: on few cores, processes that each take all of them wait for one another."""
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
