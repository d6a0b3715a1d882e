"""The module that is sharded as a whole: a Hugging Face model whose forward ends in per-target numbers, not logits.

FSDP gathers a module's weights when its forward is called, so the head's matrix must be used inside the root's forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhub.engines.training.fsdp.logprob import token_outputs
from rlhub.engines.training.packing import ModelInputs
from rlhub.models.hf import SCALAR_HEAD, backbone


def hidden_states(model: PreTrainedModel, inputs: ModelInputs) -> Tensor:
    """Last hidden states (S, hidden) at the source tokens."""
    extra: dict[str, Any] = {} if inputs.plan is None else {"packing": inputs.plan}
    outputs = backbone(model)(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        attention_mask=inputs.attention_mask,
        use_cache=False,
        **extra,
    )
    hidden: Tensor = outputs.last_hidden_state
    return hidden.flatten(0, 1).index_select(0, inputs.sources)


class PolicyModule(nn.Module):
    """Log-probs of the targets, entropy and sum of squared probabilities before them, (S,) each, float32 or float64."""

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, inputs: ModelInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        head = self.model.get_output_embeddings()
        hidden = hidden_states(self.model, inputs)
        return token_outputs(hidden, head.weight, head.bias, inputs.targets, temperature=self.temperature, wanted=outputs)


class ScalarModule(nn.Module):
    """One number (S,) of the state at each source token, float32 or float64, under the name `output`."""

    def __init__(self, model: PreTrainedModel, *, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, inputs: ModelInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        weight = self.model.get_parameter(f"{SCALAR_HEAD}.weight")
        numbers = nn.functional.linear(hidden_states(self.model, inputs), weight).squeeze(-1)
        return {self.output: numbers if numbers.dtype == torch.float64 else numbers.float()}
