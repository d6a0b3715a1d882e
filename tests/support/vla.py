"""A tiny vision-language-action policy on disk, its settings, and calls of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.tiny_smolvlm import IMAGE_SIZE, TOKENS_PER_IMAGE, write_model
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig, OptimConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest
from rlhub.engines.rollout.hf.engine import HFEngine
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig

CPU = torch.device("cpu")
CHUNK, ACTION_DIM, BINS = 2, 2, 5
TOKENS = CHUNK * ACTION_DIM
WORDS = ("reach", "red", "blue")
IMAGE, FIRST_WORD = 3, 4
FIRST_PLACE = FIRST_WORD + len(WORDS)
FIRST_BIN = FIRST_PLACE + TOKENS
DECODINGS = ("causal", "bidirectional", "sequential")


def write_policy(folder: Path, seed: int = 1) -> Path:
    write_model(folder, seed, WORDS, num_places=TOKENS, num_bins=BINS)
    return folder


def write_video_model(folder: Path) -> Path:
    """A tiny V-JEPA 2 of random weights."""
    from transformers import VJEPA2Config, VJEPA2Model

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "mlp_ratio": 2.0}
    predictor = {"pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1, "pred_mlp_ratio": 2.0}
    model = VJEPA2Model(VJEPA2Config(patch_size=8, crop_size=16, frames_per_clip=4, num_pooler_layers=1, **sizes, **predictor))
    model.save_pretrained(folder)
    return folder


def settings(decoding: str = "causal", **changes: Any) -> dict[str, Any]:
    """The content of model.vla."""
    places = list(range(FIRST_PLACE, FIRST_PLACE + TOKENS))
    sizes = {"chunk": CHUNK, "action_dim": ACTION_DIM, "bins": BINS, "first_bin_id": FIRST_BIN, "place_ids": places}
    sizes |= {"image_token_id": IMAGE, "tokens_per_image": TOKENS_PER_IMAGE}
    return {**sizes, "decoding": decoding, "value_head": True, **changes}


def model_config(folder: Path, decoding: str = "causal", **changes: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), vla=settings(decoding, **changes), enable_gradient_checkpointing=False)


def rollout_engine(model: ModelConfig, *, load: bool = True) -> HFEngine:
    engine = HFEngine(
        RolloutSetup(
            config=RolloutConfig(name="hf"),
            model=model,
            device=CPU,
            seed=1,
            max_prompt_length=16,
            max_response_length=TOKENS,
            load_checkpoint=load,
        )
    )
    engine.initialize()
    return engine


def train_engine(model: ModelConfig, *, rows: int | None = None, dtype: Any = "fp32", train: bool = True) -> FSDPEngine:
    optim = OptimConfig(lr=1e-3) if train else None
    cut = MicroBatchConfig(rows=rows)
    engine = FSDPEngine(model, FSDPConfig(model_dtype=dtype), optim, kind="vla", device=CPU, micro_batch=cut, grad_clip=1e9)
    engine.initialize()
    return engine


def requests(count: int, *, num_images: int = 1, seed: int = 0) -> list[GenerationRequest]:
    """Prompts of different lengths with random pictures."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_images, 3, IMAGE_SIZE, IMAGE_SIZE)
    return [
        GenerationRequest(
            prompt_ids=[FIRST_WORD, FIRST_WORD + 1 + i % 2][i % 3 == 2 :] + [IMAGE] * TOKENS_PER_IMAGE * num_images,
            seed=i,
            images=torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        )
        for i in range(count)
    ]


def training_rows(asked: list[GenerationRequest], answers: list[Completion]) -> dict[str, Tensor]:
    """The columns that training reads; every third call ended after its first action."""
    width = max(len(request.prompt_ids) for request in asked)
    pads = [width - len(request.prompt_ids) for request in asked]
    ids = [[0] * pad + list(r.prompt_ids) + answer.token_ids for pad, r, answer in zip(pads, asked, answers, strict=True)]
    mask = torch.ones(len(asked), TOKENS, dtype=torch.int64)
    mask[::3, ACTION_DIM:] = 0
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor([[0] * pad + [1] * (width - pad + TOKENS) for pad in pads]),
        "response_mask": mask,
        "pixel_values": torch.stack([image for request in asked if (image := request.images) is not None]),
    }
