from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from rlhub.models.megatron import compat

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing of this happens where CUDA exists")
CODE = """
def kind(tensor): return tensor.type()
def stay(tensor): return tensor.cuda()
def make(): return torch.ones(2, device=torch.cuda.current_device(), pin_memory=True)
"""


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """Stands for one of megatron's, newly imported."""
    name = f"{compat.MEGATRON}.new_module"
    made = types.ModuleType(name)
    made.__dict__["torch"] = torch
    exec(CODE, made.__dict__)
    sys.modules[name] = made
    yield made
    del sys.modules[name]


def test_does_nothing_where_cuda_exists(module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.Tensor.type, torch.Tensor.cuda
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    compat.install()
    assert module.__dict__["torch"] is torch
    assert (torch.Tensor.type, torch.Tensor.cuda) == before


def test_cuda_means_the_cpu_in_megatron_alone(module: types.ModuleType) -> None:
    compat.install()
    stand_in = module.__dict__["torch"]
    compat.install()
    assert module.__dict__["torch"] is stand_in
    assert stand_in is not torch
    made = module.make()
    assert made.device.type == "cpu"
    assert (module.kind(made), made.type()) == ("torch.cuda.FloatTensor", "torch.FloatTensor")
    assert module.stay(made) is made
    with pytest.raises((RuntimeError, AssertionError)):
        made.cuda()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(2, device="cuda")
    assert not torch.cuda.is_available()


def test_the_rest_is_the_real_torch(module: types.ModuleType) -> None:
    compat.install()
    stand_in = module.__dict__["torch"]
    assert stand_in.Tensor is torch.Tensor
    assert stand_in.cuda.is_available is torch.cuda.is_available
    assert stand_in.distributed.all_reduce is torch.distributed.all_reduce


def test_streams_and_events_do_nothing() -> None:
    stream = compat._Stream()
    stream.wait_stream(stream)
    stream.record_event().synchronize()


def test_forked_generator_leaves_the_process_alone() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    compat.install()
    tracker, draws = CudaRNGStatesTracker(), []
    tracker.add("model-parallel-rng", 3)
    before = torch.get_rng_state()
    for _ in range(2):
        with tracker.fork():
            draws.append(torch.rand(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*draws)
    assert torch.equal(draws[0], torch.rand(2, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("name", compat.UNUSED)
def test_what_megatron_may_not_import_is_there_for_others(name: str) -> None:
    from megatron.core import timers

    assert timers.wandb is None
    assert importlib.import_module(name)
