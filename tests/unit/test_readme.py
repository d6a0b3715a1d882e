"""What the README shows is what the code is."""

from __future__ import annotations

import importlib
import re
import textwrap
from pathlib import Path

import pytest
import torch

from rlhub.algorithms.inputs import AdvantageInputs
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_loop_is_the_recipes() -> None:
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    recipe = (ROOT / "recipes" / "minimal_grpo" / "grpo.py").read_text()
    assert textwrap.indent(shown.group(1).strip(), " " * 8).replace(" " * 8 + "\n", "\n") in recipe
    assert len(recipe.splitlines()) <= 60


def test_every_file_it_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


GUIDE = (ROOT / "rlhub" / "algorithms" / "README.md").read_text()


@pytest.mark.parametrize("name", [*ADVANTAGE_ESTIMATORS.names(), *POLICY_LOSSES.names()])
def test_the_guide_to_the_algorithms_has_every_name(name: str) -> None:
    assert re.search(rf"^\|.*`{re.escape(name)}`", GUIDE, re.MULTILINE)


def test_the_guides_estimator_works_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert shown is not None
    (tmp_path / "shown_in_the_guide.py").write_text(shown.group(1))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "_rows", dict(ADVANTAGE_ESTIMATORS._rows))
    module = importlib.import_module("shown_in_the_guide")
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.int64)
    inputs = AdvantageInputs(token_level_rewards=rewards, response_mask=mask, group=torch.tensor([0, 0]))
    advantages = ADVANTAGE_ESTIMATORS.get("half_grpo")(inputs, module.HalfKnobs()).advantages
    torch.testing.assert_close(advantages, torch.tensor([[0.75, 0.75], [-0.25, -0.25]]))
