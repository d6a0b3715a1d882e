"""AdamW by Megatron-core's optimizers, whole on each rank or distributed over data-parallel ranks.

The learning rate, clipping and the decision to skip a step are those of all engines (EngineOptimizer); megatron reduces
gradients, steps and gathers the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhub.models.megatron import compat  # before megatron, which it imports quietly

# isort: split
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor, nn

from rlhub.config.sections.training import OptimConfig
from rlhub.engines.training.base import StepReport
from rlhub.engines.training.optimizer import HOST, MOMENTS, EngineOptimizer, HostTensors


class MegatronAdamW(EngineOptimizer):
    """AdamW whose norms and biases (weights of fewer than two dimensions) do not decay.  Build it after the chunks are
    wrapped.

    offload: True keeps masters and moments in host memory and brings them to the device only while `step` writes them.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        config: OptimConfig,
        *,
        dtype: torch.dtype,
        distributed: bool,
        offload: bool = False,
    ) -> None:
        super().__init__(config)
        self.chunks, self.distributed = list(chunks), distributed
        settings = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            clip_grad=0.0,  # `step` clips
        )
        self.megatron = get_megatron_optimizer(settings, self.chunks, use_gloo_process_groups=False)
        compat.install()
        self.inner: list[MegatronOptimizer] = list(self.megatron.chained_optimizers)  # dense weights, and experts
        self.ranges = [owned for optimizer in self.inner for owned in _ranges(optimizer)]
        self._device = next(self.chunks[0].parameters()).device  # defined also on a rank without ranges
        self._fill_state(HOST if offload else self._device)
        masters = [owned.main for owned in self.ranges if owned.is_master_copy]
        moments = [owned.moment(name) for owned in self.ranges for name in MOMENTS]
        self.hosted = HostTensors([*masters, *moments] if offload else [])

    def _fill_state(self, device: torch.device) -> None:
        """Creates zero moments at the start, because a checkpoint of step 0 contains them too."""
        for owned in self.ranges:
            state = owned.optimizer.optimizer.state[owned.main]
            state.update({name: torch.zeros_like(owned.main, requires_grad=False, device=device) for name in MOMENTS})
        self.set_num_steps(0)

    def set_num_steps(self, num_steps: int) -> None:
        # Torch counts steps per tensor, TransformerEngine and Apex per group.
        self.num_steps = num_steps
        for optimizer in self.inner:
            plain = isinstance(optimizer.optimizer, torch.optim.AdamW)
            for group in optimizer.param_groups:
                group |= {"fused": True} if plain else {"step": num_steps}  # one kernel for all tensors, as in the FSDP engine
                for main in group["params"] if plain else ():
                    optimizer.optimizer.state[main]["step"] = torch.tensor(float(num_steps), device=self._device)

    @torch.no_grad()
    def step(self, max_norm: float, *, loss_is_finite: bool) -> StepReport:
        with self.hosted.on_device(self._device):  # a master must be on the device of the gradient that is assigned to it
            return super().step(max_norm, loss_is_finite=loss_is_finite)

    @torch.no_grad()
    def grad_norm(self) -> float:
        self.megatron.prepare_grads()
        square = torch.zeros(
            (), dtype=torch.float64, device=self._device
        )  # on the device on every rank, so that all use the same backend
        for optimizer in self.inner:
            norms = torch._foreach_norm(optimizer.get_main_grads_for_grad_norm())
            part = torch.stack(norms).double().square().sum() if norms else torch.zeros_like(square)
            dist.all_reduce(part, group=optimizer.get_grad_stats_parallel_group())
            square += part
        return float(square.sqrt())

    @torch.no_grad()
    def apply(self, rate: float, scale: float | None) -> None:
        groups = [group for optimizer in self.inner for group in optimizer.param_groups]
        if scale is not None:
            torch._foreach_mul_([main.grad for group in groups for main in group["params"] if main.grad is not None], scale)
        for group in groups:
            group["lr"], group["weight_decay"] = rate, self.config.weight_decay * group["wd_mult"]
        self.megatron.step_with_ready_grads()

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for owned in self.ranges:
            owned.main.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copies values that were written to the ranges into the weights that the model computes with.  Every rank calls it."""
        for optimizer in self.inner:
            if isinstance(optimizer, DistributedOptimizer | Float16OptimizerWithFloat16Params):
                optimizer._copy_main_params_to_model_params()
        if self.distributed:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)


@dataclass(slots=True, kw_only=True)
class ParamRange:
    """Elements [start, stop) of a flattened local parameter, which this rank's optimizer steps.

    main: these elements (in any shape) in float32, which are the parameter's own memory or a master copy.
    """

    param: nn.Parameter
    main: Tensor
    start: int
    stop: int
    optimizer: MegatronOptimizer

    def moment(self, name: str) -> Tensor:
        """Returns exp_avg or exp_avg_sq of these elements, live."""
        value: Tensor = self.optimizer.optimizer.state[self.main][name]
        return value

    @property
    def is_master_copy(self) -> bool:
        return self.main.dtype != self.param.dtype


def _ranges(optimizer: MegatronOptimizer) -> Iterator[ParamRange]:
    """Yields the ranges that one of megatron's optimizers steps on this rank."""
    for param, main in _pairs(optimizer):
        start, stop = 0, param.numel()
        if isinstance(optimizer, DistributedOptimizer):
            owned = optimizer._get_model_param_range_map(param)["param"]
            start, stop = owned.start, owned.end
        yield ParamRange(param=param, main=main, start=start, stop=stop, optimizer=optimizer)


def _pairs(optimizer: MegatronOptimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields each parameter with the tensor that is stepped in its place; megatron's groups are parallel lists of lists."""
    if isinstance(optimizer, DistributedOptimizer):
        sides = [
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        ]
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        same = optimizer.fp32_from_fp32_groups
        sides = [(same, same), (optimizer.float16_groups, optimizer.fp32_from_float16_groups)]
    else:
        same = [group["params"] for group in optimizer.param_groups]
        sides = [(same, same)]
    for params, mains in sides:
        for group, main_group in zip(params, mains, strict=True):
            yield from zip(group, main_group, strict=True)
