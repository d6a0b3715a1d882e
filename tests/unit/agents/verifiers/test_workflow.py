from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlhub.agents.trajectory import Episode, Trajectory
from rlhub.agents.verifiers import child, export
from rlhub.agents.verifiers.process import environment_problems, list_tasks
from rlhub.agents.verifiers.workflow import TASK, VerifiersEpisodes
from rlhub.agents.workflows.base import EpisodeData, WorkflowParts, build_workflow
from rlhub.agents.workflows.knobs import VerifiersKnobs
from rlhub.engines.rollout.base import SamplingParams
from rlhub.errors import ConfigError, LoadError, WorkflowError
from tests.unit.agents.openai_server.endpoint import END, Told, tokenizer

pytestmark = pytest.mark.anyio
LIBRARY = str(Path(__file__).with_name("library"))
KWARGS: dict[str, Any] = {"verifiers_python": sys.executable, "verifiers_path": [LIBRARY]}
ROW = {"extra_info": {TASK: '{"prompt": "2+2?"}'}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def score(row: Any, text: str) -> tuple[float, dict[str, float]]:
    raise AssertionError("the environment gives the reward")


def workflow_of(name: str, **kwargs: Any) -> VerifiersEpisodes:
    parts = WorkflowParts(
        tokenizer=tokenizer(),
        sampling=SamplingParams(stop_token_ids=(tokenizer().eos_token_id,)),
        max_prompt_length=200,
        max_response_length=500,
        score=score,
        kwargs=KWARGS | kwargs,
    )
    workflow = build_workflow(f"verifiers:{name}", parts)
    assert isinstance(workflow, VerifiersEpisodes)
    return workflow


def episode(number: int = 0, row: Mapping[str, Any] = ROW) -> EpisodeData:
    return EpisodeData(prompt_ids=(1,), ordinal=number, sample=0, seed=11, row=row)


def told() -> Told:
    return Told(tokenizer(), ["four" + END] * 20)


async def test_an_episode_trains_what_it_sampled_with_the_environments_rewards() -> None:
    workflow = workflow_of("talk")
    try:
        made = await workflow.arun_episode(told(), episode())
        several = await asyncio.gather(*(workflow.arun_episode(told(), episode(number)) for number in range(1, 5)))
    finally:
        await workflow.aclose()
    assert isinstance(made, Trajectory) and sum(made.rewards or ()) == 0.5
    assert made.metrics["openai/untrained_tokens"] == 0
    assert {name: made.metrics[name] for name in ("length", "reward/right", "verifiers/answers")} == {
        "length": 4.0,
        "reward/right": 1.0,
        "verifiers/answers": 1.0,
    }
    assert "unknown" not in made.metrics and len(several) == 4


async def test_several_agents_are_the_roles_that_the_settings_name() -> None:
    """The control is a run without roles, in which the episode has the mean."""
    roles = {"proposer": "trained", "solver": "trained"}
    for kwargs, expected in (({"roles": roles}, [("proposer", 0.5), ("solver", 1.5)]), ({}, [("", 1.0), ("", 1.0)])):
        workflow = workflow_of("pair", **kwargs)
        try:
            made = await workflow.arun_episode(told(), episode())
        finally:
            await workflow.aclose()
        assert isinstance(made, Episode)
        assert [(row.comparison, sum(row.rewards or ())) for row in made.trajectories] == expected


async def test_a_process_that_dies_fails_its_episodes_and_another_one_follows() -> None:
    workflow = workflow_of("talk")
    dying = workflow_of("dies")
    try:
        with pytest.raises(WorkflowError, match="environment dies: its process .*SIGKILL"):
            await dying.arun_episode(told(), episode())
        await workflow.arun_episode(told(), episode())
        first = workflow._process.host_pid()
        os.kill(first, 9)
        while workflow._process.running:
            await asyncio.sleep(0.01)
        assert await workflow.arun_episode(told(), episode()) is not None
        assert workflow._process.host_pid() != first
    finally:
        await workflow.aclose()
        await dying.aclose()
    assert not workflow._process.running


@pytest.mark.parametrize(
    ("name", "message"),
    [("fails", "environment fails: TaskError: no grader"), ("repeats", "gave 2 answers and the environment has 1")],
)
async def test_an_episode_that_cannot_be_trusted_fails(name: str, message: str) -> None:
    workflow = workflow_of(name)
    try:
        with pytest.raises(WorkflowError, match=message):
            await workflow.arun_episode(told(), episode())
    finally:
        await workflow.aclose()


async def test_an_episode_that_is_cancelled_leaves_the_others_alone() -> None:
    workflow = workflow_of("sleeps")
    try:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                running = asyncio.create_task(workflow.arun_episode(told(), episode()))
                while not workflow._process.running:
                    await asyncio.sleep(0.01)
                await asyncio.wait_for(running, 1)
        assert workflow._process.running and not workflow._process._waiting
    finally:
        await workflow.aclose()


async def test_a_process_that_hangs_is_ended_with_its_episodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The control is the test before: a process that confirms what is cancelled stays."""
    monkeypatch.setattr("rlhub.agents.verifiers.process.CANCEL_S", 0.1)
    mark = tmp_path / "hangs"
    workflow = workflow_of("hangs", verifiers_env={"mark": str(mark)})
    try:
        first, second = (asyncio.create_task(workflow.arun_episode(told(), episode(number))) for number in range(2))
        async with asyncio.timeout(120):
            while len(workflow._process._waiting) < 2 or not mark.exists():
                await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(WorkflowError, match="environment hangs: its process"):
            await second
        assert not workflow._process.running
    finally:
        await workflow.aclose()


async def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"verifiers_python is not set: a Python with verifiers; bash recipes"):
        workflow_of("talk", verifiers_python="")
    with pytest.raises(ConfigError, match=r"verifiers_python=/no/python: no such program"):
        workflow_of("talk", verifiers_python="/no/python")
    workflow = workflow_of("talkative")
    try:
        with pytest.raises(LoadError, match=r"no environment 'talkative' in .*python"):
            await workflow.arun_episode(told(), episode())
        with pytest.raises(WorkflowError, match=f"the row has no extra_info.{TASK}"):
            await workflow.arun_episode(told(), episode(row={}))
    finally:
        await workflow.aclose()


def test_an_environment_is_checked_before_the_start() -> None:
    knobs = VerifiersKnobs(**KWARGS)
    assert environment_problems(knobs, "talk") == []
    (unknown,) = environment_problems(knobs, "talkative")
    assert "verifiers:talkative: no environment 'talkative'" in unknown and "found: verifiers" in unknown
    (missing,) = environment_problems(VerifiersKnobs(verifiers_python=sys.executable), "talk")
    assert "verifiers is not installed in" in missing and "install 'verifiers>=0.4,<0.5' there" in missing


def test_the_tasks_become_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data" / "train.parquet"
    arguments = ["talk", "--python", sys.executable, "--path", LIBRARY, "--out", str(file)]
    assert export.main([*arguments, "--skip", "1", "--tasks", "2"]) == 0
    rows = pq.read_table(file).to_pylist()
    assert [row["extra_info"] for row in rows] == [
        {"index": number, "key": f"key question {number}", TASK: f'{{"prompt": "question {number}"}}'} for number in (1, 2)
    ]
    assert rows[0]["agent_name"] == "verifiers:talk" and rows[0]["data_source"] == "verifiers/talk"
    assert rows[0]["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "question 1"}]
    assert export.main(arguments) == 2 and "Taskset has no last task" in capsys.readouterr().err
    assert (
        export.main([*arguments, "--skip", "9", "--tasks", "1"]) == 2 and "no tasks after the first 9" in capsys.readouterr().err
    )
    with pytest.raises(ConfigError, match="no such program"):
        list_tasks("/no/python", {"id": "talk", "settings": {}, "path": []}, 1)


def test_roles_talk_in_this_process_unless_the_settings_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LIBRARY)
    from verifiers import v1 as vf

    assert child.with_defaults(vf, "talk", {}) == {
        "taskset": {"id": "talk"},
        "agent": {"harness": {"id": "rlhub_chat"}, "runtime": {"type": "subprocess"}},
    }
    own = {"taskset": {"split": "val"}, "agent": {"harness": {"id": "bash"}, "runtime": {"type": "docker"}, "max_turns": 2}}
    assert child.with_defaults(vf, "talk", own) == own | {"taskset": {"split": "val", "id": "talk"}}
    assert [child.with_defaults(vf, "pair", {})[role]["model"] for role in ("proposer", "solver")] == ["proposer", "solver"]
