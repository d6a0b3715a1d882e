"""A recipe's command line is refused before its first stage, and Ctrl-C between two stages is no crash."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from recipes import stages
from recipes.arithmetic import run as arithmetic


@pytest.mark.parametrize("arguments", [["--steps", "-1"], ["--sft-steps=0"], ["--ranks", "0"], ["--ranks", "two"], ["nonsense"]])
def test_sizes_that_cannot_be(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        arithmetic.parse(arguments)
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and arguments[0].partition("=")[0] in told, told


def options_of(out: Path) -> stages.Options:
    return arithmetic.parse(["--out", str(out), "--steps", "1"])


def test_a_folder_that_cannot_be_made_is_said_before_any_stage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    reached: list[str] = []
    assert stages.run(options_of(tmp_path / "file" / "out"), lambda: reached.append("stage")) == 2
    assert not reached and f"--out {tmp_path / 'file' / 'out'}: no folder that can be made" in caplog.text


def test_ctrl_c_between_two_stages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with caplog.at_level(logging.INFO):
        assert stages.run(options_of(tmp_path), interrupted) == 130
    assert "interrupted; the same command goes on" in caplog.text
