"""Rows that share prefixes, in the FSDP2 engine: gradients and numbers equal those of rows alone, and each distinct token is
computed once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhub.engines.training import prefixes
from rlhub.engines.training.base import Rows
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.errors import EngineError
from rlhub.models.prefix_attention import plan_prefix_attention
from tests.integration.fsdp_checks import POLICY_OUTPUTS, make_engine, policy_loss
from tests.integration.fsdp_ranks import Ranks
from tests.integration.prefix_checks import compare_on_ranks
from tests.support.forests import VOCAB, conversations, rows_of
from tests.unit.models.conftest import save_model

pytestmark = pytest.mark.usefixtures("process_group")

CASES = 100
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("prefixes") / "model", vocab_size=VOCAB, max_position_embeddings=128)


@pytest.fixture(scope="module")
def engines(folder: Path) -> list[FSDPEngine]:
    """One whose rows stand alone, and one whose rows share prefixes, in float32."""
    limits = (MicroBatchConfig(), MicroBatchConfig(share_prefixes=True))
    return [make_engine(str(folder), fsdp={"model_dtype": "fp32"}, micro_batch=limit) for limit in limits]


def cases() -> Iterator[tuple[dict[str, Tensor], dict[str, int]]]:
    """Rows, and limits of a pass."""
    for seed in range(CASES):
        draw = random.Random(seed)
        rows = rows_of(conversations(draw), seed)
        limits: list[dict[str, int]] = [{}, {"rows": draw.randint(1, 5)}, {"max_tokens": draw.randint(30, 90)}]
        if bool(rows["response_mask"].any()):
            yield rows, draw.choice(limits)


def gradient(engine: FSDPEngine, rows: Rows) -> tuple[Tensor, dict[str, float]]:
    sums = engine.forward_backward(rows, policy_loss(float(rows["response_mask"].sum())), outputs=POLICY_OUTPUTS)
    grads = [param.local_grad for param in engine.params]
    return torch.cat([grad.flatten() for grad in grads if grad is not None]), sums


def distance(engines: list[FSDPEngine], rows: Rows) -> float:
    alone, shared = (gradient(engine, rows)[0] for engine in engines)
    return float((alone - shared).norm() / alone.norm())


def test_gradients_and_numbers_are_those_of_rows_alone(engines: list[FSDPEngine]) -> None:
    count, names = 0, ("log_probs", "entropy", "sum_pi_squared")
    for rows, limits in cases():
        for engine in engines:
            engine.micro_batch = engine.infer_micro_batch = MicroBatchConfig(**limits, share_prefixes=engine.share_prefixes)
        assert distance(engines, rows) < TOLERANCE
        alone, shared = (engine.infer(rows, outputs=names) for engine in engines)
        for name in names:
            torch.testing.assert_close(shared[name], alone[name], rtol=TOLERANCE, atol=TOLERANCE)
        count += 1
    assert count > 0.9 * CASES


def test_each_distinct_token_is_computed_once(engines: list[FSDPEngine]) -> None:
    """Without limits of a pass; counted by what goes through the model's embedding."""
    engine, seen = engines[1], []
    engine.micro_batch = MicroBatchConfig(share_prefixes=True)
    hook = engine.model.get_input_embeddings().register_forward_hook(lambda _, given, __: seen.append(given[0].numel()))
    for rows, _ in cases():
        seen.clear()
        _, sums = gradient(engine, rows)
        texts = {
            tuple(ids[mask][: end + 1].tolist())
            for ids, mask in zip(rows["input_ids"], needed(rows), strict=True)
            for end in range(int(mask.sum()))
        }
        assert sum(seen) == sums["prefix_computed"] == sums["prefix_distinct"] == len(texts)
        assert sums["prefix_rows"] == int(needed(rows).sum()) >= len(texts)
    hook.remove()


def needed(rows: Rows) -> Tensor:
    """Returns the tokens before each row's last target, counted slowly."""
    mask, prompt = rows["attention_mask"].bool().clone(), rows["input_ids"].shape[1] - rows["response_mask"].shape[1]
    for row, targets in enumerate(rows["response_mask"]):
        places = targets.nonzero().flatten()
        mask[row, prompt + int(places[-1]) if len(places) else 0 :] = False
    return mask


def _all_before(chains: Any, shared: Any, device: torch.device) -> Any:
    """A plan in which every token sees all tokens before it in the pass: branches see their siblings."""
    return plan_prefix_attention([torch.arange(sum(map(len, chains)) - sum(shared))], [0], device)


def test_control_a_branch_that_sees_its_sibling(engines: list[FSDPEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in engines:
        engine.micro_batch = MicroBatchConfig(share_prefixes=engine.share_prefixes)
    monkeypatch.setattr(prefixes, "plan_prefix_attention", _all_before)
    found = [distance(engines, rows) for rows, _ in cases()]
    assert sum(value > 100 * TOLERANCE for value in found) > 0.9 * len(found)


def test_a_window_counts_the_places_of_a_row(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    path = save_model(tmp_path / "model", vocab_size=VOCAB, max_position_embeddings=128, **window)
    limits = (MicroBatchConfig(), MicroBatchConfig(share_prefixes=True))
    pair = [make_engine(str(path), fsdp={"model_dtype": "fp32"}, micro_batch=limit) for limit in limits]
    assert "sliding_attention" in pair[0].model.config.layer_types
    for number, (rows, _) in enumerate(cases()):
        if number % 10 == 0:
            assert distance(pair, rows) < TOLERANCE


def test_gradient_checkpointing_and_adapters(folder: Path) -> None:
    model = {"enable_gradient_checkpointing": True, "lora_rank": 4}
    limits = (MicroBatchConfig(), MicroBatchConfig(share_prefixes=True))
    pair = [make_engine(str(folder), fsdp={"model_dtype": "fp32"}, model=model, micro_batch=limit) for limit in limits]
    rows, _ = next(cases())
    assert distance(pair, rows) < TOLERANCE


def test_refusals(folder: Path) -> None:
    shared = MicroBatchConfig(share_prefixes=True)
    with pytest.raises(EngineError, match="without packing"):
        make_engine(str(folder), model={"use_remove_padding": False}, micro_batch=shared)
    with pytest.raises(EngineError, match="value engine"):
        make_engine(str(folder), "value", micro_batch=shared)


@pytest.mark.parametrize("world", [2])
def test_on_several_ranks(folder: Path, world: int) -> None:
    ranks = Ranks(world)
    try:
        for found, ratio in ranks.call(compare_on_ranks, str(folder), 10):
            assert found < TOLERANCE and ratio > 1.2  # rows are dealt one by one here, not by what they share
    finally:
        ranks.close()
