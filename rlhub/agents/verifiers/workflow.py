"""verifiers:<id>: an episode in an environment of the library verifiers, which trains on every token that the policy samples.

    bash recipes/verifiers/setup_env.sh                                  # a Python with verifiers
    python -m rlhub.agents.verifiers.export gsm8k-v1 --python .venv-verifiers/bin/python --out train.parquet
    python -m rlhub.trainer.main_ppo ... data.train_files=train.parquet actor_rollout_ref.rollout.mode=async \
        actor_rollout_ref.rollout.agent.default_agent_loop=verifiers:gsm8k-v1 \
        actor_rollout_ref.rollout.agent.kwargs.verifiers_python=.venv-verifiers/bin/python

The row has the task, and the episode runs exactly that one.  Its rewards are those of the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhub.agents.openai_server.server import OpenAIServer
from rlhub.agents.openai_server.sessions import Session
from rlhub.agents.verifiers.process import library_process
from rlhub.agents.workflows.base import EpisodeData, WorkflowParts
from rlhub.agents.workflows.knobs import VerifiersKnobs
from rlhub.agents.workflows.openai_agent import AgentEpisodes, AgentResult
from rlhub.agents.workflows.registry import fill_knobs
from rlhub.errors import WorkflowError

TASK = "verifiers_task"
"""The entry of a row's extra_info with the task as the library's JSON."""
ANSWERS = "verifiers/answers"
"""The metric that counts the policy's answers as the library has them."""


class VerifiersEpisodes(AgentEpisodes):
    """Runs episodes of one environment, whose process starts with the first of them."""

    def __init__(self, parts: WorkflowParts, target: str) -> None:
        """target: the environment's id."""
        knobs = fill_knobs(VerifiersKnobs, parts.kwargs)
        super().__init__(parts, knobs, f"verifiers:{target}")
        self._process = library_process(knobs, target)

    async def run_agent(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> AgentResult:
        task = (row.get("extra_info") or {}).get(TASK)
        if not task:
            raise WorkflowError(f"the row has no extra_info.{TASK}; write the data with python -m rlhub.agents.verifiers.export")
        found = await self._process.run({"task": task, "base_url": base_url, "api_key": api_key})
        trained = {name: reward for name, reward in found["rewards"].items() if name in self.endpoint.roles}
        return AgentResult(reward=trained or found["reward"], metrics=found["metrics"] | {ANSWERS: found["num_answers"]})

    async def _run(self, server: OpenAIServer, session: Session, data: EpisodeData) -> AgentResult:
        result = await super()._run(server, session, data)
        kept = result.metrics.get(ANSWERS, len(session.turns))
        if kept != len(session.turns):
            raise WorkflowError(
                f"{self._name}: the policy gave {len(session.turns)} answers and the environment has {kept:g}: a request was "
                "repeated after its answer was lost"
            )
        return result

    async def aclose(self) -> None:
        await super().aclose()
        await self._process.aclose()
