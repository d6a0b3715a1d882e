"""What the ranks of test_megatron_model.py do.  Each layout has groups of its own."""

from __future__ import annotations

import functools
import itertools
import os
from contextlib import contextmanager
from typing import Any

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlhub.config.sections.training import MegatronConfig, ModelConfig
from rlhub.models.megatron import compat
from rlhub.models.megatron.build import MegatronPlan, build_megatron, param_parts
from rlhub.models.megatron.model import BuiltMegatron
from rlhub.models.packed_attention import plan_attention
from rlhub.protocol.weights.pieces import take

LAYOUTS = itertools.count()
VOCABULARY = 67  # a multiple of no number of ranks
LENGTHS = (7, 3, 11, 6)  # 27 tokens: two sequence-parallel ranks need one more


@functools.cache
def rendezvous() -> dist.Store:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    )


@contextmanager
def layout(megatron: dict):
    """Model parallelism over the ranks as configured.  All groups end with it: each has a thread that wakes up 100 times a
    second, so those of a dozen layouts would slow the machine down."""
    number = next(LAYOUTS)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"layout{number}", rendezvous()),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    config = MegatronConfig(**megatron)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
    )
    compat.install()
    try:
        yield config
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(path: str, config: MegatronConfig, kind: str = "policy", **changes: Any) -> BuiltMegatron:
    model = ModelConfig(path=path, **{"enable_gradient_checkpointing": False, **changes})
    cpu = torch.device("cpu")
    return build_megatron(
        MegatronPlan(model=model, kind=kind, megatron=config, dtype=torch.float32, trainable=True, seed=5, device=cpu)
    )


def some_ids() -> torch.Tensor:
    """(tokens,) of LENGTHS rows in one line."""
    return torch.randint(3, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def loss_weights(width: int) -> torch.Tensor:
    """(tokens, width): the tests' loss is the sum of outputs times these."""
    return torch.randn(sum(LENGTHS), width, generator=torch.Generator().manual_seed(2))


def run(built: BuiltMegatron, ids: torch.Tensor, lengths: tuple[int, ...], *, backward: bool = False) -> torch.Tensor | None:
    """This rank's columns of the outputs, on the last pipeline stage; through Megatron's own schedule."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    plan = plan_attention(lengths, torch.device("cpu"))
    kept: list[torch.Tensor] = []

    def step(_, chunk):
        hidden = chunk(ids[None], positions, plan)

        def loss(last_hidden):
            out = last_hidden @ chunk.head_weight.t()
            kept.append(out.detach())
            return (out * own_weights(built, out.shape[-1])).sum() if backward else out.sum(), {}

        return hidden, loss

    share = built.config.tensor_model_parallel_size if built.config.sequence_parallel else 1
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[None] * len(built.chunks),
        model=built.chunks if len(built.chunks) > 1 else built.chunks[0],
        num_microbatches=parallel_state.get_pipeline_model_parallel_world_size(),
        seq_length=-(-plan.num_tokens // share) * share,
        micro_batch_size=1,
        forward_only=not backward,
    )
    return kept[0] if kept else None


def own_weights(built: BuiltMegatron, columns: int) -> torch.Tensor:
    """This rank's columns of the loss weights; padded ones count nothing."""
    if columns == 1:
        return loss_weights(1)
    first = parallel_state.get_tensor_model_parallel_rank() * columns
    whole = loss_weights(built.vocab_size)
    padded = torch.cat((whole, torch.zeros(len(whole), columns)), -1)
    return padded[:, first : first + columns]


def all_columns(built: BuiltMegatron, out: torch.Tensor | None) -> torch.Tensor | None:
    """The outputs of all tensor-parallel ranks, without the padding."""
    if out is None or out.shape[-1] == 1:
        return out
    group = parallel_state.get_tensor_model_parallel_group()
    shares = [torch.empty_like(out) for _ in range(group.size())]
    dist.all_gather(shares, out.contiguous(), group=group)
    return torch.cat(shares, -1)[:, : built.vocab_size]


def boxes(built: BuiltMegatron, *, grads: bool = False) -> list[tuple]:
    """(name, full shape, region, data) of everything this rank holds."""
    return [
        (part.name, part.shape, part.region, take(entry.param.grad if grads else entry.param.detach(), part.local).clone())
        for entry in param_parts(built)
        for part in entry.parts
    ]


@torch.no_grad()
def outputs_and_boxes(path: str, megatron: dict, kind: str = "policy") -> tuple:
    with layout(megatron) as config:
        built = build(path, config, kind)
        return all_columns(built, run(built, some_ids(), LENGTHS)), boxes(built)


@torch.no_grad()
def rows_alone(path: str, megatron: dict) -> tuple:
    """Outputs of the packed rows, and of each row by itself."""
    with layout(megatron) as config:
        built = build(path, config)
        packed = all_columns(built, run(built, some_ids(), LENGTHS))
        alone = [all_columns(built, run(built, row, (len(row),))) for row in some_ids().split(LENGTHS)]
        return packed, None if packed is None else torch.cat(alone)


@torch.no_grad()
def damaged(path: str, megatron: dict, damage: str) -> torch.Tensor | None:
    """Outputs after one weight of one rank, or the rows of two query groups, are not what they should be."""
    with layout(megatron) as config:
        built = build(path, config)
        entries = {part.name: (entry.param, part.local) for entry in param_parts(built) for part in entry.parts}
        if damage == "one_weight" and dist.get_rank() == 0:
            param, local = entries["model.layers.0.mlp.up_proj.weight"]
            take(param, local)[1, 2] += 0.5
        if damage == "swapped_groups":
            for entry in param_parts(built):
                keys = [part.local[0] for part in entry.parts if part.name.endswith("layers.0.self_attn.k_proj.weight")]
                if keys:
                    first, second = (slice(*rows) for rows in keys)
                    entry.param[first], entry.param[second] = entry.param[second].clone(), entry.param[first].clone()
        return all_columns(built, run(built, some_ids(), LENGTHS))


def gradients(path: str, megatron: dict, kind: str = "policy", changes: dict | None = None) -> list[tuple]:
    """Boxes of the gradients of the sum of outputs times `loss_weights`."""
    with layout(megatron) as config:
        built = build(path, config, kind, **(changes or {}))
        run(built, some_ids(), LENGTHS, backward=True)
        for chunk in built.chunks:
            for key, param in chunk.named_parameters():
                _finish(built, chunk, key, param)
        return boxes(built, grads=True)


def _finish(built: BuiltMegatron, chunk: Any, key: str, param: torch.nn.Parameter) -> None:
    """What `finalize_model_grads` does for gradients in buffers: sums over the ranks that have parts of them."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)  # an expert that no token chose
    partial = (built.config.sequence_parallel and getattr(param, "sequence_parallel", False)) or "self_attention.q_" in key
    if partial or "self_attention.k_" in key:
        dist.all_reduce(param.grad, group=parallel_state.get_tensor_model_parallel_group())
    tied = chunk.share_embeddings_and_output_weights and built.config.pipeline_model_parallel_size > 1
    if tied and ("embedding" in key or "output_layer" in key):
        dist.all_reduce(param.grad, group=parallel_state.get_embedding_group())
    if ".experts." in key:  # of the tokens of all ranks that share the experts, which here have the same
        param.grad /= built.config.expert_model_parallel_size
