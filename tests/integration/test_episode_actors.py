"""Episodes whose own code runs in real processes, one of which is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

from rlhub.agents.remote.episode_actor import EpisodeActorSettings, WorkflowKey
from rlhub.agents.remote.workflow import EpisodeActorOptions, EpisodeActors, RemoteWorkflow, episode_actor_starter
from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData
from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, Progress, SamplingParams
from rlhub.models.tokenizer import load_tokenizer
from rlhub.rewards.pool import RewardFunction
from tests.support.chat_model import save_chat_model
from tests.support.episodes import parts
from tests.support.processes import all_end

NUM_EPISODES = 8
WAIT_S = 300.0
WORKFLOW = """
import os

from rlhub.agents.workflows.base import RolloutWorkflow
from rlhub.agents.trajectory import Trajectory


class Where(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        first = await engine.agenerate(self.request(data), self.parts.sampling)
        reward, _ = await self.parts.score(data.row, str(first.token_ids))
        made = Trajectory(
            prompt_ids=list(data.prompt_ids), response_ids=first.token_ids, response_mask=[1, 1],
            rollout_log_probs=first.log_probs, versions=first.versions, metrics={"pid": os.getpid()},
        )
        made.set_reward(reward)
        return made
"""

AGENT = """
from pathlib import Path

import openai


async def reads_along(base_url, api_key, row):
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        stream = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}], stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if len(text) >= 3:
                Path(row["heard"]).touch()
    return float(len(text))
"""


class Gate:
    """An engine that answers when it is open."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting = self.asked = 0

    async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        self.asked += 1
        self.waiting += 1
        try:
            await self.open.wait()
        finally:
            self.waiting -= 1
        return Completion(token_ids=[3, request.seed], log_probs=[-0.5] * 2, finish_reason="stop", versions=[0] * 2)


def expected(seed: int) -> Trajectory:
    return Trajectory(
        prompt_ids=[5, 6],
        response_ids=[3, seed],
        response_mask=[1, 1],
        rollout_log_probs=[-0.5] * 2,
        versions=[0, 0],
        rewards=[0.0, float(len(str([3, seed])))],
    )


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))
"""
ROW = {"data_source": "", "ground_truth": "", "extra_info": None}


def test_episodes_run_elsewhere_and_none_is_lost_with_its_host(ray_cluster: None, tmp_path: Path) -> None:
    (tmp_path / "where.py").write_text(WORKFLOW)
    (tmp_path / "reward.py").write_text(REWARD)
    settings = EpisodeActorSettings(
        tokenizer=str,
        samplings={"training": SamplingParams(max_new_tokens=2)},
        max_prompt_length=8,
        max_response_length=2,
        folder=str(tmp_path),
        reward=RewardFunction(target=f"{tmp_path / 'reward.py'}:compute_score", num_workers=1),
    )
    starter = episode_actor_starter(settings, EpisodeActorOptions(log_dir=str(tmp_path / "logs")))
    pids: set[int] = set()

    async def main() -> None:
        pool, gate = EpisodeActors(starter, 2, restarts=0), Gate()
        await pool.start()
        try:
            workflow = RemoteWorkflow(parts(), WorkflowKey("training", "where.py:Where"), pool)
            episodes = [
                asyncio.create_task(
                    workflow.arun_episode(gate, EpisodeData(prompt_ids=(5, 6), ordinal=seed, sample=0, seed=seed, row=ROW))
                )
                for seed in range(NUM_EPISODES)
            ]
            while gate.waiting < NUM_EPISODES:
                await asyncio.sleep(0.01)
            pids.update(member.actor.worker.pid for member in pool.members)  # type: ignore[attr-defined]
            victim = pool.members[0].actor.worker.pid  # type: ignore[attr-defined]
            assert [member.episodes for member in pool.members] == [NUM_EPISODES // 2] * 2
            os.kill(victim, signal.SIGKILL)
            while len(pool.members) == 2 or gate.waiting < NUM_EPISODES:
                await asyncio.sleep(0.01)
            gate.open.set()
            found = await asyncio.gather(*episodes)
            assert {one.metrics.pop("pid") for one in found if one} == pids - {victim}
            assert found == [expected(seed) for seed in range(NUM_EPISODES)]
            assert gate.asked == NUM_EPISODES + NUM_EPISODES // 2
            assert pool.counts == {"deaths": 1, "episodes_again": NUM_EPISODES // 2}
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert len(pids) == 2 and os.getpid() not in pids
    assert all_end(pids)


class Listened:
    """It writes its last tokens when the first were heard."""

    def __init__(self, tokens: list[int], heard: Path) -> None:
        self.tokens, self.heard = tokens, heard

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        assert follow is not None
        for place, token in enumerate(self.tokens):
            while place == 4 and not self.heard.exists():
                await asyncio.sleep(0.01)
            follow(Progress(token_ids=[token], log_probs=[-0.5], versions=[0]))
        count = len(self.tokens)
        return Completion(token_ids=self.tokens, log_probs=[-0.5] * count, finish_reason="length", versions=[0] * count)


def test_an_agent_in_a_host_reads_its_answer_while_the_driver_samples_it(ray_cluster: None, tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text(AGENT)
    model = str(save_chat_model(tmp_path / "model"))
    settings = EpisodeActorSettings(
        tokenizer=partial(load_tokenizer, model, trust_remote_code=False),
        samplings={"training": SamplingParams(max_new_tokens=99)},
        max_prompt_length=99,
        max_response_length=99,
        kwargs={"agent": "reader.py:reads_along", "reward": "agent"},
        folder=str(tmp_path),
    )
    tokens = load_tokenizer(model, trust_remote_code=False)("1 + 2 = 3")["input_ids"]
    data = EpisodeData(prompt_ids=(5, 6), ordinal=0, sample=0, seed=1, row={"heard": str(tmp_path / "heard")})

    async def main() -> Trajectory | None:
        pool = EpisodeActors(episode_actor_starter(settings, EpisodeActorOptions(log_dir=str(tmp_path / "logs"))), 1, restarts=0)
        await pool.start()
        try:
            workflow = RemoteWorkflow(parts(), WorkflowKey("training", "openai_agent"), pool)
            return await workflow.arun_episode(Listened(tokens, tmp_path / "heard"), data)
        finally:
            await pool.close()

    found = asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert found is not None and found.response_ids == tokens and found.rewards is not None
    assert found.rewards[-1] == len("1 + 2 = 3")
