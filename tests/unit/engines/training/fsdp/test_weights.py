"""The gather of full weights, whose collective has another name in older versions of torch."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest
import torch.distributed as dist

from rlhub.engines.training.fsdp import weights


def built_again(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module under another name, as it is built with torch.distributed as that is now."""
    spec = spec_from_file_location("weights_again", weights.__file__)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "weights_again", module)
    spec.loader.exec_module(module)
    return module


def test_all_gather_is_torchs_of_either_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights.ALL_GATHER is dist.all_gather_single
    monkeypatch.delattr(dist, "all_gather_single")  # torch 2.11 has no such function
    assert built_again(monkeypatch).ALL_GATHER is dist.all_gather_into_tensor
