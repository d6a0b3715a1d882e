"""main_dpo's and main_rm's settings: what is derived, what does not fit together, what has no effect."""

from __future__ import annotations

from typing import Any

import pytest

from rlhub.config.load import collect, load
from rlhub.config.rules import checks, effects
from rlhub.config.rules.derive import derive
from rlhub.config.schema import leaves
from rlhub.config.sections.preference import DPOConfig, RMConfig

BOTH = pytest.mark.parametrize(("cls", "name"), [(DPOConfig, "dpo"), (RMConfig, "rm")])


def derived(cls: type, name: str, *overrides: str) -> Any:
    config = load(cls, name, ["trainer.device=cpu", *overrides])
    derive(config)
    return config


@BOTH
def test_the_defaults_lack_only_data_and_model(cls: type, name: str) -> None:
    config = derived(cls, name)
    assert checks.check(config) == []
    first, second = checks.check_required(config, checks.REQUIRED[cls])
    assert first.startswith("data.train_files is not set") and second.startswith("model.path is not set")
    assert config.trainer.n_gpus_per_node == 1


@BOTH
def test_every_setting_is_documented(cls: type, name: str) -> None:
    assert not [leaf.key for leaf in leaves(cls) if not leaf.doc]


@BOTH
def test_a_token_budget_holds_both_answers(cls: type, name: str) -> None:
    settings = ("data.use_dynamic_bsz=True", "data.max_length=100")
    (problem,) = checks.check(derived(cls, name, *settings, "data.max_token_len_per_gpu=199"))
    assert problem == "data.max_token_len_per_gpu=199 tokens cannot hold a pair of 2 x data.max_length=100"
    assert checks.check(derived(cls, name, *settings, "data.max_token_len_per_gpu=200")) == []


@BOTH
def test_pairs_for_every_rank(cls: type, name: str) -> None:
    (problem,) = checks.check(derived(cls, name, "data.train_batch_size=1", "trainer.n_gpus_per_node=2"))
    assert problem.startswith("data.train_batch_size=1 pairs cannot feed")


def test_the_reference_is_sharded_as_the_policy_unless_said() -> None:
    config = derived(DPOConfig, "dpo", "fsdp_config.param_offload=True")
    assert config.ref_fsdp_config == config.fsdp_config
    other = derived(DPOConfig, "dpo", "fsdp_config.param_offload=True", "ref_fsdp_config.fsdp_size=1")
    assert other.ref_fsdp_config.param_offload and other.ref_fsdp_config.fsdp_size == 1 and other.fsdp_config.fsdp_size == -1
    in_code = DPOConfig()
    in_code.trainer.device = "cpu"
    derive(in_code)
    assert in_code.ref_fsdp_config == in_code.fsdp_config
    (problem,) = checks.check(derived(DPOConfig, "dpo", "ref_fsdp_config.fsdp_size=2"))
    assert problem.startswith("ref_fsdp_config.fsdp_size=2 does not divide the 1 ranks")


@pytest.mark.parametrize(
    ("setting", "cure"),
    [
        ("ref_fsdp_config.param_offload=True", None),
        ("data.max_token_len_per_gpu=5000", "data.use_dynamic_bsz=True"),
        ("optim.min_lr_ratio=0.1", "optim.lr_scheduler_type=cosine"),
    ],
)
def test_settings_without_effect(setting: str, cure: str | None) -> None:
    blocked = ["model.lora_rank=8"] if cure is None else []
    loaded = collect(DPOConfig, "dpo", [setting, *blocked, "trainer.device=cpu"])
    (warning,) = effects.without_effect(loaded.config, loaded.set_keys)
    assert warning.startswith(f"{setting.partition('=')[0]}=")
    cured = collect(DPOConfig, "dpo", [setting, *([cure] if cure else []), "trainer.device=cpu"])
    assert effects.without_effect(cured.config, cured.set_keys) == []


def test_a_misspelled_key_is_an_error() -> None:
    assert "did you mean dpo.beta?" in collect(DPOConfig, "dpo", ["dpo.betta=0.1"]).problems[0]
    assert "did you mean margin_key?" in collect(RMConfig, "rm", ["margn_key=x"]).problems[0]
