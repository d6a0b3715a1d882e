"""The layout of a training engine's model over ranks: which sizes fit together, and how many ranks get rows of their own.

ranks = tensor x pipeline x context x data parallel.  Only the data-parallel ranks divide a batch: the others of a copy of the
model work on the same rows.  The rules here are pure arithmetic on settings; preflight compares them with the model's own sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from rlhub.config.sections.trainer import TrainerConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, ModelConfig, Section

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_model_parallel_size",
    "expert_model_parallel_size",
)
"""Sizes that all engines of a process share, because the groups of ranks belong to the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that hold a role.  For messages, name: for example "4 ranks"; text: the settings from which `count` follows."""

    count: int
    name: str
    text: str


def all_ranks(trainer: TrainerConfig) -> Ranks:
    """Returns the ranks of the main pool."""
    assert trainer.n_gpus_per_node is not None, "derive first"
    count = trainer.nnodes * trainer.n_gpus_per_node
    sizes = f"trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
    return Ranks(count=count, name=f"{count} ranks", text=f"{sizes} = {count} ranks")


@functools.singledispatch
def ranks_per_copy(section: Section) -> int:
    """Returns how many ranks share a copy of the model, and work on the same rows."""
    raise TypeError(f"no section of a training engine: {type(section).__name__}")


@ranks_per_copy.register
def _(section: FSDPConfig) -> int:
    return 1


@ranks_per_copy.register
def _(section: MegatronConfig) -> int:
    return section.tensor_model_parallel_size * section.pipeline_model_parallel_size * section.context_model_parallel_size


def data_parallel(section: Section, ranks: Ranks) -> Ranks:
    """Returns the ranks that divide the rows; at least one, where the sizes do not fit (which `check_section` reports)."""
    share = ranks_per_copy(section)
    if share == 1:
        return ranks
    count = max(ranks.count // share, 1)
    name = f"{count} data-parallel ranks"
    return Ranks(count=count, name=name, text=f"{ranks.text} / {share} that share a copy of the model = {name}")


@functools.singledispatch
def check_section(section: Section, key: str, ranks: Ranks) -> list[str]:
    """Returns the problems of a training engine's section on `ranks`.  key: key of the section."""
    raise TypeError(f"no section of a training engine: {type(section).__name__}")


@check_section.register
def _(section: FSDPConfig, key: str, ranks: Ranks) -> list[str]:
    size = section.fsdp_size
    if size == 0 or (size > 0 and ranks.count % size):
        return [f"{key}.fsdp_size={size} does not divide the {ranks.name}; -1 shards over all"]
    return []


@check_section.register
def _(section: MegatronConfig, key: str, ranks: Ranks) -> list[str]:
    tensor, pipeline = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
    stages, experts = section.virtual_pipeline_model_parallel_size, section.expert_model_parallel_size
    problems = []
    share = ranks_per_copy(section)
    if ranks.count % share:
        sizes = f"tensor {tensor} x pipeline {pipeline} x context {section.context_model_parallel_size} = {share} ranks"
        problems.append(
            f"{key}: {sizes} hold a copy of the model, which does not divide {ranks.text}: {_divide(ranks.count, share)}"
        )
    elif (ranks.count // share) % experts:
        problems.append(
            f"{key}.expert_model_parallel_size={experts} does not divide the data-parallel ranks: "
            f"{data_parallel(section, ranks).text}, {_divide(ranks.count // share, experts)}"
        )
    if stages is not None and stages > 1 and pipeline == 1:
        problems.append(
            f"{key}.virtual_pipeline_model_parallel_size={stages} cuts the stages of a pipeline, but "
            "pipeline_model_parallel_size=1; set that to 2 or more, or this to null"
        )
    if section.sequence_parallel and tensor == 1:
        problems.append(
            f"{key}.sequence_parallel=true cuts what tensor-parallel ranks would hold twice, but tensor_model_parallel_size=1; "
            "leave it null"
        )
    return problems


def _divide(total: int, size: int) -> str:
    return f"{total} = {total // size} x {size} + {total % size}"


def check_adapters(model: ModelConfig, key: str) -> list[str]:
    """Returns the problem of an adapter to start from without a rank.  key: key of the model's section."""
    if model.lora_rank > 0 or model.lora_adapter_path is None:
        return []
    return [f"{key}.lora_adapter_path={model.lora_adapter_path}, but {key}.lora_rank=0: set it to the adapter's rank"]


def check_shared_processes(sections: Mapping[str, Section]) -> list[str]:
    """Returns the problems of engines in the same processes, which share their groups of ranks.

    sections: the engines' sections by key; the others must have the sizes of the first.
    """
    found = {key: section for key, section in sections.items() if isinstance(section, MegatronConfig)}
    problems = []
    (first, wanted), *others = list(found.items()) or [("", MegatronConfig())]
    for key, section in others:
        for name in SIZES:
            have, want = getattr(section, name), getattr(wanted, name)
            if have != want:
                problems.append(
                    f"{key}.{name}={have} but {first}.{name}={want}: both are in the same processes, whose groups of ranks they "
                    "share; leave it unset to follow"
                )
    return problems
