"""GRPO on the quickstart's task, whose episodes an application drives over HTTP.

python recipes/openai_agent/online.py [options and key=value settings of recipes/arithmetic/run.py]
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages
from rlhub.utils.ports import free_port

HERE = Path(__file__).resolve().parent
AGENT = "actor_rollout_ref.rollout.agent"


def settings(port: int, key_file: Path) -> tuple[str, ...]:
    """Returns the settings of the training; validation would ask the application too."""
    return (
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.rollout.mode=async",
        f"{AGENT}.default_agent_loop=online",
        f"{AGENT}.kwargs.port={port}",
        f"{AGENT}.kwargs.key_file={key_file}",
        "trainer.max_staleness=1",
        "trainer.test_freq=-1",
    )


def main() -> int:
    """Starts the application, which waits for the run, and trains; returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        key_file, port = Path(folder) / "key", free_port()
        key_file.write_text(secrets.token_urlsafe())
        command = [sys.executable, str(HERE / "application.py"), f"http://127.0.0.1:{port}", str(key_file)]
        with subprocess.Popen(command) as application:
            try:
                return stages.quickstart_with("online", settings(port, key_file))
            finally:
                application.terminate()


if __name__ == "__main__":
    sys.exit(main())
