"""A short run of the server's soak, and that it notices a server that takes any token ids.

The long ones are scripts/checks/soak_serve.py's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

CHECKS = Path(__file__).resolve().parents[2] / "scripts" / "checks"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(CHECKS), *sys.path])
    import soak_serve

    return soak_serve.soak


def test_a_server_is_the_same_after_90_hostile_requests(soak: Any, tmp_path: Path) -> None:
    found = soak(tmp_path, engine="hf", requests=90, seed=3)
    assert found.problems == []
    assert sum(count.total() for count in found.statuses.values()) == 90


def test_a_server_without_checks_of_token_ids_does_not_pass(soak: Any, tmp_path: Path) -> None:
    found = soak(tmp_path, engine="hf", requests=40, seed=3, control=True)
    assert any("id out of range" in problem for problem in found.problems)
