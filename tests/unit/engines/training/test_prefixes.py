"""Rows in depth-first order, and the passes that they are cut into."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from rlhub.engines.training.base import StepReport
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.engines.training.packing import model_inputs
from rlhub.engines.training.prefixes import SortedRows, cut_sorted, sort_rows
from rlhub.engines.training.updates import Denominators, StepSums, policy_metrics
from tests.support.forests import conversations, rows_of

CPU = torch.device("cpu")


def columns(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    return ids, torch.arange(width) < torch.tensor([len(text) for text in texts])[:, None]


def random_texts(seed: int) -> list[list[int]]:
    rows = conversations(random.Random(seed), most_rows=7)
    return [[token for tokens, _ in row for token in tokens] for row in rows]


def distinct(texts: list[list[int]]) -> int:
    return len({tuple(text[: end + 1]) for text in texts for end in range(len(text))})


def test_neighbours_share_the_most() -> None:
    rows = sort_rows(*columns([[5, 6, 7], [9], [5, 6], [5, 8], [5, 6, 7]]))
    assert rows.order == [2, 0, 4, 3, 1] and rows.lengths == [2, 3, 3, 2, 1] and rows.shared == [0, 2, 3, 1, 0]
    assert rows.num_distinct == 5 and rows.cost(1, 4) == 4


@pytest.mark.parametrize("seed", range(20))
def test_the_cost_of_a_run_is_its_distinct_tokens(seed: int) -> None:
    texts = random_texts(seed)
    rows = sort_rows(*columns(texts))
    assert rows.num_distinct == distinct(texts)
    for first, last in itertools.combinations(range(len(texts) + 1), 2):
        assert rows.cost(first, last) == distinct([texts[row] for row in rows.order[first:last]])


def fewest(rows: SortedRows, config: MicroBatchConfig) -> tuple[int, int]:
    """Returns the fewest tokens and passes of all ways to cut."""
    count, found = len(rows.order), []
    for cuts in itertools.product((False, True), repeat=count - 1):
        places = [0, *(place for place, cut in enumerate(cuts, 1) if cut), count]
        runs = list(itertools.pairwise(places))
        if all(last - first <= (config.rows or count) for first, last in runs) and all(
            rows.cost(*run) <= (config.max_tokens or 10**9) or run[1] - run[0] == 1 for run in runs
        ):
            found.append((sum(rows.cost(*run) for run in runs), len(runs)))
    return min(found)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("limits", [{}, {"rows": 2}, {"max_tokens": 25}])
def test_passes_compute_the_fewest_tokens(seed: int, limits: dict[str, int]) -> None:
    texts, config = random_texts(seed), MicroBatchConfig(**limits, share_prefixes=True)
    rows = sort_rows(*columns(texts))
    passes = cut_sorted(rows, config, lambda needed: needed)
    costs = [distinct([texts[row] for row in members]) for members in passes]
    assert (sum(costs), len(passes)) == fewest(rows, config) and costs == sorted(costs, reverse=True)
    assert sorted(row for members in passes for row in members) == list(range(len(texts)))
    more = cut_sorted(rows, config, lambda needed: needed + 9)
    assert len(more) == len(passes) + 9 and sorted(row for members in more for row in members) == list(range(len(texts)))


def test_no_rows_are_one_empty_pass() -> None:
    nothing = torch.zeros(0, 4, dtype=torch.int64)
    assert cut_sorted(sort_rows(nothing, nothing.bool()), MicroBatchConfig(), lambda needed: needed) == [[]]


def test_a_pass_has_each_token_and_each_number_once() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 8]])
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": torch.ones(3, 2, dtype=torch.int64)}
    inputs = model_inputs(rows, pack=True, device=CPU, share_prefixes=True)
    assert inputs.input_ids.tolist() == [[5, 6, 7]] and inputs.position_ids.tolist() == [[0, 1, 2]]
    assert inputs.sources.tolist() == [1, 2, 2] and inputs.targets.tolist() == [7, 8, 9]
    assert inputs.spread(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 2], [1, 3], [1, 2]]


def test_rows_without_tokens_still_run_one() -> None:
    empty = {name: torch.zeros_like(column) for name, column in rows_of(conversations(random.Random(0)), 0).items()}
    inputs = model_inputs(empty, pack=True, device=CPU, share_prefixes=True)
    assert inputs.input_ids.shape == (1, 1) and not inputs.spread(torch.zeros(0)).any()


def test_metrics_say_how_much_was_shared() -> None:
    counts = {"prefix_rows": 58.0, "prefix_distinct": 18.0, "prefix_computed": 20.0}
    step = StepSums(
        sums={"loss": 1.0, "pg_loss": 1.0, **counts},
        denominators=Denominators(tokens=4.0, sequences=2.0, scale=1.0),
        report=StepReport(grad_norm=1.0, lr=0.1, skipped=False),
    )
    metrics = policy_metrics([step, step])
    assert metrics["perf/prefix_token_ratio"] == 2.9 and metrics["perf/prefix_recomputed"] == pytest.approx(20 / 18)
    assert not any("prefix_" in name for name in metrics if not name.startswith("perf/"))
