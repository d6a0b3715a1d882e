"""One micro-batch without padding: which tokens go through the model, and where its outputs belong.

Only what the loss needs is computed.  Tokens from a row's last target on feed nothing and are left out, so is a row whose
response is masked as a whole; hidden states are read only where the next token is a target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.engines.training.base import Rows
from rlhub.engines.training.fsdp.attention import AttentionPlan, plan_attention
from rlhub.errors import EngineError


@dataclass(slots=True, kw_only=True)
class ModelInputs:
    """What a forward pass takes, for S targets in `shape` = (rows, response).

    input_ids, position_ids: (1, tokens) packed, or (rows, longest) right padded with attention_mask of the same shape.
    sources: (S,) indices into the flattened token axis of the token before each target.
    targets: (S,) token ids.  slots: (S,) indices of the targets into the flattened `shape`.
    plan: how attention finds the rows in a packed batch; None when padded.
    """

    input_ids: Tensor
    position_ids: Tensor
    sources: Tensor
    targets: Tensor
    slots: Tensor
    shape: tuple[int, int]
    attention_mask: Tensor | None
    plan: AttentionPlan | None

    def spread(self, values: Tensor) -> Tensor:
        """(S,) values of the targets -> `shape`, zero elsewhere."""
        rows, width = self.shape
        return values.new_zeros(rows * width).index_put((self.slots,), values).view(rows, width)


def model_inputs(rows: Rows, *, pack: bool, device: torch.device) -> ModelInputs:
    """Plan one micro-batch.  Indices are worked out where the rows lie (the CPU, normally) and then moved to `device`.

    Raises EngineError where response_mask marks a token that attention_mask hides, or the first token of a row.
    """
    input_ids, response_mask = rows["input_ids"], rows["response_mask"].bool()
    real = rows["attention_mask"].bool()
    width = response_mask.shape[1]
    prompt = input_ids.shape[1] - width
    is_target = torch.zeros_like(real)
    is_target[:, prompt:] = response_mask
    order = real.cumsum(1)
    if bool((is_target & (~real | (order < 2))).any()):
        raise EngineError(
            "response_mask marks a token that attention_mask hides or that has no token before it: "
            "every prompt needs at least one token, and response_mask must lie inside attention_mask"
        )
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    last_target = torch.where(is_target, columns, -1).amax(1, keepdim=True)
    needed = real & (columns < last_target)
    flat = needed.flatten()
    before = flat.cumsum(0) - flat.long()  # how many needed tokens come before each position
    slots = response_mask.flatten().nonzero().squeeze(1)
    target_at = is_target.flatten().nonzero().squeeze(1)
    inputs = ModelInputs(
        input_ids=input_ids.flatten()[flat][None],
        position_ids=(order - 1).flatten()[flat][None],
        sources=before[target_at] - 1,
        targets=input_ids.flatten()[target_at],
        slots=slots,
        shape=(response_mask.shape[0], width),
        attention_mask=None,
        plan=None,
    )
    lengths = needed.sum(1)
    lengths = lengths[lengths > 0]
    if lengths.numel() == 0:  # the model must still run, its peers wait for it: one token that nothing depends on
        lengths = torch.ones(1, dtype=torch.int64)
        inputs.input_ids = inputs.position_ids = torch.zeros(1, 1, dtype=torch.int64)
    if pack:
        inputs.plan = plan_attention(lengths.tolist(), device)
    else:
        _pad(inputs, lengths)
    return _to(inputs, device)


def _pad(inputs: ModelInputs, lengths: Tensor) -> None:
    """From packed to right padded rows, in place."""
    longest, starts = int(lengths.max()), lengths.cumsum(0) - lengths
    row = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    place = row * longest + torch.arange(row.numel()) - starts[row]  # of each packed token in the padded batch
    mask = torch.zeros(lengths.numel() * longest, dtype=torch.int64)
    mask[place] = 1
    for name in ("input_ids", "position_ids"):
        padded = torch.zeros_like(mask)
        padded[place] = getattr(inputs, name)[0]
        setattr(inputs, name, padded.view(-1, longest))
    inputs.attention_mask = mask.view(-1, longest)
    inputs.sources = place[inputs.sources]


def _to(inputs: ModelInputs, device: torch.device) -> ModelInputs:
    for name in ("input_ids", "position_ids", "sources", "targets", "slots", "attention_mask"):
        value = getattr(inputs, name)
        if value is not None:
            setattr(inputs, name, value.to(device, non_blocking=True))
    return inputs
