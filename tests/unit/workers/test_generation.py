"""Prompts to requests and completions to columns: seeds, padding, and refusal of what would corrupt training."""

from __future__ import annotations

import pytest
import torch

from rlhub.engines.rollout.base import Completion, GenerationRequest
from rlhub.errors import EngineError
from rlhub.utils.seeding import sample_seed
from rlhub.workers.generation import (
    check_completions,
    experts_column,
    generation_requests,
    pad_completions,
    training_columns,
)

PROMPTS = torch.tensor([[0, 5, 6], [7, 8, 9]])
MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])


def test_each_sample_has_its_prompt_and_its_own_seed() -> None:
    requests = generation_requests(PROMPTS, MASK, torch.tensor([10, 11]), num_samples=2, run_seed=3)
    assert [list(r.prompt_ids) for r in requests] == [[5, 6], [5, 6], [7, 8, 9], [7, 8, 9]]
    assert [r.seed for r in requests] == [sample_seed(3, o, s) for o in (10, 11) for s in (0, 1)]
    assert len({r.seed for r in requests}) == 4


def test_an_empty_prompt_is_named() -> None:
    with pytest.raises(EngineError, match="row 1 .ordinal 11. is empty"):
        generation_requests(PROMPTS, torch.tensor([[0, 1, 1], [0, 0, 0]]), torch.tensor([10, 11]), num_samples=1, run_seed=0)


def completion(tokens: list[int], log_probs: list[float] | None = None, finish: str = "stop") -> Completion:
    return Completion(token_ids=tokens, log_probs=[-0.5] * len(tokens) if log_probs is None else log_probs, finish_reason=finish)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (completion([1, 2], [-0.1]), "2 tokens but 1 log-probs"),
        (completion([99]), "token id 99, outside the vocabulary of 10"),
        (completion([-1]), "token id -1"),
        (completion([1], [float("nan")]), "not finite"),
    ],
)
def test_corrupt_completions_are_refused(bad: Completion, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check_completions([completion([1, 2]), bad], 10, True)
    check_completions([completion([1, 2])], 10, True)


def test_columns_are_padded_to_the_widest_of_all_ranks() -> None:
    completions = [completion([4, 5]), completion([6], finish="length"), completion([]), completion([1, 2, 3])]
    padded = pad_completions(completions, pad_id=0, with_log_probs=True, widest=lambda width: width + 1)
    assert padded.responses.tolist() == [[4, 5, 0, 0], [6, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 0]]
    assert padded.finish_reason.tolist() == [0, 1, 0, 0]
    columns = training_columns(PROMPTS, MASK, padded, 2)
    assert columns["response_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
    assert columns["input_ids"][3].tolist() == [7, 8, 9, 1, 2, 3, 0]
    assert columns["attention_mask"][0].tolist() == [0, 1, 1, 1, 1, 0, 0]
    assert torch.equal(columns["rollout_log_probs"] != 0, columns["response_mask"].bool())


def test_experts_of_each_token_but_the_last_make_a_column() -> None:
    requests = [GenerationRequest(prompt_ids=[5, 6], seed=0), GenerationRequest(prompt_ids=[7], seed=0)]
    written = [completion([1, 2, 3]), completion([4])]
    for one, count in zip(written, (4, 1), strict=True):
        one.routed_experts = torch.full((count, 6), count, dtype=torch.uint8)
    column = experts_column(requests, written)
    assert [part.tolist() for part in column.unbind()] == [[[4] * 6] * 4, [[1] * 6]] and column.dtype == torch.uint8
    written[1].routed_experts = torch.zeros((2, 6), dtype=torch.uint8)
    with pytest.raises(EngineError, match="completion 1 has the experts of 2 tokens where 1 went through"):
        experts_column(requests, written)
    written[0].routed_experts = None
    with pytest.raises(EngineError, match="completion 0 has the experts of 0 tokens where 4"):
        experts_column(requests, written)
