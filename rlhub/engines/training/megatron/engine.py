"""TrainEngine on Megatron-core, for policies, value models and reward models, and the groups of ranks that it cuts a model
over.

Every rank of a model copy is given the same rows.  The outputs of a pass exist on its last pipeline stage and are sent to the
other stages, so all ranks of a copy return the same.

The groups of ranks are created once per process and shared by all its engines: Megatron-core keeps them in module state, so
actor, reference and critic of one process must agree on the sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from rlhub.models.megatron import compat  # before megatron, which it imports quietly

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor, nn

from rlhub.config.sections.training import MegatronConfig, ModelConfig, OptimConfig
from rlhub.engines.training.base import ADAPTER_BUCKET_BYTES, Adapter, ForwardOutputs, LossFunction, Rows, StepReport, TrainEngine
from rlhub.engines.training.collectives import gather_rows
from rlhub.engines.training.megatron.optimizer import MegatronAdamW
from rlhub.engines.training.megatron.passes import (
    MicroBatch,
    load_of_chunks,
    own_outputs,
    passes_needed,
    policy_outputs,
    prepare_schedule,
    run_micro_batches,
    scalar_output,
    sum_gradients,
)
from rlhub.engines.training.megatron.weights import (
    LORA_MARK,
    LiveRange,
    MegatronWeightStream,
    StreamedTensor,
    adapter_pieces,
    fill,
    live_pieces,
    live_ranges,
    mark_cut_weights,
    merged,
    plan_stream,
)
from rlhub.engines.training.micro_batch import MicroBatchConfig, cut_rows, on_device, put_rows, take_rows, trim
from rlhub.engines.training.optimizer import HostCopies
from rlhub.engines.training.packing import check_outputs, model_inputs, row_inputs, rows_read
from rlhub.errors import ConfigError, EngineError
from rlhub.models.hf import SCALAR_HEAD, ModelKind
from rlhub.models.lora import PEFT_MODEL, saved_config, scaling_of
from rlhub.models.megatron.build import MegatronPlan, ParamParts, build_megatron, param_parts
from rlhub.models.megatron.checks import num_virtual_stages
from rlhub.models.megatron.lora import LowRank, low_ranks, set_adapters
from rlhub.models.megatron.model import MegatronLM
from rlhub.models.packed_attention import AttentionPlan
from rlhub.protocol.weights.pieces import Piece, take

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class MegatronEngine(TrainEngine):
    """A TrainEngine that cuts matrices, layers, sequences and experts over ranks.  Rows are always packed, whatever
    model.use_remove_padding says.

    kind: "policy" computes log_probs, entropy and sum_pi_squared, "value" values, "reward" scores.
    optim: None builds an engine that only infers.
    temperature: divides the logits.
    infer_micro_batch: the limits of a pass of `infer`; None takes those of training.
    seed: determines new heads.
    """

    def __init__(
        self,
        model: ModelConfig,
        megatron: MegatronConfig,
        optim: OptimConfig | None,
        *,
        kind: ModelKind,
        device: torch.device,
        temperature: float = 1.0,
        micro_batch: MicroBatchConfig | None = None,
        infer_micro_batch: MicroBatchConfig | None = None,
        grad_clip: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.model_config, self.megatron_config, self.optim_config = model, megatron, optim
        self.kind: ModelKind = kind
        self.device, self.temperature, self.grad_clip, self.seed = device, temperature, grad_clip, seed
        self.micro_batch = micro_batch or MicroBatchConfig()
        self.infer_micro_batch = infer_micro_batch or self.micro_batch
        if self.micro_batch.share_prefixes:
            raise EngineError("the megatron engine shares no prefixes: use strategy=fsdp2")
        self.dtype = DTYPES[megatron.model_dtype or ("bf16" if device.type == "cuda" else "fp32")]
        self.dp_rank, self.dp_size, self.is_collect = 0, 1, True
        self.optimizer: MegatronAdamW | None = None
        self.chunks: list[nn.Module] = []
        self.params: list[ParamParts] = []
        self._parallel: ParallelState | None = None
        self._streamed: dict[str, list[StreamedTensor]] = {}
        self.low_ranks: dict[str, LowRank] = {}  # by the name of the frozen weight
        self._loss_is_finite, self._host = True, HostCopies()

    def initialize(self) -> None:
        parallel = self._parallel = ensure_model_parallel(self.megatron_config)
        self.dp_rank, self.dp_size, self.is_collect = parallel.data_rank, parallel.data_size, parallel.collects
        plan = MegatronPlan(
            model=self.model_config,
            kind=self.kind,
            megatron=self.megatron_config,
            dtype=self.dtype,
            trainable=self.optim_config is not None,
            seed=self.seed,
            device=self.device,
        )
        built = build_megatron(plan)
        prepare_schedule(built.config)
        self.vocab_size, self.chunks = built.vocab_size, list(built.chunks)
        self.params = list(param_parts(built))
        self.expert_load = load_of_chunks(self.chunks, built.config, self.device)
        self.low_ranks = {part.weight_name: part for part in low_ranks(self.chunks)}
        mark_cut_weights(self.params)
        if self.optim_config is not None:
            built.config.finalize_model_grads_func = sum_gradients
            self._make_trainable(self.optim_config)
        compat.install()

    def _make_trainable(self, optim: OptimConfig) -> None:
        distributed, offload = self.megatron_config.use_distributed_optimizer, self.megatron_config.optimizer_offload
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        wrapped = [
            DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.chunks)
        ]
        self.chunks = list(wrapped)
        self.optimizer = MegatronAdamW(wrapped, optim, dtype=self.dtype, distributed=distributed, offload=offload)

    @property
    def parallel(self) -> ParallelState:
        if self._parallel is None:
            raise EngineError("the training engine is not initialized: call initialize first")
        return self._parallel

    # Passes

    def forward_backward(
        self, rows: Rows, loss_fn: LossFunction, *, outputs: Iterable[str] = ("log_probs",), rows_per_unit: int = 1
    ) -> dict[str, float]:
        if self.optimizer is None:
            raise EngineError("this engine was built without an optimizer: it can infer, not train")
        self._prepare()
        wanted = check_outputs(self.kind, outputs)
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        sums: dict[str, list[Tensor]] = {}

        def finish(batch: MicroBatch, chunk: nn.Module, hidden: Tensor) -> Tensor:
            result = loss_fn(self._outputs(batch, chunk, hidden, wanted), batch.rows)
            if not result.loss.requires_grad:
                raise EngineError(f"the loss does not depend on the engine's outputs {sorted(wanted)}: nothing to train on")
            losses.append(result.loss.detach())
            for name, value in result.sums.items():
                sums.setdefault(name, []).append(value.detach())
            return result.loss

        bins = self._cut(rows, self.micro_batch, rows_per_unit)
        self._run(rows, bins, finish, train=True, fillers=rows_per_unit)
        return self._global_sums(losses, sums)

    def _run(
        self,
        rows: Rows,
        bins: list[list[int]],
        finish: Callable[[MicroBatch, nn.Module, Tensor], Tensor],
        *,
        train: bool,
        fillers: int = 1,
    ) -> None:
        make = partial(self._micro_batch, rows, bins, fillers)
        for chunk in self.chunks:
            chunk.train(train)
        run_micro_batches(self.chunks, make, len(bins), finish, train=train)

    def _micro_batch(self, rows: Rows, bins: list[list[int]], fillers: int, number: int) -> MicroBatch:
        micro = trim(take_rows(rows, bins[number], fillers=fillers))
        plan = row_inputs if self.kind == "reward" else model_inputs
        inputs = plan(micro, pack=True, device=self.device)
        return MicroBatch(rows=on_device(micro, self.device), inputs=inputs, indices=bins[number])

    def _outputs(self, batch: MicroBatch, chunk: nn.Module, hidden: Tensor, wanted: frozenset[str]) -> ForwardOutputs:
        model = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
        assert isinstance(model, MegatronLM) and isinstance(batch.inputs.plan, AttentionPlan)
        group = self.parallel.context_group
        own = own_outputs(batch.inputs, model.own_tokens(batch.inputs.plan)) if group.size() > 1 else None
        inputs = batch.inputs if own is None else own.inputs
        if self.kind == "policy":
            values = policy_outputs(
                hidden,
                model.head_weight,
                inputs,
                vocab_size=self.vocab_size,
                group=self.parallel.tensor_group,
                temperature=self.temperature,
                wanted=wanted,
            )
        else:
            values = dict.fromkeys(wanted, scalar_output(hidden, model.head_weight, inputs))
        if own is not None:
            values = {name: own.gathered(values[name], group) for name in sorted(values)}
        return ForwardOutputs(**{name: batch.inputs.spread(value) for name, value in values.items()})

    def _global_sums(self, losses: list[Tensor], sums: dict[str, list[Tensor]]) -> dict[str, float]:
        """Sums over micro-batches and data-parallel ranks on the last stage, which broadcasts the result within the model
        copy."""
        totals: dict[str, float] = {}
        if self.parallel.is_last_stage:
            names = sorted(sums)
            columns = [losses, *(sums[name] for name in names)]
            local = torch.stack([torch.stack(column).double().sum() for column in columns])
            totals = dict(zip(["loss", *names], self.reduce(local).tolist(), strict=True))
        if self.parallel.model_size > 1:
            box = [totals]
            dist.broadcast_object_list(box, src=self.parallel.last_stage, group=self.parallel.model_group)
            totals = box[0]
        self._loss_is_finite = math.isfinite(totals["loss"])
        return totals

    def infer(self, rows: Rows, *, outputs: Iterable[str], adapters: bool = True) -> dict[str, Tensor]:
        self._prepare()
        names = sorted(check_outputs(self.kind, outputs))
        needed = rows_read(rows, self.kind)
        shape = needed["response_mask"].shape if "response_mask" in needed else needed["attention_mask"].shape[:1]
        results = torch.zeros((len(names), *shape))
        passes: list[tuple[list[int], ForwardOutputs]] = []

        def finish(batch: MicroBatch, chunk: nn.Module, hidden: Tensor) -> Tensor:
            passes.append((batch.indices, self._outputs(batch, chunk, hidden, frozenset(names))))
            return hidden.new_zeros(())

        set_adapters(self.chunks, adapters)
        with torch.no_grad():
            self._run(needed, self._cut(needed, self.infer_micro_batch), finish, train=False)
        set_adapters(self.chunks, True)
        for indices, passed in passes:  # the first copy waits for all passes, and no pass waits
            for result, name in zip(results if indices else (), names, strict=bool(indices)):
                put_rows(result, indices, getattr(passed, name))
        if self.parallel.model_size > 1 and results.numel():
            dist.broadcast(results, src=self.parallel.last_stage, group=self.parallel.model_group)
        return dict(zip(names, results, strict=True))

    def _cut(self, rows: Rows, config: MicroBatchConfig, rows_per_unit: int = 1) -> list[list[int]]:
        return cut_rows(rows, config, rows_per_unit, self._num_passes)

    def _num_passes(self, needed: int) -> int:
        """Returns the largest number of passes that any data-parallel rank needs, in whole rounds of the schedule."""
        most = int(self.reduce(torch.tensor([needed]), op="max").item()) if self.dp_size > 1 else needed
        return passes_needed(most, self.parallel.pipeline_size, self.parallel.stages is not None)

    # Steps

    def optimizer_step(self) -> StepReport:
        if self.optimizer is None:
            raise EngineError("this engine was built without an optimizer: it can infer, not train")
        self._prepare()
        report = self.optimizer.step(self.grad_clip, loss_is_finite=self._loss_is_finite)
        self.optimizer.zero_grad()
        return report

    def reduce(self, values: Tensor, op: str = "sum", *, every_rank: bool = False) -> Tensor:
        result = values.to(self.device, copy=True)
        group = dist.group.WORLD if every_rank else self.parallel.data_group
        if dist.get_world_size(group) > 1:
            dist.all_reduce(result, op=REDUCE_OPS[op], group=group)
        return result.to(values.device)

    def gather(self, rows: Tensor) -> Tensor:
        return gather_rows(rows, self.device, self.parallel.data_group)

    # Weights and state

    def local_weights(self) -> Iterator[Piece] | None:
        if self.publishes_adapters:
            return adapter_pieces(self._pieces(), scaling_of(self.model_config))
        return None if self.low_ranks else self._base_pieces()

    def _base_pieces(self) -> Iterator[Piece]:
        return (piece for piece in self._pieces() if LORA_MARK not in piece.name)

    def _pieces(self) -> Iterator[Piece]:
        self._prepare()
        for entry in self.params:
            for part in entry.parts:
                view = take(entry.param.detach(), part.local)
                yield Piece(name=part.name, tensor=view, shape=part.shape, region=part.region)

    def _merged(self, piece: Piece) -> Tensor:
        part = self.low_ranks.get(piece.name)
        return piece.tensor if part is None else merged(piece, part, scaling_of(self.model_config))

    def named_weights(self, *, bucket_bytes: int = 256 << 20) -> Iterator[list[tuple[str, Tensor]]]:
        return self._stream("merged", list(self._base_pieces()), bucket_bytes)

    def published_weights(self, *, bucket_bytes: int = 256 << 20) -> Iterator[list[tuple[str, Tensor]]]:
        if not self.publishes_adapters:
            return self.named_weights(bucket_bytes=bucket_bytes)
        return self._stream("adapters", list(adapter_pieces(self._pieces(), scaling_of(self.model_config))), bucket_bytes)

    def adapter(self) -> Adapter | None:
        if self.model_config.lora_rank == 0:
            return None
        pieces, head = list(adapter_pieces(self._pieces(), 1.0)), f"{SCALAR_HEAD}.weight"
        pieces += [dataclasses.replace(one, name=PEFT_MODEL + head) for one in self._pieces() if one.name == head]
        buckets = self._stream("adapter", pieces, ADAPTER_BUCKET_BYTES)
        planned = (tensor.name for tensor in self._streamed["adapter"])
        layers = [name[len(PEFT_MODEL) :].removesuffix(".lora_A.weight") for name in planned if name.endswith(".lora_A.weight")]
        return Adapter(config=saved_config(layers, self.model_config, self.kind), buckets=buckets)

    def _stream(self, content: str, pieces: list[Piece], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Streams the tensors of which the ranks have these pieces; content: a name under which the plan is kept."""
        experts_apart = self.megatron_config.expert_model_parallel_size > 1  # then the ranks of one model copy lack some experts
        group = dist.group.WORLD if experts_apart else self.parallel.model_group
        assert group is not None
        if content not in self._streamed:
            infos = [piece.info for piece in pieces]
            infos_by_rank = [infos] * group.size()
            dist.all_gather_object(infos_by_rank, infos, group=group)
            self._streamed[content] = plan_stream(infos_by_rank)
        return iter(MegatronWeightStream(self._streamed[content], pieces, group, bucket_bytes, self.device, self._merged))

    def state_shards(self) -> Iterator[Piece]:
        return live_pieces(live for live in self._live_ranges() if not live.replica)

    def load_state(self, read: Callable[[Piece], Tensor]) -> None:
        fill(self._live_ranges(), read)
        if self.optimizer is not None:
            self.optimizer.publish()

    def _live_ranges(self) -> list[LiveRange]:
        self._prepare()
        if self.optimizer is not None:
            self.optimizer.hosted.wait()
        ranges = self.optimizer.ranges if self.optimizer is not None else []
        return live_ranges(self.params, ranges, distributed=self.optimizer is not None and self.optimizer.distributed)

    def scalar_state(self) -> dict[str, int | float]:
        return {} if self.optimizer is None else self.optimizer.scalar_state()

    def load_scalar_state(self, state: Mapping[str, int | float]) -> None:
        if self.optimizer is not None:
            self.optimizer.load_scalar_state(state)

    # Device and host memory

    def _prepare(self) -> None:
        assert self.parallel is not None
        self.onload()

    def onload(self) -> None:
        self._host.restore()

    def offload(self) -> None:
        config = self.megatron_config
        if self.device.type == "cpu" or self._host.stored:
            return
        if config.param_offload:
            self._host.empty(entry.param for entry in self.params)
        if config.grad_offload and self.optimizer is not None:
            buffers = [b for chunk in self.optimizer.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
            self._host.empty((buffer.grad_data for buffer in buffers), keep=False)
        if self.optimizer is not None:
            self.optimizer.hosted.wait()  # till then their memory on the device is not free
        torch.cuda.empty_cache()


@dataclass(slots=True, kw_only=True, frozen=True)
class ParallelState:
    """This rank's place in the groups.

    model_group: the ranks that together have all of the model's weights.  Where context_group, whose ranks have equal weights,
        has several ranks, as many model groups share the same rows.
    last_stage: the global rank in model_group that broadcasts the outputs.
    collects: whether this rank returns the outputs for all ranks that share its rows.
    """

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


@dataclass(slots=True, kw_only=True, frozen=True)
class Sizes:
    """The numbers of ranks that share a model's matrices, its layers, each sequence, and its experts.

    stages: the number of pieces of layers that a pipeline rank has; None for one, without interleaving.
    """

    tensor: int
    pipeline: int
    stages: int | None
    context: int
    experts: int

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))


def ensure_model_parallel(megatron: MegatronConfig) -> ParallelState:
    """Creates the groups over the default process group, or returns those that another engine of this process has created.

    Every rank calls it, and it blocks.  Raises ConfigError if another engine created groups of other sizes, or if the sizes do
    not fit the number of ranks.
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
        create_gloo_process_groups=False,  # only megatron's own checkpoints use gloo groups
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


def wanted_sizes(megatron: MegatronConfig) -> Sizes:
    """Returns the sizes that the settings configure."""
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
