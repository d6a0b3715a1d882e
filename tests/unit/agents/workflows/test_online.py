"""Sessions that an application opens over HTTP.  The application here knows only HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from rlhub.agents.openai_server.online import OnlineOptions, OnlineSessions
from rlhub.agents.openai_server.sessions import SessionLimits
from rlhub.agents.trajectory import Episode, Trajectory
from rlhub.agents.workflows.base import EpisodeData, RolloutWorkflow, WorkflowParts, build_workflow
from rlhub.engines.rollout.base import SamplingParams
from rlhub.errors import ConfigError, DeadlineError, WorkflowError
from rlhub.utils.ports import free_port
from tests.unit.agents.openai_server.endpoint import END, Told, tokenizer

pytestmark = pytest.mark.anyio
KEY = "application key"
QUESTION = {"messages": [{"role": "user", "content": "2+2?"}]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def score(row: Any, text: str) -> tuple[float, dict[str, float]]:
    raise AssertionError("not the workflow's business")


@dataclass
class Run:
    """A workflow with episodes that wait for an application, and the application's side."""

    workflow: RolloutWorkflow
    engine: Told
    origin: str
    http: aiohttp.ClientSession
    episodes: dict[str, asyncio.Task[Any]] = field(default_factory=dict)

    def offer(self, *names: str) -> None:
        """Starts the episodes `prompt-sample`."""
        for name in names:
            ordinal, sample = map(int, name.split("-"))
            data = EpisodeData(prompt_ids=(1,), ordinal=ordinal, sample=sample, seed=11 + sample, row={"question": name})
            self.episodes[name] = asyncio.create_task(self.workflow.arun_episode(self.engine, data))

    async def post(self, path: str, body: Any = None, *, key: str = KEY, once: str = "") -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {key}"} | ({"Idempotency-Key": once} if once else {})
        async with self.http.post(f"{self.origin}{path}", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def open(self, body: Any = None, once: str = "") -> dict[str, Any]:
        status, made = await self.post("/sessions", body, once=once)
        assert status == 201, made
        return made

    async def ask(self, made: dict[str, Any], body: Any = QUESTION) -> tuple[int, dict[str, Any]]:
        return await self.post(made["base_url"].removeprefix(self.origin) + "/chat/completions", body, key=made["api_key"])

    async def finish(self, made: dict[str, Any], reward: float = 1.0) -> Any:
        assert (await self.ask(made))[0] == 200
        status, told = await self.post(f"/sessions/{made['id']}/end", {"reward": reward})
        assert (status, told["status"]) == (200, "completed")
        return await self.episodes[f"{made['prompt']}-{made['sample']}"]


@asynccontextmanager
async def running(folder: Path, *names: str, **kwargs: Any) -> AsyncIterator[Run]:
    (folder / "key").write_text(KEY + "\n")
    made, port = tokenizer(), free_port()
    engine = Told(made, ["four" + END, "yes" + END])
    parts = WorkflowParts(
        tokenizer=made,
        sampling=SamplingParams(stop_token_ids=(made.eos_token_id,)),
        max_prompt_length=200,
        max_response_length=500,
        score=score,
        kwargs={"key_file": str(folder / "key"), "port": port} | kwargs,
    )
    workflow = build_workflow("online", parts)
    async with aiohttp.ClientSession() as http:
        run = Run(workflow, engine, f"http://127.0.0.1:{port}", http)
        try:
            run.offer(*names)
            while names and not workflow._server:  # type: ignore[attr-defined]
                await asyncio.sleep(0.005)
            yield run
        finally:
            for episode in run.episodes.values():
                episode.cancel()
                with suppress(BaseException):
                    await episode
            await workflow.aclose()


async def test_an_application_takes_an_episode_and_rewards_it(tmp_path: Path) -> None:
    async with running(tmp_path, "3-1") as run:
        made = await run.open()
        assert (made["prompt"], made["sample"], made["row"]) == (3, 1, {"question": "3-1"})
        assert (await run.ask(made))[1]["choices"][0]["message"]["content"] == "four"
        assert (await run.post(f"/sessions/{made['id']}/reward", {"reward": 0.25}))[1]["counted"] is True
        assert (await run.post(f"/sessions/{made['id']}/end"))[1]["status"] == "completed"
        trajectory = await run.episodes["3-1"]
        assert isinstance(trajectory, Trajectory) and sum(trajectory.rewards or ()) == 0.25
        assert run.engine.requests[0].seed == 11 + 1  # the episode's own, so that it can be repeated


async def test_places_are_the_capacity_and_a_request_without_one_comes_again(tmp_path: Path) -> None:
    async with running(tmp_path, "0-0") as run:
        made = await run.open()
        async with run.http.post(f"{run.origin}/sessions", headers={"Authorization": f"Bearer {KEY}"}) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
            assert (await refused.json())["error"]["code"] == "no_capacity"
        run.offer("0-1")
        await run.finish(made)
        assert (await run.open())["sample"] == 1


@pytest.mark.parametrize("over", ["cancelled", "expired"])
async def test_a_place_whose_wait_is_over_is_not_taken(over: str) -> None:
    """Its episode leaves the places only when it gets its turn; a session comes before that."""
    sessions = OnlineSessions(OnlineOptions(key=KEY, model="policy", limits=SessionLimits(prompt=100, response=100)))
    sessions.host = SimpleNamespace(  # type: ignore[assignment]
        open_session=lambda name, **_: SimpleNamespace(name=name, num_answering=0, used_at=time.monotonic(), turns=[]),
        close_session=lambda session: None,
    )
    places = [SimpleNamespace(ordinal=number, sample=0, session=f"{number}-0", seed=1) for number in range(2)]
    episodes = [asyncio.create_task(sessions.run(None, place)) for place in places]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    if over == "cancelled":
        episodes[0].cancel()
    else:
        sessions._places[0].expire(1.0)
    made, new = sessions.create("", "")
    assert new and made.data.ordinal == 1
    episodes[1].cancel()
    ends = await asyncio.gather(*episodes, return_exceptions=True)
    assert isinstance(ends[0], asyncio.CancelledError if over == "cancelled" else DeadlineError)


async def test_repeated_requests_count_once(tmp_path: Path) -> None:
    async with running(tmp_path, "0-0", "0-1") as run:
        made = await run.open(once="a")
        status, again = await run.post("/sessions", once="a")
        assert (status, again["id"]) == (200, made["id"])
        assert (await run.open(once="b"))["id"] != made["id"]
        await run.ask(made)
        where = f"/sessions/{made['id']}"
        told = [await run.post(f"{where}/reward", {"reward": 0.5}, once=once) for once in ("x", "", "x")]
        assert [(status, body["counted"]) for status, body in told] == [(200, True), (200, False), (200, False)]
        status, body = await run.post(f"{where}/reward", {"reward": 0.75})
        assert (status, body["error"]["code"]) == (409, "reward_conflict")
        # A request that a client repeats with its key is the first one, even where a judge has another opinion now.
        assert (await run.post(f"{where}/reward", {"reward": 0.75}, once="x"))[0] == 200
        ended = [await run.post(f"{where}/end") for _ in range(2)]
        assert [(status, body["ended"]) for status, body in ended] == [(200, True), (200, False)]
        assert sum((await run.episodes["0-0"]).rewards) == 0.5
        assert (await run.post(f"{where}/reward", {"reward": 0.5}))[1]["counted"] is False
        assert (await run.post(f"{where}/reward", {"reward": 0.6}))[0] == 409


async def test_rewards_of_answers_and_of_the_episode_exclude_each_other(tmp_path: Path) -> None:
    async with running(tmp_path, "0-0") as run:
        made = await run.open()
        answer = (await run.ask(made))[1]
        where = f"/sessions/{made['id']}/reward"
        assert (await run.post(where, {"rewards": {"chatcmpl-unknown": 1.0}}))[0] == 400
        assert (await run.post(where, {"rewards": {answer["id"]: 2.0}}))[0] == 200
        assert (await run.post(where, {"reward": 2.0}))[0] == 409
        assert (await run.post(where, {"reward": "much"}))[0] == (await run.post(where))[0] == 400
        await run.post(f"/sessions/{made['id']}/end")
        row = await run.episodes["0-0"]
        assert isinstance(row, Trajectory) and (sum(row.rewards or ()), row.comparison) == (2.0, "/0")
        assert (await run.post(where, {"rewards": {answer["id"]: 2.0}}))[1]["counted"] is False


async def test_an_end_needs_an_answer_and_a_reward(tmp_path: Path) -> None:
    async with running(tmp_path, "0-0", "0-1", "0-2") as run:
        made, empty, broken = [await run.open() for _ in range(3)]
        await run.ask(made)
        status, told = await run.post(f"/sessions/{made['id']}/end")
        assert (status, told["error"]["code"]) == (409, "no_reward")
        assert (await run.post(f"/sessions/{empty['id']}/end", {"reward": 1.0}))[1]["status"] == "failed"
        assert (await run.post(f"/sessions/{broken['id']}/end", {"failed": "my tool broke"}))[1]["status"] == "failed"
        for name, told in (("0-1", "before the policy was asked"), ("0-2", "my tool broke")):
            with pytest.raises(WorkflowError, match=told):
                await run.episodes[name]


async def test_a_session_that_is_left_fails_and_says_so_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that takes longer than the limit is no silence.  The clock is put forward."""

    async def pass_time(seconds: float) -> None:
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + seconds)  # the loop's clock too
        await asyncio.sleep(0.01)  # which ends after what has become due

    async with running(tmp_path, "0-0", session_timeout_s=60.0) as run:
        made = await run.open()
        run.engine.given = 0
        asking = asyncio.create_task(run.ask(made))
        while not run.engine.requests and not asking.done():
            await asyncio.sleep(0.005)
        await pass_time(90.0)
        run.engine.given = None
        assert (await asking)[0] == 200 and not run.episodes["0-0"].done()
        await pass_time(90.0)
        async with asyncio.timeout(60.0):
            with pytest.raises(DeadlineError, match=f"session {made['id']}"):
                await run.episodes["0-0"]
        status, told = await run.ask(made)
        assert (status, told["error"]["code"]) == (410, "session_gone")
        assert (await run.post(f"/sessions/{made['id']}/end"))[1]["status"] == "failed"
        assert (await run.post(f"/sessions/{made['id']}/reward", {"reward": 1.0}))[0] == 409


async def test_sessions_of_a_run_before_are_gone_and_wrong_keys_are_wrong(tmp_path: Path) -> None:
    async with running(tmp_path, "0-0") as before:
        old = await before.open()
    async with running(tmp_path, "0-0") as run:
        old["base_url"] = old["base_url"].replace(before.origin, run.origin)
        assert [(await run.ask(old))[0], (await run.post(f"/sessions/{old['id']}/end"))[0]] == [410, 410]
        assert (await run.ask(old | {"api_key": "another"}))[0] == 401
        assert (await run.post("/sessions", key="another"))[0] == 401
        assert (await run.post("/sessions/unknown/end", key="another"))[0] == 401
        made = await run.open()
        assert (await run.post(f"/sessions/{made['id']}/end", key=old["api_key"]))[0] == 401


async def test_samples_of_one_group_have_one_prompt(tmp_path: Path) -> None:
    """Tasks of the application's own: sessions that name a group are compared with each other alone."""
    async with running(tmp_path, "0-0", "0-1", "1-0", "1-1", "2-0", "2-1") as run:
        taken = [await run.open({"group": name}) for name in ("a", "b", "a", "", "b", "")]
        assert [made["prompt"] for made in taken] == [0, 1, 0, 2, 1, 2]
        results = [await run.finish(made) for made in taken]
        assert [row.comparison for row in results] == ["a", "b", "a", "", "b", ""]
        run.offer("3-0", "3-1")
        assert (await run.open({"group": "a"}))["prompt"] == 3  # the next samples of the task
        assert (await run.post("/sessions", {"group": "b"}))[0] == 429


async def test_a_place_of_a_group_waits_for_it_for_a_while(tmp_path: Path) -> None:
    async with running(tmp_path, "3-0", "3-1", session_timeout_s=0.3) as run:
        await run.open({"group": "a"})
        with pytest.raises(DeadlineError, match="sample 3-1 of a group"):
            await run.episodes["3-1"]


async def test_a_session_that_the_run_gives_up_is_gone(tmp_path: Path) -> None:
    """As at the end of the run, when an application has an answer and not yet said what it is worth."""
    async with running(tmp_path, "0-0", "0-1") as run:
        made = await run.open(once="a")
        assert (await run.ask(made))[0] == 200
        run.episodes["0-0"].cancel()
        run.episodes["0-1"].cancel()
        await asyncio.sleep(0.01)
        assert (await run.ask(made))[0] == 410
        for path, body in (("reward", {"reward": 1.0}), ("end", {"reward": 1.0}), ("end", {"failed": "no"})):
            status, told = await run.post(f"/sessions/{made['id']}/{path}", body)
            assert status == 410 and told["error"]["code"] == "session_gone"
        assert (await run.post("/sessions", once="a"))[0] == 429, "its place is not there any more"


async def test_the_key_is_required(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key_file is not set"):
        async with running(tmp_path, key_file=""):
            pass
    with pytest.raises(ConfigError, match="no such file"):
        async with running(tmp_path, key_file=str(tmp_path / "none")):
            pass


async def test_several_conversations_are_an_episode(tmp_path: Path) -> None:
    async with running(tmp_path, "0-0") as run:
        made = await run.open()
        await run.ask(made)
        await run.ask(made, {"messages": [{"role": "user", "content": "3+3?"}]})
        await run.post(f"/sessions/{made['id']}/end", {"reward": 1.0})
        assert isinstance(await run.episodes["0-0"], Episode)
