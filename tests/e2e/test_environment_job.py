"""Training in environments that run in actors of their own, as a job."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import Mains, Task, write_rows
from tests.e2e.test_async_job import finished, weights
from tests.support.chat_model import save_chat_model
from tests.support.metrics import rows_of

AGENT = "actor_rollout_ref.rollout.agent"
LETTERS = """
class Letters:
    def reset(self, *, seed, options):
        self.count = 0
        return f"Say vowels, {seed}.", {}
    def step(self, action):
        self.count += 1
        share = sum(letter in "aeiou" for letter in str(action)) / max(len(str(action)), 1)
        return f"{share:.2f}. Again.", share, self.count == 2, False, {}
    def close(self):
        pass
"""


def test_weights_are_the_same_wherever_environments_run(mains: Mains, task: Task, tmp_path: Path) -> None:
    """Bit for bit; with another environment they are others."""
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "odd.py").write_text(LETTERS.replace("aeiou", "bcdfg"))
    save_chat_model(tmp_path / "model")
    row = {"data_source": "letters", "reward_model": {"style": "rule", "ground_truth": ""}}
    rows = [{"prompt": [{"role": "user", "content": "Play."}], "extra_info": {"env_seed": seed}, **row} for seed in range(8)]
    write_rows(tmp_path / "train.parquet", rows)
    found = {}
    for name, hosts, simulator in (("own", 0, "letters"), ("hosts", 2, "letters"), ("odd", 2, "odd")):
        arguments = task.arguments(
            tmp_path / name,
            f"data.train_files={tmp_path / 'train.parquet'}",
            f"actor_rollout_ref.model.path={tmp_path / 'model'}",
            "data.max_prompt_length=120",
            "data.max_response_length=80",
            "actor_rollout_ref.rollout.mode=async",
            "trainer.max_staleness=0",
            "trainer.total_training_steps=2",
            f"{AGENT}.default_agent_loop=environment",
            f"{AGENT}.kwargs.environment={tmp_path / f'{simulator}.py'}:Letters",
            f"{AGENT}.kwargs.num_env_workers=1",
            f"{AGENT}.kwargs.max_turn_tokens=8",
            f"{AGENT}.num_env_hosts={hosts}",
        )
        finished(mains.run(arguments))
        found[name] = weights(tmp_path / name, 2)
        lines = rows_of(tmp_path / name)
        assert all(line["episode/env_terminated"] == 1.0 for line in lines)
        assert all(("rollout/environment_host_deaths" in line) == (hosts > 0) for line in lines)
    assert found["hosts"] == found["own"] != found["odd"]
