"""What the README shows is what the code is."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

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
