"""The scripts for Slurm as Slurm runs them, on two machines that stand-ins for `srun` and `scontrol` make of this one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlhub.utils.ports import free_port
from scripts.checks.jobs import ROOT, STEPS, Task
from tests.support.metrics import rows_of

LIMIT_S = 900.0
JOB = str(os.getpid())
SRUN = """#!/usr/bin/env bash
# Starts a command on each of two machines, refuses options that it does not know, and passes signals on.
while [[ "$1" == --* ]]; do
  case "$1" in
    --ntasks=2) tasks=2 ;;
    --ntasks-per-node=1 | --kill-on-bad-exit=1) ;;
    *) echo "srun: unrecognized option '$1'" >&2; exit 1 ;;
  esac
  shift
done
for ((node = 0; node < tasks; node++)); do SLURM_NODEID=$node "$@" & done
trap 'kill -TERM $(jobs -p)' TERM
status=0
for task in $(jobs -p); do
  wait "$task" || status=$?
  while kill -0 "$task" 2>/dev/null; do wait "$task" || status=$?; done
done
exit "$status"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$*" = "show hostnames node[1-2]" ]; then hostname; echo node2; else exit 1; fi
"""
REWARD = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    while os.path.exists({held!r}):
        time.sleep(0.02)
    return len(solution_str) % 2
"""
"""A step is not over while there is the file."""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on two machines, of which neither has a GPU."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    of_job = {
        "SLURM_JOB_ID": JOB,
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "RLHUB_PORT": str(free_port(keep=False)),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_ADDRESS", "RAY_AUTH", "SLURM_"))}
    return kept | of_job


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(variables: dict[str, str]) -> Iterator[Start]:
    """Starts scripts, with (script, log, *settings); those that a failed test leaves are ended."""
    jobs: list[subprocess.Popen[bytes]] = []
    yield lambda *arguments: jobs.append(start_job(variables, *arguments)) or jobs[-1]
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)
            job.wait(60)


def start_job(variables: dict[str, str], script: str, log: Path, *settings: str) -> subprocess.Popen[bytes]:
    """Slurm runs a copy of the script, in a folder of its own."""
    copied = Path(shutil.copy(ROOT / "scripts" / "cluster" / script, log.with_name("slurm_script")))
    with log.open("wb") as output:
        return subprocess.Popen(
            ["bash", str(copied), *settings],
            env=variables,
            stdout=output,
            stderr=output,
            cwd=log.parent,
            start_new_session=True,
        )


def wait_for(text: str, job: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while text not in log.read_text():
        assert job.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


def commands() -> list[str]:
    """Of all processes; a zombie has none."""
    return [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]


def test_a_job_that_is_told_to_stop_saves_and_continues_in_the_next(
    tmp_path: Path, variables: dict[str, str], start: Start
) -> None:
    """The first has no Ray, the second has; nothing of either is left, and the token of the second keeps others out."""
    task, run, log = Task(folder=tmp_path / "task").write(), tmp_path / "run", tmp_path / "first"
    held = tmp_path / "held"
    (task.folder / "reward.py").write_text(REWARD.format(held=str(held)))
    more = ("trainer.backend=ray", "trainer.record_batches=False", "trainer.save_freq=-1")
    settings = task.arguments(run, *more, deadline_s=600.0)

    first = start("slurm_torchrun.sh", log, *settings, "trainer.total_training_steps=1000")
    wait_for("step 2/1000", first, log)
    assert "in every process, 2 ranks on cpu" in log.read_text()
    first.send_signal(signal.SIGTERM)
    assert first.wait(LIMIT_S) != 0
    (saved,) = run.glob("global_step_*")
    done = len(rows_of(run))
    assert saved.name == f"global_step_{done}" and done >= 2, log.read_text()[-3000:]

    log, last = tmp_path / "second", f"trainer.total_training_steps={done + STEPS}"
    held.touch()
    second = start("slurm_ray.sh", log, *settings, last)
    wait_for("joined a Ray cluster: ", second, log)
    head = log.read_text().partition("joining the Ray cluster at ")[2].split()[0]
    stranger = subprocess.run(
        [Path(sys.executable).with_name("ray"), "status", "--address", head],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert stranger.returncode != 0 and "auth" in (stranger.stdout + stranger.stderr).lower(), stranger
    held.unlink()
    assert second.wait(LIMIT_S) == 0, log.read_text()[-3000:]
    assert [row["step"] for row in rows_of(run)] == list(range(1, done + STEPS + 1))
    deadline = time.monotonic() + 60  # what was killed ends when it gets a core
    while left := [command for command in commands() if f"/tmp/ray-{JOB}/" in command]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    shutil.rmtree(f"/tmp/ray-{JOB}")


@pytest.mark.parametrize("script", ["slurm_ray.sh", "slurm_torchrun.sh"])
def test_outside_of_a_job_nothing_is_started(script: str) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = ["bash", str(ROOT / "scripts" / "cluster" / script)]
    refused = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert refused.returncode != 0 and f"{script} runs in a Slurm job: submit it with sbatch" in refused.stderr


def test_a_cluster_that_does_not_start_ends_the_job(tmp_path: Path, start: Start) -> None:
    """Here srun refuses what it is asked for."""
    (tmp_path / "srun").write_text("#!/bin/sh\necho srun: error >&2\nexit 1\n")
    log = tmp_path / "log"
    assert start("slurm_ray.sh", log).wait(LIMIT_S) == 1
    assert "srun: error" in log.read_text() and "slurm: Ray ended before it had started" in log.read_text()


RAY = """#!/usr/bin/env bash
# In place of Ray: each start needs one attempt more than FAILURES.
echo "$@" >> attempts
if [ "$(wc -l < attempts)" -le "$FAILURES" ]; then echo "The current node timed out during startup."; exit 1; fi
echo "Ray runtime started."
exec sleep 1000
"""


@pytest.mark.parametrize("failures", [1, 3])
def test_ray_is_started_again_where_its_own_limit_was_too_short(tmp_path: Path, variables: dict[str, str], failures: int) -> None:
    """The control is a Ray that never starts."""
    (tmp_path / "ray").write_text(RAY)
    (tmp_path / "ray").chmod(0o755)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    log, job = tmp_path / "log", f"{JOB}{failures}"
    own = {"SLURM_JOB_ID": job, "SLURM_NODEID": "0", "RLHUB_HEAD_ADDRESS": "127.0.0.1", "FAILURES": str(failures)}
    with log.open("wb") as output:
        node = subprocess.Popen(
            ["bash", "scripts/cluster/ray_node.sh"], env=variables | own, cwd=tmp_path, stdout=output, stderr=output
        )
    if failures == 1:
        wait_for("Ray runtime started.", node, log)
        node.terminate()
    assert node.wait(LIMIT_S) == (143 if failures == 1 else 1)
    assert log.read_text().count("slurm: Ray did not start on machine 0") == failures
    attempts = (tmp_path / "attempts").read_text().splitlines()
    assert (
        len(attempts) == min(failures + 1, 3)
        and attempts[0].startswith("start --num-cpus=2 --num-gpus=0")
        and "--head" in attempts[0]
    )
    shutil.rmtree(f"/tmp/ray-{job}")
