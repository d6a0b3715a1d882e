"""main_sft, main_dpo and main_rm train by their graphs as a plain loop over the workers does, bit for bit; a user's graph may say
otherwise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhub.config import cli
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.errors import ConfigError
from rlhub.single_controller import ClassWithInitArgs, Worker
from rlhub.trainer import main_dpo, main_rm, main_sft
from rlhub.trainer.launch import launch_workers
from rlhub.trainer.ppo.metrics import mean_metrics
from rlhub.trainer.preflight.checks import check
from rlhub.trainer.supervised import build_data
from rlhub.workers.memory_handover import WorkerRuntime
from rlhub.workers.roles import DPOWorker, RewardTrainingWorker, SFTWorker
from scripts.bench.tiny_model import build
from tests.support.metrics import rows_of

STEPS = 3
JOBS: dict[str, tuple[Any, Any, type[Worker], tuple[str, ...]]] = {
    "sft": (SFTConfig, main_sft, SFTWorker, ()),
    "dpo": (DPOConfig, main_dpo, DPOWorker, ()),
    "rm": (RMConfig, main_rm, RewardTrainingWorker, ("margin_key=gap",)),
}
MINE = """
from rlhub.pipeline.builtin import MODEL, sft
from rlhub.protocol import DataProto

def lengths(batch):
    return DataProto(meta_info={"metrics": {"data/longest": float(batch.batch["response_mask"].sum(1).max())}})

def logged(config, needs):
    return sft(config).insert("lengths", below="next_batch", run=f"{__file__}:lengths", reads="response_mask")

def twice(config, needs):
    return sft(config).add("again", run="train_step", on="model", reads=MODEL, trains="model")

def two(config, needs):
    step = sft(config)
    step.roles = {**step.roles, "second": step.roles["model"]}
    return step.add("train_second", run="train_step", on="second", reads=MODEL, trains="second", when="step % 2 == 1")

def nameless(config, needs):
    step = sft(config)
    step.roles = {"student": step.roles["model"]}
    return step.replace("train_step", "train_step", on="student", reads=MODEL, trains="student")

def upside_down(config, needs):
    step = sft(config).remove("next_batch")
    return step.add("next_batch", reads="step", writes=f"{MODEL} prompts responses ordinal")

def misspelt(config, needs):
    return sft(config).replace("train_step", "train_step", on="model", reads="input_ids respons_mask", trains="model")

def sampled(config, needs):
    return sft(config).replace("next_batch", "sample", reads="step", writes=MODEL)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, 12 rows that serve as demonstrations and as pairs, and pipelines of a user's own."""
    made, rng = tmp_path_factory.mktemp("supervised"), random.Random(1)
    build(made / "model", hidden=32, layers=1, vocab_size=16)

    def words() -> str:
        return " ".join(f"w{rng.randint(2, 15)}" for _ in range(rng.randint(1, 5)))

    rows = [{name: words() for name in ("prompt", "response", "chosen", "rejected")} | {"gap": rng.random()} for _ in range(12)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "mine.py").write_text(MINE)
    return made


def prepared(kind: str, folder: Path, out: Path, *settings: str) -> Any:
    overrides = [
        f"data.train_files={folder / 'rows.jsonl'}",
        "data.train_batch_size=5",
        f"model.path={folder / 'model'}",
        "optim.lr=1e-2",
        "trainer.backend=local",
        "trainer.device=cpu",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={out}",
        *JOBS[kind][3],
        *settings,
    ]
    return cli.prepare(JOBS[kind][0], kind, overrides, preflight=check)


def trained(kind: str, folder: Path, out: Path, *settings: str) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The command's weights and metrics."""
    assert JOBS[kind][1].main(prepared(kind, folder, out, *settings)) == 0
    return load_file(out / f"global_step_{STEPS}/model/huggingface/model.safetensors"), rows_of(out)


def plain(kind: str, folder: Path, out: Path) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The same by a loop."""
    config = prepared(kind, folder, out)
    data, config.optim.total_training_steps = build_data(config), STEPS
    length = config.data.max_length
    runtime = WorkerRuntime(
        device="cpu", seed=config.trainer.seed, max_prompt_length=length, max_response_length=length, deadline_s=600
    )
    columns = ["input_ids", "attention_mask", "response_mask", *(["margin"] if kind == "rm" else [])]
    with launch_workers({"model": ClassWithInitArgs(JOBS[kind][2], config, runtime)}, config.trainer) as launched:
        model = launched.groups["model"]
        batches = data.loader.endless()
        rows = [model.train_step(next(batches).select(batch_keys=columns)).meta_info["metrics"] for _ in range(STEPS)]
        model.save_checkpoint(str(out))
    return load_file(out / "huggingface/model.safetensors"), [mean_metrics(row) for row in rows]


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize("kind", JOBS)
def test_the_graph_trains_as_a_plain_loop_does(folder: Path, tmp_path: Path, kind: str) -> None:
    weights, rows = trained(kind, folder, tmp_path / "graph")
    expected, metrics = plain(kind, folder, tmp_path / "loop")
    assert equal(weights, expected)
    for row, one in zip(rows, metrics, strict=True):
        names = [name for name in one if not name.startswith("memory/")]
        assert names and [row[name] for name in names] == [one[name] for name in names]


def test_a_pipeline_of_the_users_own(folder: Path, tmp_path: Path) -> None:
    """A node that only looks changes no weight; one that trains again does, which is the control of the equality above."""
    weights, _ = trained("sft", folder, tmp_path / "sft")
    same, rows = trained("sft", folder, tmp_path / "logged", f"trainer.pipeline={folder / 'mine.py'}:logged")
    assert equal(weights, same) and all(2 <= row["data/longest"] <= 6 for row in rows)
    other, _ = trained("sft", folder, tmp_path / "twice", f"trainer.pipeline={folder / 'mine.py'}:twice")
    assert not equal(weights, other)


def test_every_trained_role_is_saved_and_resumed(folder: Path, tmp_path: Path) -> None:
    """The second of two is trained in every other step: after three steps, with a stop between, as after three at once."""
    pipeline = (f"trainer.pipeline={folder / 'mine.py'}:two", "trainer.save_freq=1")

    def second(out: Path, *settings: str, step: int = STEPS) -> dict[str, Tensor]:
        assert main_sft.main(prepared("sft", folder, out, *pipeline, *settings)) == 0
        return load_file(out / f"global_step_{step}/second/huggingface/model.safetensors")

    _, rows = trained("sft", folder, tmp_path / "whole", *pipeline)
    whole = {
        role: load_file(tmp_path / f"whole/global_step_3/{role}/huggingface/model.safetensors") for role in ("model", "second")
    }
    first = second(tmp_path / "stopped", "trainer.total_training_steps=2", step=2)
    again = second(tmp_path / "stopped")
    assert equal(again, whole["second"]) and not equal(first, again), "it was trained in the third step"
    assert not equal(whole["model"], whole["second"])
    assert [("train_second/train/loss" in row) for row in rows] == [True, False, True]


@pytest.mark.parametrize(
    ("pipeline", "problem"),
    [
        ("upside_down", "node 'train_step' needs 'next_batch' (input_ids attention_mask response_mask), which stands below it"),
        ("misspelt", "reads 'respons_mask', which is no column; did you mean 'response_mask'?"),
        ("nameless", "it has no role 'model', which is the one that is validated"),
        ("sampled", "node 'sample' runs 'sample', which is no method of the driver"),
    ],
)
def test_a_graph_that_cannot_run_is_refused(folder: Path, tmp_path: Path, pipeline: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared("sft", folder, tmp_path, f"trainer.pipeline={folder / 'mine.py'}:{pipeline}")
    assert problem in str(caught.value)


def test_the_pipeline_of_another_command_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trainer.pipeline=ppo is another command's; of this one: dpo, or your own"):
        prepared("dpo", folder, tmp_path, "trainer.pipeline=ppo")
