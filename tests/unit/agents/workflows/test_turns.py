"""Transcripts, the tokens that chat templates add between turns, and retries with feedback."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhub.agents.workflows.base import build_workflow
from rlhub.agents.workflows.turns import Transcript, TurnTemplate, turn_seed
from rlhub.engines.rollout.base import Completion
from rlhub.errors import ConfigError
from tests.support.chat_model import CHAT_TEMPLATE
from tests.support.chatml import QWEN_TEMPLATE, chatml_tokenizer
from tests.support.episode_parts import ScriptedEngine, parts, run, written

# Drops the reasoning of turns before the last question and fills in an empty one for the last answer, as Qwen3's does.
THINKING = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last and loop.index0 > ns.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def words_tokenizer() -> PreTrainedTokenizerFast:
    """Words between spaces are tokens, as in recipes/arithmetic."""
    words = ["<pad>", "<end>", "<unknown>", "user:", "tool:", "assistant:", "wrong", *map(str, range(10))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} {% if m.role == 'assistant' %}<end> {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>", chat_template=template
    )


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Puts a mark before the first word of every text, as Llama's sentencepiece models do."""
    tokenizer = chatml_tokenizer()
    inner = Tokenizer(models.BPE({**tokenizer.get_vocab(), "▁": len(tokenizer)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=QWEN_TEMPLATE,
    )


def test_what_stands_between_turns_is_tokenized_as_in_the_whole_text() -> None:
    for tokenizer in (chatml_tokenizer(), words_tokenizer(), chatml_tokenizer(CHAT_TEMPLATE.replace("end>", "|im_end|>"))):
        template = TurnTemplate(tokenizer, roles=["tool", "user"])
        chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
        added = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]
        whole = tokenizer.apply_chat_template([*chat, *added], tokenize=False, add_generation_prompt=True)
        first = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (first, "2"))
        ended = [*prompt, *answer, tokenizer.eos_token_id]
        expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
        assert [*ended, *template.between(added)] == expected
        assert [*prompt, *answer, *template.between(added, turn_ended=False)] == expected


def test_a_template_that_drops_reasoning_adds_what_it_adds() -> None:
    tokenizer = chatml_tokenizer(THINKING)
    for role in ("tool", "user"):
        added = TurnTemplate(tokenizer, roles=["tool", "user"]).between([{"role": role, "content": "x"}])
        assert tokenizer.decode(added) == f"\n<|im_start|>{role}\nx<|im_end|>\n<|im_start|>assistant\n"


def test_no_mark_of_a_texts_beginning_comes_between_turns() -> None:
    tokenizer = spaced_tokenizer()
    added = TurnTemplate(tokenizer, roles=["user"]).between([{"role": "user", "content": "x"}])
    alone = tokenizer("\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    mark = tokenizer.convert_tokens_to_ids("▁")
    assert alone[0] == mark != added[0] and alone[1:] == added


def test_a_transcript_keeps_its_columns_together() -> None:
    transcript = Transcript(prompt_ids=[1, 2], budget=8, scored=True)
    transcript.add_completion(Completion(token_ids=[5, 6], log_probs=[-1.0, -2.0], finish_reason="stop", versions=[3, 3]))
    assert transcript.add_context([7, 8]) and transcript.remaining == 4
    transcript.add_reward(0.5)
    transcript.add_completion(Completion(token_ids=[9], log_probs=[], finish_reason="stop", versions=[4]))
    transcript.add_reward(0.25)
    assert not transcript.add_context([1, 1, 1]), "no token of the policy would fit after it"
    found = transcript.trajectory({"x": 1.0})
    found.check()
    assert found.response_ids == [5, 6, 7, 8, 9] and found.response_mask == [1, 1, 0, 0, 1]
    assert found.rewards == [0.0, 0.5, 0.0, 0.0, 0.25] and found.versions == [3, 3, -1, -1, 4]
    assert found.finish_reason == "length" and found.metrics == {"num_turns": 2.0, "x": 1.0}


def test_every_turn_has_noise_of_its_own() -> None:
    assert turn_seed(5, 0) == 5
    assert len({turn_seed(seed, turn) for seed in range(20) for turn in range(1, 20)}) == 380


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>b<|im_end|>", "plain"])
def test_text_from_outside_holds_no_special_token(text: str) -> None:
    tokenizer = chatml_tokenizer()
    neutral = TurnTemplate(tokenizer, roles=["user"]).neutral(text)
    assert not set(tokenizer.all_special_ids) & set(tokenizer(neutral, add_special_tokens=False)["input_ids"])
    assert neutral.replace(" ", "") == text


async def exact(row: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
    return float(text == row["ground_truth"]), {}


def again(text: str) -> str:
    return f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("wrong", "reward"), [(0, 1.0), (1, 0.5), (2, 0.25), (3, 0.0)])
def test_tries_go_on_until_an_answer_is_right_and_each_costs(wrong: int, reward: float) -> None:
    workflow = build_workflow("multi_turn", parts(score=exact, feedback="No.", turn_discount=0.5))
    found = run(workflow, ScriptedEngine(replies=["5"] * wrong + ["4"]))
    turns = min(wrong + 1, 3)
    assert found.metrics["num_turns"] == turns and found.rewards is not None
    assert sum(found.rewards) == found.rewards[-1] == reward
    assert found.metrics["right_at_once"] == float(wrong == 0) and found.metrics["right_at_last"] == float(wrong < 3)
    said = ["5<|im_end|>", again("No.")] * min(wrong, 2) + [("4" if wrong < 3 else "5") + "<|im_end|>"]
    assert written(found) == said


@pytest.mark.parametrize(("second", "reward"), [("4", 1.0), ("5", 0.0)])
def test_the_workflow_of_the_readme(tmp_path: Path, second: str, reward: float) -> None:
    readme = Path(__file__).parents[4] / "rlhub" / "agents" / "README.md"
    shown = re.search(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    assert shown is not None
    (tmp_path / "checked.py").write_text(shown[1])
    workflow = build_workflow(f"{tmp_path / 'checked.py'}:CheckedAnswer", parts(score=exact, question="Really?"))
    found = run(workflow, ScriptedEngine(replies=["5", second]))
    assert written(found) == ["5<|im_end|>", again("Really?"), f"{second}<|im_end|>"]
    assert found.rewards is not None and sum(found.rewards) == found.rewards[-1] == reward
    assert found.metrics["changed"] == reward


def test_the_episode_ends_where_no_other_answer_fits() -> None:
    found = run(build_workflow("multi_turn", parts(score=exact, budget=30)), ScriptedEngine(replies=["5", "4"]))
    assert found.metrics["num_turns"] == 1 and found.rewards == [0.0, 0.0] and found.finish_reason == "length"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    """Among others what counts its messages, or shows only the last of them."""
    template = "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
    broken = parts(score=exact)
    for source, message in ((template, "rewrites earlier turns"), ("{{ messages[-1].content }}", "rewrites|drops"), ("", "no")):
        broken.tokenizer = chatml_tokenizer(source)
        with pytest.raises(ConfigError, match=message):
            build_workflow("multi_turn", broken)


@pytest.mark.parametrize(
    "settings", [{"feedback": ""}, {"turn_discount": -1.0}, {"max_turn_tokens": 0}, {"max_user_turns": "2"}, {"feedbak": "x"}]
)
def test_wrong_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        build_workflow("multi_turn", parts(score=exact, **settings))
