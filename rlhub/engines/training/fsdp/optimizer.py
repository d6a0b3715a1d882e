"""AdamW on each rank's rows, with gradient clipping over all ranks.

The optimizer sees plain local tensors that alias the shards: no per-parameter dispatch through distributed tensors, and its
state is already what a checkpoint needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhub.config.sections.training import OptimConfig
from rlhub.engines.training.fsdp.sharding import Layout, ShardedParam
from rlhub.engines.training.host_tensors import HOST, HostTensors
from rlhub.engines.training.learning_rate import check_schedule, learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True, kw_only=True)
class Slot:
    """A trainable weight and the leaf tensor the optimizer steps in its place."""

    owner: ShardedParam
    leaf: nn.Parameter


class ShardedAdamW:
    """AdamW whose norms and biases (fewer than two dimensions) do not decay.  offload: the moments are made in host memory and
    are on the device only while `step` writes them."""

    def __init__(self, params: Sequence[ShardedParam], config: OptimConfig, layout: Layout, *, offload: bool = False) -> None:
        check_schedule(config)
        self.config, self.layout = config, layout
        self.slots = [Slot(owner=p, leaf=nn.Parameter(p.local)) for p in params if p.param.requires_grad]
        self.num_steps = 0
        self.num_skipped = 0
        decayed = [slot.leaf for slot in self.slots if slot.owner.param.dim() >= 2]
        others = [slot.leaf for slot in self.slots if slot.owner.param.dim() < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )
        for slot in self.slots:
            leaf = slot.leaf
            where = HOST if offload else leaf.device
            self.adamw.state[leaf] = {name: torch.zeros_like(leaf, requires_grad=False, device=where) for name in MOMENTS}
            self.adamw.state[leaf]["step"] = torch.zeros((), dtype=torch.float32, device=leaf.device)
        self._hosted = HostTensors(self.moment(slot, name) for slot in self.slots if offload for name in MOMENTS)

    @property
    def schedule_step(self) -> int:
        return self.num_steps + self.num_skipped

    def moment(self, slot: Slot, name: str) -> Tensor:
        """exp_avg or exp_avg_sq of this rank's rows, live."""
        value: Tensor = self.adamw.state[slot.leaf][name]
        return value

    def rebind(self) -> None:
        """Point the leaves at where the shards are now (they move when weights are loaded or offloaded)."""
        for slot in self.slots:
            slot.leaf.data = slot.owner.local

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps
        for slot in self.slots:
            self.adamw.state[slot.leaf]["step"].fill_(float(num_steps))

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Norm of the whole gradient; every rank calls."""
        norms = torch._foreach_norm([g for slot in self.slots if (g := slot.owner.local_grad) is not None])
        device = self.slots[0].leaf.device
        total = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
        if self.layout.shard_group is not None:
            dist.all_reduce(total, group=self.layout.shard_group)
        return float(total.sqrt())

    @torch.no_grad()
    def step(self, max_norm: float, *, loss_is_finite: bool) -> tuple[float, float, bool]:
        """Clip and step unless the gradient or loss is not finite; returns (gradient norm, learning rate, skipped).

        The schedule moves on either way.  Every rank calls, and all come to the same decision.
        """
        rate, norm = learning_rate(self.config, self.schedule_step), self.grad_norm()
        if not (loss_is_finite and math.isfinite(norm)):
            self.num_skipped += 1
            return norm, rate, True
        self.rebind()
        for slot in self.slots:
            slot.leaf.grad = slot.owner.local_grad
        if norm > max_norm:
            torch._foreach_mul_([slot.leaf.grad for slot in self.slots if slot.leaf.grad is not None], max_norm / (norm + 1e-6))
        for group in self.adamw.param_groups:
            group["lr"] = rate
        with self._hosted.on_device(self.slots[0].leaf.device):
            self.adamw.step()
        for slot in self.slots:
            slot.leaf.grad = None
        self.num_steps += 1
        return norm, rate, False
