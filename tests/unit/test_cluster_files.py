"""Images and the files for Slurm and Kubernetes: linters, KubeRay's schema, and the command that a manifest runs."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhub.config.cli import prepare
from rlhub.config.sections.ppo import PPOConfig
from tests.support.kuberay import problems
from tests.support.linters import ROOT, lint

CLUSTER = ROOT / "scripts" / "cluster"
MANIFESTS = sorted(CLUSTER.glob("*.yaml"))
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*[!e]"))
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((CLUSTER / name).read_text())
    return document


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["spec"]["rayClusterSpec"] if document["kind"] == "RayJob" else document["spec"]
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_the_schema_of_kuberay(path: Path) -> None:
    assert problems(read(path.name)) == []


@pytest.mark.parametrize(
    ("where", "value", "text"),
    [
        (("workerGroupSpecs", 0, "replica"), 2, "workerGroupSpecs.0: Additional properties are not allowed ('replica'"),
        (("workerGroupSpecs", 0, "replicas"), "two", "workerGroupSpecs.0.replicas: 'two' is not of type 'integer'"),
        (("headGroupSpec", "rayStartParams", "num-cpus"), 0, "rayStartParams.num-cpus: 0 is not of type 'string'"),
        (("authOptions", "mode"), "tokens", "authOptions.mode: 'tokens' is not one of"),
        (("headGroupSpec", "template", "spec", "containers", 0, "volumeMounts", 0, "path"), "/", "('path' was unexpected)"),
        (("headGroupSpec", "template"), None, "headGroupSpec: 'template' is a required property"),
    ],
)
def test_a_wrong_field_is_found(where: tuple[Any, ...], value: object, text: str) -> None:
    for name in ("ray_job.yaml", "ray_cluster.yaml"):
        document = copy.deepcopy(read(name))
        node = cluster_of(document)
        for key in where[:-1]:
            node = node[key]
        if value is None:
            del node[where[-1]]
        else:
            node[where[-1]] = value
        (problem,) = problems(document)
        assert text in problem


def test_a_kind_or_version_that_kuberay_has_not_is_found() -> None:
    for wrong in ({"kind": "RayJobs"}, {"apiVersion": "ray.io/v1alpha1"}):
        (problem,) = problems(read("ray_job.yaml") | wrong)
        assert "known: RayCluster, RayJob of ray.io/v1" in problem


def test_both_manifests_describe_the_same_cluster() -> None:
    assert cluster_of(read("ray_job.yaml")) == cluster_of(read("ray_cluster.yaml"))
    assert cluster_of(read("ray_job.yaml"))["rayVersion"] == PINS["ray"]


def test_the_job_asks_for_the_machines_that_it_gets() -> None:
    """Its command passes the program's parser, and each path in it lies on the volume that all pods have."""
    job = read("ray_job.yaml")
    (group,) = cluster_of(job)["workerGroupSpecs"]
    python, dash_m, module, *settings = shlex.split(job["spec"]["entrypoint"])
    assert (python, dash_m, module) == ("python", "-m", "rlhub.trainer.main_ppo")
    trainer = prepare(PPOConfig, "ppo", settings, only_show=True).trainer
    (worker,) = group["template"]["spec"]["containers"]
    assert trainer.nnodes == group["replicas"] == group["minReplicas"]
    assert str(trainer.n_gpus_per_node) == worker["resources"]["limits"]["nvidia.com/gpu"]
    assert (trainer.device, trainer.ray_init, trainer.save_freq > 0) == ("cuda", {"address": "auto"}, True)
    head = cluster_of(job)["headGroupSpec"]["template"]["spec"]["containers"][0]
    for container in (head, worker):
        assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/data"]
        assert f"-t {container['image']} ." in (ROOT / "docker" / "README.md").read_text()
    paths = [value for value in (setting.partition("=")[2] for setting in settings) if "/" in value]
    assert len(paths) == 4 and all(path.startswith("/data/") for path in paths)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_sound_and_have_the_pinned_environment(path: Path) -> None:
    """Their environment is that of setup_env.sh, which installs what constraints.txt pins; they leave out the same files."""
    assert lint("hadolint", path) == ""
    text = path.read_text()
    assert "bash scripts/setup_env.sh" in text and "pip install" not in text
    (base,) = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    assert re.search(r":\d+\.\d+", base), "a base image by its version"
    assert len({path.with_name(f"{each.name}.dockerignore").read_text() for each in DOCKERFILES}) == 1


def test_the_linter_finds_a_fault_in_an_image(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && apt-get install git\n")
    assert {"DL3006", "DL3003", "DL3009"} & set(re.findall(r"DL\d+", lint("hadolint", "--no-color", tmp_path / "Dockerfile")))


@pytest.mark.parametrize("name", ["slurm_ray.sh", "slurm_torchrun.sh"])
def test_slurm_reads_the_options_of_a_job(name: str) -> None:
    """Slurm stops reading them at the first command; the program is told to save before the time limit, in the script itself."""
    lines = (CLUSTER / name).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert options == lines[1 : 1 + len(options)] and len(options) < first
    assert {"#SBATCH --ntasks-per-node=1", "#SBATCH --signal=B:TERM@300"} <= set(options)
