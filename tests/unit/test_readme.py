"""What the READMEs show is what the code is: every file, name, setting and piece of code in them exists."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from rlhub.algorithms.inputs import AdvantageInputs
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from rlhub.config.compose import example_names
from rlhub.config.load import free_keys
from rlhub.config.schema import leaves, sections
from rlhub.config.sections.export import ExportConfig
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.serve import ServeConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.registry import load_object

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docker", "recipes", "rlhub", "scripts", "trainer_configs")
TEXTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for name in FOLDERS for path in sorted((ROOT / name).rglob("README.md"))),
]
CONFIGS = (PPOConfig, SFTConfig, DPOConfig, RMConfig, ServeConfig, ExportConfig)
README_LINES = 160
COLUMNS = ("reward_model.ground_truth", "reward_model.style")
"""Of rows of data, which look like settings."""
PATHS = re.compile(
    r"(?<![\w./@$-])((?:docker|recipes|rlhub|scripts|tests|trainer_configs)/[\w./<>*{},-]*[\w/]|[\w./{},-]+/[\w{},]+\.py)(?![<*{\w])"
)
SHORT = "rollout."
"""How texts call actor_rollout_ref.rollout for short."""

every_text = pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))


def broken_links(text: str, folder: Path) -> Iterator[str]:
    """Links to files that are not there, or to headings that their file does not have."""
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+://", link):
            continue
        name, _, heading = link.partition("#")
        shown = text if not name else _content(folder / name)
        if shown is None or (heading and heading not in headings(shown)):
            yield link


def _content(path: Path) -> str | None:
    """None for a path that is not there."""
    return path.read_text() if path.is_file() else "" if path.exists() else None


def headings(text: str) -> set[str]:
    """As the links to them are written: lower case, without punctuation, hyphens for spaces."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def missing_files(text: str, folder: Path) -> Iterator[str]:
    """Paths from the repository's root, and Python files from there, from rlhub or from the text's own folder, that do not exist;
    {a,b} stands for both, and paths with another part to fill in are left out."""
    for path in (path for found in PATHS.findall(text) for path in _each(found)):
        places = (ROOT, ROOT / "rlhub", folder) if path.endswith(".py") else (ROOT,)
        example = set("<>*{") & set(path) or path.startswith(("path/to/", "..."))
        if not (example or any((place / path).exists() for place in places)):
            yield path


def _each(path: str) -> Iterator[str]:
    """Each of the paths that a path with {a,b} stands for."""
    choice = re.search(r"\{([\w,]+)\}", path)
    names = choice[1].split(",") if choice else [""]
    yield from (path.replace(choice[0], name) if choice else path for name in names)


def unknown_names(text: str) -> Iterator[str]:
    """`rlhub.module:Name` that cannot be imported, and modules that do not exist."""
    for name in re.findall(r"\brlhub(?:\.\w+)+:\w+", text):
        try:
            load_object(name)
        except (ImportError, AttributeError):
            yield name
    for name in re.findall(r"\brlhub(?:\.[a-z_]\w*)+(?![\w:.(])", text):
        try:
            found = find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            yield name


def unknown_settings(text: str) -> Iterator[str]:
    """Settings written in full, or as `rollout.name`, that no command has."""
    known = {leaf.key for cls in CONFIGS for leaf in leaves(cls)} | {key for cls in CONFIGS for key, _ in sections(cls)}
    free = tuple(f"{key}." for cls in CONFIGS for key in free_keys(cls))
    roots = "actor_rollout_ref|algorithm|critic|custom_reward_function|data|reward_model|rollout|trainer"
    prose = re.sub(r"```python\n.*?```", "", text, flags=re.DOTALL)
    for name in re.findall(rf"(?<![\w./-])(?:{roots})\.[a-z_][\w.]*(?<!\.)", prose):
        full = f"actor_rollout_ref.{name}" if name.startswith(SHORT) else name
        if name not in COLUMNS and not any(key in known or key.startswith(free) for key in (name, full)):
            yield name


@every_text
def test_every_file_name_and_setting_in_it_exists(path: Path) -> None:
    text = path.read_text()
    found = [*broken_links(text, path.parent), *missing_files(text, path.parent), *unknown_names(text), *unknown_settings(text)]
    assert found == []


def test_every_class_and_table_that_the_walkthroughs_name_exists() -> None:
    code = "\n".join(path.read_text() for name in ("rlhub", "tests", "scripts") for path in (ROOT / name).rglob("*.py"))
    words = set(re.findall(r"\w+", code))
    named = re.findall(r"`(\w*[A-Z]\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 20 and [name for name in named if name not in words] == []


def test_what_does_not_exist_is_found() -> None:
    """The control of the test above."""
    text = (
        "[a](rlhub/nowhere.md) [b](README.md#no-such-heading) `rlhub/no_such.py` `rlhub.registry:NoName` `rlhub.no_such.module` "
        "`trainer.no_such_setting=1 rollout.n=2 rollout.m=2` [c](README.md#quickstart) `rlhub/<name>.py` "
        "`rlhub.registry:Registry` `config/{compose,no_such_either}.py` `path/to/file.py:Name`"
    )
    assert list(broken_links(text, ROOT)) == ["rlhub/nowhere.md", "README.md#no-such-heading"]
    assert list(missing_files(text, ROOT)) == ["rlhub/nowhere.md", "rlhub/no_such.py", "config/no_such_either.py"]
    assert list(unknown_names(text)) == ["rlhub.registry:NoName", "rlhub.no_such.module"]
    assert list(unknown_settings(text)) == ["trainer.no_such_setting", "rollout.m"]


def test_the_readme_is_short_and_shows_the_curve() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < README_LINES
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+\.svg)\)", text)
    drawing = ElementTree.parse(ROOT / picture)
    assert len(drawing.findall(".//{http://www.w3.org/2000/svg}path")) >= 2, "accuracy and length"


def test_the_example_loop_is_the_recipes() -> None:
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    recipe = (ROOT / "recipes" / "minimal_grpo" / "grpo.py").read_text()
    assert textwrap.indent(shown.group(1).strip(), " " * 8).replace(" " * 8 + "\n", "\n") in recipe
    assert len(recipe.splitlines()) <= 60


def test_the_worked_example_of_the_recipes_is_a_recipe() -> None:
    files = sorted((ROOT / "recipes" / "custom_advantage").glob("*.py"))
    assert sum(len(path.read_text().splitlines()) for path in files) < 60
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "recipes" / "README.md").read_text(), re.DOTALL)
    assert len(shown) == len(files)
    assert all(any(piece in path.read_text() for path in files) for piece in shown)


def test_every_recipe_and_every_example_is_in_a_table() -> None:
    recipes = {path.parent.name for path in (ROOT / "recipes").glob("*/README.md")}
    assert recipes == set(re.findall(r"\[`(\w+)`\]\(\1\)", (ROOT / "recipes" / "README.md").read_text()))
    table = re.findall(r"^\| `examples/.*$", (ROOT / "trainer_configs" / "README.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`(examples/[^`]+)`", "\n".join(table))) == example_names()


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
