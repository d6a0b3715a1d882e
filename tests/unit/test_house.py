"""The figures of the package's shape hold, and each is found to be off where it is."""

from __future__ import annotations

import pytest

from scripts.checks.house import BOUNDS, House, figures, read_house


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return figures(read_house())


BY_PARTS = "modules with one importer, %"
"""Grows with each registered part, which is one file and one registration: no test may fail where somebody adds one."""


@pytest.mark.parametrize("figure", [name for name in BOUNDS if name != BY_PARTS])
def test_figure_is_within_its_bound(figure: str, found: dict[str, float]) -> None:
    value = found[figure]
    assert BOUNDS[figure].holds(value), f"{figure}: {value:g}, wanted {BOUNDS[figure].text}; see scripts/checks/house.py --list"


def house_of(**modules: str) -> House:
    """Modules of a package by name, `__` for a dot."""
    return House({"rlhub": "", **{f"rlhub.{name.replace('__', '.')}": text for name, text in modules.items()}})


def test_importers_are_files_re_exports_and_lazy_rows() -> None:
    house = house_of(
        a="from rlhub.b import f\nimport rlhub.c\n",
        b="def f() -> None: ...\n",
        c="ROW = 'rlhub.b:f'\n",
        pack="from rlhub.pack.inner import g\n",
        pack__inner="def g() -> None: ...\n",
        d="def h() -> None:\n    from rlhub.pack import g\n",
    )
    assert house.importers["rlhub.b"] == {"rlhub.a", "rlhub.c"}
    assert house.importers["rlhub.pack.inner"] == {"rlhub.pack", "rlhub.d"}
    assert house.one_importer() == ["rlhub.c"]


def test_a_registered_part_may_have_the_registry_alone() -> None:
    house = house_of(
        registry="""'''rlhub.told:x'''\nROW = 'rlhub.part:f'\n""",
        part="from rlhub.half import g\n",
        half="g = 1\n",
        told="x = 1\n",
    )
    assert house.registered == {"rlhub.part"}
    assert house.importers["rlhub.part"] == {"rlhub.registry"}
    assert house.one_importer() == ["rlhub.half", "rlhub.part"]
    assert house.unregistered() == ["rlhub.half"]


def test_cycles_of_files_are_found_and_lazy_rows_make_none() -> None:
    cycle = house_of(
        a="import rlhub.b",
        b="def f() -> None:\n    import rlhub.c",
        c="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rlhub.a",
        d="import rlhub.a",
    )
    assert cycle.cycles() == ["rlhub.a <-> rlhub.b <-> rlhub.c"]
    assert house_of(a="ROW = 'rlhub.b:f'", b="import rlhub.a").cycles() == []


def test_names_docstrings_and_sizes() -> None:
    house = house_of(
        a='class Part:\n    """Of a whole."""\n    x: int\n    """Of x."""\n',
        b="class Part: ...\n\n\ndef f() -> None: ...\n" + "\n" * 600,
        algorithms="",
        algorithms__advantages__x="x = 1\n",
    )
    assert house.same_names() == ["Part: rlhub.a, rlhub.b"]
    assert len(house.of_docstrings()) == 2
    assert house.small() == ["rlhub.a"] and house.large() == ["rlhub.b"]
    found = figures(house)
    assert found["classes of one name"] == 1 and found["large files"] == 1 and found["docstrings beginning with Of"] == 2
