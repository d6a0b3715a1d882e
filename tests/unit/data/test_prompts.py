"""PromptDataset and PromptLoader: what is tokenized, what is refused, and an order that survives stopping anywhere."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.config.sections.ppo import DataConfig
from rlhub.data.prompts import PromptDataset, PromptLoader, check_sources
from rlhub.errors import ConfigError, DataError

SPEC = importlib.util.spec_from_file_location("characters", Path(__file__).with_name("characters.py"))
characters = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(characters)
TOKENIZER = characters.character_tokenizer()


def row(prompt: object = "1+1=", **other: object) -> dict:
    return {"prompt": prompt, "data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "2"}, **other}


def dataset(tmp_path: Path, rows: list[dict], tokenizer: object = TOKENIZER, **config: object) -> PromptDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    return PromptDataset(DataConfig(**config), str(path), tokenizer)


def text(ids: list[int]) -> str:
    return "".join(TOKENIZER.convert_ids_to_tokens(ids))


def test_text_prompts_are_left_padded_as_they_are(tmp_path: Path) -> None:
    data = dataset(tmp_path, [row("1+1="), row("12+34=", extra_info={"index": 5})]).batch(np.array([0, 1]))
    assert [text(ids) for ids in data.batch["prompts"].tolist()] == ["<pad><pad>1+1=", "12+34="]
    assert data.batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1], [1] * 6]
    assert data.batch["prompts"].dtype == data.batch["attention_mask"].dtype
    columns = {key: array.tolist() for key, array in data.non_tensor_batch.items()}
    assert columns == {
        "data_source": ["sums", "sums"],
        "ground_truth": ["2", "2"],
        "extra_info": [{}, {"index": 5}],
        "raw_prompt": ["1+1=", "12+34="],
        "raw_chat": ["1+1=", "12+34="],
    }


def test_rows_may_name_the_workflow_that_runs_their_episodes(tmp_path: Path) -> None:
    data = dataset(tmp_path, [row("1+1="), row("2+2=", agent_name="tool_agent")]).batch(np.array([0, 1]))
    assert data.non_tensor_batch["agent_name"].tolist() == [None, "tool_agent"]
    with pytest.raises(DataError, match="agent_name.*name of a workflow"):
        dataset(tmp_path, [row(agent_name=7)])


def test_what_rewards_and_workflows_alone_read_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    """Other extra_info leaves the position in the data as it is, and is not unseen."""
    first, same, other, named = (
        dataset(tmp_path, [row(**({"extra_info": {"index": 1}} | more))])
        for more in ({}, {}, {"extra_info": {"index": 2}}, {"agent_name": "x"})
    )
    assert first.fingerprint == same.fingerprint == other.fingerprint == named.fingerprint
    assert first.extras_fingerprint == same.extras_fingerprint
    assert len({data.extras_fingerprint for data in (first, other, named)}) == 3
    assert PromptLoader(first, 1).extras_fingerprint == first.extras_fingerprint


def test_chat_prompts_go_through_the_template(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    found = dataset(tmp_path, [row(messages), row("2+2=")])
    assert [text(ids) for ids in found.prompt_ids] == ["[s]add<eos>\n[u]1+1<eos>\n[a]", "2+2="]
    assert found.batch(np.array([0])).non_tensor_batch["raw_prompt"][0] == "[s]add<eos>\n[u]1+1<eos>\n[a]"


def test_a_token_without_an_embedding_is_an_error_that_names_row_and_id(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (row("119"), row("2+9"))))
    plus = TOKENIZER.convert_tokens_to_ids("+")
    assert len(PromptDataset(DataConfig(), str(path), TOKENIZER, vocab_size=len(TOKENIZER))) == 2
    with pytest.raises(DataError, match=rf"rows.jsonl, row 2, column 'prompt': token 1 .* has id {plus}, .* has {plus} rows"):
        PromptDataset(DataConfig(), str(path), TOKENIZER, vocab_size=plus)


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    tokenizer = characters.character_tokenizer(template="{{ flavour }}{{ messages[0]['content'] }}")
    found = dataset(tmp_path, [row([{"role": "user", "content": "1"}])], tokenizer, apply_chat_template_kwargs={"flavour": "x"})
    assert text(found.prompt_ids[0]) == "x1"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(None), "'prompt': is null"),
        (row(float("nan")), "must be text, got float nan"),
        (row(7), "must be text, got int"),
        (row(""), "is empty"),
        (row(" \n"), "is empty"),
        (row("\ud800"), "not valid Unicode"),
        (row([]), "at least one"),
        (row({"role": "user"}), "must be chat messages"),
        (row([{"role": "user"}]), "'content' must be text, got NoneType"),
        (row([{"content": "x"}]), "'role'"),
        (row([{"role": "user", "content": "\udfff"}]), "not valid Unicode"),
        (row([{"role": "tool", "content": "x"}]), "chat template refuses.*unknown role"),
        ({"prompts": "1", "data_source": "s"}, "'prompt': missing; did you mean 'prompts'"),
        ({"prompt": "1"}, "'data_source': missing"),
        (row(data_source=3), "'data_source': must be text"),
        (row(reward_model={"ground_truth": float("nan")}), "'reward_model': .*ground_truth.* NaN"),
        (row(reward_model={"ground_truth": {"all": ["2", [float("nan")]]}}), "'reward_model': .*ground_truth.* NaN"),
        (row(reward_model="2"), "'reward_model': must be an object with 'ground_truth'"),
        (row(reward_model={"style": "rule"}), "'reward_model'"),
        (row(reward_model=None), "'reward_model': is null"),
        (row(extra_info=[1]), "'extra_info'"),
    ],
)
def test_bad_rows_are_named(bad: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        dataset(tmp_path, [row(), bad])
    assert f"{tmp_path / 'rows.jsonl'}, row 2, column " in str(caught.value)


def test_chat_without_a_template_and_tokenizers_without_tokens_to_pad(tmp_path: Path) -> None:
    messages = row([{"role": "user", "content": "1"}])
    with pytest.raises(DataError, match="no chat template"):
        dataset(tmp_path, [messages], characters.character_tokenizer(template=None))
    with pytest.raises(DataError, match="neither a pad token"):
        dataset(tmp_path, [row()], characters.character_tokenizer(pad=False, eos=False))
    assert dataset(tmp_path, [row()], characters.character_tokenizer(pad=False)).pad_id == 1


def test_odd_but_valid_text(tmp_path: Path) -> None:
    found = dataset(tmp_path, [row("a\u0000b"), row("\U0001f600\u200d\u202e"), row("e\u0301")])
    assert [len(ids) for ids in found.prompt_ids] == [3, 3, 2]


def test_rows_without_ground_truth_column(tmp_path: Path) -> None:
    found = dataset(tmp_path, [{"prompt": "1", "data_source": "s"}])
    assert found.batch(np.array([0])).non_tensor_batch["ground_truth"].tolist() == [None]


def test_overlong_prompts(tmp_path: Path) -> None:
    rows = [row("1+1="), row("abcdefg"), row("hijklmnop")]
    with pytest.raises(DataError, match=r"row 2, column 'prompt': 7 tokens exceed data.max_prompt_length=5; so do 1 other"):
        dataset(tmp_path, rows, max_prompt_length=5)
    kept = dataset(tmp_path, rows, max_prompt_length=5, filter_overlong_prompts=True)
    assert len(kept) == 1 and kept.num_filtered == 2
    with pytest.raises(DataError, match="all 2 prompts.*shortest has 7"):
        dataset(tmp_path, rows[1:], max_prompt_length=5, filter_overlong_prompts=True)
    for policy, expected in (("left", "cdefg"), ("right", "abcde"), ("middle", "abefg")):
        cut = dataset(tmp_path, rows, max_prompt_length=5, truncation=policy)
        assert [text(list(ids)) for ids in cut.prompt_ids[:2]] == ["1+1=", expected]
    with pytest.raises(DataError, match="data.truncation"):
        dataset(tmp_path, rows, truncation="centre")


# -- order -----------------------------------------------------------------------------------------------------------------


def numbered(tmp_path: Path, size: int) -> PromptDataset:
    return dataset(tmp_path, [row(f"{index}=") for index in range(size)])


def drain(loader: PromptLoader, epochs: int) -> list[tuple[list[str], list[int]]]:
    batches = []
    while loader.epoch < epochs:
        batches += [(batch.non_tensor_batch["raw_prompt"].tolist(), batch.batch["ordinal"].tolist()) for batch in loader]
    return batches


def test_epochs_are_complete_permutations_with_running_ordinals(tmp_path: Path) -> None:
    data = numbered(tmp_path, 10)
    batches = drain(PromptLoader(data, 4, seed=3, drop_last=False), 2)
    assert [len(rows) for rows, _ in batches] == [4, 4, 2, 4, 4, 2]
    assert [ordinal for _, ordinals in batches for ordinal in ordinals] == list(range(20))
    rows = [name for names, _ in batches for name in names]
    assert sorted(rows[:10]) == sorted(rows[10:]) == [f"{i}=" for i in range(10)] and rows[:10] != rows[10:]
    assert rows != [name for names, _ in drain(PromptLoader(data, 4, seed=4, drop_last=False), 2) for name in names]
    plain = drain(PromptLoader(data, 4, shuffle=False, drop_last=True), 1)
    assert [name for names, _ in plain for name in names] == [f"{i}=" for i in range(8)]


@given(st.integers(1, 9), st.integers(1, 5), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=30)
def test_stopping_anywhere_changes_nothing(tmp_path_factory, rows: int, size: int, shuffle: bool, drop_last: bool) -> None:
    size = min(size, rows)
    data = numbered(tmp_path_factory.mktemp("rows"), rows)
    make = lambda: PromptLoader(data, size, seed=1, shuffle=shuffle, drop_last=drop_last)  # noqa: E731
    whole = drain(make(), 3)
    assert len(whole) == 3 * len(make())
    for stop in range(len(whole) + 1):
        first, seen = make(), 0
        while seen < stop:
            for _ in first:
                seen += 1
                if seen == stop:
                    break
        second = make()
        second.load_state(json.loads(json.dumps(first.state())))
        assert drain(second, 3) == whole[stop:]


def test_resuming_with_a_larger_batch_than_the_epoch_has_left(tmp_path: Path) -> None:
    data = numbered(tmp_path, 6)
    loader = PromptLoader(data, 2)
    list(itertools.islice(loader, 2))
    larger = PromptLoader(data, 4)
    larger.load_state(loader.state())
    batches = drain(larger, 2)
    assert [ordinals for _, ordinals in batches] == [[4, 5, 6, 7]]


def test_changes_are_errors(tmp_path: Path) -> None:
    state = PromptLoader(numbered(tmp_path, 6), 2).state()
    assert set(state) == {"seed", "shuffle", "epoch", "cursor", "consumed", "dataset_hash"}
    with pytest.raises(DataError, match="not the one the run was started with"):
        PromptLoader(numbered(tmp_path, 7), 2).load_state(state)
    with pytest.raises(DataError, match="data.seed was 1 .* is 2 now"):
        PromptLoader(numbered(tmp_path, 6), 2, seed=2).load_state(state)
    changed = [row(f"{i}=") for i in range(5)] + [row("5=", reward_model={"ground_truth": "3"})]
    with pytest.raises(DataError, match="not the one"):
        PromptLoader(dataset(tmp_path, changed), 2).load_state(state)


def test_fewer_rows_than_a_batch(tmp_path: Path) -> None:
    data = numbered(tmp_path, 3)
    with pytest.raises(DataError, match="3 usable rows, fewer than one batch of 4"):
        PromptLoader(data, 4)
    assert [len(batch) for batch in PromptLoader(data, 4, drop_last=False)] == [3]
    with pytest.raises(DataError, match="at least 1"):
        PromptLoader(data, 0)


@pytest.mark.parametrize(
    ("sources", "messages"),
    [
        ({"sums": {"weight": 2}, "words": {"val_kwargs": {"n": 2}}}, []),
        ({"smus": {}}, ["data.sources.smus: no row has this data_source; did you mean 'sums'?; known: sums, words"]),
        (
            {"words": {"adv_estimator": "rloo"}, "sums": {"val_kwargs": {"n": 2}}},
            [
                "data.sources.words.adv_estimator: no row of data.train_files has this data_source; known: sums",
                "data.sources.sums.val_kwargs: no row of data.val_files has this data_source; known: words",
            ],
        ),
    ],
)
def test_settings_of_sources_that_no_row_reads_are_named(tmp_path: Path, sources: dict, messages: list[str]) -> None:
    training, validation = dataset(tmp_path, [row()]), dataset(tmp_path, [row(data_source="words")])
    config = DataConfig(sources=sources)
    if messages:
        with pytest.raises(ConfigError) as error:
            check_sources(config, training, validation)
        assert list(error.value.problems) == messages
    else:
        check_sources(config, training, validation)
    check_sources(DataConfig(sources={"smus": {"weight": 2}}), None, validation)  # nothing trains


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sampler": "mixture", "sources": {"sums": {"weight": 0}}}, "all sources of data.train_files have the weight 0"),
        ({"sampler": "curriculum"}, "2 usable rows and data.train_batch_size=2"),
        ({"sampler": "curriculum", "sampler_kwargs": {"by": "level"}, "train_batch_size": 1}, "by=level: usable row 1 of"),
    ],
)
def test_data_that_do_not_suit_their_sampler_are_refused_when_they_are_read(tmp_path: Path, config: dict, message: str) -> None:
    settings = DataConfig(**({"train_batch_size": 2} | config))
    with pytest.raises(DataError, match=message):
        PromptLoader.training(dataset(tmp_path, [row(), row("2+2=")]), settings)
