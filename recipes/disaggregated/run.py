"""Trainer and inference as two jobs with nothing between them but HTTP and a folder, on the quickstart's task.

    python recipes/disaggregated/run.py [options and key=value settings of recipes/arithmetic/run.py]

Starts both here, to show it.  The two commands are printed: run each on a machine of its own, under whatever scheduler, as long
as the folder has the same path on both.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes.arithmetic import run as quickstart
from recipes.stages import environment

logger = logging.getLogger("disaggregated")

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
    engine, rest = serving_engine(arguments)
    options = quickstart.parse(["--name=disaggregated", *SETTINGS, *rest])
    out = options.out
    warm_start = quickstart.prepare(options)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
