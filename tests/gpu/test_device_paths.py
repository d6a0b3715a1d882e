"""Small paths that differ on a GPU: padded passes, sampling, fingerprints, memory that is emptied and filled again."""

from __future__ import annotations

import pytest
import torch

from rlhub.engines.rollout.base import SamplingParams
from rlhub.engines.rollout.hf.decode import sample_tokens
from rlhub.engines.training.optimizer import HostCopies, HostTensors
from rlhub.engines.training.packing import model_inputs
from rlhub.protocol.weights.fingerprint import digests, fingerprint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("learned", [1, 0])
def test_passes_are_planned_alike_from_rows_on_either_device(pack: bool, learned: int) -> None:
    rows = {
        "input_ids": torch.tensor([[10, 11, 12, 13], [0, 20, 21, 22]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 0], [1, 1]]) * learned,
    }
    here = model_inputs(rows, pack=pack, device=CUDA)
    there = model_inputs({name: column.cuda() for name, column in rows.items()}, pack=pack, device=CUDA)
    for name in ("input_ids", "position_ids", "sources", "targets", "slots"):
        assert getattr(here, name).is_cuda and torch.equal(getattr(here, name), getattr(there, name))


def test_no_token_without_probability_is_drawn() -> None:
    logits = torch.randn(64, 150_000, device=CUDA)
    for seed in range(20):
        generator = torch.Generator(CUDA).manual_seed(seed)
        _, log_probs = sample_tokens(logits, torch.rand(64, device=CUDA, generator=generator), SamplingParams(top_k=50))
        assert log_probs.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_changed_or_moved_element_changes_the_fingerprint(dtype: torch.dtype) -> None:
    weight = torch.randn(300, 500, device=CUDA).to(dtype)
    moved = weight.clone()
    moved[0], moved[1] = weight[1], weight[0]
    assert fingerprint(weight) == fingerprint(weight.clone()) != fingerprint(moved)
    assert digests([weight, moved])[0] == digests([weight.clone()])[0] != digests([moved])[0]


def test_optimizer_states_are_on_the_device_while_they_are_written() -> None:
    states = [torch.ones(1 << 20, device=CUDA), torch.zeros(3, device=CUDA)]
    used, hosted = torch.cuda.memory_allocated(CUDA), HostTensors(states)
    assert torch.cuda.memory_allocated(CUDA) < used and all(state.device.type == "cpu" for state in states)
    with hosted.on_device(CUDA):
        assert all(state.device == CUDA for state in states)
        states[0].add_(1)
    assert all(state.device.type == "cpu" for state in states) and float(states[0].sum()) == 2 << 20


def test_emptied_storages_come_back_with_their_content() -> None:
    buffer = torch.randn(1 << 20, device=CUDA)
    view, before, copies = buffer[10:20], buffer.clone(), HostCopies()
    taken = torch.cuda.memory_allocated(CUDA)
    copies.empty([view])
    assert torch.cuda.memory_allocated(CUDA) < taken
    copies.restore()
    assert torch.equal(buffer, before) and torch.equal(view, before[10:20])
