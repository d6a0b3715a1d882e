"""Collective operations of an engine's ranks outside its passes: joining the process group, bringing rows together, and checking
that weights are finite.

A step whose gradient is not finite is skipped, but a finite gradient can still produce weights that are not, with a learning
rate out of all bounds.  Nothing later would detect it, because a fingerprint of NaN equals that of the same NaN.  So weights
are checked after each update, before each save and before each sync.
"""

from __future__ import annotations

import datetime
import os
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import Tensor

from rlhub.engines.training.base import TrainEngine
from rlhub.errors import NonFiniteError
from rlhub.protocol.columns import all_gather_rows
from rlhub.protocol.weights.fingerprint import nonfinite_names

WEIGHTS = "model."
"""The prefix of the names of weights in `state_shards`, which yields them first."""
MAX_LISTED = 4
"""The most names that an error lists."""


def ensure_process_group(device: torch.device, *, timeout_s: float = 1800.0) -> None:
    """Joins the default process group unless this process has joined one already.

    One rank (WORLD_SIZE absent or 1) forms a group in memory, without a port.  More ranks read RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT from the environment; every rank must call, and the call blocks until all have.

    timeout_s: the limit of this and of every later collective, in seconds.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but not in its module's __all__
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, init_method="env://", timeout=timeout)


def gather_rows(rows: Tensor, device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """Does what `TrainEngine.gather` says, over the ranks of the group (None: all), whose tensors are on `device`."""
    size = dist.get_world_size(group)
    if size == 1:
        return rows
    shape = torch.tensor([len(rows), rows.shape[1] if rows.dim() > 1 else 1], device=device)
    shapes = torch.stack(all_gather_rows(shape[None], [1] * size, group)).squeeze(1).tolist()
    wide = rows.reshape(shape.tolist()).to(device)
    wide = torch.nn.functional.pad(wide, (0, max(width for _, width in shapes) - wide.shape[1]))
    every = torch.cat(all_gather_rows(wide, [count for count, _ in shapes], group)).to(rows.device)
    return every if rows.dim() > 1 else every.squeeze(1)


def check_finite(engine: TrainEngine, occasion: str, *, optimizer: bool = False) -> None:
    """Raises NonFiniteError on every rank if any rank has a weight that is not finite; every rank calls it.

    occasion: words for the message that say when the check was made.
    optimizer: True checks the optimizer's state too.
    """
    pieces = engine.state_shards()
    if not optimizer:
        pieces = takewhile(lambda piece: piece.name.startswith(WEIGHTS), pieces)
    found = nonfinite_names((piece.name.removeprefix(WEIGHTS), piece.tensor) for piece in pieces)
    if int(engine.reduce(torch.tensor(len(found)), "max", every_rank=True)) == 0:
        return
    names = _of_every_rank(found)
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    raise NonFiniteError(
        f"{len(names)} weights are not finite {occasion}: {', '.join(names[:MAX_LISTED])}{more}. They were neither saved nor "
        "given to a rollout engine. Lower the learning rate (optim.lr) or what multiplies the loss, and run the command again: "
        "it goes on from its last checkpoint",
        weights=tuple(names),
    )


def _of_every_rank(found: list[str]) -> list[str]:
    """Returns each name of any rank once, in the order of the ranks."""
    by_rank = [found]
    if dist.is_initialized() and dist.get_world_size() > 1:
        by_rank *= dist.get_world_size()
        dist.all_gather_object(by_rank, found)
    return list(dict.fromkeys(name for names in by_rank for name in names))
