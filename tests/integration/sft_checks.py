"""What the ranks of test_sft_packing.py run: steps of supervised fine-tuning as the worker takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhub.config.sections.sft import SFTConfig, SFTDataConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig, OptimConfig
from rlhub.data.supervised import SFTDataset
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.registry import build_sft_engine
from rlhub.engines.training.updates import sft_loss, take_steps
from rlhub.models.tokenizer import load_tokenizer

CPU = torch.device("cpu")
LR = 1e-3
DECAY = 0.1


def dataset(path: str, file: str) -> SFTDataset:
    return SFTDataset(SFTDataConfig(max_length=512), file, load_tokenizer(path))


def config_of(path: str, data: dict[str, Any], model: dict[str, Any]) -> SFTConfig:
    return SFTConfig(
        data=SFTDataConfig(max_length=512, **data),
        model=ModelConfig(path=path, enable_gradient_checkpointing=False, **model),
        optim=OptimConfig(lr=LR, weight_decay=DECAY),
        fsdp_config=FSDPConfig(model_dtype="fp64"),
    )


def train(path: str, file: str, steps: list[list[int]], data: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """One optimizer step for each list of rows: losses, gradient norms and the weights at the end."""
    ensure_process_group(CPU, timeout_s=120)
    engine = build_sft_engine(config_of(path, data, model), device=CPU, seed=0)
    engine.initialize()
    demonstrations = dataset(path, file)
    losses, norms = [], []
    for rows in steps:
        batch = demonstrations.batch(np.array(rows)).chunk(dist.get_world_size())[dist.get_rank()]
        (step,) = take_steps(
            engine, dict(batch.batch.items()), sft_loss, num_mini_batches=1, epochs=1, scale=1.0, outputs=("log_probs",)
        )
        losses.append(step.sums["loss"])
        norms.append(step.report.grad_norm)
    weights = {name: tensor.clone().numpy() for bucket in engine.named_weights() for name, tensor in bucket}
    return {"losses": losses, "norms": norms, "weights": weights}


def row_by_row(path: str, file: str, steps: list[list[int]], learn_all: bool = False) -> dict[str, Any]:
    """The same in plain PyTorch: every row alone, without padding.  learn_all: also the tokens that others wrote."""
    from transformers import AutoModelForCausalLM

    demonstrations = dataset(path, file).demonstrations
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    decayed = [param for param in model.parameters() if param.dim() >= 2]
    rest = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), foreach=False, fused=False)
    losses, norms = [], []
    for rows in steps:
        items = [demonstrations[row] for row in rows]
        masks = [[1] * len(item.tokens) if learn_all else item.learned for item in items]
        count = sum(sum(mask[1:]) for mask in masks)
        total = 0.0
        for item, mask in zip(items, masks, strict=True):
            ids = torch.tensor(item.tokens)
            log_p = model(ids[None]).logits[0, :-1].log_softmax(-1)
            loss: Tensor = -(log_p.gather(1, ids[1:, None])[:, 0] * torch.tensor(mask[1:])).sum() / count
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        adamw.step()
        adamw.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {name: p.detach().numpy() for name, p in model.named_parameters()}}
