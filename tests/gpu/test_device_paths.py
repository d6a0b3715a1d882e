"""Small paths that differ on a GPU: padded passes, sampling, fingerprints, memory that is emptied and filled again."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch

from rlhub.engines.rollout.base import SamplingParams
from rlhub.engines.rollout.hf.decode import sample_tokens
from rlhub.engines.training.fsdp.logprob import add_product, token_outputs
from rlhub.engines.training.optimizer import HostCopies, HostTensors
from rlhub.engines.training.packing import model_inputs
from rlhub.models.device_copies import to_device
from rlhub.protocol.weights.fingerprint import digests, fingerprint
from rlhub.sharding_manager import mirror
from rlhub.utils.ports import free_port

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
    assert all(state.device.type == "cpu" and state.is_pinned() for state in states)
    hosted.wait()
    assert float(states[0].sum()) == 2 << 20


def test_copies_of_a_micro_batch_are_queued_from_pinned_memory() -> None:
    torch.cuda.synchronize()
    ids = torch.randint(100, (1 << 20,))
    with torch.cuda.device(CUDA):
        torch.cuda.set_sync_debug_mode("error")  # raises at a copy or a read that waits
        try:
            found = to_device(ids, CUDA)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), ids)


@pytest.mark.parametrize("entropy", [False, True])
def test_the_compiled_head_is_the_plain_one(entropy: bool) -> None:
    """In bfloat16, against float64, at a vocabulary of ordinary size; its memory is that of two chunks and the gradients."""
    tokens, width, vocabulary = 3000, 256, 32000
    hidden, weight = torch.randn(tokens, width, device=CUDA), torch.randn(vocabulary, width, device=CUDA) * 0.1
    targets = torch.randint(vocabulary, (tokens,), device=CUDA)
    results = []
    for dtype, compiled in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        leaves = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in (hidden, weight)]
        out = token_outputs(*leaves, None, targets, temperature=0.7, wanted={"log_probs", "entropy"}, compiled=compiled)
        loss = out["log_probs"].mean() + (out["entropy"].mean() if entropy else 0)
        results.append([out["log_probs"], out["entropy"], *torch.autograd.grad(loss, leaves)])
    for plain, eager, ours in zip(*results, strict=True):
        distances = [float((other.double() - plain).norm() / plain.norm()) for other in (eager, ours)]
        assert distances[1] < max(1e-2, 1.5 * distances[0])


def test_half_precision_products_add_up_in_float32() -> None:
    total, left, right = torch.randn(64, 32, device=CUDA), torch.randn(64, 16, device=CUDA), torch.randn(16, 32, device=CUDA)
    expected = total + left.bfloat16().float() @ right.bfloat16().float()
    add_product(total, left.bfloat16(), right.bfloat16())
    torch.testing.assert_close(total, expected, rtol=2e-2, atol=2e-2)


def test_emptied_storages_come_back_with_their_content() -> None:
    buffer = torch.randn(1 << 20, device=CUDA)
    view, before, copies = buffer[10:20], buffer.clone(), HostCopies()
    taken = torch.cuda.memory_allocated(CUDA)
    copies.empty([view])
    assert torch.cuda.memory_allocated(CUDA) < taken
    copies.restore()
    assert torch.equal(buffer, before) and torch.equal(view, before[10:20])


def test_versions_go_between_two_gpus_by_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    files = [tmp_path / "one", tmp_path / "two"]
    files[0].write_bytes(random.Random(0).randbytes(mirror.CHUNK_BYTES + 77))
    files[1].write_bytes(b"x")
    port, there = free_port(), [(tmp_path / "there" / file.name, file.stat().st_size) for file in files]
    sender = threading.Thread(target=mirror._send, args=(files, mirror.Peer("127.0.0.1", port, CUDA, 60.0)))
    sender.start()
    mirror._receive(there, mirror.Peer("127.0.0.1", port, torch.device("cuda", 1), 60.0))
    sender.join()
    assert [path.read_bytes() for path, _ in there] == [file.read_bytes() for file in files]


def test_a_captured_graph_computes_with_the_weights_that_were_exchanged() -> None:
    worker = pytest.importorskip("rlhub.engines.rollout.vllm.worker")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).to(CUDA).requires_grad_(False)
    standby, given = worker.StandbyWeights(model), torch.randn(4, 64, device=CUDA)
    model(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(given)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    for piece in standby.pieces():
        piece.tensor.copy_(torch.randn(piece.tensor.shape))
    wanted = {piece.name: piece.tensor.clone() for piece in standby.pieces()}
    standby.exchange()
    graph.replay()
    assert torch.equal(out, torch.func.functional_call(model, wanted, (given,)))
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
