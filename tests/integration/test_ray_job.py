"""`ray job submit`: the trainer as a job of a running Ray cluster, its source shipped by a runtime environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhub.single_controller.ray.cluster import build_runtime_env
from rlhub.utils.ports import free_port
from tests.support.chat_model import save_chat_model
from tests.support.metrics import rows_of

LOOPBACK = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 400.0
JOB_TIMEOUT_S = 600.0
"""Of one job: half a minute when nothing else runs."""
DECOY_BYTES = 300_000
LEFT_OUT = (".git", ".venv", ".venv-cuda", "checkpoints", "outputs", "wandb", "__pycache__", "rlhub/__pycache__")
LARGEST_PACKAGE = 4 * 2**20
"""Bytes of the source tree alone, generously."""

PLUGIN = """
import json, os, sys, pathlib
import rlhub

here = pathlib.Path.cwd()
found = {
    "arguments": sys.argv, "cwd": str(here), "rlhub": rlhub.__file__, "plugin": __file__,
    "files": {str(path.relative_to(here)): path.stat().st_size for path in here.rglob("*") if path.is_file()},
}
pathlib.Path(os.environ["FOUND_OUT"], f"{os.getpid()}.json").write_text(json.dumps(found))
"""
REWARD = """
from helpers.parity import share_of_odd

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return share_of_odd(solution_str)
"""
HELPER = """
def share_of_odd(text):
    return sum(ord(letter) % 2 for letter in text) / max(len(text), 1)
"""


@dataclass(slots=True, kw_only=True)
class Head:
    """A running head node.  address: of its job server."""

    process: subprocess.Popen[bytes]
    address: str

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def submit(self, runtime_env: dict[str, Any], *command: str) -> subprocess.CompletedProcess[str]:
        """`ray job submit`, with the job's output streamed until it ends."""
        ray = str(Path(sys.executable).with_name("ray"))
        job = [ray, "job", "submit", "--address", self.address, "--runtime-env-json", json.dumps(runtime_env), "--", *command]
        return subprocess.run(job, capture_output=True, text=True, timeout=JOB_TIMEOUT_S, env=client_environment())

    def jobs(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.address}/api/jobs/", timeout=120) as answer:
            return list(json.load(answer))


def client_environment() -> dict[str, str]:
    """Nothing of ours may point to another cluster, and no proxy stands between processes of this machine."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    return {**kept, "no_proxy": LOOPBACK, "NO_PROXY": LOOPBACK, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}


def start_head(folder: Path) -> Head:
    """All of it on loopback and on ports that are free."""
    ports: set[int] = set()
    while len(ports) < 8:  # one may be drawn twice
        ports.add(free_port(keep=False))
    gcs, dashboard, *others = ports
    names = (
        "dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port",
        "node-manager-port", "object-manager-port",
    )  # fmt: skip
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats",
        "--num-cpus=4", "--num-gpus=0", "--object-store-memory=300000000", f"--node-ip-address={LOOPBACK}", f"--port={gcs}",
        "--include-dashboard=true", f"--dashboard-host={LOOPBACK}", f"--dashboard-port={dashboard}",
        *(f"--{name}={port}" for name, port in zip(names, others, strict=True)),
    ]  # fmt: skip
    # The variable lets Ray bind loopback alone: see rlhub.single_controller.ray.cluster.
    environment = {**client_environment(), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with (folder / "head.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True)
    return Head(process=process, address=f"http://{LOOPBACK}:{dashboard}")


def wait_for_job_server(head: Head, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert head.process.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            head.jobs()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)


def stop(head: Head) -> None:
    """End the head and everything it started, and make sure of it."""
    family = head.family() if head.process.poll() is None else []
    head.process.terminate()
    _, alive = psutil.wait_procs(family, timeout=240)
    for process in alive:
        process.kill()
    head.process.wait(timeout=30)
    assert alive == [], "ended when asked to"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    folder = tmp_path_factory.mktemp("head")
    started = start_head(folder)
    try:
        wait_for_job_server(started, folder / "head.log")
        yield started
    finally:
        stop(started)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and rows in a place that all nodes see."""
    folder = tmp_path_factory.mktemp("data")
    save_chat_model(folder / "model", max_positions=64)
    rows = [{"prompt": f"{n} + 1 =", "data_source": "sums", "reward_model": {"ground_truth": str(n + 1)}} for n in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's checkout: our source, a reward and a plugin of their own, and much that must not be shipped."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("rlhub", "trainer_configs"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "helpers").mkdir()
    (folder / "helpers" / "parity.py").write_text(HELPER)
    (folder / "reward.py").write_text(REWARD)
    (folder / "job_plugin.py").write_text(PLUGIN)
    for name in LEFT_OUT:
        (folder / name / "deep").mkdir(parents=True, exist_ok=True)
        (folder / name / "deep" / "decoy.txt").write_bytes(os.urandom(DECOY_BYTES))
    for name in ("train.parquet", "model.safetensors", ".env"):
        (folder / name).write_bytes(os.urandom(DECOY_BYTES))
    return folder


def trainer_command(data: Path, run_folder: Path, *more: str) -> list[str]:
    return [
        "python", "-m", "rlhub.trainer.main_ppo",
        f"data.train_files={data / 'train.parquet'}", "data.train_batch_size=4", "data.max_prompt_length=16",
        "data.max_response_length=6", f"actor_rollout_ref.model.path={data / 'model'}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.name=hf",
        "algorithm.adv_estimator=grpo", "custom_reward_function.path=reward.py", "reward_model.num_workers=1",
        "trainer.device=cpu", "trainer.n_gpus_per_node=2", "trainer.ray_init.address=auto", "trainer.plugins=[job_plugin]",
        "trainer.total_training_steps=2", "trainer.save_freq=2", f"trainer.default_local_dir={run_folder}", *more,
    ]  # fmt: skip


def environment_of(project: Path, found: Path) -> dict[str, Any]:
    found.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return build_runtime_env(project, {"FOUND_OUT": str(found), "PATH": path, "HF_HUB_OFFLINE": "1"})


def test_a_job_trains_with_the_source_that_was_shipped(head: Head, project: Path, data: Path, tmp_path: Path) -> None:
    runtime_env = environment_of(project, tmp_path / "found")
    done = head.submit(runtime_env, *trainer_command(data, tmp_path / "run"))
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout + done.stderr
    assert [job["status"] for job in head.jobs() if job["type"] == "SUBMISSION"] == ["SUCCEEDED"]
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0.0 and abs(row["mismatch/kl"]) < 1e-5 for row in rows)
    assert (tmp_path / "run" / "global_step_2").is_dir()

    found = [json.loads(path.read_text()) for path in (tmp_path / "found").iterdir()]
    assert len(found) == 3, "the driver and two ranks"
    (package,) = {process["cwd"] for process in found}
    assert Path(package) != project
    for process in found:
        assert {process["rlhub"], process["plugin"]} == {f"{package}/rlhub/__init__.py", f"{package}/job_plugin.py"}
    driver = next(process for process in found if "main_ppo" in process["arguments"][0])
    check_package(driver["files"], project)


def check_package(files: dict[str, int], project: Path) -> None:
    """The whole source and nothing else.  files: path in the package -> bytes."""
    files = {name: size for name, size in files.items() if "__pycache__" not in name or name.endswith("decoy.txt")}
    source = {
        str(path.relative_to(project)): path.stat().st_size
        for folder in ("rlhub", "trainer_configs", "helpers")
        for path in (project / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    own = {name: (project / name).stat().st_size for name in ("reward.py", "job_plugin.py")}
    assert files == source | own
    assert sum(files.values()) < LARGEST_PACKAGE


def test_a_wrong_setting_fails_the_job_and_says_why(head: Head, project: Path, data: Path, tmp_path: Path) -> None:
    """Before any worker starts, and without a traceback of ours."""
    runtime_env = environment_of(project, tmp_path / "found")
    done = head.submit(runtime_env, *trainer_command(data, tmp_path / "run", "algorithm.adv_estimator=grp"))
    assert done.returncode != 0, done.stdout
    assert "FAILED" in [job["status"] for job in head.jobs()]
    output = done.stdout + done.stderr
    assert "algorithm.adv_estimator" in output and "did you mean 'grpo'" in output, output
    assert "Traceback" not in output, output
    assert not (tmp_path / "run").exists()
    assert len(list((tmp_path / "found").iterdir())) <= 1, "no worker was started"
