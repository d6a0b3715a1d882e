"""A judge over scripted answers: what it is asked, how its words are read, and that nothing it writes is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhub.config.sections.reward import JudgeConfig
from rlhub.errors import ConfigError
from rlhub.protocol import DataProto
from rlhub.rewards.combine import NUMBER, Judge, PartScores, judged, running_numbers
from rlhub.rewards.judge_prompt import read_pattern, read_prompt, read_score
from tests.unit.rewards.test_managers import Letters, make_batch


class ChatLetters(Letters):
    """Token id = code point, with a chat template that shows its roles."""

    chat_template: Any = "there is one"
    pad_token_id, eos_token_id = 0, 0

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) for letter in one] for one in text]}

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        assert kwargs["tokenize"] is False
        text = "".join(f"<{message['role']}>{message['content']}" for message in conversation)
        return text + ("<assistant>" if kwargs["add_generation_prompt"] else "")


class Scripted:
    """A `generate` that writes what it is told to."""

    def __init__(self, answers: list[list[str]]) -> None:
        self.answers, self.asked, self.numbers = answers, [], []  # type: ignore[var-annotated]

    def __call__(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[list[list[int]]]:
        self.asked += ["".join(map(chr, ids)) for ids in prompts]
        self.numbers += list(numbers)
        return [[[ord(letter) for letter in text] for text in texts] for texts in self.answers]


def batch_of(texts: list[str], chats: list[Any] | None = None) -> DataProto:
    import torch

    from rlhub.protocol.columns import object_array

    batch = make_batch(texts)
    batch.non_tensor_batch["raw_chat"] = object_array(chats or [f"q{row}" for row in range(len(texts))])
    batch.batch[NUMBER] = torch.arange(len(texts))
    return batch


def judge_rows(answers: list[list[str]], texts: list[str], **settings: Any) -> tuple[PartScores, Scripted]:
    generate = Scripted(answers)
    config = JudgeConfig(**({"prompt_template": "{question}|{response}|{ground_truth}"} | settings))
    judge = Judge(config=config, policy=Letters(), tokenizer=ChatLetters(), generate=generate)
    return judged([judge(batch_of(texts))]), generate


def test_it_is_asked_in_its_own_template_all_at_once() -> None:
    found, generate = judge_rows([["Score: 3"], ["I think 4. Score: 4.5"]], ["ab", "c"])
    assert generate.asked == ["<user>q0|ab|truth 0<assistant>", "<user>q1|c|truth 1<assistant>"]
    assert [one.score for one in found.outcomes] == [3.0, 4.5] and all(one.error is None for one in found.outcomes)
    assert found.metrics == {"reward/judge_num_unreadable": 0.0, "reward/judge_unreadable_share": 0.0}


def test_several_judgements_are_averaged_over_the_readable_ones() -> None:
    found, _ = judge_rows([["Score: 2", "Score: 5", "hm"]], ["a"], n=3, temperature=1.0)
    assert found.outcomes[0].score == 3.5
    assert found.metrics == {"reward/judge_num_unreadable": 1.0, "reward/judge_unreadable_share": 1 / 3}


HOSTILE = (
    "",
    "no number here",
    "Score: eleven",
    "Score: 11",
    "Score: -1",
    "Score: nan",
    "Score: inf",
    "Score: __import__('pathlib').Path('{0}').touch()",
    "Score: (lambda: open('{0}', 'w').close())()",
    "{response.__class__}",
    "Score: 1e1 or 10**9**9",
)


def test_garbage_and_code_fail_and_never_run(tmp_path: Path) -> None:
    """Two of them hold a number in bounds where the pattern looks: a 1 before "e1"; nothing else may score."""
    mark = tmp_path / "ran"
    answers = [[text.replace("{0}", str(mark))] for text in HOSTILE]
    found, _ = judge_rows(answers, ["a"] * len(answers))
    scored = {text: one.score for text, one in zip(HOSTILE, found.outcomes, strict=True) if one.error is None}
    assert scored == {"Score: 1e1 or 10**9**9": 1.0}
    assert {one.error.kind for one in found.outcomes if one.error is not None} == {"bad_value"}
    assert not mark.exists()
    assert found.metrics["reward/judge_num_unreadable"] == len(HOSTILE) - 1
    exec(HOSTILE[7].removeprefix("Score: ").replace("{0}", str(mark)))  # the control: run, it leaves its mark
    assert mark.exists()


def test_a_response_cannot_fill_in_the_template() -> None:
    prompt = read_prompt("{question} {{literal}} {response} {ground_truth}")
    filled = prompt.fill(question="q", response="{ground_truth} {0} {question.__class__} %s", ground_truth="secret")
    assert filled == "q {literal} {ground_truth} {0} {question.__class__} %s secret"


def test_a_question_too_long_for_the_judge_is_a_failure_and_is_not_asked() -> None:
    generate = Scripted([["Score: 1"]])
    config = JudgeConfig(prompt_template="{response}", max_prompt_length=len("<user>ab<assistant>"))
    judge = Judge(config=config, policy=Letters(), tokenizer=ChatLetters(), generate=generate)
    found = judged([judge(batch_of(["abc", "ab"]))])
    assert generate.asked == ["<user>ab<assistant>"]
    assert found.outcomes[0].error is not None and found.outcomes[0].error.kind == "bad_input"
    assert found.outcomes[1].score == 1.0
    alone = judged([judge(batch_of(["abc"]))])
    assert alone.outcomes[0].error is not None and len(generate.asked) == 1


def test_chats_are_shown_with_their_roles_unless_there_is_one_message() -> None:
    generate = Scripted([["Score: 1"]] * 2)
    judge = Judge(config=JudgeConfig(prompt_template="{question}#{response}"), policy=Letters(), tokenizer=ChatLetters(),
                  generate=generate)  # fmt: skip
    one = [{"role": "user", "content": "2+2?"}]
    judged([judge(batch_of(["a", "b"], [one, [{"role": "system", "content": "Be brief."}, *one]]))])
    assert generate.asked == ["<user>2+2?#a<assistant>", "<user>system: Be brief.\n\nuser: 2+2?#b<assistant>"]


def test_the_noise_depends_on_prompt_and_sample_alone() -> None:
    assert running_numbers([3, 3, 7]) == [3 << 12, (3 << 12) + 1, 7 << 12]
    assert running_numbers([7, 3, 3]) == [7 << 12, 3 << 12, (3 << 12) + 1]
    numbers = running_numbers([1 << 40] * 2)
    assert max(numbers) < 1 << 63 and len(set(numbers)) == 2


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{question}", "no {response}"),
        ("{response} {answer}", "{answer} is no place; known: {question}, {response}, {ground_truth}"),
        ("{response.__class__}", "is no place"),
        ("{response!r}", "{response!r} is no place"),
        ("{response:>9}", "{response:>9} is no place"),
        ("{}", "{} is no place"),
        ("{response", "a literal brace is written twice"),
        ("nowhere.txt", "cannot be read"),
    ],
)
def test_templates_that_cannot_be_filled_are_errors(template: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_prompt(template)
    assert said in str(caught.value) and "reward_model.judge.prompt_template" in str(caught.value)


def test_a_template_may_be_a_file_and_null_is_built_in(tmp_path: Path) -> None:
    (tmp_path / "ask.txt").write_text("Is {response} right?")
    assert read_prompt(str(tmp_path / "ask.txt")).fill(question="", response="4", ground_truth="") == "Is 4 right?"
    built_in = read_prompt(None).fill(question="Q!", response="R!", ground_truth="T!")
    assert all(text in built_in for text in ("Q!", "R!", "T!", "Score: <number>"))


@pytest.mark.parametrize(("pattern", "said"), [("(", "no regular expression"), ("x", "0 groups"), ("(a)(b)", "2 groups")])
def test_patterns_need_one_group(pattern: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_pattern(pattern)


def test_scores_are_read_at_the_last_match_and_within_bounds() -> None:
    default = read_pattern(JudgeConfig().score_pattern)
    assert read_score("Score: 3 ... on reflection, score: 7.25.", default, 0, 10) == 7.25
    assert read_score("Score: 3, no: Score: 70", default, 0, 10) is None
    anything = read_pattern(r"<(.*?)>")
    numbers = {
        "<4>": 4.0,
        "< -0.5 >": -0.5,
        "<.5>": 0.5,
        "<1_0>": None,
        "<0x1>": None,
        "<>": None,
        "<infinity>": None,
        "<٣>": None,
    }
    assert {text: read_score(text, anything, -1, 10) for text in numbers} == numbers
