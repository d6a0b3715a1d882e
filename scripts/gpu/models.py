"""Models with random weights in the shapes of public ones, and the rows of tokens that they are trained on.

No download: a model is a folder with a config.json of published sizes, random weights and a tokenizer of numbered words.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from scripts.gpu.measure import Context, release
from tests.support.model_shapes import SHAPES

LOGIT_STD = 3.0
"""The spread of the random models' logits, in nats: about that of a trained model, where a plain initialisation gives nearly
uniform probabilities."""
SMALL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True, "initializer_range": 0.1,
}  # fmt: skip
"""Heads are 32 wide, the smallest that vLLM's CPU attention has.  Two layers need larger weights than Qwen2's own initialisation
gives: a residual stream of mostly the embedding would repeat the last token for ever."""
FULL = {
    "0.5B": SHAPES["Qwen2.5-0.5B"],
    "1.5B": SHAPES["Qwen2.5-1.5B"],
    "7B, 8 layers": SHAPES["Qwen2.5-7B"] | {"num_hidden_layers": 8, "tie_word_embeddings": False},
}
"""The third has the matrices of a 7B model, and fits on one GPU with its optimizer."""


def shape(name: str, *, small: bool) -> dict[str, object]:
    """Returns the sizes of a model of FULL, or tiny ones in its place."""
    if not small:
        return FULL[name]
    return SMALL | {"tie_word_embeddings": FULL[name].get("tie_word_embeddings", False)}


def model_folder(context: Context, name: str) -> Path:
    """Returns the folder of a model, which the first section that asks for it writes: bfloat16 weights and a tokenizer."""
    folder = context.work / f"model-{name.replace(', ', '-').replace(' ', '-')}{'-small' * context.small}"
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    sizes = {key: value for key, value in shape(name, small=context.small).items() if key != "model_type"}
    _write_model(Qwen2Config(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=None), unfinished, context.device)
    release(context.device)  # the section's parts are processes of their own
    unfinished.rename(folder)
    return folder


@torch.no_grad()
def _write_model(config: Qwen2Config, folder: Path, device: torch.device) -> None:
    """Writes a model whose weights are drawn on the device, which takes seconds where a CPU takes minutes."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    head = model.get_output_embeddings().weight
    head.normal_(std=LOGIT_STD / config.hidden_size**0.5)
    model.save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, config.vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def full_rows(num_rows: int, row_tokens: int, vocabulary: int) -> dict[str, Tensor]:
    """Returns rows without padding, half prompt and half response, as PolicyUpdater reads them."""
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.randint(2, vocabulary, (num_rows, row_tokens), generator=generator)
    width = row_tokens // 2
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "responses": ids[:, -width:],
        "response_mask": torch.ones(num_rows, width, dtype=torch.int64),
        "advantages": torch.randn(num_rows, 1, generator=generator).expand(num_rows, width).contiguous(),
    }


def uneven_rows(num_rows: int, row_tokens: int, vocabulary: int) -> dict[str, Tensor]:
    """Returns rows of unequal lengths: prompts padded on the left, responses on the right."""
    rows = full_rows(num_rows, row_tokens, vocabulary)
    width = row_tokens // 2
    prompts = torch.linspace(width // 4, width, num_rows).long()
    responses = torch.linspace(width, width // 4, num_rows).long()
    columns = torch.arange(row_tokens)
    mask = (columns >= (width - prompts)[:, None]) & (columns < (width + responses)[:, None])
    return rows | {
        "input_ids": rows["input_ids"] * mask,
        "attention_mask": mask.long(),
        "responses": rows["responses"] * mask[:, width:],
        "response_mask": mask[:, width:].long(),
    }


def prompt_ids(num_prompts: int, num_tokens: int, vocabulary: int) -> list[list[int]]:
    """Returns random prompts of one length."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, vocabulary, (num_prompts, num_tokens), generator=generator).tolist()
