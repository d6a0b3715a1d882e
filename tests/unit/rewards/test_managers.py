"""Managers over a scripted pool: decoding, placing, policies, penalties; `build_reward_manager` with real children."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhub.algorithms.inputs import on_last_token
from rlhub.config.sections.reward import CustomRewardConfig, RewardModelConfig
from rlhub.errors import ConfigError, RegistryError, RewardError
from rlhub.protocol import DataProto
from rlhub.rewards import ManagerParts, RewardFailure, RewardOutcome, RewardRequest, build_reward_manager
from rlhub.rewards.base import BackgroundManager, RewardResult, ScoredRows, start_scoring
from rlhub.rewards.managers import (
    DapoKnobs,
    DapoManager,
    NaiveManager,
    OverlongBuffer,
    overlong_penalty,
    reward_function,
    reward_target,
)

EOS = 0
WIDTH = 6


class Letters:
    """Token id = code point; 0 ends a text and is special."""

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return ["".join(chr(i) for i in ids if not (skip_special_tokens and i == EOS)) for ids in sequences]


class Scripted:
    """Scores by a table; what is not in it fails."""

    def __init__(self, table: dict[str, float | dict[str, Any]]) -> None:
        self.table, self.seen = table, []  # type: ignore[var-annotated]

    def score(self, requests: Sequence[RewardRequest], *, max_failures: int | None = None) -> list[RewardOutcome]:
        self.seen = list(requests)
        return [self._one(request.solution_str) for request in requests]

    def _one(self, text: str) -> RewardOutcome:
        if text not in self.table:
            return RewardOutcome(error=RewardFailure(kind="raised", message=f"no {text}"))
        value = self.table[text]
        details = dict(value) if isinstance(value, dict) else {"score": value}
        return RewardOutcome(score=details.pop("score"), details=details)

    def close(self) -> None: ...


def make_batch(texts: list[str], prompt_width: int = 2) -> DataProto:
    rows = len(texts)
    responses = torch.full((rows, WIDTH), ord("?"))
    mask = torch.zeros(rows, WIDTH, dtype=torch.int64)
    for row, text in enumerate(texts):
        responses[row, : len(text)] = torch.tensor([ord(c) for c in text], dtype=torch.int64)
        mask[row, : len(text)] = 1
    tensors = {
        "responses": responses,
        "response_mask": mask,
        "response_length": mask.sum(1),
        "attention_mask": torch.cat([torch.ones(rows, prompt_width, dtype=torch.int64), mask], 1),
    }
    columns = {
        "data_source": ["source"] * rows,
        "ground_truth": [f"truth {i}" for i in range(rows)],
        "extra_info": [{"i": i} for i in range(rows)],
    }
    return DataProto.from_dict(tensors, columns)


def parts(table: dict[str, Any], **settings: Any) -> ManagerParts:
    values: dict[str, Any] = {"on_error": "mask", "max_error_rate": 1.0, "max_response_length": WIDTH} | settings
    return ManagerParts(pool=Scripted(table), tokenizer=Letters(), **values)  # type: ignore[arg-type]


def tokens_of(result: RewardResult, batch: DataProto) -> torch.Tensor:
    """The rewards on tokens, (rows, WIDTH): where a manager scores whole responses, on the last token that the model wrote."""
    assert result.token_level_scores is None
    return on_last_token(result.scores, batch.batch["response_mask"])


def ending_in_context(texts: list[str], written: list[list[int]]) -> DataProto:
    """The model wrote only some of each response's tokens."""
    batch = make_batch(texts)
    batch.batch["response_mask"] = torch.tensor([row + [0] * (WIDTH - len(row)) for row in written])
    return batch


def test_the_score_is_on_the_last_token_that_the_model_wrote() -> None:
    """A tool's answer or an observation may follow it: a score on that would be on nobody's token."""
    batch = ending_in_context(["abcd", "abcd", "ab", "abcd"], [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1], [0, 0, 0, 0]])
    result = NaiveManager(parts({"abcd": 0.5, "ab": 1.0}))(batch)
    expected = torch.zeros(4, WIDTH)
    expected[0, 1], expected[1, 2], expected[2, 1] = 0.5, 0.5, 1.0
    assert torch.equal(tokens_of(result, batch), expected)
    assert result.scores.tolist() == [0.5, 0.5, 1.0, 0.5]


def test_requests_hold_the_response_without_padding_and_special_tokens() -> None:
    built = parts({"ab": 1.0, "": 0.25, "abcdef": 0.5})
    batch = make_batch(["ab\0", "", "abcdef"])
    result = NaiveManager(built)(batch)
    assert [(r.data_source, r.solution_str, r.ground_truth, r.extra_info) for r in built.pool.seen] == [  # type: ignore[attr-defined]
        ("source", "ab", "truth 0", {"i": 0}),
        ("source", "", "truth 1", {"i": 1}),
        ("source", "abcdef", "truth 2", {"i": 2}),
    ]
    expected = torch.zeros(3, WIDTH)
    expected[0, 2], expected[2, 5] = 1.0, 0.5
    assert torch.equal(tokens_of(result, batch), expected) and result.scores.dtype == torch.float32
    assert torch.equal(result.scores, torch.tensor([1.0, 0.25, 0.5]))
    assert result.valid.tolist() == [True] * 3 and result.valid.dtype == torch.bool
    assert result.metrics == {"reward/num_failed": 0.0, "reward/failed_share": 0.0}


def test_an_environments_tokens_count_towards_the_place_of_the_score() -> None:
    batch = make_batch(["abcd"])
    batch.batch["response_mask"] = torch.tensor([[1, 0, 0, 1, 0, 0]])
    assert tokens_of(NaiveManager(parts({"abcd": 2.0}))(batch), batch).tolist() == [[0, 0, 0, 2.0, 0, 0]]


def test_rewards_are_made_of_outcomes_and_one_number_a_row_alone() -> None:
    """The rows may be elsewhere.  Control: outcomes in another order are other rewards."""
    knobs = DapoKnobs(overlong_buffer_cfg={"enable": True, "len": 2})  # type: ignore[arg-type]
    table: dict[str, Any] = {"a": 1.0, "abcde": {"score": 0.5, "n": 3}, "abcdef": 1.0}
    batch = make_batch(["a", "abcde", "abcdef", "xxxxxx"])
    manager = DapoManager(parts(table), knobs)
    whole, outcomes = manager(batch), manager.parts.pool._one  # type: ignore[attr-defined]
    scored = [outcomes(text) for text in ("a", "abcde", "abcdef", "xxxxxx")]
    rows = ScoredRows(outcomes=scored, lengths=np.array([1, 5, 6, 6]), sources=np.array(["source"] * 4, dtype=object))
    apart = manager.reward(rows)
    assert torch.equal(apart.scores, whole.scores) and torch.equal(apart.valid, whole.valid) and apart.metrics == whole.metrics
    assert {name: column.tolist() for name, column in apart.extra.items()} == {
        name: column.tolist() for name, column in whole.extra.items()
    }
    shuffled = manager.reward(replace(rows, outcomes=scored[::-1]))
    assert not torch.equal(shuffled.scores, whole.scores)


def test_only_a_manager_that_reads_outcomes_alone_says_so() -> None:
    class Calls(NaiveManager):
        def __call__(self, batch: DataProto) -> RewardResult:
            return super().__call__(batch)

    assert NaiveManager(parts({})).scores_rows and DapoManager(parts({}), DapoKnobs()).scores_rows
    assert not Calls(parts({})).scores_rows


def test_a_manager_that_can_only_be_called_is_given_the_rows_when_its_rewards_are_asked_for() -> None:
    manager, batch = NaiveManager(parts({"a": 1.0, "b": 2.0})), make_batch(["a", "b"])
    assert not isinstance(manager, BackgroundManager)
    pending = start_scoring(manager, batch)
    batch.reorder(torch.tensor([1, 0]))
    assert pending().scores.tolist() == [1.0, 2.0], "of the rows as they were"


def test_mask_and_zero_keep_going_and_count() -> None:
    batch = make_batch(["ab", "xx", "ab", "yy"])
    for on_error, valid in (("mask", [True, False, True, False]), ("zero", [True] * 4)):
        result = NaiveManager(parts({"ab": 1.0}, on_error=on_error))(batch)
        assert result.scores.tolist() == [1.0, 0.0, 1.0, 0.0] and result.valid.tolist() == valid
        assert tokens_of(result, batch).sum(1).tolist() == [1.0, 0.0, 1.0, 0.0]
        assert result.metrics == {"reward/num_failed": 2.0, "reward/failed_share": 0.5, "reward/num_failed/raised": 2.0}


def test_fail_and_too_many_failures_stop_with_an_example() -> None:
    batch = make_batch(["ab", "xx", "ab", "ab"])
    with pytest.raises(RewardError, match=r"(?s)1 of 4.*row 1, data_source 'source'.*raised: no xx.*on_error=fail"):
        NaiveManager(parts({"ab": 1.0}, on_error="fail"))(batch)
    for on_error in ("mask", "zero"):
        with pytest.raises(RewardError, match=r"1 of 4 = 25% is more than reward_model.max_error_rate=0.2"):
            NaiveManager(parts({"ab": 1.0}, on_error=on_error, max_error_rate=0.2))(batch)
        NaiveManager(parts({"ab": 1.0}, on_error=on_error, max_error_rate=0.25))(batch)


def test_details_become_columns_and_means() -> None:
    table = {"a": {"score": 1.0, "acc": True, "n": 3}, "b": {"score": 0.0, "acc": False, "n": 5, "why": "wrong"}}
    result = NaiveManager(parts(table))(make_batch(["a", "b", "x"]))
    assert result.extra["acc"].tolist() == [True, False, None] and result.extra["why"].tolist() == [None, "wrong", None]
    assert result.metrics["reward/acc"] == 0.5 and result.metrics["reward/n"] == 4.0 and "reward/why" not in result.metrics
    complete = NaiveManager(parts(table))(make_batch(["a", "b"]))
    assert complete.extra["acc"].dtype == np.float64 and complete.extra["n"].tolist() == [3.0, 5.0]


def test_a_detail_that_is_a_list_stays_one_object_a_row() -> None:
    result = NaiveManager(parts({"a": {"score": 1.0, "steps": [1, 2]}, "b": {"score": 1.0, "steps": [3, 4]}}))(
        make_batch(["a", "b"])
    )
    assert result.extra["steps"].tolist() == [[1, 2], [3, 4]] and result.extra["steps"].shape == (2,)


def test_the_overlong_penalty_follows_the_paper() -> None:
    """R = 0 up to L_max - L_cache, then falls linearly to -1 at L_max (equation 13 of the DAPO paper), times the factor."""
    buffer = OverlongBuffer(enable=True, len=4, penalty_factor=2.0)
    lengths = np.array([0, 5, 6, 7, 8, 9, 10])
    assert overlong_penalty(lengths, limit=10, buffer=buffer).tolist() == [0, 0, 0, -0.5, -1.0, -1.5, -2.0]


def test_dapo_adds_the_penalty_but_not_to_correctness_or_failed_rows() -> None:
    knobs = DapoKnobs(overlong_buffer_cfg={"enable": True, "len": 2})  # type: ignore[arg-type]
    table = {"a": 1.0, "abcde": 1.0, "abcdef": 1.0}
    batch = make_batch(["a", "abcde", "abcdef", "xxxxxx"])
    result = DapoManager(parts(table), knobs)(batch)
    assert result.scores.tolist() == [1.0, 0.5, 0.0, 0.0]
    assert tokens_of(result, batch).sum(1).tolist() == [1.0, 0.5, 0.0, 0.0]
    assert result.extra["acc"].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert result.extra["overlong_reward"].tolist() == [0.0, -0.5, -1.0, -1.0]
    off = DapoManager(parts(table), DapoKnobs())(make_batch(["a", "abcdef"]))
    assert off.scores.tolist() == [1.0, 1.0] and off.extra == {}


def test_dapo_keeps_the_scorers_own_correctness() -> None:
    knobs = DapoKnobs(overlong_buffer_cfg={"enable": True, "len": 2})  # type: ignore[arg-type]
    result = DapoManager(parts({"ab": {"score": 0.9, "acc": False}}), knobs)(make_batch(["ab"]))
    assert result.extra["acc"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"enable": True}, "len must be at least 1"),
        ({"enable": True, "len": 2, "penalty_factor": -1.0}, "penalty_factor must be 0 or more"),
        ({"enabled": True}, "did you mean 'enable'"),
        ("on", "must be a mapping"),
    ],
)
def test_wrong_dapo_knobs_are_named(given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DapoKnobs(overlong_buffer_cfg=given)


def test_a_buffer_longer_than_the_response_is_an_error() -> None:
    with pytest.raises(ValueError, match="exceeds data.max_response_length=6"):
        DapoManager(parts({}), DapoKnobs(overlong_buffer_cfg=OverlongBuffer(enable=True, len=7)))


@pytest.mark.parametrize("name", ["num_failed", "failed_share", "num_failed/raised", "mean", "std", "judge"])
def test_a_detail_with_the_name_of_one_of_the_runs_own_metrics_replaces_none(name: str) -> None:
    table = {"a": {"score": 1.0, name: 40.0}, "b": {"score": 0.0, name: 60.0}}
    result = NaiveManager(parts(table))(make_batch(["a", "b", "x", "x"]))
    assert (result.metrics["reward/num_failed"], result.metrics["reward/failed_share"]) == (2.0, 0.5)
    assert result.metrics["reward/num_failed/raised"] == 2.0
    assert result.metrics[f"reward/details/{name}"] == 50.0
    assert {"reward/mean", "reward/std", "reward/judge"}.isdisjoint(result.metrics)
    assert result.extra[name].tolist() == [40.0, 60.0, None, None], "who reads it by its name finds it"


def test_means_of_the_largest_details_are_finite() -> None:
    table = {"a": {"score": 3e38, "n": 1.5e308}, "b": {"score": 3e38, "n": 1.5e308}}
    result = NaiveManager(parts(table))(make_batch(["a", "b"]))
    assert result.metrics["reward/n"] == pytest.approx(1.5e308)


def test_the_built_in_scorers_are_the_default() -> None:
    manager = build_reward_manager(RewardModelConfig(on_error="fail"), CustomRewardConfig(), Letters(), WIDTH)
    batch = make_batch(["#### 1", "#### 2"])
    batch.non_tensor_batch["data_source"][:] = "openai/gsm8k"
    batch.non_tensor_batch["ground_truth"][:] = "2"
    assert manager(batch).scores.tolist() == [0.0, 1.0]
    manager.close()


def test_a_function_of_ones_own_by_a_path_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour.py").write_text("FACTOR = 3\n")
    (tmp_path / "own.py").write_text(
        "from neighbour import FACTOR\ndef reward(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': FACTOR * len(solution_str), 'i': extra_info['i']}\n"
    )
    monkeypatch.chdir(tmp_path)
    dapo = RewardModelConfig(reward_manager="dapo", reward_kwargs={"overlong_buffer_cfg": {"enable": True, "len": 2}})
    manager = build_reward_manager(dapo, CustomRewardConfig(path="own.py", name="reward"), Letters(), WIDTH)
    result = manager(make_batch(["ab", "abcdef"]))
    assert result.scores.tolist() == [6.0, 17.0] and result.extra["i"].tolist() == [0.0, 1.0]
    manager.close()


def test_mistakes_are_configuration_errors_that_name_the_key(tmp_path: Path) -> None:
    def build(reward_model: RewardModelConfig, custom: CustomRewardConfig | None = None) -> None:
        build_reward_manager(reward_model, custom or CustomRewardConfig(), Letters(), WIDTH)

    broken = tmp_path / "broken.py"
    broken.write_text("def compute_score(text): return 0\n")
    with pytest.raises(ConfigError, match="custom_reward_function.path=missing.py: no such file"):
        build(RewardModelConfig(), CustomRewardConfig(path="missing.py"))
    with pytest.raises(ConfigError, match=r"(?s)custom_reward_function: cannot load .*broken.py:compute_score.*solution_str"):
        build(RewardModelConfig(), CustomRewardConfig(path=str(broken)))
    with pytest.raises(ConfigError, match=r"(?s)custom_reward_function: .*no attribute 'scorer'"):
        build(RewardModelConfig(), CustomRewardConfig(path=str(broken), name="scorer"))
    with pytest.raises(RegistryError, match="did you mean 'dapo'"):
        build(RewardModelConfig(reward_manager="dapoo"))
    with pytest.raises(ConfigError, match=r"reward_model.reward_kwargs.overlong_buffer: no such knob"):
        build(RewardModelConfig(reward_manager="dapo", reward_kwargs={"overlong_buffer": {}}))
    with pytest.raises(ConfigError, match=r"reward_model.reward_kwargs: .*len=9 exceeds data.max_response_length"):
        build(RewardModelConfig(reward_manager="dapo", reward_kwargs={"overlong_buffer_cfg": {"enable": True, "len": 9}}))
    with pytest.raises(ConfigError, match="reward_model.reward_kwargs.anything"):
        build(RewardModelConfig(reward_kwargs={"anything": 1}))


def test_without_a_path_the_target_is_the_built_in_one() -> None:
    assert reward_target(CustomRewardConfig()) == "rlhub.rewards.registry:compute_score"


def test_sources_have_reward_functions_of_their_own(tmp_path: Path) -> None:
    """In the same processes; a source without one has the run's."""
    for name, value in (("run", 1.0), ("other", 2.0)):
        (tmp_path / f"{name}.py").write_text(f"def score(data_source, solution_str, ground_truth, extra_info): return {value}\n")
    custom = CustomRewardConfig(path=str(tmp_path / "run.py"), name="score")
    own = {"math": f"{tmp_path / 'other.py'}:score"}
    pool = reward_function(RewardModelConfig(num_workers=1), custom, own).pool()
    try:
        requests = [RewardRequest(data_source=name, solution_str="", ground_truth="") for name in ("math", "words", "math")]
        assert [outcome.score for outcome in pool.score(requests)] == [2.0, 1.0, 2.0]
    finally:
        pool.close()
