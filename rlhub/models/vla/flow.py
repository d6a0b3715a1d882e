"""Policies that write actions as numbers by flow matching: PI0 (Black et al. 2024, arXiv 2410.24164), cloned by its flow loss.

The model learns the velocity noise - actions at the point t * noise + (1 - t) * actions.  It gives no probability of an action,
so no policy gradient trains it.  The noise and the time of a row follow from numbers, not from the process: they are the same
on every rank and in every cut of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rlhub.config.sections.vla import VLAConfig
from rlhub.errors import ConfigError, DataError
from rlhub.models.device_copies import to_device
from rlhub.models.vla.policy import PIXEL_VALUES, normalised

FLOW_COLUMNS = ("actions", "noise", "times", "robot_state")
"""The float32 columns of a row beside tokens and pictures: actions (rows, chunk, 1, action_dim) from -1 to 1, noise (rows, chunk,
1, the model's numbers of an action), times (rows,) in (0, 1], robot_state (rows, 1, 1, the model's numbers of a state).  Columns
of two or three axes would be trimmed like tokens."""


@dataclass(slots=True, kw_only=True)
class FlowInputs:
    """The inputs of a pass: tokens (rows, prompt) and their mask, and the columns of FLOW_COLUMNS without the axes of size 1."""

    input_ids: Tensor
    attention_mask: Tensor
    actions: Tensor
    noise: Tensor
    times: Tensor
    robot_state: Tensor

    def to(self, device: torch.device) -> FlowInputs:
        """Returns the same on the device, without waiting for the copies."""
        return FlowInputs(**{name: to_device(getattr(self, name), device) for name in self.__slots__})


def check_flow(config: PreTrainedConfig, vla: VLAConfig) -> None:
    """Raises ConfigError for a model that has no flow, or another chunk or fewer numbers than model.vla says."""
    if config.model_type != "pi0":
        raise ConfigError(f"model.vla.decoding=flow needs a PI0 model, not {config.model_type}; use another decoding")
    image = config.vlm_config.image_token_id
    given, known = (vla.chunk, vla.image_token_id), (config.chunk_size, image)
    if given != known:
        raise ConfigError(f"model.vla: chunk and image_token_id are {given}, but those of the model are {known}")
    if vla.action_dim > config.max_action_dim:
        raise ConfigError(
            f"model.vla.action_dim={vla.action_dim} is more than the model's max_action_dim={config.max_action_dim}"
        )


def flow_columns(
    config: PreTrainedConfig,
    vla: VLAConfig,
    actions: NDArray[np.float32],
    state: NDArray[np.float32] | None,
    seeds: list[list[int]],
) -> dict[str, Tensor]:
    """Returns FLOW_COLUMNS of rows.

    actions: (rows, chunk, action_dim), from model.vla.action_low to action_high.  state: (rows, numbers); None: zeros.
    seeds: of each row's noise and time.  Raises DataError for a state of more numbers than the model has.
    """
    low, high = np.asarray(vla.action_low), np.asarray(vla.action_high)
    rows, size = len(actions), config.max_state_dim
    padded = np.zeros((rows, size))
    if state is not None:
        if state.shape[1] > size:
            raise DataError(f"the recorded state has {state.shape[1]} numbers, and the model's max_state_dim is {size}")
        padded[:, : state.shape[1]] = state
    streams = [np.random.default_rng(seed) for seed in seeds]
    shape = (config.chunk_size, 1, config.max_action_dim)
    times = [stream.beta(config.time_sampling_beta_alpha, config.time_sampling_beta_beta) for stream in streams]
    columns = {
        "actions": ((actions - low) / (high - low) * 2 - 1)[:, :, None],
        "noise": np.stack([stream.standard_normal(shape) for stream in streams]),
        "times": np.asarray(times) * config.time_sampling_scale + config.time_sampling_offset,
        "robot_state": padded[:, None, None],
    }
    return {name: torch.from_numpy(column.astype(np.float32)) for name, column in columns.items()}


def flow_inputs(rows: Mapping[str, Tensor], vla: VLAConfig) -> FlowInputs:
    """Returns what a pass over `rows` reads; a row without tokens, which fills a pass, reads the places of its pictures."""
    width, num_images = rows["response_mask"].shape[1], rows[PIXEL_VALUES].shape[1]
    ids, attended = (rows[name][:, : rows["input_ids"].shape[1] - width] for name in ("input_ids", "attention_mask"))
    if not attended.any():
        ids = ids.new_full((len(ids), vla.tokens_per_image * num_images), vla.image_token_id)
        attended = torch.ones_like(ids)
    columns = {name: rows[name] if rows[name].dim() == 1 else rows[name].squeeze(-2) for name in FLOW_COLUMNS}
    columns["robot_state"] = columns["robot_state"].squeeze(1)
    return FlowInputs(input_ids=ids, attention_mask=attended, **columns)


def flow_errors(model: PreTrainedModel, vla: VLAConfig, inputs: FlowInputs, images: Tensor) -> Tensor:
    """Returns the squared errors of the predicted velocities, (rows, chunk x action_dim).

    images: (rows, images, colours, height, width) uint8.
    """
    dtype = model.get_input_embeddings().weight.dtype
    actions = inputs.noise.new_zeros(inputs.noise.shape)
    actions[..., : vla.action_dim] = inputs.actions
    time, noise = inputs.times[:, None, None], inputs.noise
    predicted = model(
        state=inputs.robot_state.to(dtype),
        noise=(time * noise + (1 - time) * actions).to(dtype),
        timestep=inputs.times,
        input_ids=inputs.input_ids,
        pixel_values=normalised(images, vla, dtype),
        pixel_attention_mask=torch.ones(images.shape[:2], dtype=torch.bool, device=images.device),
        attention_mask=inputs.attention_mask,
    ).logits
    errors: Tensor = (noise - actions - predicted)[..., : vla.action_dim].square()
    return errors.flatten(1)
