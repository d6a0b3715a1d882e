"""A vision-language model as a policy over action tokens; training and generation share every line of its forward pass.

A call reads a prompt with image tokens, and writes chunk x action_dim action tokens.  Decoded in one pass (OpenVLA-OFT, Kim et
al. 2025, arXiv 2502.19645), the model reads a place token where each action token will stand, and the distribution of the action
token is read at that place itself.  Decoded one after the other (OpenVLA, Kim et al. 2024, arXiv 2406.09246), it is read at the
token before, as in a language model.  In both cases only the bins are in the distribution.

Pixels are bytes until the forward pass, which normalises them on the device; no image processor runs.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlhub.config.sections.vla import VLAConfig
from rlhub.errors import ConfigError, EngineError
from rlhub.models.device_copies import to_device
from rlhub.models.weight_files import stored_tensors

PIXEL_VALUES = "pixel_values"
"""The column of images, (rows, images, colours, height, width) uint8."""
VALUE_HEAD = "v_head"
"""The linear head of a policy that predicts values; transformers' own loaders pass over it."""
AXIS_OF_IMAGES = ("smolvlm", "idefics2", "idefics3")
"""The model types that take pixels as (rows, images, ...); the others take (rows x images, ...)."""
OTHER_PIXELS = ("image_grid_thw", "image_sizes")
"""Arguments of models that cut images into patches themselves, or into tiles by their size."""


def check_vla(config: PreTrainedConfig, vla: VLAConfig) -> None:
    """Raises ConfigError naming each setting that does not fit the model's vocabulary or images."""
    vocabulary, image = int(config.get_text_config().vocab_size), getattr(config, "image_token_id", None)
    places, last_bin = vla.place_ids, vla.first_bin_id + vla.bins - 1
    problems = []
    foreign = [token for token in (*places, last_bin) if not 0 <= token < vocabulary]
    if foreign:
        problems.append(
            f"model.vla: token ids {foreign} of place_ids and of the last bin (first_bin_id + bins - 1) are outside the "
            f"vocabulary of {config.model_type}, 0 to {vocabulary - 1}"
        )
    if image is not None and image != vla.image_token_id:
        problems.append(f"model.vla.image_token_id={vla.image_token_id}, but the image token of {config.model_type} is {image}")
    if image is not None and (image in places or vla.first_bin_id <= image <= last_bin):
        problems.append(f"token {image} stands for a part of an image, so it can be neither a bin nor a place of model.vla")
    if problems:
        raise ConfigError(problems)


def complete(model: PreTrainedModel, vla: VLAConfig, path: str | None) -> None:
    """Makes a loaded vision-language model a policy of actions, in place: adds its value head, if it has one.

    path: the model's folder; a value head in its files is loaded, and a new one is zero.  None leaves it zero.
    Raises ConfigError for a model that does not read plain pixels.
    """
    check_vla(model.config, vla)
    read = inspect.signature(type(model.base_model).forward).parameters
    if PIXEL_VALUES not in read or any(name in read for name in OTHER_PIXELS):
        raise ConfigError(
            f"{model.config.model_type} does not take images as plain pixels of one size, which model.vla needs; use a model "
            "like SmolVLM, Idefics 3 or LLaVA"
        )
    if not vla.value_head:
        return
    embedding = model.get_input_embeddings().weight
    head = nn.Linear(embedding.shape[1], 1, dtype=embedding.dtype, device=embedding.device)
    model.add_module(VALUE_HEAD, head)
    if embedding.is_meta:
        return
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    folder = Path(path).expanduser() if path else None
    for name, stored in stored_tensors(folder).items() if folder and folder.is_dir() else ():
        if name.startswith(f"{VALUE_HEAD}."):
            handle: Any = safe_open(str(folder / stored.file), framework="pt")  # type: ignore[operator]  # folder is set here
            with torch.no_grad():
                model.get_parameter(name).copy_(handle.get_tensor(name))


@dataclass(slots=True, kw_only=True)
class PlacedTokens:
    """The text side of a forward pass, without padding on the left.

    input_ids, position_ids: (rows, longest), padded on the right.
    attention_mask: (rows, longest), or (rows, 1, longest, longest) bool where places see each other.
    sources: (rows, response) indices into the flattened tokens, where the distribution of each action token is read.
    is_filler: the pass has no row; its one token reads no image, but the vision part runs.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    sources: Tensor
    is_filler: bool = False

    def to(self, device: torch.device) -> PlacedTokens:
        """Returns the same on the device, without waiting for the copies."""
        names = ("input_ids", "position_ids", "attention_mask", "sources")
        moved = {name: to_device(getattr(self, name), device) for name in names}
        return PlacedTokens(**moved, is_filler=self.is_filler)


def place_tokens(input_ids: Tensor, attention_mask: Tensor, width: int, vla: VLAConfig) -> PlacedTokens:
    """Returns the tokens of a pass over rows with `width` action tokens each.

    input_ids, attention_mask: (rows, prompt + width), prompts padded on the left.  Action tokens that were not executed were
    sampled too, so all `width` are read, whatever the mask says.  Raises EngineError for a row without a prompt.
    """
    attended = attention_mask.bool()
    prompt, rows = input_ids.shape[1] - width, len(input_ids)
    parallel = vla.decoding != "sequential"
    if not attended.any():
        one = input_ids.new_full((1, 1), vla.first_bin_id)
        sources = input_ids.new_zeros(rows, width)
        return PlacedTokens(input_ids=one, position_ids=one * 0, attention_mask=one * 0 + 1, sources=sources, is_filler=True)
    starts = attended[:, :prompt].sum(1)
    if bool((starts == 0).any()):
        raise EngineError("a row has no prompt: a vision-language-action policy reads at least its image tokens")
    ids = input_ids.clone()
    if parallel:
        places = vla.place_ids if len(vla.place_ids) > 1 else vla.place_ids * width
        ids[:, prompt:] = torch.tensor(places[:width], dtype=ids.dtype, device=ids.device)
    attended = torch.cat([attended[:, :prompt], attended.new_ones(rows, width)], 1)
    longest = int(starts.max()) + width
    columns = torch.arange(longest, device=ids.device)
    inside = columns < (starts + width)[:, None]
    tokens = torch.full_like(inside, vla.first_bin_id, dtype=ids.dtype)  # any token but that of images
    tokens[inside] = ids[attended]
    first = torch.arange(rows, device=ids.device) * longest + starts - (0 if parallel else 1)
    return PlacedTokens(
        input_ids=tokens,
        position_ids=columns.expand(rows, -1),
        attention_mask=_visible(inside, starts) if vla.decoding == "bidirectional" else inside.long(),
        sources=first[:, None] + torch.arange(width, device=ids.device),
    )


def _visible(inside: Tensor, starts: Tensor) -> Tensor:
    """Returns (rows, 1, queries, keys) bool: each token sees those before it, and a place sees all places.

    inside: (rows, tokens), where a row has a token.  starts: (rows,) the column of the first place.
    """
    columns = torch.arange(inside.shape[1], device=inside.device)
    is_place = columns >= starts[:, None]
    causal = columns[None, :] <= columns[:, None]
    return ((causal | (is_place[:, :, None] & is_place[:, None, :])) & inside[:, None, :])[:, None]


def hidden_states(model: PreTrainedModel, vla: VLAConfig, tokens: PlacedTokens, images: Tensor, **cache: Any) -> Tensor:
    """Returns the last hidden states (rows x tokens, hidden).

    images: (rows, images, colours, height, width) uint8, as many for each row as its prompt has image tokens for.
    cache: arguments of transformers' key-value cache, if the pass fills one.
    """
    pixels = normalised(images, vla, model.get_input_embeddings().weight.dtype)
    if model.config.model_type not in AXIS_OF_IMAGES:
        pixels = pixels.flatten(0, 1)
    read = {} if tokens.is_filler else {PIXEL_VALUES: pixels}
    outputs = model.base_model(
        input_ids=tokens.input_ids,
        attention_mask=tokens.attention_mask,
        position_ids=tokens.position_ids,
        **read,
        **({"use_cache": False} | cache),
    )
    hidden: Tensor = outputs.last_hidden_state.flatten(0, 1)
    return hidden + 0.0 * _features(model, pixels) if tokens.is_filler else hidden


def _features(model: PreTrainedModel, pixels: Tensor) -> Tensor:
    """Returns the sum of what the vision part makes of the images; ranks that share weights must all use them."""
    found = model.get_image_features(pixel_values=pixels).pooler_output
    return torch.stack([part.sum() for part in ([found] if isinstance(found, Tensor) else found)]).sum()


def normalised(images: Tensor, vla: VLAConfig, dtype: torch.dtype) -> Tensor:
    """Returns (x / 255 - mean) / std.  images: (rows, images, colours, height, width) uint8."""
    if images.dtype != torch.uint8 or images.dim() != 5:
        raise EngineError(
            f"pixel_values are {images.dtype} of shape {tuple(images.shape)}; a policy reads uint8 of shape (rows, images, "
            "colours, height, width) and normalises it itself"
        )
    mean, std = (torch.tensor(x, device=images.device)[:, None, None] for x in (vla.pixel_mean, vla.pixel_std))
    return ((images.float() / 255 - mean) / std).to(dtype)


def bin_head(model: PreTrainedModel, vla: VLAConfig) -> tuple[Tensor, Tensor | None]:
    """Returns weight (bins, hidden) and bias (bins,) of the language-model head's rows of the action tokens."""
    head = model.get_output_embeddings()
    bins = slice(vla.first_bin_id, vla.first_bin_id + vla.bins)
    return head.weight[bins], None if head.bias is None else head.bias[bins]


def values_of(model: PreTrainedModel, vla: VLAConfig, hidden: Tensor) -> Tensor:
    """Returns the predicted returns (S,) at hidden states (S, hidden).  Raises EngineError without a value head."""
    if not vla.value_head:
        raise EngineError("this policy predicts no values; set model.vla.value_head=True, or train a critic")
    head = model.get_submodule(VALUE_HEAD)
    numbers: Tensor = head(hidden).squeeze(-1) * vla.value_scale
    return numbers if numbers.dtype == torch.float64 else numbers.float()
