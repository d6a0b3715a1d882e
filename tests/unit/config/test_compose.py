"""A file that stands alone is composed without Hydra, and to what Hydra would make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhub.config import compose as module
from rlhub.config.compose import compose, resolve

YAML = """\
# of the user's own
data: {train_batch_size: 8, train_files: [a.parquet, "b c.parquet"], max_prompt_length: null}
trainer:
  experiment_name: run-${trainer.seed}
  logger: [console]
  ray_init: {runtime_env: {env_vars: {A: "1"}}}
"""
OVERRIDES = (
    "data.train_batch_size=64",
    "+data.seed=5",
    "++trainer.seed=6",
    "trainer.ray_init.runtime_env.env_vars.B='x=y'",
    "+trainer.ray_init={num_cpus: 3, nested: {c: [1, {d: 2}]}}",
    'data.train_files=["c.parquet",d.jsonl]',
    "data.max_prompt_length=1_024",
    "algorithm.gamma=1e-1",
    "algorithm.adv_kwargs={alpha: 0.5, mode: 'a b'}",
    "trainer.logger=console",
    "trainer.default_local_dir=${trainer.experiment_name}/${now:%Y}",
    "trainer.experiment_name=null",
    "data.prompt_key='\"quoted\"'",
    "entirely.new.key=true",
    "trainer.nothing=",
    "trainer.seed=7",
)


class CalledError(Exception):
    """Hydra was asked."""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "own.yaml").write_text(YAML)
    return str(tmp_path)


@pytest.fixture
def no_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise CalledError

    monkeypatch.setattr(module, "_by_hydra", refuse)


def composed(name: str, overrides: tuple[str, ...], folder: str | None = None) -> dict[str, Any]:
    problems: list[str] = []
    found = compose(name, overrides, folder, problems)
    assert not problems
    return found


CASES = (("own", OVERRIDES), ("own", ("trainer={seed: 1}",)), ("ppo", OVERRIDES))


def test_as_hydra_would(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [composed(*case, folder) for case in CASES]
    asked = []
    by_hydra = module._by_hydra
    monkeypatch.setattr(module, "_by_hydra", lambda *given: asked.append(1) or by_hydra(*given))
    monkeypatch.setattr(module, "_put_together", lambda *_: None)
    expected = [composed(*case, folder) for case in CASES]
    assert len(asked) == len(CASES)
    assert repr(alone) == repr(expected), "types and order included"


@pytest.mark.parametrize(
    ("text", "overrides", "words"), [("a: [", (), "not readable as YAML"), ("a: [1]", ("a.b=1",), "invalid literal")]
)
def test_a_file_that_cannot_be_used_is_a_problem(text: str, overrides: tuple[str, ...], words: str, folder: str) -> None:
    Path(folder, "own.yaml").write_text(text)
    problems: list[str] = []
    assert compose("own", overrides, folder, problems) == {}
    assert len(problems) == 1 and problems[0].startswith("own: ") and words in problems[0]


@pytest.mark.usefixtures("no_hydra")
def test_what_needs_no_hydra(folder: str) -> None:
    assert composed("own", (), folder)["trainer"]["logger"] == ["console"]
    assert composed("ppo", ("trainer.seed=3",)) == {"trainer": {"seed": 3}}


@pytest.mark.usefixtures("no_hydra")
@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("defaults: [ppo, _self_]", ()),
        ("# @package trainer\nseed: 1", ()),
        ("hydra: {verbose: true}", ()),
        ("[1, 2]", ()),
        ("a: [", ()),
        ("a: 1", ("~a",)),
        ("a: 1", ("optim=tiny",)),
        ("a: 1", ("a@b=c",)),
        ("a: [1]", ("a.b=1",)),
    ],
)
def test_what_is_left_to_hydra(text: str, overrides: tuple[str, ...], folder: str) -> None:
    Path(folder, "own.yaml").write_text(text)
    Path(folder, "optim").mkdir()
    with pytest.raises(CalledError):
        compose("own", overrides, folder, [])


@pytest.mark.usefixtures("no_hydra")
def test_of_an_absent_file_it_says_where_it_looked_and_what_there_is(folder: str) -> None:
    Path(folder, "own.yaml").write_text("seed: 1")
    problems: list[str] = []
    assert compose("nonsense", (), folder, problems) == {}
    (problem,) = problems
    assert problem.startswith("--config-name nonsense: no nonsense.yaml in ")
    assert folder in problem and "own, ppo" in problem
    assert compose("own.yaml", (), folder, []) == {"seed": 1}


def test_interpolations() -> None:
    values = {
        "a": {"x": "${b.y}/${b.z}", "list": ["${c.v}", 3]},
        "b": {"y": 1, "z": "${c.v}"},
        "c": {"v": 2.5, "section": {"w": [1]}},
        "d": {"untouched": [1, None, "text"]},
        "e": "${c.section}",
    }
    problems: list[str] = []
    assert resolve(values, problems) == {
        "a": {"x": "1/2.5", "list": [2.5, 3]},
        "b": {"y": 1, "z": 2.5},
        "c": {"v": 2.5, "section": {"w": [1]}},
        "d": {"untouched": [1, None, "text"]},
        "e": {"w": [1]},
    }
    assert resolve({"a": {"x": 1, "y": "${.x}"}, "b": "${a}"}, problems) == {"a": {"x": 1, "y": 1}, "b": {"x": 1, "y": 1}}
    assert not problems
    assert resolve({"a": "${b.nothing}", "b": {"c": 1}}, problems) == {"a": None, "b": {"c": 1}}
    assert len(problems) == 1 and problems[0].startswith("a: ")
