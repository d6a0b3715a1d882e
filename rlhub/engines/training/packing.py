"""One micro-batch without padding: the tokens that go through the model, and the places of its outputs.

Only numbers that the loss reads are computed.  For numbers per token, the tokens from a row's last target on are left out, and
so is a row whose response is masked as a whole; hidden states are read only where the next token is a target.  For one number
per row all its tokens go in, and the hidden state is read at the last.

Rows may share their prefixes: then each distinct token goes in once, at the position that it has in its rows, and a number that
several rows have in common is computed once too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhub.config.sections.vla import FLOW, VLAConfig
from rlhub.engines.training.base import Rows
from rlhub.engines.training.prefixes import Forest, plan_forest, sort_rows
from rlhub.errors import EngineError
from rlhub.models.device_copies import to_device
from rlhub.models.experts import OWN
from rlhub.models.packed_attention import AttentionPlan, plan_attention
from rlhub.models.prefix_attention import PrefixPlan
from rlhub.models.shape import ModelKind
from rlhub.models.vision import ImageInputs, ImageReader
from rlhub.models.vla.flow import FLOW_COLUMNS, FlowInputs, flow_inputs
from rlhub.models.vla.policy import PIXEL_VALUES, PlacedTokens, place_tokens
from rlhub.protocol.columns import dense_rows
from rlhub.protocol.sequences import IMAGES, ROUTED_EXPERTS, images_of

CPU = torch.device("cpu")
OUTPUTS: dict[ModelKind, frozenset[str]] = {
    "policy": frozenset({"log_probs", "entropy", "sum_pi_squared"}),
    "value": frozenset({"values"}),
    "reward": frozenset({"scores"}),
    "vla": frozenset({"log_probs", "entropy", "sum_pi_squared", "values", "flow_errors"}),
}
"""The outputs that an engine of each kind computes."""


@dataclass(slots=True, kw_only=True)
class ModelInputs:
    """The inputs of a forward pass that computes S numbers for `shape`: (rows, response), or (rows,) for one number per row.

    input_ids, position_ids: (1, tokens) packed, or (rows, longest) right-padded with an attention_mask of the same shape.
    sources: (S,) indices into the flattened token axis: the token before each target, or the last token of each row.
    targets: (S,) ids of the tokens after the sources; empty with one number per row.
    slots: (S,) indices of the numbers into the flattened `shape`.
    copies: (slots,) the number of each slot, where rows with a common prefix share numbers and there are more slots than numbers.
    plan: the places of the rows in a packed batch, for attention; None when padded.
    pictures: those in the prompts of a language model's rows, which are padded then.
    experts: (tokens, routers * top_k) int16, the recorded experts of each token of the flattened token axis, OWN where there are
        none; None where routers choose.
    placed, flow, images: of a vision-language-action policy, which reads these and no packed tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    sources: Tensor
    targets: Tensor
    slots: Tensor
    shape: tuple[int, ...]
    attention_mask: Tensor | None
    plan: AttentionPlan | PrefixPlan | None
    placed: PlacedTokens | None = None
    flow: FlowInputs | None = None
    images: Tensor | None = None
    pictures: ImageInputs | None = None
    copies: Tensor | None = None
    experts: Tensor | None = None

    def spread(self, values: Tensor) -> Tensor:
        """Returns the (S,) values in `shape`, with zeros elsewhere."""
        if self.copies is not None:
            values = values.index_select(0, self.copies)
        return values.new_zeros(math.prod(self.shape)).index_put((self.slots,), values).view(self.shape)


def model_inputs(rows: Rows, *, pack: bool, device: torch.device, share_prefixes: bool = False) -> ModelInputs:
    """Plans one micro-batch for numbers per token.

    share_prefixes: True packs each distinct token once.

    Indices are computed on the rows' device and then moved to `device`.  The rows are on the CPU, because computing indices on
    a GPU would wait for it at every step.  Raises EngineError if response_mask marks a token that attention_mask hides, or the
    first token of a row.
    """
    input_ids, response_mask = rows["input_ids"], rows["response_mask"].bool()
    is_target, needed = needed_tokens(rows)
    target_at = is_target.flatten().nonzero().squeeze(1)
    inputs = _packed(
        input_ids,
        needed,
        sources=_num_before(needed)[target_at] - 1,
        targets=input_ids.flatten()[target_at],
        slots=response_mask.flatten().nonzero().squeeze(1),
        shape=tuple(response_mask.shape),
    )
    if ROUTED_EXPERTS in rows:
        inputs.experts = _recorded_experts(rows[ROUTED_EXPERTS], needed)
    if share_prefixes:
        if inputs.experts is not None:
            raise EngineError("rows that share a token may have other recorded experts for it: set actor.prefix_packing=false")
        return _shared(inputs, plan_forest(sort_rows(input_ids, needed), device), device)
    return _finished(inputs, needed.sum(1), pack=pack, device=device)


def _recorded_experts(column: Tensor, needed: Tensor) -> Tensor:
    """Returns `ModelInputs.experts` of packed tokens; a row's recorded tokens are its first ones.

    column: ROUTED_EXPERTS.  needed: (rows, tokens), the tokens that are packed.
    """
    values, lengths = dense_rows(column)
    row, _ = needed.nonzero(as_tuple=True)
    position = (needed.cumsum(1) - 1)[needed]
    known = position < lengths[row]
    experts = torch.full((len(row), values.shape[1]), OWN, dtype=torch.int16)
    experts[known] = values[((lengths.cumsum(0) - lengths)[row] + position)[known]].short()
    return experts


def picture_inputs(rows: Rows, reader: ImageReader, model: PreTrainedModel, *, device: torch.device) -> ModelInputs:
    """Plans one micro-batch of rows with pictures in their prompts, padded: the column IMAGES, which may be missing."""
    inputs = model_inputs(rows, pack=False, device=CPU)
    read = needed_tokens(rows)[1].any(1).tolist()
    given = images_of(rows[IMAGES]) if IMAGES in rows else [b""] * len(read)
    files = [file for file, is_read in zip(given, read, strict=True) if is_read] or [b""]
    assert inputs.attention_mask is not None, "rows are padded"
    inputs.pictures = reader.plan(model, inputs.input_ids, inputs.attention_mask, files).to(device)
    return _to(inputs, device)


def needed_tokens(rows: Rows) -> tuple[Tensor, Tensor]:
    """Returns the tokens whose numbers the loss reads, and those that go through the model for them, (rows, tokens) bool each."""
    real, response_mask = rows["attention_mask"].bool(), rows["response_mask"].bool()
    is_target = torch.zeros_like(real)
    is_target[:, real.shape[1] - response_mask.shape[1] :] = response_mask
    if bool((is_target & (~real | (real.cumsum(1) < 2))).any()):
        raise EngineError(
            "response_mask marks a token that attention_mask hides or that has no token before it: "
            "every prompt needs at least one token, and response_mask must lie inside attention_mask"
        )
    columns = torch.arange(real.shape[1], device=real.device)
    last_target = torch.where(is_target, columns, -1).amax(1, keepdim=True)
    return is_target, real & (columns < last_target)


def _shared(inputs: ModelInputs, forest: Forest, device: torch.device) -> ModelInputs:
    """Returns packed inputs with each distinct token and each distinct pair of source and target once, on `device`."""
    inputs.plan, places = forest.plan, forest.places
    for name in ("input_ids", "position_ids"):
        once = torch.zeros(1, forest.plan.num_tokens, dtype=torch.int64)
        once[0, places] = getattr(inputs, name)[0]
        setattr(inputs, name, once)
    pairs, inputs.copies = torch.unique((places[inputs.sources] << 32) + inputs.targets, return_inverse=True)
    inputs.sources, inputs.targets = pairs >> 32, pairs & 0xFFFFFFFF
    return _to(inputs, device)


def action_inputs(rows: Rows, vla: VLAConfig, *, device: torch.device) -> ModelInputs:
    """Plans one micro-batch of calls of a vision-language-action policy, for numbers per action token.

    Rows are (rows, prompt + response) tokens as ever, with pixel_values (rows, images, colours, height, width) uint8.  Raises
    EngineError where response_mask marks a token that is no bin.
    """
    mask = rows["response_mask"].bool()
    width, slots = mask.shape[1], mask.flatten().nonzero().squeeze(1)
    placed = place_tokens(rows["input_ids"], rows["attention_mask"], width, vla)
    responses = rows["input_ids"][:, rows["input_ids"].shape[1] - width :]
    targets = responses.flatten()[slots] - vla.first_bin_id
    if bool(((targets < 0) | (targets >= vla.bins)).any()):
        raise EngineError(
            f"a response has a token that is no action: these are {vla.first_bin_id} to {vla.first_bin_id + vla.bins - 1} "
            "(model.vla.first_bin_id and bins)"
        )
    inputs = ModelInputs(
        input_ids=placed.input_ids,
        position_ids=placed.position_ids,
        sources=placed.sources.flatten()[slots],
        targets=targets,
        slots=slots,
        shape=tuple(mask.shape),
        attention_mask=None,
        plan=None,
        placed=placed.to(device),
        images=to_device(rows[PIXEL_VALUES], device),
    )
    return _to(inputs, device)


def action_flow_inputs(rows: Rows, vla: VLAConfig, *, device: torch.device) -> ModelInputs:
    """Plans one micro-batch of a policy by flow matching, for numbers per number of an action; see FLOW_COLUMNS."""
    mask, flow = rows["response_mask"].bool(), flow_inputs(rows, vla)
    slots = mask.flatten().nonzero().squeeze(1)
    none = slots.new_empty(0)
    inputs = ModelInputs(
        input_ids=flow.input_ids,
        position_ids=none,
        sources=slots,
        targets=none,
        slots=slots,
        shape=tuple(mask.shape),
        attention_mask=None,
        plan=None,
        flow=flow.to(device),
        images=to_device(rows[PIXEL_VALUES], device),
    )
    return _to(inputs, device)


def row_inputs(rows: Rows, *, pack: bool, device: torch.device) -> ModelInputs:
    """Plans one micro-batch for one number per row, at its last attended token; a row without any gets 0."""
    needed = rows["attention_mask"].bool()
    lengths = needed.sum(1)
    inputs = _packed(
        rows["input_ids"],
        needed,
        sources=lengths.cumsum(0)[lengths > 0] - 1,
        targets=rows["input_ids"].new_empty(0),
        slots=lengths.nonzero().squeeze(1),
        shape=(needed.shape[0],),
    )
    return _finished(inputs, lengths, pack=pack, device=device)


def _num_before(needed: Tensor) -> Tensor:
    """Returns the number of needed tokens before each position of the flattened rows."""
    flat = needed.flatten()
    return flat.cumsum(0) - flat.long()


def _packed(input_ids: Tensor, needed: Tensor, **outputs: Any) -> ModelInputs:
    """Packs the needed tokens of all rows into one line; a token's position counts the tokens before it in its row."""
    flat = needed.flatten()
    positions = needed.cumsum(1) - 1
    return ModelInputs(
        input_ids=input_ids.flatten()[flat][None],
        position_ids=positions.flatten()[flat][None],
        attention_mask=None,
        plan=None,
        **outputs,
    )


def _finished(inputs: ModelInputs, lengths: Tensor, *, pack: bool, device: torch.device) -> ModelInputs:
    """Returns the inputs packed or padded as configured, on `device`.  lengths: the needed tokens of each row."""
    lengths = lengths[lengths > 0]
    if lengths.numel() == 0:  # other ranks wait for the model, so it must run: over one token that nothing depends on
        lengths = lengths.new_ones(1)
        inputs.input_ids = inputs.position_ids = lengths.new_zeros(1, 1)
        if inputs.experts is not None:
            inputs.experts = inputs.experts.new_full((1, inputs.experts.shape[1]), OWN)
    if pack:
        inputs.plan = plan_attention(lengths.tolist(), device)
    else:
        _pad(inputs, lengths)
    return _to(inputs, device)


def _pad(inputs: ModelInputs, lengths: Tensor) -> None:
    """Turns packed rows into right-padded ones, in place."""
    longest, starts, device = int(lengths.max()), lengths.cumsum(0) - lengths, lengths.device
    row = torch.repeat_interleave(torch.arange(lengths.numel(), device=device), lengths)
    place = (
        row * longest + torch.arange(row.numel(), device=device) - starts[row]
    )  # the index of each packed token in the padded batch
    mask = lengths.new_zeros(lengths.numel() * longest)
    mask[place] = 1
    for name in ("input_ids", "position_ids"):
        padded = torch.zeros_like(mask)
        padded[place] = getattr(inputs, name)[0]
        setattr(inputs, name, padded.view(-1, longest))
    if inputs.experts is not None:
        padded_experts = inputs.experts.new_full((len(mask), inputs.experts.shape[1]), OWN)
        padded_experts[place] = inputs.experts
        inputs.experts = padded_experts
    inputs.attention_mask = mask.view(-1, longest)
    inputs.sources = place[inputs.sources]


def _to(inputs: ModelInputs, device: torch.device) -> ModelInputs:
    for name in ("input_ids", "position_ids", "sources", "targets", "slots", "copies", "attention_mask", "experts"):
        value = getattr(inputs, name)
        if value is not None:
            setattr(inputs, name, to_device(value, device))
    return inputs


def check_outputs(kind: ModelKind, outputs: Iterable[str]) -> frozenset[str]:
    """Returns the set of requested outputs.  Raises EngineError for an empty set, or for an output that the kind does not
    compute."""
    wanted = frozenset(outputs)
    if not wanted or not wanted <= OUTPUTS[kind]:
        raise EngineError(f"a {kind} engine computes {sorted(OUTPUTS[kind])}, not {sorted(wanted)}")
    return wanted


def rows_read(rows: Rows, kind: ModelKind, vla: VLAConfig | None = None) -> dict[str, Tensor]:
    """Returns the columns that a forward pass reads.  vla: of a policy of actions."""
    ids = ("input_ids", "attention_mask")
    more: dict[ModelKind, tuple[str, ...]] = {"reward": (), "vla": ("response_mask", PIXEL_VALUES)}
    if vla is not None and vla.decoding == FLOW:
        more["vla"] += FLOW_COLUMNS
    optional = [name for name in (IMAGES, ROUTED_EXPERTS) if kind == "policy" and name in rows]
    return {name: rows[name] for name in (*ids, *more.get(kind, ("response_mask",)), *optional)}
