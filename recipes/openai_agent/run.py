"""Asynchronous GRPO of a policy that an existing agent script uses through OpenAI's client, on the quickstart's task.

python recipes/openai_agent/run.py [options and key=value settings of recipes/arithmetic/run.py]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages

HERE = Path(__file__).resolve().parent
SETTINGS = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.mode=async",
    "actor_rollout_ref.rollout.agent.default_agent_loop=openai_agent",
    f"actor_rollout_ref.rollout.agent.kwargs.agent='{HERE / 'agent.py'}:run'",
    "actor_rollout_ref.rollout.agent.kwargs.reward=agent",
    "algorithm.rollout_correction.rollout_is=token",
    "trainer.max_staleness=1",
)

if __name__ == "__main__":
    sys.exit(stages.quickstart_with("openai_agent", SETTINGS))
