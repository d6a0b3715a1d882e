"""main_dpo and main_rm before any process starts: files, columns, names and knobs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rlhub.config.rules.derive import derive
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.trainer.preflight import checks as preflight
from tests.unit.trainer.preflight.test_checks import MODEL


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(MODEL))
    Path("pairs.jsonl").write_text(json.dumps({"prompt": "1", "chosen": "2", "rejected": "3", "gap": 1.0}) + "\n")
    Path("talks.jsonl").write_text(json.dumps({"chosen": [], "rejected": []}) + "\n")
    Path("odd.jsonl").write_text(json.dumps({"prompt": "1", "chosn": "2", "rejected": "3"}) + "\n")


def found(config: Any, *set_keys: str, **changes: object) -> list[str]:
    config.data.train_files, config.model.path, config.trainer.device = "pairs.jsonl", "model", "cpu"
    for name, value in changes.items():
        node = config
        *parents, last = name.split("__")
        for parent in parents:
            node = getattr(node, parent)
        setattr(node, last, value)
    derive(config)
    return preflight.check(config, frozenset(set_keys))


@pytest.mark.parametrize("cls", [DPOConfig, RMConfig])
def test_data_and_model(cls: type) -> None:
    assert found(cls()) == []
    assert found(cls(), data__train_files="talks.jsonl") == [], "a prompt may stand in the answers"
    (problem,) = found(cls(), data__val_files=["odd.jsonl"])
    assert problem.startswith("data.val_files: odd.jsonl has no column 'chosen' (data.chosen_key); did you mean 'chosn'?")
    assert "no such folder" in found(cls(), model__path="./nowhere")[0]
    assert "1025 tokens, but model has 1024 positions" in found(cls(), data__max_length=1025)[0]


def test_margins() -> None:
    assert found(RMConfig(), margin_key="gap") == []
    (problem,) = found(RMConfig(), margin_key="gaps")
    assert "no column 'gaps' (margin_key); did you mean 'gap'?" in problem


def test_losses_and_their_knobs(caplog: pytest.LogCaptureFixture) -> None:
    assert "did you mean 'hinge'?" in found(DPOConfig(), dpo__loss_type="hinges")[0]
    (problem,) = found(DPOConfig(), "dpo.label_smoothing", dpo__label_smoothing=0.5)
    assert "label_smoothing must be in [0, 0.5)" in problem
    assert "dpo.tau: no such knob" in found(DPOConfig(), dpo__kwargs={"tau": 1.0})[0]
    with caplog.at_level(logging.WARNING):
        assert found(DPOConfig(), "dpo.label_smoothing", dpo__label_smoothing=0.1) == [] and not caplog.text
        assert found(DPOConfig(), "dpo.label_smoothing", dpo__label_smoothing=0.1, dpo__loss_type="ipo") == []
    assert "dpo.label_smoothing=0.1 has no effect: dpo.loss_type=ipo does not read it" in caplog.text
