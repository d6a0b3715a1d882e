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

from recipes import stages
from recipes.arithmetic import run as quickstart

logger = logging.getLogger("disaggregated")

START_S = 300.0
LOG_CHARACTERS = 4000  # of a server that did not start
SETTINGS = (
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.rollout_is=token",
    "actor_rollout_ref.rollout.name=remote",
    "actor_rollout_ref.rollout.mode=async",
    "trainer.max_staleness=1",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Warm start, then server and trainer; returns the exit status of the one that failed, or 0."""
    parser = quickstart.parser("disaggregated")
    parser.add_argument("--engine", default="auto", help="generation engine of the server")
    options, found = stages.parse(parser, arguments)
    return stages.run(options, lambda: learn(options, found.engine))


def learn(options: stages.Options, engine: str) -> None:
    """All stages, and what came out."""
    out, folder = options.out, options.out / options.name
    options.overrides[:0] = SETTINGS
    warm_start = quickstart.prepare(options)
    shared = out / "shared"
    shared.mkdir(parents=True, exist_ok=True)
    with server(shared, warm_start, engine, out / "server.log") as address:
        remote = "actor_rollout_ref.rollout.remote"
        settings = [
            f"{remote}.urls=['{address}']",
            f"{remote}.api_key_file={shared / 'key'}",
            f"{remote}.admin_key_file={shared / 'admin-key'}",
            f"{remote}.weights_folder={shared}",
        ]
        stages.train("trainer", "main_ppo", [*quickstart.rl_settings(options, warm_start, folder), *settings])
    logger.info("\n%s", quickstart.summary(folder / "metrics.jsonl"))


@contextmanager
def server(shared: Path, model: Path, engine: str, log: Path) -> Iterator[str]:
    """The inference job; gives its address, and ends it."""
    ready = shared / "address"
    ready.unlink(missing_ok=True)
    settings = [f"model.path={model}", f"rollout.name={engine}", "server.port=0"]
    settings += [f"server.api_key_file={shared / 'key'}", f"server.admin_key_file={shared / 'admin-key'}"]
    settings += [f"server.ready_file={ready}"]
    command = [sys.executable, "-m", "rlhub.trainer.main_serve", *settings]
    logger.info("\ninference (log in %s):\n  %s", log, shlex.join(command))
    with log.open("w") as stream:
        # In a session of its own: Ctrl-C is for the trainer, whose last step still needs the server.
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=stages.environment(), start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not ready.is_file():
            if process.poll() is not None or time.monotonic() > deadline:
                logger.error("the server did not start: %s", log.read_text()[-LOG_CHARACTERS:])
                raise subprocess.CalledProcessError(process.poll() or 1, command)
            time.sleep(0.1)
        yield ready.read_text()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
