"""The gather of full weights, whose collective has another name in older versions of torch."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from rlhub.engines.training.fsdp import weights


def gather_of_2_11(output: Any, own: Any, group: Any = None) -> None: ...


def gather_of_2_13(output: Any, own: Any, group: Any = None) -> None: ...


def built_again(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module under another name, as it is built with torch.distributed as that is now."""
    spec = spec_from_file_location("weights_again", weights.__file__)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "weights_again", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("newer", [True, False])
def test_all_gather_is_torchs_of_either_version(monkeypatch: pytest.MonkeyPatch, newer: bool) -> None:
    """Whichever torch is installed."""
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather_of_2_11)
    monkeypatch.setattr(dist, "all_gather_single", gather_of_2_13, raising=False)
    if not newer:
        monkeypatch.delattr(dist, "all_gather_single")
    assert built_again(monkeypatch).ALL_GATHER is (gather_of_2_13 if newer else gather_of_2_11)
