"""Every example in trainer_configs/examples passes all checks before the start on the machine that it is written for, and on a
quarter of that machine it does not; and it says why of every line."""

from __future__ import annotations

import importlib.machinery
import json
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhub.config import devices
from rlhub.config.cli import prepare
from rlhub.config.compose import config_dir, example_names
from rlhub.config.load import flatten, free_keys
from rlhub.config.rules.derive import derive
from rlhub.config.rules.placement import pools_of
from rlhub.config.schema import to_dict
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import ConfigError
from rlhub.trainer.preflight import checks as preflight
from rlhub.trainer.preflight.memory import check_memory
from tests.support.model_shapes import save_shape, shape_named_like

NAMES = example_names()
ON_GPUS = [name for name in NAMES if not name.endswith("cpu")]
SEVERAL_MACHINES = ("examples/30b_a3b_24gpu_megatron", "examples/32b_32gpu")
DEVICE_GB = 79.6
"""GiB of a GPU of 80 GB, as nvidia-smi says it."""
SMALL_MODELS = ("0.5b", "1.5b_8gpu")
"""Which also fit a quarter of such a GPU."""
ROW = {"prompt": "1+1=", "data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {}}
PATH = "actor_rollout_ref.model.path"


def text_of(name: str) -> str:
    return (config_dir() / f"{name}.yaml").read_text()


def said(name: str) -> dict[str, Any]:
    """Setting -> value, as the file has them."""
    return dict(flatten(yaml.safe_load(text_of(name)), free_keys(PPOConfig)))


def gpus_of(name: str) -> int:
    """As the name says; 0 for a CPU."""
    found = re.search(r"_(\d+)gpu", name)
    return int(found.group(1)) if found else 0


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data and reward as the examples name them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("rows.jsonl").write_text(json.dumps(ROW) + "\n")
    Path("reward.py").write_text("def compute_score(*row): return 1.0\n")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends a machine with so many GPUs of that size, on which every backend is installed."""

    def pretend(gpus: int, device_gb: float = DEVICE_GB) -> None:
        facts = {"count_gpus": gpus, "torch_has_cuda": gpus > 0, "driver_problem": None, "gpu_memory_gb": device_gb}
        for module in (preflight, derive, devices):
            for name in facts.keys() & vars(module).keys():
                monkeypatch.setattr(module, name, lambda value=facts[name]: value)
        spec = importlib.machinery.ModuleSpec("installed", None)
        for module in ("rlhub.trainer.preflight.checks", "rlhub.engines.rollout.registry"):
            monkeypatch.setattr(f"{module}.find_spec", lambda name: spec)

    return pretend


def prepared(name: str, *overrides: str) -> PPOConfig:
    """The example with a folder of its model's shape, checked as main_ppo does; ConfigError: it is refused."""
    settings = said(name)
    shape = "Qwen2.5-0.5B" if name.endswith("tiny_cpu") else shape_named_like(settings[PATH])
    files = ["data.train_files=rows.jsonl", "data.val_files=rows.jsonl", f"{PATH}={save_shape(Path('model'), shape)}"]
    if "custom_reward_function.path" in settings:
        files.append("custom_reward_function.path=reward.py")
    folder = [] if "trainer.default_local_dir" not in settings else ["trainer.default_local_dir=run"]
    return prepare(PPOConfig, name, [*files, *folder, *overrides], preflight=preflight.check_training)


def per_machine(name: str) -> int:
    return 8 if name in SEVERAL_MACHINES else gpus_of(name)


@pytest.mark.parametrize("name", NAMES)
def test_it_passes_every_check_on_its_machine_without_a_warning(
    name: str, machine: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    machine(per_machine(name))
    with caplog.at_level(logging.WARNING):
        config = prepared(name)
    assert caplog.messages == []
    if name in ON_GPUS:
        assert sum(pool.ranks for pool in pools_of(config.trainer).values()) == gpus_of(name), "the name says how many GPUs"
        assert check_memory(config, DEVICE_GB) == [], "asked of several machines, too, whose GPUs a start does not know"
    assert config.trainer.experiment_name == name.removeprefix("examples/")


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_quarter_of_the_gpus_is_refused(name: str, machine: Callable[..., None]) -> None:
    machine(per_machine(name) // 4)
    if name not in SEVERAL_MACHINES:
        with pytest.raises(ConfigError, match="GPU"):
            prepared(name)
        return
    try:  # a cluster's GPUs are not known before it is joined: the example itself is cut down
        config = prepared(name, f"trainer.nnodes={max(said(name)['trainer.nnodes'] // 4, 1)}", "trainer.n_gpus_per_node=4")
    except ConfigError as error:
        assert "divide" in str(error)
    else:
        assert any("more than its 79.6 GiB" in problem for problem in check_memory(config, DEVICE_GB))


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_quarter_of_the_memory_is_refused_but_for_small_models(name: str, machine: Callable[..., None]) -> None:
    machine(per_machine(name))
    problems = check_memory(prepared(name), DEVICE_GB / 4)
    small = name.removeprefix("examples/").startswith(SMALL_MODELS)
    assert bool(problems) != small
    if not small and name not in SEVERAL_MACHINES:
        machine(per_machine(name), DEVICE_GB / 4)
        with pytest.raises(ConfigError, match="GPU memory"):
            prepared(name)


@pytest.mark.parametrize("name", ON_GPUS)
def test_it_says_which_gpus_it_fits(name: str, machine: Callable[..., None]) -> None:
    """The smallest size, in whole GiB, that the check lets pass."""
    machine(per_machine(name))
    config = prepared(name)
    smallest = next(size for size in range(1, math.ceil(DEVICE_GB)) if not check_memory(config, size))
    stated = re.search(r"^# Fits (?:a GPU|GPUs) of (\d+) GiB and more by the check before the start", text_of(name), re.MULTILINE)
    assert stated is not None and int(stated.group(1)) == smallest


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_only_what_differs_from_the_defaults_and_says_why(name: str) -> None:
    defaults = dict(flatten(to_dict(PPOConfig()), free_keys(PPOConfig)))
    assert [key for key, value in said(name).items() if defaults.get(key) == value] == [], "these are the defaults"
    settings = [line for line in text_of(name).splitlines() if re.match(r" *\w+: +[^#\s]", line)]
    assert len(settings) >= len(said(name)), "one setting a line"
    assert [line for line in settings if not re.search(r" # \S+ \S+", line)] == []
    assert f"--config-name={name}" in text_of(name), "the command"


def test_ones_own_file_builds_on_an_example(tmp_path: Path) -> None:
    Path("mine.yaml").write_text("defaults: [examples/7b_8gpu, _self_]\ndata: {train_batch_size: 512}\n")
    config = prepare(PPOConfig, "mine", config_dir=str(tmp_path), only_show=True)
    assert config.data.train_batch_size == 512
    assert (
        config.actor_rollout_ref.rollout.gpu_memory_utilization
        == said("examples/7b_8gpu")["actor_rollout_ref.rollout.gpu_memory_utilization"]
    )
