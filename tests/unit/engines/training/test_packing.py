from __future__ import annotations

import pytest
import torch

from rlhub.engines.training.packing import model_inputs, row_inputs
from rlhub.errors import EngineError
from rlhub.models.experts import OWN
from rlhub.protocol.columns import jagged
from rlhub.protocol.sequences import ROUTED_EXPERTS

CPU = torch.device("cpu")


def rows() -> dict[str, torch.Tensor]:
    """Prompts 2, 1 and 2 wide in 2 columns, responses 3, 1 and 2 in 3; the last row is masked in the response."""
    return {
        "input_ids": torch.tensor([[10, 11, 12, 13, 14], [0, 20, 21, 0, 0], [30, 31, 32, 33, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]]),
    }


def test_packs_only_what_targets_need() -> None:
    inputs = model_inputs(rows(), pack=True, device=CPU)
    assert inputs.input_ids.tolist() == [[10, 11, 12, 13, 20]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 0]]
    assert inputs.sources.tolist() == [1, 3, 4]
    assert inputs.targets.tolist() == [12, 14, 21]
    assert inputs.spread(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 0, 2], [3, 0, 0], [0, 0, 0]]
    assert inputs.plan is not None and inputs.plan.num_tokens == 5


def test_padded_form() -> None:
    inputs = model_inputs(rows(), pack=False, device=CPU)
    assert inputs.input_ids.tolist() == [[10, 11, 12, 13], [20, 0, 0, 0]]
    assert inputs.attention_mask is not None and inputs.attention_mask.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert inputs.input_ids.flatten()[inputs.sources].tolist() == [11, 13, 20]


@pytest.mark.parametrize("pack", [True, False])
def test_nothing_to_learn_still_runs_one_token(pack: bool) -> None:
    empty = {name: torch.zeros_like(column) for name, column in rows().items()}
    inputs = model_inputs(empty, pack=pack, device=CPU)
    assert inputs.input_ids.shape == (1, 1) and inputs.sources.numel() == 0
    assert not inputs.spread(torch.zeros(0)).any()


@pytest.mark.parametrize(("column", "row", "place", "value"), [("attention_mask", 1, 2, 0), ("attention_mask", 1, 1, 0)])
def test_impossible_targets_are_errors(column: str, row: int, place: int, value: int) -> None:
    broken = rows()
    broken[column][row, place] = value
    with pytest.raises(EngineError, match="response_mask"):
        model_inputs(broken, pack=True, device=CPU)


def test_one_number_a_row_is_read_at_its_last_token() -> None:
    inputs = row_inputs(rows(), pack=True, device=CPU)
    assert inputs.input_ids.tolist() == [[10, 11, 12, 13, 14, 20, 21, 30, 31, 32, 33]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3]]
    assert inputs.input_ids[0, inputs.sources].tolist() == [14, 21, 33]
    assert inputs.spread(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1, 2, 3]
    padded = row_inputs(rows(), pack=False, device=CPU)
    assert padded.input_ids.tolist() == [[10, 11, 12, 13, 14], [20, 21, 0, 0, 0], [30, 31, 32, 33, 0]]
    assert padded.input_ids.flatten()[padded.sources].tolist() == [14, 21, 33]


@pytest.mark.parametrize("pack", [True, False])
def test_rows_without_tokens_get_zero(pack: bool) -> None:
    some = rows()
    some["attention_mask"][1] = 0
    inputs = row_inputs(some, pack=pack, device=CPU)
    assert inputs.input_ids.flatten()[inputs.sources].tolist() == [14, 33]
    assert inputs.spread(torch.tensor([1.0, 3.0])).tolist() == [1, 0, 3]
    none = row_inputs({name: torch.zeros_like(column) for name, column in some.items()}, pack=pack, device=CPU)
    assert none.input_ids.shape == (1, 1) and none.spread(torch.zeros(0)).tolist() == [0, 0, 0]


def recorded() -> torch.Tensor:
    """Two experts of each token; the first row's last read token has none."""
    parts = [torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([[7, 8]]), torch.tensor([[9, 9], [9, 9], [9, 9]])]
    return jagged(torch.cat(parts).to(torch.uint8), torch.tensor([3, 1, 3]))


def test_recorded_experts_go_with_their_tokens() -> None:
    given = rows() | {ROUTED_EXPERTS: recorded()}
    packed, padded = (model_inputs(given, pack=pack, device=CPU).experts for pack in (True, False))
    assert packed is not None and packed.tolist() == [[1, 2], [3, 4], [5, 6], [OWN, OWN], [7, 8]]
    assert padded is not None and padded.tolist() == [*packed.tolist(), *[[OWN, OWN]] * 3]
    assert model_inputs(rows(), pack=True, device=CPU).experts is None
    given["response_mask"] = torch.zeros_like(given["response_mask"])
    for pack in (True, False):  # the token that runs although nothing is to be learned
        alone = model_inputs(given, pack=pack, device=CPU).experts
        assert alone is not None and alone.tolist() == [[OWN, OWN]]


def test_shared_tokens_have_no_recorded_experts() -> None:
    with pytest.raises(EngineError, match="prefix_packing=false"):
        model_inputs(rows() | {ROUTED_EXPERTS: recorded()}, pack=True, device=CPU, share_prefixes=True)
