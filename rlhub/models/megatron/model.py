"""The model that is built of Megatron-core's parts: a rank's piece of a decoder-only transformer, and its layers.

The layers are Megatron-core's local ones.  Added here are the parts that Megatron-core has only with TransformerEngine: RMS
norms under sequence parallelism, the router's product, and attention over packed rows.

Context parallelism is that of DeepSpeed-Ulysses (arXiv:2309.14509): each rank has a slice of the packed tokens, and around
attention, the only operation across tokens, ranks exchange tokens for heads.  Everything else is computed token by token, on
slices of the packed line without regard to rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay as MegatronReplay
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm
from transformers import PreTrainedConfig

from rlhub.errors import EngineError
from rlhub.models.experts import OWN, RouterReplay
from rlhub.models.hf import ModelKind
from rlhub.models.megatron.transformer_config import rotary_frequencies
from rlhub.models.packed_attention import AttentionPlan, attend_packed


@dataclass(slots=True, kw_only=True)
class BuiltMegatron:
    """This rank's part of a built model.

    chunks: its pieces, one unless the pipeline is virtual.
    vocab_size: the number of real tokens, without the padding.
    """

    chunks: list[MegatronLM]
    config: TransformerConfig
    hf_config: PreTrainedConfig
    vocab_size: int


class MegatronLM(GPTModel):  # type: ignore[misc]
    """A piece of a decoder-only transformer, for one packed row of tokens.

    The caller multiplies with the head, which it needs only where the next token matters.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hf_config: PreTrainedConfig,
        kind: ModelKind,
        *,
        padded_vocab_size: int,
        first: bool,
        last: bool,
        stage: int | None,
    ) -> None:
        """Builds the piece.

        first, last: whether the embedding and the head are in this piece.
        stage: the number of this piece among the rank's virtual pieces; None without them.
        """
        self.scalar = kind != "policy"
        super().__init__(
            config,
            layer_specs(config, stage),
            vocab_size=padded_vocab_size,
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings) and not self.scalar,
            position_embedding_type="none",  # angles come from the position ids given, not from places in the row
            vp_stage=stage,
        )
        self.register_buffer("rotary_frequencies", rotary_frequencies(hf_config), persistent=False)

    def setup_embeddings_and_output_layer(self) -> None:
        """Replaces the vocabulary's output layer by a scalar head; GPTModel calls it at the end of its construction."""
        if self.scalar and self.post_process:
            self.output_layer = nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype)
        super().setup_embeddings_and_output_layer()
        if self.scalar and self.post_process:
            self.score = self.output_layer
            del self.output_layer

    @property
    def head_weight(self) -> Tensor:
        """Returns this rank's rows of the output layer, (vocabulary / tensor-parallel ranks, hidden), or the scalar head, (1,
        hidden)."""
        weight: Tensor
        if self.scalar:
            weight = self.score.weight
        elif self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        return weight

    def forward(self, input_ids: Tensor, position_ids: Tensor, packing: AttentionPlan, experts: Tensor | None = None) -> Tensor:
        """Computes hidden states of input_ids and position_ids, both (1, tokens).

        The last piece returns (tokens, hidden) for all `own_tokens` on every tensor-parallel rank, to be multiplied with this
        rank's rows of the head.  An earlier piece returns (tokens, 1, hidden) for the next piece; under sequence parallelism
        this is the rank's share.

        packing: the places of the rows in the tokens.
        experts: (tokens, routers * top_k), those that tokens are sent to (see RouterReplay); None: those that routers choose.
        """
        own = self.own_tokens(packing)
        ids, positions = cut_padded(input_ids, own), cut_padded(position_ids, own)
        sent = None if experts is None else own_experts(experts, own, self.config)
        angles = positions[0, :, None].float() * self.rotary_frequencies
        hidden = self.decoder(
            hidden_states=self.embedding(input_ids=ids, position_ids=positions) if self.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=torch.cat((angles, angles), -1)[:, None, None],
            packed_seq_params=PackedRows(plan=packing, experts=sent),
        )
        return self._complete(hidden)[: max(packing.num_tokens - own.start, 0), 0] if self.post_process else hidden

    def own_tokens(self, packing: AttentionPlan) -> slice:
        """Returns this context-parallel rank's slice of the packed tokens; it may reach beyond their end."""
        return own_tokens(packing.num_tokens, self.config)

    def _complete(self, hidden: Tensor) -> Tensor:
        """Returns all own tokens on every tensor-parallel rank.

        In the backward pass gradients are added over the ranks if each multiplies with rows of its own, and passed unchanged
        if all have the same scalar head.
        """
        complete = hidden
        if self.config.sequence_parallel:
            complete = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not self.scalar)
        elif not self.scalar:
            complete = copy_to_tensor_model_parallel_region(hidden)
        return complete


def layer_specs(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """Returns the layers of this pipeline rank's piece (`stage` of its virtual pieces), and the norm after the last layer."""
    first = get_transformer_layer_offset(config, vp_stage=stage)
    own = range(first, first + get_num_layers_to_build(config, vp_stage=stage))
    sparse = config.moe_layer_freq if config.num_moe_experts else None
    specs = [_layer_spec(config, sparse is not None and bool(sparse[number])) for number in own]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, sparse: bool) -> ModuleSpec:
    """Returns a layer of Megatron-core's local modules with this file's norms and attention.  sparse: True for a layer with
    experts."""
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
        parts.mlp.submodules.router = ExpertRouter
    return spec


class RMSNorm(nn.Module):
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Under sequence parallelism a rank sees some of the tokens, and in the norms of query and key some of the heads.  The
    weights' gradients are then parts of sums over the tensor-parallel ranks, which `finalize_model_grads` adds up by the mark
    on the weight and by the norms' names.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class ExpertRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router with the logits of the Hugging Face model: a product in the model's dtype, and float32 from there on.

    Megatron's own product fails without TransformerEngine, with or without CUDA.
    """

    def gating(self, input: Tensor) -> Tensor:
        return linear(input, self.weight).float()


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]  # megatron has no types
    """The argument that Megatron's layers pass on to the attention.

    `qkv_format` stays None, so that the layers treat the tokens as one row of a batch of one, whose rotary angles follow its
    position ids.
    """

    plan: AttentionPlan | None = None
    experts: Tensor | None = None  # of this rank's tokens


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Megatron's core attention: causal, of each packed row over itself, on this rank's heads.

    Context-parallel ranks have a slice of the tokens each, which they exchange for a share of those heads.
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
        """Computes attention; returns (tokens, 1, heads * width).

        Tokens beyond the plan pad the ranks to equal shares: they attend to nothing, and their outputs are zero.

        query: (tokens, 1, heads, width).
        key, value: as query, with their own number of heads.
        """
        if not isinstance(packed_seq_params, PackedRows) or packed_seq_params.plan is None:
            raise EngineError("this attention needs the plan of its packed rows; call the model's own forward")
        plan, several = packed_seq_params.plan, self.config.context_parallel_size > 1
        tokens = [tensor[:, 0] for tensor in (query, key, value)]
        if several:
            tokens = tokens_for_heads(*tokens)
        q, k, v = (tensor[: plan.num_tokens] for tensor in tokens)
        out = attend_packed(q, k, v, plan, scaling=self.scale)
        out = pad(out, (0, 0, 0, 0, 0, tokens[0].shape[0] - plan.num_tokens))
        return (heads_for_tokens(out) if several else out).flatten(1)[:, None]


def own_tokens(num_tokens: int, config: TransformerConfig) -> slice:
    """Returns this context-parallel rank's slice of packed tokens.

    All slices are equally long, and under sequence parallelism a multiple of the tensor-parallel ranks, so the last may end in
    padding after the tokens.
    """
    share = config.tensor_model_parallel_size if config.sequence_parallel else 1
    count = -(-num_tokens // (config.context_parallel_size * share)) * share
    first = parallel_state.get_context_parallel_rank() * count
    return slice(first, first + count)


def cut_padded(tokens: Tensor, own: slice) -> Tensor:
    """Returns a slice of the last axis, with zeros beyond the end of the axis."""
    present = tokens[..., own]
    return pad(present, (0, own.stop - own.start - present.shape[-1]))


def own_experts(experts: Tensor, own: slice, config: TransformerConfig) -> Tensor:
    """Returns the experts of the tokens that this rank's routers see: under sequence parallelism its share of the slice.  The
    padding has none."""
    present = experts[own]
    padded = pad(present, (0, 0, 0, own.stop - own.start - len(present)), value=OWN)
    if not config.sequence_parallel:
        return padded
    share: Tensor = padded.chunk(config.tensor_model_parallel_size)[parallel_state.get_tensor_model_parallel_rank()]
    return share


def replay_in(chunks: Sequence[nn.Module], config: TransformerConfig) -> None:
    """Makes the routers of this rank's pieces of a model take the experts that its forward pass is given.

    A layer takes the experts of a pass from the plan that it is called with, again where it is computed again in a backward pass,
    which in a pipeline comes after the forward passes of other micro-batches.
    """
    if not config.num_moe_experts:
        return
    replay = RouterReplay(sum(config.moe_layer_freq))

    def load(layer: nn.Module, args: Any, options: dict[str, Any]) -> None:
        replay.load(options["packed_seq_params"].experts)

    for layer in [module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerLayer)]:
        for router in [module for module in layer.modules() if isinstance(module, TopKRouter)]:
            router.router_replay = ReplayedTopK(replay, sum(config.moe_layer_freq[: layer.layer_number - 1]))
            layer.register_forward_pre_hook(load, with_kwargs=True)


class ReplayedTopK(MegatronReplay):  # type: ignore[misc]
    """Stands in the place where Megatron's router asks for a replay instead of its own top-k.

    Megatron's own class keeps every router of the process in one list, and takes micro-batches in the order of their forward
    passes alone.
    """

    def __init__(self, replay: RouterReplay, number: int) -> None:
        self._replay, self._number = replay, number

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Returns (scores, experts), (tokens, topk) each."""
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        chosen = self._replay.chosen(self._number, own)
        return (values, own) if chosen is None else (scores.gather(1, chosen), chosen)


def tokens_for_heads(*tensors: Tensor) -> list[Tensor]:
    """Exchanges (own tokens, heads, width) for (all tokens, heads / ranks, width) over the context group, all tensors at once.

    Query, key and value are cut alike, so each rank's query heads come with their key-value heads.
    """
    group = parallel_state.get_context_parallel_group()
    shares = [torch.unflatten(tensor, 1, (group.size(), -1)) for tensor in tensors]
    sent = torch.cat(shares, 2).transpose(0, 1)  # (rank, own tokens, its heads of all tensors, width)
    received: Tensor = all_to_all(group, sent.contiguous())
    return list(torch.split(received.flatten(0, 1), [share.shape[2] for share in shares], 1))


def heads_for_tokens(tensor: Tensor) -> Tensor:
    """Exchanges (all tokens, heads / ranks, width) for (own tokens, heads, width): the reverse of `tokens_for_heads`."""
    group = parallel_state.get_context_parallel_group()
    sent = torch.unflatten(tensor, 0, (group.size(), -1))  # (rank, its tokens, own heads, width)
    received: Tensor = all_to_all(group, sent.contiguous())
    return received.transpose(0, 1).flatten(1, 2)
