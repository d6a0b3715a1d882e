"""The folder through which a server of another job gets its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhub.engines.rollout.remote.server import Staging


def versions(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_resumed_run_keeps_what_it_writes_and_not_what_was_written_after_its_checkpoint(tmp_path: Path) -> None:
    staging = Staging(tmp_path, "policy-0", None)
    staging.take([[("weight", torch.ones(2))]])
    (tmp_path / "policy-1-9").mkdir()
    for version in range(6):
        staging.write(version)
    assert versions(tmp_path) == ["policy-0-4", "policy-0-5", "policy-1-9"]
    assert staging.write(2).is_dir()
    assert versions(tmp_path) == ["policy-0-2", "policy-1-9"]
    staging.write(3)
    assert versions(tmp_path) == ["policy-0-2", "policy-0-3", "policy-1-9"]
