"""Registry: one registration adds a part, names load it on first use, wrong names get a suggestion; and where the values of a
part's knobs come from."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhub.errors import ConfigError, RegistryError
from rlhub.registry import Registry, knobs_for, load_object, suggest

MODULE = """
from dataclasses import dataclass
@dataclass
class Knobs:
    alpha: float = 1.0
def part(): return "part"
class Outer:
    def inner(): ...
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module on the path that is not imported yet."""
    (tmp_path / "registry_plugin_under_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "registry_plugin_under_test", raising=False)
    return "registry_plugin_under_test"


def test_decorator_registers_the_object_itself() -> None:
    registry: Registry[object] = Registry("thing")

    @registry.register("mine", requires={"values"})
    def mine() -> None: ...

    assert registry.get("mine") is mine
    assert registry.row("mine").requires == {"values"}
    assert "mine" in registry and "other" not in registry and registry.names() == ["mine"]
    assert registry.knobs_class("mine") is None


def test_lazy_row_is_imported_by_get_and_not_before(plugin: str) -> None:
    registry: Registry[object] = Registry("thing")
    registry.add_lazy("lazy", f"{plugin}:part", knobs=f"{plugin}:Knobs")
    assert registry.row("lazy").target == f"{plugin}:part" and "lazy" in registry
    assert plugin not in sys.modules
    part = registry.get("lazy")
    assert plugin in sys.modules and part() == "part"  # type: ignore[operator]
    assert registry.get("lazy") is part
    knobs = registry.knobs_class("lazy")
    assert knobs is not None and knobs().alpha == 1.0


def test_unknown_name_says_what_there_is() -> None:
    registry: Registry[object] = Registry("advantage estimator")
    registry.add_lazy("grpo", "a:b")
    registry.add_lazy("gae", "a:c")
    with pytest.raises(
        RegistryError, match=r"no advantage estimator 'grp'; did you mean 'grpo'\? known: gae, grpo\. To add an adv"
    ):
        registry.get("grp")
    with pytest.raises(LookupError, match=r"^no advantage estimator 'zzz'; known: gae, grpo"):
        registry.row("zzz")


def test_a_name_is_registered_once_but_a_module_may_register_what_its_lazy_row_names(plugin: str) -> None:
    registry: Registry[object] = Registry("thing")
    registry.add_lazy("part", f"{plugin}:part")
    registry.add_lazy("part", f"{plugin}:part")
    registry.register("part")(load_object(f"{plugin}:part"))
    with pytest.raises(RegistryError, match="thing 'part' is registered twice"):
        registry.register("part")(lambda: None)
    with pytest.raises(RegistryError, match="registered twice"):
        registry.add_lazy("part", f"{plugin}:Knobs")


def test_load_object_reaches_nested_attributes_and_refuses_other_forms(plugin: str) -> None:
    assert load_object(f"{plugin}:Outer.inner").__name__ == "inner"
    with pytest.raises(RegistryError, match="module:attribute"):
        load_object("json")
    with pytest.raises(ModuleNotFoundError):
        load_object("no_such_module_anywhere:x")


def test_suggest_only_what_is_alike() -> None:
    assert suggest("vanila", ["vanilla", "gspo"]) == "; did you mean 'vanilla'?"
    assert suggest("qqq", ["vanilla"]) == ""


@dataclass(slots=True, kw_only=True)
class Knobs:
    gamma: float = 0.5
    bound: float = 3.0

    def __post_init__(self) -> None:
        if self.bound <= 1:
            raise ValueError("bound must be above 1")


@dataclass(slots=True, kw_only=True)
class Section:
    gamma: float = 0.9
    other: int = 1


def test_kwargs_win_over_the_section_and_the_section_over_the_default() -> None:
    assert knobs_for(Knobs, Section(), {}, where="w") == Knobs(gamma=0.9, bound=3.0)
    assert knobs_for(Knobs, Section(), {"gamma": 0.1, "bound": 2.0}, where="w") == Knobs(gamma=0.1, bound=2.0)


def test_a_misspelled_knob_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm\.adv_kwargs\.gama: no such knob; did you mean 'gamma'\?; known: bound, gamma"
    ):
        knobs_for(Knobs, Section(), {"gama": 1.0}, where="algorithm.adv_kwargs")


def test_a_value_the_knobs_refuse_is_an_error_that_says_where() -> None:
    with pytest.raises(ConfigError, match="algorithm.adv_kwargs: bound must be above 1"):
        knobs_for(Knobs, Section(), {"bound": 0.5}, where="algorithm.adv_kwargs")


def test_an_algorithm_without_knobs_takes_none() -> None:
    assert knobs_for(None, Section(), {}, where="w") is None
    with pytest.raises(ConfigError, match=r"w\.gamma: no such knob; this algorithm has no knobs"):
        knobs_for(None, Section(), {"gamma": 1.0}, where="w")
