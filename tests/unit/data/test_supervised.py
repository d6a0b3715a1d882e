"""SFTDataset: exactly the response's tokens are learned, in the shape of rollouts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from rlhub.config.sections.ppo import DataConfig
from rlhub.config.sections.sft import SFTDataConfig
from rlhub.data.order import ResumableLoader
from rlhub.data.prompts import PromptDataset
from rlhub.data.supervised import SFTDataset
from rlhub.errors import DataError

SPEC = importlib.util.spec_from_file_location("characters", Path(__file__).with_name("characters.py"))
characters = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(characters)
TOKENIZER = characters.character_tokenizer()


def write(tmp_path: Path, rows: list[dict]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    return str(path)


def dataset(tmp_path: Path, rows: list[dict], tokenizer: object = TOKENIZER, **config: object) -> SFTDataset:
    return SFTDataset(SFTDataConfig(**config), write(tmp_path, rows), tokenizer)


def text(ids: list[int]) -> str:
    return "".join(TOKENIZER.convert_ids_to_tokens(ids))


def learned(data: SFTDataset, index: int = 0) -> str:
    """The text of the learned tokens, read from a batch as an engine reads it."""
    batch = data.batch(np.array([index])).batch
    responses = batch["input_ids"][:, -batch["response_mask"].shape[1] :]
    return text(responses[batch["response_mask"] == 1].tolist())


def test_prompt_and_response_have_the_shape_of_rollouts(tmp_path: Path) -> None:
    data = dataset(tmp_path, [{"prompt": "1+1=", "response": "2"}, {"prompt": "5=", "response": "five"}])
    batch = data.batch(np.array([0, 1])).batch
    assert [text(ids) for ids in batch["input_ids"].tolist()] == ["1+1=2<eos><pad><pad><pad>", "<pad><pad>5=five<eos>"]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1]]
    assert batch["response_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["responses"].tolist() == batch["input_ids"][:, 4:].tolist()
    assert batch["prompts"].tolist() == batch["input_ids"][:, :4].tolist()
    assert {tensor.dtype for tensor in batch.values()} == {batch["prompts"].dtype}


def test_prompts_are_those_of_reinforcement_learning(tmp_path: Path) -> None:
    prompts = ["1+1=", [{"role": "user", "content": "1"}]]
    path = write(tmp_path, [{"prompt": prompt, "response": "2", "data_source": "s"} for prompt in prompts])
    sft = SFTDataset(SFTDataConfig(), path, TOKENIZER)
    ours = [item.tokens[: item.start()] for item in sft.demonstrations]
    assert ours == [list(ids) for ids in PromptDataset(DataConfig(), path, TOKENIZER).prompt_ids]


@pytest.mark.parametrize("row", [{"prompt": "1", "response": "2+"}, {"prompt": "1+", "response": "2"}])
def test_a_token_without_an_embedding_is_an_error_that_names_row_and_id(tmp_path: Path, row: dict) -> None:
    plus = TOKENIZER.convert_tokens_to_ids("+")
    path = write(tmp_path, [{"prompt": "1", "response": "2"}, row])
    assert len(SFTDataset(SFTDataConfig(), path, TOKENIZER, vocab_size=plus + 1)) == 2
    with pytest.raises(DataError, match=rf"row 2, .* has id {plus}, and the model's embedding has {plus} rows"):
        SFTDataset(SFTDataConfig(), path, TOKENIZER, vocab_size=plus)


def test_a_response_that_ends_is_not_ended_twice(tmp_path: Path) -> None:
    assert learned(dataset(tmp_path, [{"prompt": "1", "response": "2<eos>"}])) == "2<eos>"


def test_conversations_learn_the_assistants_turns(tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "1"), ("assistant", "one"), ("user", "2"), ("assistant", "two"), ("user", "bye")]
    data = dataset(tmp_path, [{"messages": [{"role": role, "content": content} for role, content in turns]}])
    item = data.demonstrations[0]
    assert text(item.tokens) == "[s]s<eos>\n[u]1<eos>\n[a]one<eos>\n[u]2<eos>\n[a]two<eos>"
    assert learned(data) == "one<eos>two<eos>"
    assert text(item.tokens[: item.start()]) == "[s]s<eos>\n[u]1<eos>\n[a]"


def test_a_template_without_an_end_gets_one(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}]
    data = dataset(tmp_path, [{"messages": messages}], characters.character_tokenizer(template=template))
    assert learned(data) == "one<eos>"


def test_a_template_that_rewrites_history_is_refused(tmp_path: Path) -> None:
    template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}]
    with pytest.raises(DataError, match="row 1, column 'messages': the chat template rewrites"):
        dataset(tmp_path, [{"messages": messages}], characters.character_tokenizer(template=template))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "1"}, "row 2, column 'response': missing"),
        ({"prompt": "1", "response": ""}, "'response': is empty"),
        ({"prompt": "", "response": "2"}, "'prompt': is empty"),
        ({"prompt": "1", "response": 2}, "'response': must be text, got int"),
    ],
)
def test_bad_rows(bad: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        dataset(tmp_path, [{"prompt": "1", "response": "2"}, bad])


def test_bad_conversations(tmp_path: Path) -> None:
    for messages in ([{"role": "user", "content": "1"}], [{"role": "assistant", "content": "1"}]):
        with pytest.raises(DataError, match="needs an assistant turn"):
            dataset(tmp_path, [{"messages": messages}])


def test_length_limit(tmp_path: Path) -> None:
    rows = [{"prompt": "abcdef", "response": "12345"}]  # 12 tokens with the end
    with pytest.raises(DataError, match="row 1: 12 tokens exceed data.max_length=8"):
        dataset(tmp_path, rows, max_length=8)
    assert learned(dataset(tmp_path, rows, max_length=8, truncation="right")) == "12"
    assert learned(dataset(tmp_path, rows, max_length=8, truncation="left")) == "12345<eos>"
    # The first token of a sequence has nothing before it that could predict it.
    assert learned(dataset(tmp_path, rows, max_length=4, truncation="left")) == "45<eos>"
    with pytest.raises(DataError, match="no response token is left"):
        dataset(tmp_path, rows, max_length=6, truncation="right")


def test_no_end_token(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="learn to stop"):
        dataset(tmp_path, [{"prompt": "1", "response": "2"}], characters.character_tokenizer(eos=False))


def test_loader_state(tmp_path: Path) -> None:
    rows = [{"prompt": f"{index}=", "response": "x"} for index in range(6)]
    loader = ResumableLoader(dataset(tmp_path, rows), 2, seed=5)
    batches = [batch.batch["prompts"].tolist() for batch in loader]
    again = ResumableLoader(dataset(tmp_path, rows), 2, seed=5)
    next(iter(again))
    resumed = ResumableLoader(dataset(tmp_path, rows), 2, seed=5)
    resumed.load_state(again.state())
    assert [batch.batch["prompts"].tolist() for batch in resumed] == batches[1:]
    rows[0]["response"] = "y"
    with pytest.raises(DataError, match="not the one"):
        ResumableLoader(dataset(tmp_path, rows), 2, seed=5).load_state(again.state())
