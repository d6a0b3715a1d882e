"""Training an agent of several conversations, as a job."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlhub.agents.verifiers.export import rows_of as rows_for
from rlhub.agents.verifiers.process import list_tasks
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


JUDGED = """
import json
import openai

SCHEMA = {"type": "object", "properties": {"points": {"enum": [3, 4]}}, "required": ["points"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}

async def run(base_url, api_key, row):
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        ask = client.chat.completions.create
        question = [{"role": "user", "content": row["raw_prompt"]}]
        said = await ask(model="pupil", messages=question, max_tokens=8, logprobs=True, top_logprobs=5)
        assert all(len(place.top_logprobs) == 5 for place in said.choices[0].logprobs.content)
        try:
            await ask(model="pupil", messages=question, response_format=FORM)
        except openai.BadRequestError as error:
            assert "train" in error.message
        else:
            raise AssertionError("an answer that trains was forced into a form")
        messages = [{"role": "user", "content": "Judge: " + (said.choices[0].message.content or "nothing")}]
        white = {str(token): -100 for token in WHITE}
        verdict = await ask(
            model="judge", messages=messages, response_format=FORM, logit_bias=white, frequency_penalty=0.1, max_tokens=40
        )
        return json.loads(verdict.choices[0].message.content)["points"]
"""


def test_a_frozen_judge_answers_in_a_form_beside_a_pupil_that_trains(mains: Mains, task: Task, tmp_path: Path) -> None:
    """With vLLM: every verdict is JSON of its schema, and the recorded log-probs of the pupil are the plain policy's."""
    pytest.importorskip("lmformatenforcer", reason="vLLM's check of a JSON schema imports it")
    tokenizer = AutoTokenizer.from_pretrained(save_chat_model(tmp_path / "model"))
    white = [tokenizer.encode(text, add_special_tokens=False)[0] for text in " \n\r\t"]
    (tmp_path / "agent.py").write_text(JUDGED.replace("WHITE", repr(white)))
    row = {"data_source": "letters", "reward_model": {"style": "rule", "ground_truth": ""}}
    rows = [{"prompt": [{"role": "user", "content": f"Say {n}."}], "extra_info": {"index": n}, **row} for n in range(8)]
    write_rows(tmp_path / "train.parquet", rows)
    arguments = task.arguments(
        tmp_path / "run",
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        "data.max_prompt_length=80",
        "data.max_response_length=80",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.kv_cache_gb=0.1",
        "trainer.max_staleness=0",
        "trainer.total_training_steps=2",
        f"{AGENT}.episode_retries=0",
        f"{AGENT}.default_agent_loop=openai_agent",
        f"{AGENT}.kwargs.agent={tmp_path / 'agent.py'}:run",
        f"{AGENT}.kwargs.reward=agent",
        f"{AGENT}.kwargs.roles={{pupil: trained, judge: frozen}}",
    )
    finished(mains.run(arguments))
    for row in (row for row in rows_of(tmp_path / "run") if row["step"]):
        assert 3 <= row["critic/score/min"] <= row["critic/score/max"] <= 4 and not row["rollout/failed_groups"]
        assert row["episode/openai/frozen_tokens"] > 0 == row["episode/openai/untrained_tokens"]
        assert abs(row["mismatch/kl"]) < 1e-5


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


def test_the_evaluation_of_an_agent_as_the_readme_has_it(mains: Mains, tmp_path: Path) -> None:
    readme = Path(__file__).parents[2] / "rlhub" / "agents" / "README.md"
    shown = re.search(r"```bash\npython -m rlhub\.trainer\.main_eval (.*?)```", readme.read_text(), re.DOTALL)
    assert shown is not None
    (tmp_path / "agent.py").write_text(TWO_CONVERSATIONS.replace("return vowels", "return 0.75"))
    save_chat_model(tmp_path / "my_model")
    row = {"data_source": "letters", "reward_model": {"style": "rule", "ground_truth": ""}}
    write_rows(tmp_path / "val.parquet", [{"prompt": [{"role": "user", "content": f"Say {n}."}], **row} for n in range(4)])
    command = shown[1].replace("\\\n", " ")
    for name in ("agent.py", "my_model", "val.parquet"):
        assert command.count(f"={name}") == 1
        command = command.replace(f"={name}", f"={tmp_path / name}")
    here = ["data.max_prompt_length=80", "data.max_response_length=80", "actor_rollout_ref.rollout.name=hf"]
    here += ["trainer.device=cpu", "trainer.backend=local", f"trainer.default_local_dir={tmp_path / 'run'}"]
    finished(mains.run([*command.split(), *here], module="rlhub.trainer.main_eval"))
    (found,) = rows_of(tmp_path / "run")
    assert found["val/reward/mean"] == 0.75 and {"val/pass@1", "val/pass@4"} <= set(found)


def test_a_job_trains_on_an_environment_of_verifiers(mains: Mains, task: Task, tmp_path: Path) -> None:
    """The library is a stand-in, in a process of its own; tests/integration/test_verifiers.py has the real one."""
    library = Path(__file__).parents[1] / "unit" / "agents" / "verifiers" / "library"
    described = {"id": "talk", "settings": {}, "path": [str(library)]}
    write_rows(tmp_path / "train.parquet", rows_for("talk", list_tasks(sys.executable, described, 4)))
    save_chat_model(tmp_path / "model")
    arguments = task.arguments(
        tmp_path / "run",
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.max_prompt_length=80",
        "data.max_response_length=16",
        "actor_rollout_ref.rollout.mode=async",
        "trainer.total_training_steps=2",
        f"{AGENT}.kwargs.verifiers_python={sys.executable}",
        f"{AGENT}.kwargs.verifiers_path=[{library}]",
    )
    finished(mains.run(arguments))
    lines = [line for line in rows_of(tmp_path / "run") if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["critic/rewards/mean"] == 0.5 and line["episode/reward/right"] == 1.0
        assert line["episode/openai/untrained_tokens"] == 0 and line["episode/verifiers/answers"] == 1
