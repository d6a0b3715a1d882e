"""The groups of ranks that Megatron-core cuts a model over: created once per process, shared by all its engines.

Megatron-core keeps them in module state, so actor, reference and critic of one process must agree on the sizes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch.distributed as dist

from rlhub.models.megatron import compat  # before megatron, which it imports quietly

# isort: split
from megatron.core import parallel_state

from rlhub.config.sections.training import MegatronConfig
from rlhub.errors import ConfigError
from rlhub.models.megatron.checks import num_virtual_stages


@dataclass(slots=True, kw_only=True, frozen=True)
class Sizes:
    """Numbers of ranks that share a model's matrices, its layers, each sequence, and its experts.  stages: pieces of layers of a
    pipeline rank, None: one."""

    tensor: int
    pipeline: int
    stages: int | None
    context: int
    experts: int

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))


@dataclass(slots=True, kw_only=True, frozen=True)
class ParallelState:
    """This rank's place in the groups.  model_group: the ranks that together have all of the model's weights; last_stage: the
    global rank among them that broadcasts the outputs.  Several such groups share rows where context_group, of equal weights,
    has several ranks.  collects: whether this rank returns the outputs for all that share its rows."""

    data_rank: int
    data_size: int
    data_group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    model_group: dist.ProcessGroup
    model_size: int
    pipeline_size: int
    stages: int | None
    last_stage: int
    is_last_stage: bool
    collects: bool


def wanted_sizes(megatron: MegatronConfig) -> Sizes:
    return Sizes(
        tensor=megatron.tensor_model_parallel_size,
        pipeline=megatron.pipeline_model_parallel_size,
        stages=num_virtual_stages(megatron),
        context=megatron.context_model_parallel_size,
        experts=megatron.expert_model_parallel_size,
    )


def current_sizes() -> Sizes | None:
    """Returns the sizes of this process's groups; None before the first engine."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    return Sizes(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        stages=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        experts=parallel_state.get_expert_model_parallel_world_size(),
    )


def ensure_model_parallel(megatron: MegatronConfig) -> ParallelState:
    """Creates the groups over the default process group, or takes those that another engine of this process has created.

    Every rank calls, and it blocks.  Raises ConfigError if another engine created groups of other sizes, or if the sizes do not
    fit the number of ranks.
    """
    compat.install()
    sizes, present = wanted_sizes(megatron), current_sizes()
    if present is None:
        _create_groups(sizes)
    elif present != sizes:
        raise ConfigError(
            f"the Megatron engines of one process share their groups of ranks: another engine made {present}, this one wants "
            f"{sizes}; give actor, reference and critic the same sizes, or processes of their own"
        )
    return _parallel_state(sizes)


def _create_groups(sizes: Sizes) -> None:
    world, ranks = dist.get_world_size(), sizes.tensor * sizes.pipeline * sizes.context
    if world % ranks or (world // ranks) % sizes.experts:
        raise ConfigError(f"megatron: {world} ranks cannot be cut into {sizes}; change the sizes or the number of ranks")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.stages,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.experts,
        create_gloo_process_groups=False,  # only megatron's own checkpoints use them
    )


def _parallel_state(sizes: Sizes) -> ParallelState:
    model_group = parallel_state.get_model_parallel_group()
    ranks = dist.get_process_group_ranks(model_group)
    inner = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
    return ParallelState(
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        data_group=parallel_state.get_data_parallel_group(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        context_group=parallel_state.get_context_parallel_group(),
        model_group=model_group,
        model_size=len(ranks),
        pipeline_size=sizes.pipeline,
        stages=sizes.stages,
        last_stage=ranks[-sizes.tensor],
        is_last_stage=parallel_state.is_pipeline_last_stage(),
        collects=inner == (0, 0) and parallel_state.is_pipeline_first_stage(),
    )
