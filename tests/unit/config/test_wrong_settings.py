"""Command lines that mean something else than they say, and faults that only a worker can find."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhub.config import cli, load
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import ConfigError, DataError, EngineError, RlhubError, WorkerError


def problems_of(*overrides: str) -> list[str]:
    return load.collect(PPOConfig, "ppo", overrides).problems


@pytest.mark.parametrize("section", ["actor_rollout_ref", "actor_rollout_ref.ref", "critic", "reward_model"])
def test_a_value_in_place_of_a_section_is_named(section: str) -> None:
    """Also where parts of the section take the values of another."""
    assert problems_of(f"{section}=5") == [f"{section}: got 5, expected section (mapping)"]


def test_a_folder_below_home_needs_no_quotes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A shell leaves `~` as it is behind a key with dots, and Hydra does not read it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load.load(PPOConfig, "ppo", ["data.train_files=~/a.parquet", "+trainer.default_local_dir=~"])
    assert config.data.train_files == f"{tmp_path}/a.parquet" and config.trainer.default_local_dir == str(tmp_path)


class TestWhatAWorkerFinds:
    def ended(self, capsys: pytest.CaptureFixture[str], cause: RlhubError | None) -> tuple[int, str]:
        def main(config: PPOConfig) -> int:
            error = WorkerError("init_model raised", role="actor", rank=1, remote_traceback="Traceback (most recent call last)")
            raise error from cause

        code = cli.run(PPOConfig, "ppo", main, description="", required=(), argv=["data.train_batch_size=256"])
        return code, capsys.readouterr().err

    @pytest.mark.parametrize("cause", [ConfigError("model.target_modules: no linear layer"), DataError("row 3: no prompt")])
    def test_a_fault_of_the_users_is_told_as_one_that_the_driver_finds(
        self, capsys: pytest.CaptureFixture[str], cause: RlhubError
    ) -> None:
        code, told = self.ended(capsys, cause)
        assert code == cli.EXIT_USAGE and f"error: {cause}\n" in told and "Traceback" not in told

    @pytest.mark.parametrize("cause", [None, EngineError("not initialized")])
    def test_any_other_is_told_with_its_place(self, capsys: pytest.CaptureFixture[str], cause: RlhubError | None) -> None:
        code, told = self.ended(capsys, cause)
        assert code == cli.EXIT_FAILURE and "[actor rank 1] init_model raised" in told and "Traceback" in told
