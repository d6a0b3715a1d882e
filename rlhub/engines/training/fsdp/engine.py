"""TrainEngine on FSDP2, for policies, value models and reward models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rlhub.config.sections.training import FSDPConfig, ModelConfig, OptimConfig, recompute_of
from rlhub.config.sections.vla import FLOW, vla_of
from rlhub.engines.training.base import (
    ADAPTER_BUCKET_BYTES,
    Adapter,
    ForwardOutputs,
    LossFunction,
    Rows,
    StepReport,
    TokenCounts,
    TrainEngine,
)
from rlhub.engines.training.collectives import gather_rows
from rlhub.engines.training.expert_load import load_of
from rlhub.engines.training.fsdp.blocks import resolve_compile
from rlhub.engines.training.fsdp.building import BuildPlan, ShardedAdamW, build_sharded, fill, live_pieces
from rlhub.engines.training.fsdp.weights import (
    Entry,
    FSDPWeightStream,
    Layout,
    ShardedParam,
    adapter_pieces,
    local_pieces,
    make_layout,
    num_bytes,
    reshard,
)
from rlhub.engines.training.micro_batch import MicroBatchConfig, cut_rows, on_device, put_rows, take_rows, trim
from rlhub.engines.training.packing import (
    ModelInputs,
    action_flow_inputs,
    action_inputs,
    check_outputs,
    model_inputs,
    needed_tokens,
    picture_inputs,
    row_inputs,
    rows_read,
)
from rlhub.engines.training.prefixes import cut_sorted, sort_rows
from rlhub.errors import EngineError
from rlhub.models.experts import RouterReplay, replay_in
from rlhub.models.hf import ModelKind
from rlhub.models.lora import lora_layers, lora_names, saved_config, saved_names, set_adapters
from rlhub.models.packed_attention import use_flash_attention_3
from rlhub.models.vision import ImageReader, image_reader
from rlhub.protocol.weights.pieces import Piece

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
UNSHARDED_GRAD_BYTES = 2 << 30
"""Gradients up to this size stay unsharded until the last micro-batch, so that a step has one reduction.  Larger ones are
reduced after each micro-batch, which costs communication but needs only a shard's memory."""


class FSDPEngine(TrainEngine):
    """A TrainEngine that shards parameters, gradients and optimizer state over the ranks.

    kind: "policy" computes log_probs, entropy and sum_pi_squared, "value" values, "reward" scores; "vla" those of a policy
        and, with a value head, values.
    optim: None builds an engine that only infers.
    temperature: divides the logits.
    infer_micro_batch: the limits of a pass of `infer`; None takes those of training.  Both share prefixes, or neither does.
    seed: determines adapters and new heads.
    """

    def __init__(
        self,
        model: ModelConfig,
        fsdp: FSDPConfig,
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
        self.model_config, self.fsdp_config, self.optim_config = model, fsdp, optim
        self.kind: ModelKind = kind
        self.vla = vla_of(model) if kind == "vla" else None
        self.reader: ImageReader | None = None  # of a language model that reads images
        self.device, self.temperature, self.grad_clip, self.seed = device, temperature, grad_clip, seed
        self.micro_batch = micro_batch or MicroBatchConfig()
        self.infer_micro_batch = infer_micro_batch or self.micro_batch
        self.share_prefixes = self.micro_batch.share_prefixes
        if self.share_prefixes and (kind != "policy" or not model.use_remove_padding):
            raise EngineError(f"a {kind} engine shares no prefixes{'' if model.use_remove_padding else ' without packing'}")
        self.dp_rank, self.dp_size, self.is_collect = 0, 1, True
        self.layout: Layout | None = None
        self.optimizer: ShardedAdamW | None = None
        self.params: list[ShardedParam] = []
        self.replay: RouterReplay | None = None  # of a model with experts
        self._loss_is_finite = True
        self._offloaded = False

    def initialize(self) -> None:
        self.dp_rank, self.dp_size = dist.get_rank(), dist.get_world_size()
        self.layout = make_layout(self.fsdp_config, self.device)
        use_flash_attention_3(self.device)
        is_flow = self.vla is not None and self.vla.decoding == FLOW  # words and pictures reach its actions by a key-value cache
        self.reader = image_reader(self.model_config) if self.kind == "policy" else None
        plan = BuildPlan(
            model=self.model_config,
            kind=self.kind,
            dtype=DTYPES[self.fsdp_config.model_dtype],
            temperature=self.temperature,
            trainable=self.optim_config is not None,
            seed=self.seed,
            share_prefixes=self.share_prefixes,
            recompute="none" if is_flow else recompute_of(self.model_config, self.fsdp_config),
            compiled=resolve_compile(self.fsdp_config.use_torch_compile, self.device),
        )
        built = build_sharded(plan, self.layout, self.device)
        self.root, self.model, self.params = built.root, built.model, built.params
        self.replay = replay_in(self.model)
        self.expert_load = load_of(self.model, self.device)
        self._sync_once = num_bytes(p.param for p in self.params if p.param.requires_grad) <= UNSHARDED_GRAD_BYTES
        if self.optim_config is not None:
            offload = self.fsdp_config.optimizer_offload
            self.optimizer = ShardedAdamW(self.params, self.optim_config, self.layout, offload=offload)

    # Passes

    def forward_backward(
        self, rows: Rows, loss_fn: LossFunction, *, outputs: Iterable[str] = ("log_probs",), rows_per_unit: int = 1
    ) -> dict[str, float]:
        if self.optimizer is None:
            raise EngineError("this engine was built without an optimizer: it can infer, not train")
        self._prepare()
        wanted = check_outputs(self.kind, outputs)
        self.root.train()
        self._zero_grad()
        losses: list[Tensor] = []
        sums: dict[str, list[Tensor]] = {}
        bins = self._cut(rows, self.micro_batch, rows_per_unit)
        for number, indices in enumerate(bins):
            if isinstance(self.root, FSDPModule):
                self.root.set_requires_gradient_sync(not self._sync_once or number == len(bins) - 1)
            micro = trim(take_rows(rows, indices, fillers=rows_per_unit))
            inputs, micro = self._inputs(micro), on_device(micro, self.device)
            result = loss_fn(self._forward(inputs, wanted), micro)
            if not result.loss.requires_grad:
                raise EngineError(f"the loss does not depend on the engine's outputs {sorted(wanted)}: nothing to train on")
            (result.loss * self.dp_size).backward()  # type: ignore[no-untyped-call]  # FSDP averages gradients over the ranks
            losses.append(result.loss.detach())
            for name, value in result.sums.items():
                sums.setdefault(name, []).append(value.detach())
        return self._global_sums(losses, sums)

    def _global_sums(self, losses: list[Tensor], sums: dict[str, list[Tensor]]) -> dict[str, float]:
        if self.token_counts is not None:
            counts = dataclasses.asdict(self.token_counts)
            sums |= {f"prefix_{name}": [torch.tensor(count, device=self.device)] for name, count in counts.items()}
        names = sorted(sums)
        columns = [losses, *(sums[name] for name in names)]
        totals = torch.stack([torch.stack(column).double().sum() for column in columns])
        loss, *values = self.reduce(totals).tolist()
        self._loss_is_finite = math.isfinite(loss)
        return {"loss": loss, **dict(zip(names, values, strict=True))}

    def infer(self, rows: Rows, *, outputs: Iterable[str], adapters: bool = True) -> dict[str, Tensor]:
        self._prepare()
        wanted = check_outputs(self.kind, outputs)
        needed = rows_read(rows, self.kind, self.vla)
        shape = needed["response_mask"].shape if "response_mask" in needed else needed["attention_mask"].shape[:1]
        results = {name: torch.zeros(shape, dtype=self._output_dtype) for name in wanted}
        self.root.eval()
        set_adapters(self.root, adapters)
        passes = self._cut(needed, self.infer_micro_batch)
        with torch.no_grad():
            passed = [self._forward(self._inputs(trim(take_rows(needed, indices))), wanted) for indices in passes]
        set_adapters(self.root, True)
        reshard(self.root)
        for indices, outputs_of_pass in zip(
            passes, passed, strict=True
        ):  # the first copy waits for all passes, and no pass waits
            for name in results if indices else ():
                put_rows(results[name], indices, getattr(outputs_of_pass, name))
        return results

    def _inputs(self, micro: Rows) -> ModelInputs:
        if self.vla is not None:
            plan_actions = action_flow_inputs if self.vla.decoding == FLOW else action_inputs
            return plan_actions(micro, self.vla, device=self.device)
        pack, device = self.model_config.use_remove_padding, self.device
        if self.kind == "reward":
            return row_inputs(micro, pack=pack, device=device)
        if self.reader is not None:
            return picture_inputs(micro, self.reader, self.model, device=device)
        inputs = model_inputs(micro, pack=pack, device=device, share_prefixes=self.share_prefixes)
        if self.token_counts is not None:
            self.token_counts.computed += inputs.input_ids.numel()
        return inputs

    def _forward(self, inputs: ModelInputs, wanted: frozenset[str]) -> ForwardOutputs:
        if self.replay is not None:
            self.replay.load(inputs.experts)
        elif inputs.experts is not None:
            raise EngineError(
                f"the routers of {self.model_config.path} take no recorded experts: set actor.router_replay=disabled"
            )
        values: dict[str, Tensor] = self.root(inputs, wanted)
        return ForwardOutputs(**{name: inputs.spread(value) for name, value in values.items()})

    def _cut(self, rows: Rows, config: MicroBatchConfig, rows_per_unit: int = 1) -> list[list[int]]:
        if not self.share_prefixes:
            return cut_rows(rows, config, rows_per_unit, self._num_passes)
        if rows_per_unit > 1:
            raise EngineError("rows that share prefixes have no units of several rows")
        ordered = sort_rows(rows["input_ids"], needed_tokens(rows)[1])
        self.token_counts = TokenCounts(rows=sum(ordered.lengths), distinct=ordered.num_distinct)
        return cut_sorted(ordered, config, self._num_passes)

    def _num_passes(self, needed: int) -> int:
        """Returns the largest number of passes that any rank needs."""
        return int(self.reduce(torch.tensor([needed]), op="max").item()) if self.dp_size > 1 else needed

    @property
    def _output_dtype(self) -> torch.dtype:
        return torch.float64 if self.fsdp_config.model_dtype == "fp64" else torch.float32

    # Steps

    def optimizer_step(self) -> StepReport:
        if self.optimizer is None:
            raise EngineError("this engine was built without an optimizer: it can infer, not train")
        self._prepare()
        report = self.optimizer.step(self.grad_clip, loss_is_finite=self._loss_is_finite)
        self._zero_grad()
        return report

    def _zero_grad(self) -> None:
        for param in self.params:
            param.param.grad = None

    def reduce(self, values: Tensor, op: str = "sum", *, every_rank: bool = False) -> Tensor:
        result = values.to(self.device, copy=True)
        if self.dp_size > 1:
            dist.all_reduce(result, op=REDUCE_OPS[op])
        return result.to(values.device)

    def gather(self, rows: Tensor) -> Tensor:
        return gather_rows(rows, self.device)

    # Weights and state

    def named_weights(self, *, bucket_bytes: int = 256 << 20) -> Iterator[list[tuple[str, Tensor]]]:
        self._prepare()
        assert self.layout is not None
        return iter(FSDPWeightStream(self._entries(), self.layout, bucket_bytes))

    def published_weights(self, *, bucket_bytes: int = 256 << 20) -> Iterator[list[tuple[str, Tensor]]]:
        if not self.publishes_adapters:
            return self.named_weights(bucket_bytes=bucket_bytes)
        self._prepare()
        assert self.layout is not None
        return iter(FSDPWeightStream(self._adapters(), self.layout, bucket_bytes))

    def local_weights(self) -> Iterator[Piece] | None:
        self._prepare()
        if self.publishes_adapters:
            return adapter_pieces(self._adapters())
        return None if self.model_config.lora_rank > 0 else local_pieces(self.params)

    def _adapters(self) -> list[Entry]:
        """Returns the adapters as a rollout engine gets them, with the scale in B."""
        by_name = {param.name: param for param in self.params}
        saved = saved_names(self.model, self.kind)
        scales = [
            (name, scale) for one in lora_names(self.model) for name, scale in ((one.lora_a, 1.0), (one.lora_b, one.scaling))
        ]
        return [Entry(name=saved[name], weight=by_name[name], scaling=scale) for name, scale in scales]

    def _entries(self) -> list[Entry]:
        by_name = {param.name: param for param in self.params}
        lora = {names.weight: names for names in lora_names(self.model)}
        adapters = {name for names in lora.values() for name in (names.lora_a, names.lora_b)}
        entries = []
        for name, param in by_name.items():
            if name in lora:
                low, high = by_name[lora[name].lora_a], by_name[lora[name].lora_b]
                entries.append(Entry(name=name, weight=param, lora_a=low, lora_b=high, scaling=lora[name].scaling))
            elif name not in adapters:
                entries.append(Entry(name=name, weight=param))
        return entries

    def adapter(self) -> Adapter | None:
        if self.model_config.lora_rank == 0:
            return None
        self._prepare()
        assert self.layout is not None
        saved = saved_names(self.model, self.kind)
        entries = [Entry(name=saved[param.name], weight=param) for param in self.params if param.name in saved]
        return Adapter(
            config=saved_config((name for name, _ in lora_layers(self.model)), self.model_config, self.kind),
            buckets=iter(FSDPWeightStream(entries, self.layout, ADAPTER_BUCKET_BYTES)),
        )

    def state_shards(self) -> Iterator[Piece]:
        self._prepare()
        assert self.layout is not None
        if self.layout.replica > 0:  # the first replica yields the same rows
            return iter(())
        return live_pieces(self.params, self.optimizer)

    def load_state(self, read: Callable[[Piece], Tensor]) -> None:
        self._prepare()
        fill(live_pieces(self.params, self.optimizer), read)

    def scalar_state(self) -> dict[str, int | float]:
        return {} if self.optimizer is None else self.optimizer.scalar_state()

    def load_scalar_state(self, state: Mapping[str, int | float]) -> None:
        if self.optimizer is not None:
            self.optimizer.load_scalar_state(state)

    # Device and host memory

    def _prepare(self) -> None:
        if self.layout is None:
            raise EngineError("the training engine is not initialized: call initialize first")
        if self._offloaded:
            self.onload()

    def onload(self) -> None:
        if self._offloaded:
            self._move(self.device)
        self._offloaded = False

    def offload(self) -> None:
        if self.device.type == "cpu":
            return
        if self.fsdp_config.param_offload:
            self._move(torch.device("cpu"))
            self._offloaded = True
        if self.optimizer is not None:
            self.optimizer.hosted.wait()  # till then their memory on the device is not free
        torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        self._zero_grad()
        self.root.to(device)
        if self.optimizer is not None:
            self.optimizer.rebind()
