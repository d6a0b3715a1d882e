"""What the ranks of test_preference.py run: pairs through an engine, compared with plain transformers on single rows."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhub.config.sections.preference import DPOLossConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig, OptimConfig
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.engines.training.updates import (
    PAIR,
    DPOLoss,
    PairLoss,
    RewardLoss,
    count_pairs,
    evaluate_pairs,
    interleave,
    sequence_log_probs,
)
from tests.integration.fsdp_checks import CPU, full, relative_error, thresholds

BETA, SMOOTHING = 0.3, 0.1


def make_pairs(vocab: int = 67) -> dict[str, Tensor]:
    """7 pairs of unequal lengths: columns (pairs, 2, ...), a margin (pairs,)."""
    generator = torch.Generator().manual_seed(3)
    prompt, response = 5, 6
    prompts = torch.tensor([5, 1, 3, 2, 5, 4, 1])[:, None].expand(-1, 2)
    answers = torch.tensor([[6, 1], [3, 4], [1, 6], [2, 2], [5, 1], [1, 1], [6, 5]])
    columns = torch.arange(prompt + response)
    mask = (columns >= prompt - prompts[..., None]) & (columns < prompt + answers[..., None])
    ids = torch.randint(3, vocab, mask.shape, generator=generator)
    ids[:, 1, :prompt] = ids[:, 0, :prompt]
    return {
        "input_ids": torch.where(mask, ids, 0),
        "attention_mask": mask.long(),
        "response_mask": mask[..., prompt:].long(),
        "margin": torch.rand(7, generator=generator, dtype=torch.float64),
    }


def my_rows(pairs: Rows, uneven: bool) -> dict[str, Tensor]:
    """This rank's rows; `uneven`: the last rank of several has none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if uneven and world > 1:
        own = slice(0, 0) if rank == world - 1 else slice(rank, None, world - 1)
    else:
        own = slice(rank, None, world)
    return interleave({name: column[own] for name, column in pairs.items()})


def make_engine(path: str, kind: str, case: dict[str, Any]) -> FSDPEngine:
    ensure_process_group(CPU, timeout_s=120)
    engine = FSDPEngine(
        ModelConfig(path=path, **{"enable_gradient_checkpointing": False, **case.get("model", {})}),
        FSDPConfig(model_dtype="fp64"),
        OptimConfig(lr=1e-2),
        kind=kind,  # type: ignore[arg-type]
        device=CPU,
        micro_batch=MicroBatchConfig(**case.get("micro", {})),
    )
    engine.initialize()
    return engine


def plain_model(path: str, kind: str) -> Any:
    if kind == "policy":
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    return AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64, num_labels=1, pad_token_id=0)


def log_prob_of(model: Any, ids: Tensor, length: int) -> Tensor:
    """log pi of a row's last `length` tokens, without padding."""
    log_p = model(ids[None]).logits[0].log_softmax(-1)
    return sum((log_p[place - 1, ids[place]] for place in range(len(ids) - length, len(ids))), torch.zeros((), dtype=log_p.dtype))


def direct_loss(model: Any, reference: Any, pairs: Rows, kind: str) -> Tensor:
    """The mean over pairs of DPO's equation 7 with label smoothing, or of Bradley-Terry with margins, one row at a time."""
    total, count = torch.zeros((), dtype=torch.float64), len(pairs["margin"])
    for index in range(count):
        ids = [pairs["input_ids"][index, side][pairs["attention_mask"][index, side].bool()] for side in range(2)]
        lengths = pairs["response_mask"][index].sum(-1).tolist()
        if kind == "policy":
            ratios = []
            for row, length in zip(ids, lengths, strict=True):
                with torch.no_grad():
                    base = log_prob_of(reference, row, length)
                ratios.append(log_prob_of(model, row, length) - base)
            logit = BETA * (ratios[0] - ratios[1])
            total = total + (1 - SMOOTHING) * (1 + (-logit).exp()).log() + SMOOTHING * (1 + logit.exp()).log()
        else:
            won, lost = (model(row[None]).logits[0, 0] for row in ids)
            total = total + (1 + (lost + pairs["margin"][index] - won).exp()).log()
    return total / count


def reference_log_probs(path: str, rows: dict[str, Tensor], case: dict[str, Any]) -> dict[str, Tensor]:
    """As a worker makes them: a pass of another engine over interleaved rows."""
    engine = make_engine(path, "policy", case)
    log_probs = engine.infer(rows, outputs=("log_probs",))["log_probs"]
    return rows | {"ref_log_prob": sequence_log_probs(log_probs, rows["response_mask"])}


def gradient(path: str, base: str, kind: str, case: dict[str, Any]) -> dict[str, float]:
    """error: relative L2 distance of the gradient from the plain loop's; loss, expected: theirs; evaluated: by a pass without
    gradient.  case: micro, model, uneven, large, damage (of the plain loop), local (divide by this rank's own pairs)."""
    pairs = make_pairs()
    with thresholds(case.get("large", False)):
        engine = make_engine(path, kind, case)
        rows = my_rows(pairs, case.get("uneven", False))
        loss: PairLoss = RewardLoss()
        if kind == "policy":
            rows = reference_log_probs(base, rows, case)
            loss = DPOLoss(DPOLossConfig(beta=BETA, label_smoothing=SMOOTHING))
        evaluated = evaluate_pairs(engine, rows, loss)
        num_pairs = count_pairs(engine, rows)
        if case.get("local"):
            num_pairs = len(rows["input_ids"]) / PAIR * engine.dp_size
        step = partial(_of_step, loss, num_pairs)
        for _ in range(2):  # gradients start from zero each time
            sums = engine.forward_backward(rows, step, outputs=loss.outputs, rows_per_unit=PAIR)
    plain = plain_model(path, kind)
    if kind == "reward":
        head = next(param for param in engine.params if param.name == "score.weight")
        plain.score.weight.data.copy_(full(head.param.detach()))
    if case.get("damage"):
        pairs["input_ids"][0, 1, 5] = 3 + (pairs["input_ids"][0, 1, 5] + 1) % 60
    expected = direct_loss(plain, plain_model(base, kind) if kind == "policy" else None, pairs, kind)
    expected.backward()
    return {
        "error": relative_error(engine, plain),
        "loss": sums["loss"],
        "expected": float(expected),
        "evaluated": evaluated["loss"] / evaluated["count"],
        "count": evaluated["count"],
        "margins": abs(evaluated["rewards/margins"] - sums["rewards/margins"]),
    }


def _of_step(loss: PairLoss, num_pairs: float, outputs: ForwardOutputs, micro: Rows) -> LossOutput:
    assert len(micro["input_ids"]) % PAIR == 0
    return loss(outputs, micro, num_pairs)


def distance_from_log_two(path: str) -> float:
    """DPO's loss where policy and reference are one, minus log 2."""
    engine = make_engine(path, "policy", {})
    rows = reference_log_probs(path, my_rows(make_pairs(), False), {"micro": {"rows": 1}})
    sums = evaluate_pairs(engine, rows, DPOLoss(DPOLossConfig()))
    return sums["loss"] / sums["count"] - math.log(2)
