"""Metrics of a step that the driver makes of what workers return and of what its phases took, under the field's names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhub.protocol import Batch
from rlhub.utils.timing import PREFIX

PER_RESPONSE_TOKEN = {"gen": "generate_sequences"}
PER_TOKEN = {
    "ref": "compute_ref_log_prob",
    "values": "compute_values",
    "adv": "compute_advantages",
    "update_critic": "update_critic",
    "update_actor": "update_actor",
}
"""The field's name of a phase -> the phase, whose time is divided by the tokens of prompts and responses."""


def mean_metrics(collected: dict[str, list[float]] | dict[str, float]) -> dict[str, float]:
    """Returns one number per metric from what the ranks returned; none for a metric that no rank returned."""
    return {name: sum(v) / len(v) if isinstance(v, list) else float(v) for name, v in collected.items() if v != []}


def timing_per_token(timings: Mapping[str, float], lengths: Tensor, response_lengths: Tensor) -> dict[str, float]:
    """Returns timing_per_token_ms/{gen,ref,values,adv,update_critic,update_actor} of the phases that a step has had.

    timings: timing_s/... of the step.  lengths: (rows,) the tokens of prompt and response; response_lengths: (rows,).  Generation
    is divided by the response tokens of the batch that trains, the other phases by all of its tokens (verl's definition).
    """
    num_tokens, num_response_tokens = lengths.sum().item(), response_lengths.sum().item()
    found = {}
    for phases, tokens in ((PER_RESPONSE_TOKEN, num_response_tokens), (PER_TOKEN, num_tokens)):
        for name, phase in phases.items():
            if tokens and PREFIX + phase in timings:
                found[f"timing_per_token_ms/{name}"] = timings[PREFIX + phase] * 1000 / tokens
    return found


def row_lengths(batch: Batch) -> Tensor:
    """Returns the tokens of prompt and response of each row, (rows,) int64."""
    columns = batch.batch
    if "prompt_length" not in columns.keys():
        return torch.as_tensor(columns["attention_mask"].sum(1))
    return torch.as_tensor(columns["prompt_length"] + columns["response_length"])
