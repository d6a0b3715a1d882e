"""What users name by where it stands is looked up in its source, which is not run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhub.config.names import settings_problems, target_problems

SOURCE = """
import os
open("ran", "w")
LIMIT, (MOST, least) = 3, (4, 5)
number: int = 3

class Guess:
    def __init__(self, low=0, *, high):
        pass

class Other(Guess):
    pass

def search(query: str, index, *, top=5):
    pass

async def anything(**settings):
    pass

def _hidden():
    pass
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("mine.py").write_text(SOURCE)


@pytest.mark.parametrize("name", ["Guess", "search", "anything", "_hidden", "os", "LIMIT", "least", "number", "Guess.inner"])
def test_names_that_are_there(name: str) -> None:
    assert target_problems("key", f"mine.py:{name}") == target_problems("key", f"mine:{name}") == []
    assert not Path("ran").exists() and "mine" not in sys.modules


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("mine.py:Gues", "not defined in mine.py, which has: Guess, Other, anything, search; did you mean 'Guess'?"),
        ("mine:serch", "did you mean 'search'?"),
        ("nowhere.py:Guess", "no such file (looked for "),
        ("nowhere:Guess", "no module 'nowhere'"),
        ("no.where:Guess", "no module 'no.where'"),
        ("mine:", "neither 'module:name' nor 'path/to/file.py:name'"),
        ("mine.py:", "neither 'module:name' nor 'path/to/file.py:name'"),
        ("broken.py:Guess", "not a Python file: "),
        (".:Guess", "no module"),
    ],
)
def test_names_that_are_not(target: str, said: str) -> None:
    Path("broken.py").write_text("class (:\n")
    (problem,) = target_problems("key", target)
    assert problem.startswith(f"key={target}: ") and said in problem, problem


@pytest.mark.parametrize(
    "text",
    ["try:\n    import x as Gues\nexcept ImportError:\n    pass", "from os import *", "def __getattr__(name): return 1"],
)
def test_what_only_running_it_would_tell_is_no_problem(text: str) -> None:
    Path("mine.py").write_text(text)
    assert target_problems("key", "mine.py:Gues") == []
    assert target_problems("key", "_thread:nothing") == []  # no file of Python


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("Guess", {"high": 1}, None),
        ("Guess", {"high": 1, "lwo": 2}, "key.lwo: no such setting; did you mean 'low'?; mine.py:Guess takes low, high"),
        ("Guess", {"low": 1}, "key: mine.py:Guess needs high, not set; mine.py:Guess takes low, high"),
        ("Other", {"what": 1}, None),  # it stands in the base
        ("anything", {"what": 1}, None),
        ("search", {"query": "", "indx": 1, "index": 2}, "key.indx: no such setting; did you mean 'index'?"),
        ("LIMIT", {"what": 1}, None),
    ],
)
def test_settings_that_a_signature_tells_of(name: str, settings: dict[str, object], said: str | None) -> None:
    found = settings_problems("key", f"mine.py:{name}", settings)
    assert len(found) == (said is not None) and all(str(said) in problem for problem in found), found


def test_the_rest_may_come_from_elsewhere() -> None:
    assert settings_problems("key", "mine.py:search", {"index": 1}, complete=False) == []
    assert settings_problems("key", "mine.py:search", {"index": 1})
