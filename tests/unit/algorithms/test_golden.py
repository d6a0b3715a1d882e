"""Recorded values of every formula: a change shows, with the case, both values and the command that records it on purpose."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlhub.algorithms import aggregation, kl, masked, preference
from rlhub.algorithms.advantages import gae
from rlhub.algorithms.correction import weights
from rlhub.algorithms.policy_losses import gspo
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES
from rlhub.registry import Row
from scripts import golden


def test_every_value_is_as_recorded() -> None:
    found = golden.compare()
    assert not found, "\n".join([*found, f"if this is meant, record it and say why in the commit: {golden.COMMAND}"])


def test_every_registered_name_is_computed() -> None:
    families = {
        "advantages": ADVANTAGE_ESTIMATORS,
        "policy_losses": POLICY_LOSSES,
        "kl": KL_ESTIMATORS,
        "preferences": PREFERENCE_LOSSES,
    }
    for family, registry in families.items():
        cases = {case.partition(":")[0] for case in golden.compute(family)}
        assert set(golden.ours(registry)) <= cases
    parts = {f"{registry.kind} {name}" for registry in families.values() for name in registry.names()}
    assert set(golden.VARIANTS) <= parts


@pytest.mark.parametrize(
    ("module", "name", "broken", "case"),
    [
        (gspo, "row_mean", lambda values, mask: values.mean(1, keepdim=True), "policy_losses: 'gspo clip_low=0.1 clip_high=0.1"),
        (gae, "whiten", lambda values, mask: values * mask, "advantages: 'gae: advantages' [0]"),
        (kl, "K3_BOUND", 9.999999, "kl: 'low_var_kl: value'"),
        (masked, "VARIANCE_EPS", 2e-8, "values_and_means: 'whiten'"),
        (aggregation, "masked_sum", lambda loss, mask, dim=None: (loss * mask).mean(), "values_and_means: 'aggregate token-sum'"),
        (weights, "LOG_RATIO_BOUND", 0.1, "corrections: 'rollout_is=sequence"),
        (preference, "logsigmoid", lambda x: 1.0000001 * x.sigmoid().log(), "preferences: 'sigmoid: loss'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_changed_formula_is_named_with_both_values(monkeypatch, module, name: str, broken, case: str) -> None:
    monkeypatch.setattr(module, name, broken)
    found = golden.compare()
    named = [line for line in found if line.startswith(case)]
    assert named and all(": was " in line and ", is " in line for line in named), found


def test_a_new_part_fails_until_its_values_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(name="new", target="rlhub.algorithms.policy_losses.reinforce:reinforce")
    monkeypatch.setitem(POLICY_LOSSES._rows, "new", row)
    assert "policy_losses: 'new: loss' has no recorded value" in golden.compare()


def test_a_part_of_someone_elses_needs_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICY_LOSSES._rows, "theirs", Row(name="theirs", target="plugin:theirs"))
    assert golden.compare() == []


def test_what_is_no_longer_computed_or_was_recorded_from_other_inputs_is_said(tmp_path: Path) -> None:
    for family in golden.FAMILIES:
        record = json.loads((golden.FOLDER / f"{family}.json").read_text())
        if family == "kl":
            record["cases"]["gone: value"] = 1.0
        if family == "advantages":
            record["version"] = 0
        (tmp_path / f"{family}.json").write_text(json.dumps(record))
    assert golden.compare(tmp_path) == [
        f"advantages: recorded from inputs of version 0, which are now {golden.VERSION}",
        "kl: 'gone: value' is recorded and no longer computed",
    ]


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        (1.0, 1.0 + 1e-12, None),
        (1.0, 1.0 + 1e-9, "value: was 1.0, is 1.000000001"),
        ([[0.0, 2.0]], [[0.0, -2.0]], "[0][1]: was 2.0, is -2.0"),
        ([1.0], [1.0, 2.0], "value: was [1.0], is [1.0, 2.0]"),
        (0.0, 1e-13, None),
    ],
)
def test_differences_beyond_rounding_are_found(old, new, difference: str | None) -> None:
    assert golden.first_difference(old, new) == difference


def test_the_command_records_and_compares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(golden, "FOLDER", tmp_path / "golden")
    monkeypatch.setattr(golden, "FAMILIES", {"kl": golden.kl})
    monkeypatch.setattr(sys, "argv", ["golden.py", "--update"])
    assert golden.main() == 0
    lines = (tmp_path / "golden" / "kl.json").read_text().splitlines()
    cases = golden.compute("kl")
    assert len(lines) == len(cases) + 5 and json.loads("".join(lines))["cases"] == cases
    monkeypatch.setattr(sys, "argv", ["golden.py"])
    assert golden.main() == 0 and "as recorded" in capsys.readouterr().out
    monkeypatch.setattr(kl, "K3_BOUND", 5.0)
    assert golden.main() == 1
    shown = capsys.readouterr().out
    assert "kl: 'k3: value' [6]: was 10.0, is 5.0" in shown and "scripts/golden.py --update" in shown
