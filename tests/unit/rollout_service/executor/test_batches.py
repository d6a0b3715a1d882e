"""Groups of episodes and whole batches of prompts give the same training columns, and failures in a row stop the run."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from rlhub.agents.trajectory import NOT_SAMPLED, Trajectory
from rlhub.engines.rollout.base import FINISH_CODES, Completion
from rlhub.errors import WorkflowError
from rlhub.rollout_service.executor.batches import ADDED, TOOL_REWARDS, FailureLimit, episode_metrics, to_batch
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem, mask_older
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.workers import generation

PAD, VOCABULARY = 0, 50


def group(ordinal: int, prompt: tuple[int, ...], *completions: Completion) -> Group:
    trajectories = [
        Trajectory(
            prompt_ids=list(prompt),
            response_ids=c.token_ids,
            response_mask=[1] * len(c.token_ids),
            rollout_log_probs=c.log_probs,
            versions=c.versions,
            finish_reason=c.finish_reason,
        )
        for c in completions
    ]
    return Group(
        item=PromptItem(prompt_ids=prompt, ordinal=ordinal, row={"data_source": f"d{ordinal}"}), trajectories=trajectories
    )


def completion(*tokens: int, version: int = 0, finish_reason: str = "stop") -> Completion:
    return Completion(
        token_ids=list(tokens),
        log_probs=[-token / 10 for token in tokens],
        finish_reason=finish_reason,
        versions=[version] * len(tokens),
    )


GIVEN = {
    4: ((7, 8, 9), (completion(3), completion(4, 5, 6, 1, finish_reason="length"))),
    9: ((7,), (completion(3, 2), completion(9, 9, 1))),
}


def test_columns_are_those_of_batch_generation() -> None:
    groups = [group(ordinal, prompt, *completions) for ordinal, (prompt, completions) in GIVEN.items()]
    batch = to_batch(groups, pad_id=PAD, vocab_size=VOCABULARY)
    flat = [c for _, completions in GIVEN.values() for c in completions]
    padded = generation.pad_completions(flat, pad_id=PAD, with_log_probs=True, widest=lambda width: width)
    prompts, mask = torch.tensor([[7, 8, 9], [PAD, PAD, 7]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
    expected = generation.training_columns(prompts, mask, padded, 2)
    for name, column in expected.items():
        assert torch.equal(batch.batch[name], column) and batch.batch[name].dtype == column.dtype, name
    assert batch.batch["ordinal"].tolist() == [4, 4, 9, 9] and batch.batch["uid"].tolist() == [0, 0, 1, 1]
    assert batch.non_tensor_batch["data_source"].tolist() == ["d4", "d4", "d9", "d9"]
    assert set(batch.batch.keys()) - set(expected) == {"ordinal", "uid", "policy_version"}
    assert batch.batch["policy_version"][0].tolist() == [0] + [NOT_SAMPLED] * 3
    assert FINISH_CODES == generation.FINISH_CODES


def test_rewards_become_the_columns_of_scoring() -> None:
    one = group(0, (7,), completion(3, 2), completion(4))
    for trajectory, reward in zip(one.trajectories, (1.5, 0.0), strict=True):
        trajectory.set_reward(reward)
    one.valid, one.numbers = [True, False], [{"acc": 1.0}, {}]
    columns = to_batch([one], pad_id=PAD).batch
    assert columns["given_rewards"].tolist() == [[0.0, 1.5], [0.0, 0.0]]
    assert columns["scores"].tolist() == [1.5, 0.0] and columns["valid"].tolist() == [True, False]
    assert columns["reward/acc"].tolist() == [1.0, 0.0] and columns["reward/acc"].dtype == torch.float64


def test_rewards_of_tools_are_columns_of_their_own_and_count_in_scores() -> None:
    """Only a valid sample gets them; and masked tokens keep none of them."""
    one = group(0, (5,), completion(1, 2), completion(3, 4))
    one.trajectories[0].added_rewards = [0.5, 0.25]
    columns = to_batch([one], pad_id=0).batch
    assert columns[ADDED].tolist() == [[0.5, 0.25], [0.0, 0.0]] and columns[TOOL_REWARDS].tolist() == [0.75, 0.0]
    assert "given_rewards" not in columns.keys()
    for trajectory in one.trajectories:
        trajectory.set_reward(2.0)
    columns = to_batch([one], pad_id=0).batch
    assert columns["given_rewards"].tolist() == [[0.0, 2.0], [0.0, 2.0]] and columns["scores"].tolist() == [2.75, 2.0]
    one.valid = [False, True]
    assert to_batch([one], pad_id=0).batch["scores"].tolist() == [2.0, 2.0]
    one.trajectories[0].versions = [0, 1]
    mask_older(one, 1)
    assert one.trajectories[0].added_rewards == [0.0, 0.75]


def test_what_others_wrote_is_not_the_policys() -> None:
    one = group(0, (7,), completion(3, 20, 21, 4, version=2))
    one.trajectories[0].response_mask = [1, 0, 0, 1]
    one.trajectories[0].versions = [2, NOT_SAMPLED, NOT_SAMPLED, 3]
    columns = to_batch([one], pad_id=PAD).batch
    assert columns["response_mask"].tolist() == [[1, 0, 0, 1]] and columns["response_length"].tolist() == [4]
    assert columns["attention_mask"].tolist() == [[1] * 5]
    assert one.first_version == 2 and one.num_tokens == 2
    assert mask_older(one, 3) == 1
    assert one.trajectories[0].response_mask == [0, 0, 0, 1] and one.valid == [True]
    assert mask_older(one, 4) == 1 and one.valid == [False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.response_ids.__setitem__(0, VOCABULARY), "token id 50, outside the vocabulary of 50"),
        (lambda t: t.response_ids.__setitem__(0, -2), "token id -2"),
        (lambda t: t.rollout_log_probs.__setitem__(0, float("nan")), "not finite"),
        (lambda t: t.set_reward(1.0), "samples without rewards in a batch in which others have them"),
    ],
)
def test_what_would_corrupt_training_is_refused(change, message: str) -> None:
    one = group(3, (7,), completion(3), completion(4))
    change(one.trajectories[0])
    with pytest.raises(WorkflowError, match=f"prompt 3.*{message}"):
        to_batch([one], pad_id=PAD, vocab_size=VOCABULARY)


def test_a_number_that_only_some_samples_have_is_refused() -> None:
    one = group(3, (7,), completion(3), completion(4))
    for trajectory in one.trajectories:
        trajectory.set_reward(1.0)
    one.numbers = [{"acc": 1.0}, {}]
    with pytest.raises(WorkflowError, match="no 'acc' for a sample of prompt 3"):
        to_batch([one], pad_id=PAD)


def test_metrics_are_means_over_those_that_have_them() -> None:
    one = group(0, (7,), completion(3), completion(4))
    one.trajectories[0].metrics = {"turns": 2.0, "calls": 1.0}
    one.trajectories[1].metrics = {"turns": 4.0}
    assert episode_metrics([one]) == {"episode/turns": 3.0, "episode/calls": 1.0}


def test_groups_survive_a_checkpoint() -> None:
    one = group(4, *[(7, 8), completion(3, 4, version=5)])
    one.trajectories[0].set_reward(0.25)
    one.numbers = [{"acc": 1.0}]
    again = Group.from_json(one.to_json(), one.item)
    assert again == one and np.isclose(again.trajectories[0].rewards[-1], 0.25)


def test_failures_in_a_row_stop_the_run_and_others_do_not() -> None:
    failure_limit, error = FailureLimit(3), ValueError("a bug")
    for _ in range(5):
        assert failure_limit.failed(1, error) is None and failure_limit.failed(2, error) is None
        failure_limit.complete()
    assert failure_limit.failed(1, error) is None and failure_limit.failed(2, error) is None
    stop = failure_limit.failed(3, error)
    assert str(stop).startswith("3 groups of episodes failed in a row, the last with ValueError: a bug. Correct the workflow")
    assert stop is not None and stop.__cause__ is error


def test_failures_and_rejections_are_told_of_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    failure_limit = FailureLimit(2)
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            failure_limit.failed(number, ValueError("a bug"))
            failure_limit.complete()
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [1, 2, 4, 8, 16]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            failure_limit.rejected("filtered out")
        failure_limit.accepted()
        failure_limit.rejected("again")
        failure_limit.rejected("and again")
    assert [record.args for record in caplog.records] == [
        *((count, "filtered out") for count in (2, 4, 8, 16)),
        (2, "and again"),
    ]


def test_groups_that_are_always_too_old_stop_the_run() -> None:
    staleness = StalenessManager(batch=2, max_staleness=1)
    staleness.set_version(4)
    failure_limit = FailureLimit(6)
    assert failure_limit.dropped(5, staleness) is None
    assert "6 groups in a row were more than 1 versions old when they came, at version 4" in str(
        failure_limit.dropped(6, staleness)
    )
