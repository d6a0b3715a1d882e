"""The command line of docker, and the refusals.  No daemon is needed, and none is tried."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from rlhub.errors import ConfigError
from rlhub.sandboxes.base import SandboxLimits
from rlhub.sandboxes.docker import DockerProvider, docker_arguments, end_containers
from rlhub.sandboxes.registry import load_sandbox


def options(**settings: object) -> list[str]:
    provider = DockerProvider(limits=SandboxLimits(memory_gb=0.5, processes=16, disk_mb=1), **settings)  # type: ignore[arg-type]
    return docker_arguments(provider, "box", 1000, ["/h/work", "/h/tmp"])


def value(arguments: list[str], name: str) -> list[str]:
    return [after for word, after in zip(arguments, arguments[1:], strict=False) if word == name]


def test_every_bound_is_on_the_command_line() -> None:
    found = options()
    assert found[:2] == ["docker", "run"] and found[-1] == "--entrypoint"
    assert value(found, "--network") == ["none"] and value(found, "--cap-drop") == ["ALL"] and "--read-only" in found
    assert value(found, "--memory") == value(found, "--memory-swap") == ["536870912b"]
    assert value(found, "--pids-limit") == ["16"] and value(found, "--user") == ["1000:1000"]
    assert value(found, "--security-opt") == ["no-new-privileges"]
    assert value(found, "--ulimit") == ["fsize=1048576", "core=0"]
    assert value(found, "--mount") == ["type=bind,src=/h/work,dst=/workspace", "type=bind,src=/h/tmp,dst=/tmp"]


def test_values_of_variables_are_not_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    assert "TOKEN" in value(options(env=["TOKEN"]), "--env") and not any("secret" in word for word in options(env=["TOKEN"]))


def fake_docker(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "docker"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_no_client_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"box=docker: docker's client is not installed; install docker"):
        load_sandbox("docker", where="box")


def test_no_daemon_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_docker(tmp_path, monkeypatch, "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    with pytest.raises(ConfigError, match=r"no daemon that answers \(Cannot connect.*start it.*sandbox=bwrap"):
        load_sandbox("docker", where="box")


def test_a_missing_image_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_docker(tmp_path, monkeypatch, '[ "$1" = version ] || { echo "No such image: small:1" >&2; exit 1; }')
    with pytest.raises(ConfigError, match=r"no image small:1 .*docker pull small:1"):
        load_sandbox({"name": "docker", "image": "small:1"}, where="box")


def test_containers_that_are_left_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_docker(tmp_path, monkeypatch, f'echo "$@" >> {tmp_path}/calls; [ "$1" = kill ] || printf "1a\\n2b\\n"')
    assert end_containers("box")
    assert (tmp_path / "calls").read_text() == "ps --quiet --filter name=box-\nkill 1a 2b\n"
    fake_docker(tmp_path, monkeypatch, "exit 1")
    assert not end_containers("box")
