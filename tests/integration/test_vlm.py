"""Vision-language models that write text, in the hf engine and the FSDP2 engine: log-probs, positions, weights and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from recipes.tiny_vlm import Architecture, write_model
from recipes.vlm_count.generate import WORDS, png
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig, OptimConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.engines.rollout.hf.engine import HFEngine
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.errors import ConfigError, EngineError, RequestError
from rlhub.models.hf import build_model, save_sidecars
from rlhub.models.tokenizer import load_tokenizer
from rlhub.models.vision import image_reader
from rlhub.protocol.sequences import images_column, pack_files, unpack_files
from rlhub.sharding_manager.manager import ShardingManager

pytestmark = pytest.mark.usefixtures("process_group")
CPU = torch.device("cpu")
TOKENS = 6
SAMPLING = SamplingParams(max_new_tokens=TOKENS)
SIZES = (((32, 32),), ((16, 24),), ((32, 32), (40, 32)), (), ((32, 32),))
"""Height and width of the pictures of each prompt."""


@pytest.fixture(scope="module", params=get_args(Architecture))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vlm") / request.param
    write_model(path, 1, WORDS, request.param)
    return path


def section(folder: Path) -> ModelConfig:
    return ModelConfig(path=str(folder), enable_gradient_checkpointing=False)


def rollout_engine(folder: Path, *, load: bool = True) -> HFEngine:
    sizes = {"max_prompt_length": 100, "max_response_length": TOKENS}
    engine = HFEngine(
        RolloutSetup(config=RolloutConfig(name="hf"), model=section(folder), device=CPU, seed=1, load_checkpoint=load, **sizes)
    )
    engine.initialize()
    return engine


def train_engine(folder: Path, rows: int | None = 3) -> FSDPEngine:
    cut = MicroBatchConfig(rows=rows)
    engine = FSDPEngine(section(folder), FSDPConfig(), OptimConfig(lr=1e-3), kind="policy", device=CPU, micro_batch=cut)
    engine.initialize()
    return engine


def requests(folder: Path, samples: int = 2) -> list[GenerationRequest]:
    """Prompts with one, two and no pictures of different sizes, and texts of different lengths."""
    reader, tokenizer, generator = image_reader(section(folder)), load_tokenizer(str(folder)), np.random.default_rng(0)
    assert reader is not None
    found = []
    for number, sizes in enumerate(SIZES):
        files = [png(generator.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
        content = [*({"type": "image"} for _ in files), {"type": "text", "text": " how many red circles ?" + " blue" * number}]
        text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(reader.expand(text, files), add_special_tokens=False)["input_ids"]
        seeds = range(10 * number, 10 * number + samples)
        found += [GenerationRequest(prompt_ids=ids, seed=seed, pictures=pack_files(files)) for seed in seeds]
    return found


def training_rows(asked: Sequence[GenerationRequest], answers: Sequence[Completion]) -> dict[str, Tensor]:
    width = max(len(request.prompt_ids) for request in asked)
    pads = [width - len(request.prompt_ids) for request in asked]
    ids = [[0] * pad + list(one.prompt_ids) + answer.token_ids for pad, one, answer in zip(pads, asked, answers, strict=True)]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor([[0] * pad + [1] * (width - pad + TOKENS) for pad in pads]),
        "response_mask": torch.ones(len(asked), TOKENS, dtype=torch.int64),
        "images": images_column([request.pictures for request in asked]),
    }


def log_probs(engine: FSDPEngine, rows: Rows) -> Tensor:
    return engine.infer(rows, outputs=("log_probs",))["log_probs"]


def sampled(answers: Sequence[Completion]) -> Tensor:
    return torch.tensor([answer.log_probs for answer in answers])


def test_rollout_and_trainer_agree_after_each_update(folder: Path) -> None:
    """With the weights synchronised and compared each time, those of the vision part too, which learn."""
    rollout, trainer = rollout_engine(folder, load=False), train_engine(folder)
    manager = ShardingManager(trainer, rollout, bucket_bytes=1 << 16)
    before = {param.name: param.local.clone() for param in trainer.params}

    def loss(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        assert outputs.log_probs is not None
        return LossOutput(loss=-(outputs.log_probs * (micro["input_ids"][:, -TOKENS:] % 5 - 2)).sum() / 64)

    for version in (1, 2):
        assert manager.sync(version).num_weights == len(trainer.params)
        answers = rollout.generate(asked := requests(folder), SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
        rows = training_rows(asked, answers)
        assert (log_probs(trainer, rows) - sampled(answers)).abs().max() < 1e-5
        trainer.forward_backward(rows, loss)
        assert not trainer.optimizer_step().skipped
    unchanged = [param.name for param in trainer.params if torch.equal(param.local, before[param.name])]
    assert not [name for name in unchanged if "vis" in name], unchanged


def test_log_probs_are_those_of_the_textbook(folder: Path) -> None:
    """transformers' own forward pass with its own positions, one row without padding, given ids and pixels."""
    asked, reader = requests(folder, samples=1), image_reader(section(folder))
    assert reader is not None
    answers = rollout_engine(folder).generate(asked, SAMPLING)
    for answer in answers:  # transformers takes every image token for a part of a picture, sampled ones too
        answer.token_ids = [0 if token == reader.image_token_id else token for token in answer.token_ids]
    rows = training_rows(asked, answers)
    found = log_probs(train_engine(folder), rows)
    plain = AutoModelForImageTextToText.from_pretrained(folder).eval()
    for row, request in enumerate(asked):
        ids = rows["input_ids"][row][rows["attention_mask"][row].bool()][None]
        read = reader.prepared(request.pictures).arguments
        types = {"mm_token_type_ids": (ids == reader.image_token_id).int()} if reader.by_grids and read else {}
        with torch.no_grad():
            logits = plain(input_ids=ids, **read, **types).logits[0, -TOKENS - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, ids[0, -TOKENS:, None])[:, 0]
        torch.testing.assert_close(found[row], wanted, rtol=0, atol=1e-5)


def test_one_pixel_changes_the_log_probs_of_its_row_alone(folder: Path) -> None:
    asked = requests(folder, samples=1)
    rows = training_rows(asked, rollout_engine(folder).generate(asked, SAMPLING))
    engine = train_engine(folder)
    before = log_probs(engine, rows)
    files = [request.pictures for request in asked]
    other = np.full((32, 32, 3), 128, dtype=np.uint8)
    same = other.copy()
    other[5, 5] = 0
    changed = []
    for picture in (same, other):
        files[0] = pack_files([png(picture)])
        changed.append(log_probs(engine, rows | {"images": images_column(files)}))
    assert (changed[0][0] - changed[1][0]).abs().max() > 1e-6
    torch.testing.assert_close(changed[1][1:], before[1:], rtol=0, atol=1e-6)


def test_a_pass_does_not_depend_on_other_rows_or_lengths(folder: Path) -> None:
    """Micro-batches of one row and of all; a rank without rows; equal pictures are read once in a pass."""
    asked = requests(folder)
    rows = training_rows(asked, rollout_engine(folder).generate(asked, SAMPLING))
    one, whole = train_engine(folder, rows=1), train_engine(folder, rows=None)
    torch.testing.assert_close(log_probs(one, rows), log_probs(whole, rows), rtol=0, atol=1e-5)
    none = {name: column[:0] for name, column in rows.items() if name != "images"} | {"images": images_column([])}
    assert log_probs(one, none).shape == (0, TOKENS)
    texts = {name: column for name, column in rows.items() if name != "images"}
    without = [not unpack_files(request.pictures) for request in asked]
    torch.testing.assert_close(log_probs(one, texts)[without], log_probs(one, rows)[without], rtol=0, atol=1e-5)


def test_a_sampled_image_token_is_a_token_like_others(folder: Path) -> None:
    asked, reader = requests(folder, samples=1), image_reader(section(folder))
    assert reader is not None
    engine, ids = rollout_engine(folder), reader.image_token_id
    answers = engine.generate(asked, SAMPLING)
    for answer in answers:
        answer.token_ids[1] = ids
    rows = training_rows(asked, answers)
    found = log_probs(train_engine(folder), rows)
    longer = [
        replace(one, prompt_ids=[*one.prompt_ids, *answer.token_ids[:2]], start=2)
        for one, answer in zip(asked, answers, strict=True)
    ]
    following = engine.generate(longer, SAMPLING)
    for row, answer in enumerate(following):
        rows["input_ids"][row, -4:] = torch.tensor(answer.token_ids)
    found = log_probs(train_engine(folder), rows)
    assert (found[:, 2:] - sampled(following)).abs().max() < 1e-5


def test_single_requests_give_the_same_as_batches(folder: Path) -> None:
    engine, asked = rollout_engine(folder), requests(folder)
    whole = engine.generate(asked, SAMPLING)

    async def all_at_once() -> list[Completion]:
        return await asyncio.gather(*(engine.agenerate(request, SAMPLING) for request in asked))

    single = asyncio.run(all_at_once())
    assert [one.token_ids for one in single] == [one.token_ids for one in whole]
    for one, other in zip(single, whole, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_what_cannot_be_read_is_refused(folder: Path, tmp_path: Path) -> None:
    asked = requests(folder, samples=1)
    rows = training_rows(asked, rollout_engine(folder).generate(asked, SAMPLING))
    cut = {name: column[:, 8:] if name in ("input_ids", "attention_mask") else column for name, column in rows.items()}
    with pytest.raises(EngineError, match="image tokens for pictures with .* features: a prompt with pictures must not be cut"):
        log_probs(train_engine(folder), cut)
    with pytest.raises(RequestError, match="request 0 has images, which this engine's model does not read"):
        rollout_engine(folder).generate([replace(asked[0], images=torch.zeros(1, 3, 32, 32, dtype=torch.uint8))], SAMPLING)
    with pytest.raises(ConfigError, match="reads images, and no value model does"):
        build_model(section(folder), "value", dtype=torch.float32, attention=None, seed=1)


def test_the_saved_model_has_its_image_processor(folder: Path, tmp_path: Path) -> None:
    save_sidecars(section(folder), tmp_path / "copy")
    AutoModelForImageTextToText.from_pretrained(folder).save_pretrained(tmp_path / "copy")
    asked = requests(folder, samples=1)
    again = requests(tmp_path / "copy", samples=1)
    assert [one.prompt_ids for one in asked] == [one.prompt_ids for one in again]
    answers = [rollout_engine(path).generate(asked, SAMPLING) for path in (folder, tmp_path / "copy")]
    assert answers[0] == answers[1]


def test_gradients_are_those_of_the_textbook(folder: Path) -> None:
    """Rows in passes of two, whose order the engine chooses; control: with the pictures of other rows they differ."""
    asked, reader = requests(folder, samples=1), image_reader(section(folder))
    assert reader is not None
    answers = rollout_engine(folder).generate(asked, SAMPLING)
    for answer in answers:  # transformers takes a sampled image token for a part of a picture, and padding for no token
        answer.token_ids = [5 if token in (0, reader.image_token_id) else token for token in answer.token_ids]
    rows = training_rows(asked, answers) | {"weight": torch.linspace(-1, 1, len(asked))}
    plain = AutoModelForImageTextToText.from_pretrained(folder)

    def loss(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        assert outputs.log_probs is not None
        return LossOutput(loss=(outputs.log_probs * micro["weight"][:, None]).sum())

    def gradient(given: Rows) -> dict[str, Tensor]:
        engine = train_engine(folder, rows=2)
        engine.forward_backward(given, loss)
        return {param.name: param.local_grad for param in engine.params if param.local_grad is not None}

    for row, request in enumerate(asked):
        ids = rows["input_ids"][row][rows["attention_mask"][row].bool()][None]
        read = reader.prepared(request.pictures).arguments
        types = {"mm_token_type_ids": (ids == reader.image_token_id).int()} if reader.by_grids and read else {}
        logits = plain(input_ids=ids, **read, **types).logits[0, -TOKENS - 1 : -1]
        (logits.log_softmax(-1).gather(1, ids[0, -TOKENS:, None]).sum() * rows["weight"][row]).backward()
    wanted = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}

    def distance(found: dict[str, Tensor]) -> float:
        return float(torch.cat([(found[name] - grad).flatten() for name, grad in wanted.items()]).norm() / total)

    total = torch.cat([grad.flatten() for grad in wanted.values()]).norm()
    assert distance(gradient(rows)) < 1e-4
    pictures = [request.pictures for request in asked]
    pictures[0], pictures[4] = pictures[4], pictures[0]
    assert distance(gradient(rows | {"images": images_column(pictures)})) > 1e-2
