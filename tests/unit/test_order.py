"""The order in which two workers take the files of a suite."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.order import longest_first


def test_the_named_files_come_first_and_then_those_of_many_tests() -> None:
    files = {"a.py": 1, "b.py": 3, "long.py": 1, "c.py": 3}
    items: list[Any] = [SimpleNamespace(path=Path(name), number=n) for name, count in files.items() for n in range(count)]
    longest_first(items, ("long.py", "gone.py"))
    found = [(item.path.name, item.number) for item in items]
    assert found == [("long.py", 0), *(("b.py", n) for n in range(3)), *(("c.py", n) for n in range(3)), ("a.py", 0)]
