"""Workflows, environments, agents and tools of the user's own are looked at before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhub.config.sections.ppo import PPOConfig
from rlhub.trainer.preflight.rollout import check_episodes
from tests.unit.trainer.preflight.test_rollout import episodes

WORKFLOWS = """
from dataclasses import dataclass
from rlhub.agents.workflows.base import RolloutWorkflow
from rlhub.agents.workflows.registry import fill_knobs
from rlhub.agents.workflows.turns import MultiTurn

@dataclass(slots=True, kw_only=True)
class Knobs:
    num_tries: int = 2
    def __post_init__(self):
        if self.num_tries < 1:
            raise ValueError("num_tries must be at least 1")

@dataclass
class Strict:
    needed: int

class Plain(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        return None

class Known(Plain):
    def __init__(self, parts):
        super().__init__(parts)
        self.knobs = fill_knobs(Knobs, parts.kwargs)

class Demanding(Plain):
    def __init__(self, parts):
        self.knobs = fill_knobs(Strict, parts.kwargs)

class Retries(MultiTurn):
    pass

class Hollow(RolloutWorkflow):
    pass

class Greedy(Plain):
    def __init__(self, parts, engine):
        pass

class Foreign:
    def __init__(self, parts):
        pass

def make(parts):
    return Known(parts)

class Reads(Plain):
    def __init__(self, parts):
        super().__init__(parts)
        self.seconds = parts.kwargs["seconds"]
    def wait(self):
        return self.parts.kwargs.get("tries", 1)

class Inherits(Reads):
    pass

class Passes(Plain):
    def __init__(self, parts):
        self.settings = dict(parts.kwargs)

def seconds_of(parts):
    return parts.kwargs["seconds"]

class HandsOn(Plain):
    def __init__(self, parts):
        super().__init__(parts)
        self.seconds = seconds_of(parts)

class Renames(Plain):
    def __init__(self, parts):
        kwargs = parts.kwargs
        self.seconds = kwargs["seconds"]

NUMBER = 3
"""
PARTS = """
class Maze:
    def __init__(self, size, *, seed=0):
        pass

def run(base_url, api_key, row):
    pass

def act(url, row):
    pass

def search(query: str, index: str) -> str:
    "Look it up."
"""
ENVIRONMENT = {"agent__default_agent_loop": "environment"}
AGENT = {"agent__default_agent_loop": "openai_agent"}
ONLINE = {"agent__default_agent_loop": "online"}
Case = tuple[dict[str, object], tuple[str, ...]]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flows.py").write_text(WORKFLOWS)
    Path("parts.py").write_text(PARTS)
    Path("fails.py").write_text("import no_such_package\nclass Mine: ...\n")
    Path("agent.py").write_text("print(1)\n")
    Path("key").write_text("a key\n")
    Path("empty").write_text("\n")


def own(name: str, **kwargs: object) -> PPOConfig:
    return episodes(agent__default_agent_loop=f"flows.py:{name}", agent__kwargs=kwargs)


@pytest.mark.parametrize(
    "config",
    [
        own("Plain"),
        own("Plain", max_user_turns=2),
        own("Inherits", seconds=1, tries=2),
        own("Passes", whatever=1),
        own("Renames", whatever=1),
        own("HandsOn", seconds=1),
        own("Known", num_tries=1),
        own("Retries", feedback="No."),
        own("Known"),
        own("make", x=1),
    ],
)
def test_workflows_that_are_well(config: PPOConfig) -> None:
    assert check_episodes(config) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (own("Knwon"), ("default_agent_loop=flows.py:Knwon", "not defined in flows.py", "did you mean 'Known'?", "Retries")),
        (own("Known", num_trys=1), ("agent.kwargs.num_trys: no such knob; did you mean 'num_tries'?", "flows.py:Known")),
        (own("Plain", whatever=1), ("agent.kwargs.whatever: no such setting of workflow flows.py:Plain", "takes none")),
        (own("Reads", secnods=1), ("agent.kwargs.secnods", "did you mean 'seconds'?", "it reads: seconds, tries")),
        (own("Inherits", trise=1), ("agent.kwargs.trise", "did you mean 'tries'?", "flows.py:Inherits")),
        (own("Known", num_tries=0), ("num_tries must be at least 1", "flows.py:Known")),
        (own("Retries", feedbak="No."), ("agent.kwargs.feedbak", "did you mean 'feedback'?", "flows.py:Retries")),
        (own("Demanding"), ("Strict of workflow flows.py:Demanding must have a default for every setting",)),
        (own("Hollow"), ("flows.py:Hollow: lacks arun_episode",)),
        (own("Greedy"), ("flows.py:Greedy: is made from its parts alone", "'engine'")),
        (own("Foreign"), ("flows.py:Foreign: no subclass of RolloutWorkflow",)),
        (own("NUMBER"), ("flows.py:NUMBER: a int; expected a subclass of RolloutWorkflow",)),
        (episodes(agent__default_agent_loop="fails.py:Mine"), ("default_agent_loop: ", "No module named 'no_such_package'")),
    ],
)
def test_workflows_that_are_not(config: PPOConfig, said: tuple[str, ...]) -> None:
    (problem,) = check_episodes(config)
    assert all(part in problem for part in said), problem


def with_kwargs(base: dict[str, object], **kwargs: object) -> dict[str, object]:
    return {**base, "agent__kwargs": kwargs}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (ENVIRONMENT, ("agent.kwargs.environment is not set", "grid_walk")),
        (with_kwargs(ENVIRONMENT, environment="grid_wlak"), ("did you mean 'grid_walk'",)),
        (with_kwargs(ENVIRONMENT, environment="parts.py:Mzae"), ("agent.kwargs.environment=parts.py:Mzae", "'Maze'")),
        (with_kwargs(ENVIRONMENT, environment="parts.py:Maze"), ("agent.kwargs.environment_kwargs", "needs size")),
        (
            with_kwargs(ENVIRONMENT, environment="parts.py:Maze", environment_kwargs={"size": 1, "sed": 2}),
            ("environment_kwargs.sed", "did you mean 'seed'?"),
        ),
        (with_kwargs(ENVIRONMENT, environment="grid_walk", format="hermse"), ("multi_turn.format", "'hermes'")),
        (AGENT, ("agent.kwargs.agent is not set", "path/to/agent.py:run")),
        (with_kwargs(AGENT, agent="agnet.py"), ("agent.kwargs.agent=agnet.py: no such file",)),
        (with_kwargs(AGENT, agent="parts.py:runn"), ("not defined in parts.py", "did you mean 'run'?")),
        (with_kwargs(AGENT, agent="parts.py:act"), ("must take base_url, api_key and row", "parts.py:act")),
        (with_kwargs(AGENT, agent="agent.py", format="hermse"), ("agent.kwargs.format", "'hermes'")),
        (ONLINE, ("agent.kwargs.key_file is not set",)),
        (with_kwargs(ONLINE, key_file="none"), ("agent.kwargs.key_file=none: no such file",)),
        (with_kwargs(ONLINE, key_file="empty"), ("agent.kwargs.key_file=empty: no such file, or an empty one",)),
        (with_kwargs(ONLINE, key_file="key", agent="agent.py"), ("agent.kwargs.agent", "no such knob")),
        (with_kwargs(ONLINE, key_file="key", port=0), ("port=0",)),
        (with_kwargs(ONLINE | {"agent__num_workers": 2}, key_file="key"), ("num_workers=2", "one address")),
    ],
)
def test_what_a_workflow_is_told_to_use(values: dict[str, object], said: tuple[str, ...]) -> None:
    problems = check_episodes(episodes(**values))
    assert problems and all(any(part in problem for problem in problems) for part in said), problems


@pytest.mark.parametrize(
    "values",
    [
        with_kwargs(ENVIRONMENT, environment="grid_walk"),
        with_kwargs(ENVIRONMENT, environment="parts.py:Maze", environment_kwargs={"size": 1}),
        with_kwargs(AGENT, agent="agent.py"),
        with_kwargs(AGENT, agent="parts.py:run"),
        with_kwargs(ONLINE, key_file="key"),
    ],
)
def test_what_a_workflow_may_use(values: dict[str, object]) -> None:
    assert check_episodes(episodes(**values)) == []


def test_applications_take_no_episodes_of_validation_and_no_greedy_ones() -> None:
    config = episodes(**with_kwargs(ONLINE, key_file="key"))
    config.trainer.test_freq, config.algorithm.adv_estimator = 5, "remax"
    validation, greedy = check_episodes(config)
    assert "trainer.test_freq=5" in validation and "agent_name" in validation
    assert "adv_estimator=remax" in greedy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tools: [calculator, {name: 'parts.py:search', settings: {index: x}}]", ()),
        ("tools: [calculater]", ("tool_config_path=tools.yaml, entry 0", "did you mean 'calculator'?")),
        ("tools: [calculator, 'parts.py:serch']", ("entry 1=parts.py:serch", "not defined in parts.py", "'search'")),
        ("tools: [{name: 'parts.py:search', settings: {indx: x}}]", ("entry 0.indx: no such setting", "'index'")),
        ("tools: [{nam: calculator}]", ("entry 0", "a mapping with 'name' and 'settings'")),
        ("tools: [{name: calculator, setings: {}}]", ("entry 0", "a mapping with 'name' and 'settings'")),
        ("tools: [{name: calculator, settings: 3}]", ("entry 0", "a mapping with 'name' and 'settings'")),
        ("tool: [calculator]", ("multi_turn.tool_config_path=tools.yaml: expected a list under 'tools'",)),
        ("tools: [", ("multi_turn.tool_config_path=tools.yaml: ",)),
    ],
)
def test_the_list_of_tools(text: str, said: tuple[str, ...]) -> None:
    Path("tools.yaml").write_text(text)
    problems = check_episodes(episodes(multi_turn__enable=True, multi_turn__tool_config_path="tools.yaml"))
    assert len(problems) == bool(said) and all(part in problem for problem in problems for part in said), problems
    listed = text.startswith("tools: [") and text.endswith("]")
    if listed:  # the same entries among the workflow's own settings
        import yaml

        entries = yaml.safe_load(text)["tools"]
        problems = check_episodes(episodes(multi_turn__enable=True, agent__kwargs={"tools": entries}))
        assert len(problems) == bool(said) and all("agent.kwargs.tools, entry" in problem for problem in problems), problems
