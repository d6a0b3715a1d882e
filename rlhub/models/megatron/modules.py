"""The parts of a layer that Megatron-core has only with TransformerEngine, and the layers put together with them.

RMS norms that know sequence parallelism, and attention over packed rows; the rest is Megatron-core's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm

from rlhub.errors import EngineError
from rlhub.models.megatron.context import heads_for_tokens, tokens_for_heads
from rlhub.models.packed_attention import AttentionPlan, attend_packed


@dataclass
class PackedRows(PackedSeqParams):
    """What travels through Megatron's layers to the attention.  `qkv_format` stays None, so that they treat the tokens as
    one row of a batch of one, whose rotary angles come from its position ids."""

    plan: AttentionPlan | None = None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Under sequence parallelism a rank sees some of the tokens, and in the norms of query and key some of the heads: their
    weights' gradients are parts of sums over the tensor-parallel ranks, which `finalize_model_grads` adds up by the mark on
    the weight and by the norms' names.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class Router(TopKRouter):
    """Megatron's choice of experts with the Hugging Face model's logits: a product in the model's dtype, float32 from there on.

    Megatron's own product fails where TransformerEngine is not installed, with or without CUDA.
    """

    def gating(self, input: Tensor) -> Tensor:
        return linear(input, self.weight).float()


class PackedAttention(MegatronModule):
    """Megatron's core attention: causal, each packed row over itself, on this rank's heads.

    Context-parallel ranks have a slice of the tokens each.  Here they exchange them for a share of those heads.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """query (tokens, 1, heads, width); key, value with their own number of heads; returns (tokens, 1, heads * width).

        Tokens after the plan's pad the ranks to equal shares: they attend to nothing and give zeros.
        """
        if not isinstance(packed_seq_params, PackedRows) or packed_seq_params.plan is None:
            raise EngineError("this attention needs the plan of its packed rows; call the model's own forward")
        plan, several = packed_seq_params.plan, self.config.context_parallel_size > 1
        tokens = [tensor[:, 0] for tensor in (query, key, value)]
        if several:
            tokens = tokens_for_heads(*tokens)
        out = attend_packed(*(tensor[: plan.num_tokens] for tensor in tokens), plan, scaling=self.scale)
        out = pad(out, (0, 0, 0, 0, 0, tokens[0].shape[0] - plan.num_tokens))
        return (heads_for_tokens(out) if several else out).flatten(1)[:, None]


def layer_specs(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline rank's piece (`stage` of its virtual pieces) and the norm after the last."""
    first = get_transformer_layer_offset(config, vp_stage=stage)
    own = range(first, first + get_num_layers_to_build(config, vp_stage=stage))
    sparse = config.moe_layer_freq if config.num_moe_experts else None
    specs = [_layer_spec(config, sparse is not None and bool(sparse[number])) for number in own]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, sparse: bool) -> ModuleSpec:
    """One layer: of Megatron-core's local modules, with our norms and attention.  sparse: with experts, one after another."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if sparse else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if sparse:
        parts.mlp.submodules.router = Router
    return spec
