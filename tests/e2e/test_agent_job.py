"""Training an agent of several conversations, as a job."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import Mains, Task, write_rows
from tests.e2e.test_async_job import finished, weights
from tests.support.chat_model import save_chat_model
from tests.support.metrics import rows_of

AGENT = "actor_rollout_ref.rollout.agent"
TWO_CONVERSATIONS = """
import openai

async def run(base_url, api_key, row):
    vowels = 0
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        for number in range(2):
            messages = [{"role": "user", "content": f"{row['raw_prompt']} {number}"}]
            for _ in range(3):
                answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
                messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
                vowels += sum(letter in "aeiou" for letter in answer.choices[0].message.content)
    return vowels
"""


def test_all_conversations_of_an_agent_train_wherever_their_tokens_are(mains: Mains, task: Task, tmp_path: Path) -> None:
    """Bit for bit.  The control trains the last conversation, and others weights come out."""
    (tmp_path / "agent.py").write_text(TWO_CONVERSATIONS)
    save_chat_model(tmp_path / "model")
    row = {"data_source": "letters", "reward_model": {"style": "rule", "ground_truth": ""}}
    rows = [{"prompt": [{"role": "user", "content": f"Say {n}."}], "extra_info": {"index": n}, **row} for n in range(8)]
    write_rows(tmp_path / "train.parquet", rows)
    settings = {
        "driver": ["trainer.batches=driver"],
        "reference": ["trainer.batches=reference", f"{AGENT}.num_workers=1"],
        "graph": ["trainer.batches=reference", "trainer.pipeline=ppo"],
        "last": [f"{AGENT}.kwargs.segment=last"],
    }
    found = {}
    for name, more in settings.items():
        arguments = task.arguments(
            tmp_path / name,
            f"data.train_files={tmp_path / 'train.parquet'}",
            f"actor_rollout_ref.model.path={tmp_path / 'model'}",
            "data.max_prompt_length=80",
            "data.max_response_length=80",
            "actor_rollout_ref.rollout.mode=async",
            "trainer.max_staleness=0",
            "trainer.total_training_steps=2",
            f"{AGENT}.default_agent_loop=openai_agent",
            f"{AGENT}.kwargs.agent={tmp_path / 'agent.py'}:run",
            f"{AGENT}.kwargs.reward=agent",
            *more,
        )
        finished(mains.run(arguments))
        found[name] = weights(tmp_path / name, 2)
        lines = [line for line in rows_of(tmp_path / name) if line["step"] > 0]
        assert all((line["episode/openai/untrained_tokens"] > 0) == (name == "last") for line in lines)
        assert all(line["episode/openai/segments"] == 2.0 for line in lines)
    assert found["driver"] == found["reference"] == found["graph"] != found["last"]
