import subprocess
import sys

import pytest

from rlhub.config.rollout import RolloutConfig
from rlhub.engines.rollout.registry import ROLLOUT_ENGINES, resolve_engine_name
from rlhub.errors import RegistryError

LIGHT = """
import sys
import rlhub.engines.rollout.registry as registry
assert registry.ROLLOUT_ENGINES.names() == ["fake", "hf", "remote", "vllm"]
registry.resolve_engine_name("auto")
assert not {"torch", "vllm", "transformers"} & set(sys.modules), "heavy import"
"""


def test_names_can_be_checked_without_loading_anything_heavy() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=60)


def test_auto_is_vllm_where_installed_else_hf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhub.engines.rollout.registry.find_spec", lambda name: object())
    assert resolve_engine_name(RolloutConfig().name) == "vllm"
    monkeypatch.setattr("rlhub.engines.rollout.registry.find_spec", lambda name: None)
    assert resolve_engine_name(RolloutConfig().name) == "hf"
    assert resolve_engine_name("fake") == "fake"


def test_an_unknown_engine_is_refused_with_a_suggestion() -> None:
    with pytest.raises(RegistryError, match="did you mean 'vllm'"):
        ROLLOUT_ENGINES.get("vlm")
