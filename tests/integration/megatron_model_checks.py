"""What the ranks of test_megatron_model.py do.  torch.distributed is initialised once; model parallelism for each layout."""

from __future__ import annotations

from contextlib import contextmanager

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlhub.config.model import ModelConfig
from rlhub.config.training import MegatronConfig
from rlhub.models.megatron import compat
from rlhub.models.megatron.build import BuiltMegatron, MegatronPlan, build_megatron
from rlhub.models.megatron.names import parts
from rlhub.models.packed_attention import plan_attention
from rlhub.utils.regions import take

LENGTHS = (7, 3, 11, 6)


@contextmanager
def layout(megatron: dict):
    """Model parallelism over the first ranks as configured; the ranks left over take part in nothing."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
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


def build(path: str, config: MegatronConfig, kind: str = "policy", **changes) -> BuiltMegatron:
    model = ModelConfig(path=path, **{"enable_gradient_checkpointing": False, **changes})
    cpu = torch.device("cpu")
    return build_megatron(
        MegatronPlan(model=model, kind=kind, megatron=config, dtype=torch.float32, trainable=True, seed=5, device=cpu)
    )


def packed_rows(vocab: int = 67):
    """(ids, positions) of LENGTHS rows in one line, and their plan."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocab, (1, sum(LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return ids, positions, plan_attention(LENGTHS, torch.device("cpu"))


def outputs(built: BuiltMegatron, inputs) -> torch.Tensor | None:
    """Logits (or scores) of the real vocabulary on the ranks of the last pipeline stage, through Megatron's own schedule."""
    ids, positions, plan = inputs
    kept: list[torch.Tensor] = []

    def step(_, chunk):
        hidden = chunk(ids, positions, plan)

        def keep(last_hidden):
            kept.append(last_hidden @ chunk.head_weight.t())
            return last_hidden.sum(), {}

        return hidden, keep

    share = built.config.tensor_model_parallel_size if built.config.sequence_parallel else 1
    num_tokens = -(-plan.num_tokens // share) * share
    chunks = built.chunks
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[None] * len(chunks),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=parallel_state.get_pipeline_model_parallel_world_size(),
        seq_length=num_tokens,
        micro_batch_size=1,
        forward_only=True,
    )
    if not kept:
        return None
    if kept[0].shape[-1] == 1:
        return kept[0]
    group = parallel_state.get_tensor_model_parallel_group()
    shares = [torch.empty_like(kept[0]) for _ in range(group.size())]
    dist.all_gather(shares, kept[0].contiguous(), group=group)
    return torch.cat(shares, -1)[:, : built.vocab_size]


@torch.no_grad()
def logits(path: str, megatron: dict, kind: str = "policy", **changes) -> torch.Tensor | None:
    with layout(megatron) as config:
        built = build(path, config, kind, **changes)
        return outputs(built, packed_rows())


def held(path: str, megatron: dict, kind: str = "policy"):
    """(name, shape, region, data) of everything this rank holds."""
    with layout(megatron) as config:
        built = build(path, config, kind)
        return [
            (part.name, part.shape, part.region, take(entry.param.detach(), part.local).clone())
            for entry in parts(built)
            for part in entry.parts
        ]
