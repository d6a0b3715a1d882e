"""Building Megatron-core models from Hugging Face checkpoints: policies, and value and reward models with a scalar head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhub.models.megatron import compat  # before megatron, which it imports quietly

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rlhub.config.sections.model import ModelConfig
from rlhub.config.sections.training import MegatronConfig
from rlhub.errors import ConfigError
from rlhub.models.hf import ModelKind, check_weights, load_config
from rlhub.models.kinds import reward_problem
from rlhub.models.megatron.checks import megatron_problems, num_virtual_stages
from rlhub.models.megatron.context import cut, own_tokens
from rlhub.models.megatron.loading import load_weights
from rlhub.models.megatron.modules import PackedRows, layer_specs
from rlhub.models.megatron.transformer_config import make_transformer_config, rotary_frequencies
from rlhub.models.packed_attention import AttentionPlan


@dataclass(slots=True, kw_only=True)
class MegatronPlan:
    """What to build.  dtype: of the weights and the computation.  trainable: whether weights take gradients.  seed: of
    weights the checkpoint lacks.  device: where the weights lie."""

    model: ModelConfig
    kind: ModelKind
    megatron: MegatronConfig
    dtype: torch.dtype
    trainable: bool
    seed: int
    device: torch.device


class MegatronLM(GPTModel):
    """A piece of a decoder-only transformer, for one packed row of tokens; the head's product is left to the caller, who
    needs it only where the next token matters."""

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
        """first, last: whether the embedding and the head are in this piece.  stage: which of the rank's virtual pieces."""
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
        """Called at the end of GPTModel's construction: here the vocabulary's output layer gives way to a scalar head."""
        if self.scalar and self.post_process:
            self.output_layer = nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype)
        super().setup_embeddings_and_output_layer()
        if self.scalar and self.post_process:
            self.score = self.output_layer
            del self.output_layer

    @property
    def head_weight(self) -> Tensor:
        """(vocabulary / tensor-parallel ranks, hidden): this rank's rows of the output layer, or (1, hidden): the scalar head."""
        if self.scalar:
            return self.score.weight
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def forward(self, input_ids: Tensor, position_ids: Tensor, packing: AttentionPlan) -> Tensor:  # type: ignore[override]
        """input_ids, position_ids (1, tokens); packing: where the rows lie in them.

        Returns hidden states: (tokens, hidden) from the last piece, of all `own_tokens` on every tensor-parallel rank, to
        be multiplied with the head's rows of this rank; before it (tokens, 1, hidden), this rank's share under sequence
        parallelism, for the next piece.
        """
        own = self.own_tokens(packing)
        ids, positions = cut(input_ids, own), cut(position_ids, own)
        angles = positions[0, :, None].float() * self.rotary_frequencies
        hidden = self.decoder(
            hidden_states=self.embedding(input_ids=ids, position_ids=positions) if self.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=torch.cat((angles, angles), -1)[:, None, None],
            packed_seq_params=PackedRows(plan=packing),
        )
        return self._complete(hidden)[: max(packing.num_tokens - own.start, 0), 0] if self.post_process else hidden

    def own_tokens(self, packing: AttentionPlan) -> slice:
        """Those of the packed tokens that this context-parallel rank has; the slice may end after them."""
        return own_tokens(packing.num_tokens, self.config)

    def _complete(self, hidden: Tensor) -> Tensor:
        """All own tokens on every tensor-parallel rank.  Back, gradients are added over the ranks where each multiplies with
        rows of its own, and taken as they are where all have the same scalar head."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not self.scalar)
        return hidden if self.scalar else copy_to_tensor_model_parallel_region(hidden)


@dataclass(slots=True, kw_only=True)
class BuiltMegatron:
    """This rank's pieces of the model, one unless the pipeline is virtual.  vocab_size: real tokens, without the padding."""

    chunks: list[MegatronLM]
    config: TransformerConfig
    hf_config: PreTrainedConfig
    vocab_size: int


def build_megatron(plan: MegatronPlan, *, load: bool = True) -> BuiltMegatron:
    """This rank's part of the model with the checkpoint's weights.  Every rank calls it, after model parallelism was set up.

    load: False leaves the weights as memory had them.
    """
    hf_config = load_megatron_config(plan.model, plan.kind, plan.megatron)
    compat.install()
    config = make_transformer_config(
        hf_config,
        plan.megatron,
        dtype=plan.dtype,
        recompute=plan.model.enable_gradient_checkpointing and plan.trainable,
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )
    tensor = plan.megatron.tensor_model_parallel_size
    padded = -(-hf_config.vocab_size // tensor) * tensor
    built = BuiltMegatron(
        chunks=[
            MegatronLM(config, hf_config, plan.kind, padded_vocab_size=padded, **place).to(plan.device)
            for place in _places(num_virtual_stages(plan.megatron))
        ],
        config=config,
        hf_config=hf_config,
        vocab_size=hf_config.vocab_size,
    )
    compat.install()
    _seed_generators(plan)
    for chunk in built.chunks:
        chunk.requires_grad_(plan.trainable).train(plan.trainable)
    if load:
        check_weights(plan.model, plan.kind)
        load_weights(built, plan.model, plan.seed)
    return built


def load_megatron_config(model: ModelConfig, kind: ModelKind, megatron: MegatronConfig) -> PreTrainedConfig:
    """The Hugging Face configuration; raises ConfigError with all that keeps the model from being built."""
    config = load_config(model)
    if kind == "reward" and (problem := reward_problem(str(model.path), config.architectures or [], config.num_labels)):
        raise ConfigError(problem)
    world = torch.distributed.get_world_size()
    if problems := megatron_problems(config.to_dict(), megatron, world, lora_rank=model.lora_rank):
        raise ConfigError(problems)
    return config


def _places(stages: int | None) -> list[dict[str, Any]]:
    """Where each of this rank's pieces lies in the model, in order."""
    rank, last = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size() - 1
    if stages is None:
        return [{"first": rank == 0, "last": rank == last, "stage": None}]
    return [
        {"first": rank == 0 and stage == 0, "last": rank == last and stage == stages - 1, "stage": stage}
        for stage in range(stages)
    ]


def _seed_generators(plan: MegatronPlan) -> None:
    """Megatron's generators for dropout must exist, though nothing is dropped; the process's own are left alone."""
    devices = [plan.device] if plan.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        model_parallel_cuda_manual_seed(plan.seed)
