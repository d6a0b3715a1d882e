"""Pictures in the prompts of a language model: from the bytes of image files to the embeddings at a prompt's image tokens.

Only the files travel with a row.  Training and generation prepare them by the model's own image processor and fill them in with
the same code here, so both compute the same log-probs.  No processor of videos is built, so torchvision is not needed:
transformers takes its image processors for PIL without it.

The image tokens of a row are the first ones in it, as many as its pictures have; a policy may write the same token later on,
where it is a token like any other.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, PreTrainedConfig, PreTrainedModel

from rlhub.config.sections.training import ModelConfig
from rlhub.errors import ConfigError, EngineError
from rlhub.models.device_copies import to_device
from rlhub.models.tokenizer import load_tokenizer
from rlhub.protocol.sequences import unpack_files

GRIDS = ("qwen2_vl", "qwen2_5_vl")
"""The model types that cut a picture into patches of one sequence and give tokens places in three axes (arXiv 2409.12191)."""
TILES = ("smolvlm", "idefics3")
"""The model types that cut a picture into tiles of one size (arXiv 2504.05299)."""
GRID = "image_grid_thw"
BLANK = 32
"""Width and height of the picture that the vision part reads where a pass has none."""


def reads_images(config: PreTrainedConfig) -> bool:
    """Returns whether this is the configuration of a model with a vision part."""
    return "vision_config" in config.sub_configs


def image_reader(model: ModelConfig) -> ImageReader | None:
    """Returns the reader of the pictures in prompts for this section's model; None for a language model, and for a policy of
    actions, which reads plain pixels."""
    if model.vla or model.path is None:
        return None
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    return ImageReader(config, model) if reads_images(config) else None


@dataclass(slots=True, kw_only=True)
class ImageInputs:
    """The pictures of a pass.

    arguments: of the model's get_image_features, for the distinct pictures of the pass.
    order: (image tokens,) the feature at each image token of the pass, row by row.
    is_image: (rows, tokens) bool, the image tokens.
    position_ids: (rows, tokens), or (3, rows, tokens) where places have three axes.
    """

    arguments: dict[str, Tensor]
    order: Tensor
    is_image: Tensor
    position_ids: Tensor

    def to(self, device: torch.device) -> ImageInputs:
        """Returns the same on the device, without waiting for the copies."""
        moved = {name: to_device(getattr(self, name), device) for name in ("order", "is_image", "position_ids")}
        return ImageInputs(arguments={name: to_device(value, device) for name, value in self.arguments.items()}, **moved)


@dataclass(slots=True, kw_only=True, frozen=True)
class RowImages:
    """One row's pictures.  arguments: of the model's get_image_features; {} without pictures.  count: of their features."""

    arguments: dict[str, Tensor]
    count: int


class ImageReader:
    """Writes the image tokens of prompts and prepares pictures, as the model's own image processor does."""

    def __init__(self, config: PreTrainedConfig, model: ModelConfig) -> None:
        if config.model_type not in GRIDS + TILES:
            raise ConfigError(
                f"{model.path!r} is a {config.model_type}, of which rlhub does not know how pictures enter the prompt; it knows "
                f"{', '.join(GRIDS + TILES)}"
            )
        try:
            self.processor: Any = AutoImageProcessor.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"no image processor could be loaded from {model.path!r}: {error}") from error
        tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self.config, self.image_token_id = config, int(config.image_token_id)
        self.image_token = str(tokenizer.convert_ids_to_tokens(self.image_token_id))
        self.by_grids = config.model_type in GRIDS

    def expand(self, text: str, files: Sequence[bytes]) -> str:
        """Returns a prompt's text with as many image tokens for each picture as it has features.

        text: with one image token for each of the `files`, in order.  Raises ValueError for another number of them, and for a
        file that is no picture.
        """
        first, *others = text.split(self.image_token)
        if len(others) != len(files):
            raise ValueError(
                f"the chat template wrote {len(others)} image tokens ({self.image_token}) for {len(files)} pictures; each needs "
                'a part {"type": "image"} in the messages, and a chat template that writes it'
            )
        return first + "".join(self._tokens(file) + rest for file, rest in zip(files, others, strict=True))

    def _tokens(self, file: bytes) -> str:
        """Returns the text of the tokens that stand for one picture."""
        width, height = open_image(file).size
        if self.by_grids:
            return self.image_token * int(
                self.processor.get_number_of_image_patches(height, width) // self.processor.merge_size**2
            )
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string  # only for these models

        _, rows, cols = self.processor.get_number_of_image_patches(height, width)
        rows, cols = (rows, cols) if self.processor.do_image_splitting else (0, 0)
        marks = "<fake_token_around_image>", self.image_token, "<global-img>"
        return str(get_image_prompt_string(rows, cols, self._tile_tokens, *marks))

    @property
    def _tile_tokens(self) -> int:
        vision = self.config.vision_config
        return int((vision.image_size // vision.patch_size) ** 2 // self.config.scale_factor**2)

    def prepared(self, row: bytes) -> RowImages:
        """Returns one row's pictures as the model reads them.  row: see `pack_files`; empty for none."""
        images = [open_image(file).convert("RGB") for file in unpack_files(row)]
        return self._prepared(images) if images else RowImages(arguments={}, count=0)

    def _prepared(self, images: list[Any]) -> RowImages:
        found = self.processor(images=images if self.by_grids else [images], return_tensors="pt")
        pixels = found["pixel_values"]
        if self.by_grids:
            grids = found["image_grid_thw"]
            count = int((grids.prod(1) // self.processor.merge_size**2).sum())
            return RowImages(arguments={"pixel_values": pixels, GRID: grids}, count=count)
        inside = found.get("pixel_attention_mask", torch.ones_like(pixels[:, :, 0]))
        arguments = {"pixel_values": pixels, "pixel_attention_mask": inside.long()}  # (1, tiles, ...)
        return RowImages(arguments=arguments, count=pixels.shape[1] * self._tile_tokens)

    def plan(self, model: PreTrainedModel, ids: Tensor, attended: Tensor, rows: Sequence[bytes]) -> ImageInputs:
        """Plans the pictures of a pass.

        ids, attended: (rows, tokens), on the CPU.  rows: the pictures of each row; equal ones are read once.  Raises
        EngineError for a row with fewer image tokens than its pictures have features.
        """
        found = {row: self.prepared(row) for row in dict.fromkeys(rows)}
        read = [one for one in found.values() if one.count] or [self._prepared([np.zeros((BLANK, BLANK, 3), np.uint8)])]
        starts, start = {}, 0
        for row, one in found.items():
            starts[row], start = start, start + one.count
        counts = torch.tensor([found[row].count for row in rows])
        is_image = (ids == self.image_token_id) & attended.bool()
        is_image &= is_image.cumsum(1) <= counts[:, None]
        if not torch.equal(is_image.sum(1), counts):
            raise EngineError(
                f"rows have {is_image.sum(1).tolist()} image tokens for pictures with {counts.tolist()} features: a prompt with "
                "pictures must not be cut, and must be made by the image processor of the same model"
            )
        grids = [found[row].arguments[GRID] for row in rows if self.by_grids and found[row].count]
        return ImageInputs(
            arguments={
                name: torch.cat([one.arguments[name] for one in read], 0 if self.by_grids else 1) for name in read[0].arguments
            },
            order=torch.cat([torch.arange(starts[row], starts[row] + found[row].count) for row in rows]),
            is_image=is_image,
            position_ids=_positions(model, ids, attended, is_image, grids),
        )


def _positions(model: Any, ids: Tensor, attended: Tensor, is_image: Tensor, grids: Sequence[Tensor]) -> Tensor:
    """Returns (rows, tokens), or (3, rows, tokens) where pictures have places in three axes; 0 for padding."""
    if grids:
        found, _ = model.base_model.get_rope_index(
            ids, mm_token_type_ids=is_image.long(), image_grid_thw=torch.cat(list(grids)), attention_mask=attended
        )
        return torch.as_tensor(found)
    return (attended.long().cumsum(1) - 1).clamp(min=0)


def input_embeddings(model: PreTrainedModel, ids: Tensor, images: ImageInputs) -> Tensor:
    """Returns the embeddings (rows, tokens, hidden) of a pass, its pictures' features at their image tokens.

    The vision part runs in every pass, because ranks that share its weights must all use them.
    """
    embedded: Tensor = model.get_input_embeddings()(ids)
    found = model.get_image_features(**(images.arguments | {"pixel_values": images.arguments["pixel_values"].to(embedded.dtype)}))
    parts = found.pooler_output
    features = torch.cat([part.reshape(-1, embedded.shape[-1]) for part in ([parts] if isinstance(parts, Tensor) else parts)])
    chosen = features.index_select(0, images.order)
    if not len(chosen):
        return embedded + 0.0 * features.sum()
    return embedded.masked_scatter(images.is_image[..., None], chosen.to(embedded.dtype))


def open_image(file: bytes) -> Any:
    """Returns the PIL picture of an image file.  Raises ValueError for bytes that are none."""
    from PIL import Image  # only jobs with pictures need it

    try:
        return Image.open(io.BytesIO(file))
    except (OSError, ValueError) as error:
        raise ValueError(f"{len(file)} bytes are no image file: {error}") from error
