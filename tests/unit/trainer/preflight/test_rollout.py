"""What is found wrong with generation before any process starts: workflows and their settings, servers of other jobs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.rollout import RemoteConfig, RolloutConfig
from rlhub.config.sections.serve import ServeConfig
from rlhub.engines.rollout.remote.dialects import DIALECTS
from rlhub.engines.rollout.remote.server import EVALUATION_ONLY, remote_problems
from rlhub.trainer.preflight import checks as preflight
from rlhub.trainer.preflight.rollout import check_episodes, check_rollout_engine, check_weights_reach
from rlhub.trainer.preflight.serve import check as check_server
from tests.support.model_shapes import save_shape

ROW = {"prompt": "1+1=", "data_source": "exact", "ground_truth": "2"}


def episodes(**values: object) -> PPOConfig:
    """rollout.mode=async with these fields of the rollout's section, `__` for a dot."""
    config = PPOConfig()
    config.actor_rollout_ref.rollout.mode = "async"
    for path, value in values.items():
        node: object = config.actor_rollout_ref.rollout
        *parents, last = path.split("__")
        for name in parents:
            node = getattr(node, name)
        setattr(node, last, value)
    return config


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"agent__default_agent_loop": "singel_turn"}, ("default_agent_loop", "'singel_turn'", "'single_turn'")),
        ({"agent__default_agent_loop": "nowhere.py:Mine"}, ("default_agent_loop=nowhere.py:Mine", "no such file")),
        (
            {"agent__default_agent_loop": "multi_turn", "agent__kwargs": {"max_asistant_turns": 2}},
            ("agent.kwargs.max_asistant_turns", "'max_assistant_turns'", "multi_turn"),
        ),
        (
            {"agent__default_agent_loop": "multi_turn", "agent__kwargs": {"turn_discount": -1}},
            ("agent.kwargs", "turn_discount=-1", "at least 0"),
        ),
        (
            {"agent__kwargs": {"max_asistant_turns": 2}},
            ("agent.kwargs.max_asistant_turns: no such setting of workflow single_turn", "takes none"),
        ),
        ({"multi_turn__enable": True, "agent__kwargs": {"max_parallel_calls": 0}}, ("max_parallel_calls=0", "at least 1")),
        ({"multi_turn__enable": True, "multi_turn__tool_config_path": "tools.yml"}, ("tool_config_path=tools.yml", "YAML file")),
    ],
)
def test_a_workflow_and_its_settings(values: dict[str, object], parts: tuple[str, ...]) -> None:
    (problem,) = check_episodes(episodes(**values))
    assert all(part in problem for part in parts), problem


def test_settings_may_be_those_of_workflows_that_rows_name(tmp_path: Path) -> None:
    config = episodes(agent__default_agent_loop="multi_turn", agent__kwargs={"environment": "mine"})
    assert check_episodes(config)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**ROW, "agent_name": "environment"}) + "\n")
    config.data.train_files = str(path)
    assert check_episodes(config) == []


LIBRARY = Path(__file__).parents[2] / "agents" / "verifiers" / "library"
VERIFIERS = {"verifiers_python": sys.executable, "verifiers_path": [str(LIBRARY)]}


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        ({}, ("verifiers_python is not set", "setup_env.sh")),
        ({"verifiers_python": "/no/python"}, ("verifiers_python=/no/python: no such program",)),
        ({"verifiers_pyhton": "x"}, ("verifiers_pyhton", "'verifiers_python'", "verifiers:talkative")),
        (VERIFIERS, ("no environment 'talkative'", "found: ")),
    ],
)
def test_an_environment_of_verifiers_is_looked_for_by_the_default_and_by_rows(
    kwargs: dict[str, object], parts: tuple[str, ...], tmp_path: Path
) -> None:
    config = episodes(agent__default_agent_loop="verifiers:talkative", agent__kwargs=kwargs)
    (problem,) = check_episodes(config)
    assert all(part in problem for part in parts), problem
    if "verifiers_pyhton" in kwargs:
        return
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**ROW, "agent_name": "verifiers:talkative"}) + "\n" + json.dumps(ROW) + "\n")
    config = episodes(agent__kwargs=kwargs)
    config.data.train_files = str(rows)
    assert check_episodes(config) == [problem]


def test_an_environment_of_verifiers_that_is_there_is_found() -> None:
    assert check_episodes(episodes(agent__default_agent_loop="verifiers:talk", agent__kwargs=VERIFIERS)) == []


def remote(change: Callable[[RemoteConfig], object] = lambda _: None) -> RolloutConfig:
    config = RolloutConfig(name="remote", remote=RemoteConfig(urls=["http://host:8000"], weights_folder="."))
    change(config.remote)
    return config


def put(name: str, value: object) -> Callable[[RemoteConfig], object]:
    return lambda config: setattr(config, name, value)


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("urls", [], ("remote.urls is not set", "rollout.name=remote", "[http://host:8000]")),
        ("urls", ["host:8000"], ("remote.urls: 'host:8000'", "http://host:port")),
        ("api_key_file", "nowhere", ("remote.api_key_file=nowhere cannot be read", "servers")),
        ("api_key_file", "empty", ("remote.api_key_file=empty is empty", "write")),
        ("server", "openai", ("remote.server=openai", "evaluation only", "vllm")),
        ("weights_folder", None, ("remote.weights_folder is not set", "same path")),
        ("weights_folder", "empty/weights", ("remote.weights_folder=empty/weights", "may write to")),
    ],
)
def test_a_server_of_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, parts: tuple[str, ...]
) -> None:
    """What only training needs is no problem of an evaluation."""
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    assert remote_problems(remote(), trains=True) == []
    (problem,) = remote_problems(remote(put(name, value)), trains=True)
    assert all(part in problem for part in parts), problem
    of_training = name in ("server", "weights_folder")
    assert remote_problems(remote(put(name, value)), trains=False) == ([] if of_training else [problem])


def test_training_asks_more_than_evaluation_and_nothing_where_nobody_generates() -> None:
    config = PPOConfig()
    config.actor_rollout_ref.rollout = remote(put("weights_folder", None))
    (problem,) = check_weights_reach(config)
    assert "weights_folder" in problem and preflight.check_rollout_engine(config) == []
    config.trainer.replay_from = "batches"
    assert check_weights_reach(config) == []


def test_what_serves_evaluation_only_is_what_its_dialect_says() -> None:
    for server in ("rlhub", "vllm", "sglang", "openai"):
        assert DIALECTS[server].trains == (server not in EVALUATION_ONLY)


SHAPES = {"mixtral": "Qwen3-30B-A3B", "dense": "Qwen2.5-7B", "qwen3_moe": "Qwen3-30B-A3B"}


@pytest.mark.parametrize("name", ["vllm", "vllm_async"])
def test_experts_of_an_unknown_layout_are_refused_on_vllm_before_anything_starts(tmp_path: Path, name: str) -> None:
    """As policy, judge and served model; hf runs it, and a dense model and Qwen's experts pass on both."""
    experts, dense, known = (str(save_shape(tmp_path / name, shape)) for name, shape in SHAPES.items())
    values = json.loads((file := Path(experts) / "config.json").read_text())
    file.write_text(json.dumps({**values, "model_type": "mixtral"}))
    config, key = episodes(name=name), "actor_rollout_ref.rollout.name"
    config.actor_rollout_ref.model.path = experts
    (problem,) = check_rollout_engine(config)
    assert problem.startswith(f"{key}={name}: the model is a mixtral with 128 experts") and f"set {key}=hf" in problem
    assert check_weights_reach(config) == [], "said once"
    for config.actor_rollout_ref.model.path in (dense, known):
        assert check_rollout_engine(config) == []
    config.actor_rollout_ref.model.path, config.actor_rollout_ref.rollout.name = experts, "hf"
    assert check_rollout_engine(config) == []

    config.reward_model.judge.model.path, config.reward_model.judge.name = experts, name
    (problem,) = preflight.check_scoring_models(config)
    assert problem.startswith(f"reward_model.judge.name={name}: ") and "set reward_model.judge.name=hf" in problem

    server = ServeConfig(device="cpu")
    server.model.path, server.rollout.name = experts, name
    (problem,) = check_server(server, set())
    assert problem.startswith(f"rollout.name={name}: ") and "set rollout.name=hf" in problem


def test_servers_of_another_job_have_one_driver() -> None:
    config = PPOConfig()
    config.actor_rollout_ref.rollout = remote()
    assert not [problem for problem in check_rollout_engine(config) if "controller" in problem]
    config.trainer.controller = "multi"
    (problem,) = check_rollout_engine(config)
    assert "rollout.name=remote" in problem and "or trainer.controller=single" in problem


def test_no_more_replicas_than_servers() -> None:
    config = PPOConfig()
    config.actor_rollout_ref.rollout = remote()
    config.actor_rollout_ref.rollout.max_replicas = len(set(config.actor_rollout_ref.rollout.remote.urls))
    assert check_rollout_engine(config) == []
    config.actor_rollout_ref.rollout.max_replicas += 1
    (problem,) = check_rollout_engine(config)
    assert "max_replicas=" in problem and "remote.urls" in problem
