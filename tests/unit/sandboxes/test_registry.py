"""A sandbox is named by a setting; a wrong one is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhub.errors import ConfigError
from rlhub.sandboxes import bwrap
from rlhub.sandboxes.registry import SANDBOXES, load_sandbox

OWN = """
from dataclasses import dataclass
from rlhub.sandboxes.base import SandboxProvider

@dataclass(slots=True, kw_only=True)
class Hosted(SandboxProvider):
    region: str = "near"

    @property
    def python(self): return "python3"

    def check(self):
        if self.region == "far": raise RuntimeError("unreachable")

    async def open(self): raise NotImplementedError

number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "hosted.py").write_text(OWN)
    return f"{tmp_path / 'hosted.py'}"


def test_a_provider_of_ones_own_has_limits_and_settings(own: str) -> None:
    found = load_sandbox({"name": f"{own}:Hosted", "region": "here", "memory_gb": 2}, where="box", timeout_s=3.0, memory_gb=1.0)
    assert (found.region, found.limits.memory_gb, found.limits.timeout_s) == ("here", 2, 3.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("bwarp", "no sandbox 'bwarp'; did you mean 'bwrap'"),
        ({"memory_gb": 1}, "expected a name"),
        ({"name": "{own}:Hosted", "memory": 1}, "no such setting: memory; did you mean 'memory_gb'"),
        ({"name": "{own}:Hosted", "processes": 0}, r"sandbox.processes=0: must be above 0"),
        ("{own}:number", "it is a int; expected a class derived from"),
    ],
)
def test_a_wrong_setting_is_refused(own: str, setting: object, message: str) -> None:
    if isinstance(setting, dict):
        setting = {key: str(value).format(own=own) if key == "name" else value for key, value in setting.items()}
    else:
        setting = str(setting).format(own=own)
    with pytest.raises(ConfigError, match=message):
        load_sandbox(setting, where="box")  # type: ignore[arg-type]


def test_the_registry_lists_what_comes_with_rlhub() -> None:
    assert SANDBOXES.names() == ["bwrap", "docker"]


@pytest.fixture
def fresh() -> None:
    bwrap.usable_mode.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_bwrap_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"box=bwrap: needs bwrap \(apt install bubblewrap\), prlimit \(apt install util-linux"):
        load_sandbox("bwrap", where="box")
    bwrap.usable_mode.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_refused_user_namespaces_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bwrap, "_refusal", lambda mode: "No permissions to create new namespace")
    monkeypatch.setattr(bwrap.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(ConfigError, match=r"No permissions to create new namespace.*user.max_user_namespaces.*sandbox=docker"):
        load_sandbox("bwrap", where="box")
    bwrap.usable_mode.cache_clear()


def test_unset_variables_and_missing_paths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ConfigError, match=r"sandbox.env lists NOT_SET: not set where the run starts"):
        load_sandbox({"name": "bwrap", "env": ["NOT_SET"]}, where="box")
    with pytest.raises(ConfigError, match=r"sandbox.read_only: no such path: /no/such"):
        load_sandbox({"name": "bwrap", "read_only": ["/no/such"]}, where="box")
