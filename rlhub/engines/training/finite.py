"""Whether what a training engine holds is finite: asked after each update, before each save and before each sync.

A step whose gradient is not finite is skipped; a finite one can still make weights that are not, by a learning rate out of all
bounds.  Nothing that is computed, saved or compared later would say so: a fingerprint of NaN equals that of the same NaN.
"""

from __future__ import annotations

from itertools import takewhile

import torch
import torch.distributed as dist

from rlhub.engines.training.base import TrainEngine
from rlhub.errors import NonFiniteError
from rlhub.protocol.weights.fingerprint import nonfinite_names

WEIGHTS = "model."
"""What the names of weights begin with in `state_shards`, which has them before everything else."""
SHOWN = 4
"""Most names that an error lists."""


def check_finite(engine: TrainEngine, occasion: str, *, optimizer: bool = False) -> None:
    """Raise NonFiniteError, on every rank, if any rank has a weight that is not finite; every rank calls it.

    occasion: when this is asked, for the message.  optimizer: its state too.
    """
    pieces = engine.state_shards()
    if not optimizer:
        pieces = takewhile(lambda piece: piece.name.startswith(WEIGHTS), pieces)
    found = nonfinite_names((piece.name.removeprefix(WEIGHTS), piece.tensor) for piece in pieces)
    if int(engine.reduce(torch.tensor(len(found)), "max", every_rank=True)) == 0:
        return
    names = _of_all_ranks(found)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    raise NonFiniteError(
        f"{len(names)} weights are not finite {occasion}: {', '.join(names[:SHOWN])}{more}. They were neither saved nor given to "
        "a rollout engine. Lower the learning rate (optim.lr) or what multiplies the loss, and run the command again: it goes on "
        "from its last checkpoint",
        weights=tuple(names),
    )


def _of_all_ranks(found: list[str]) -> list[str]:
    """Each name once, in the order of the ranks."""
    everywhere = [found]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everywhere *= dist.get_world_size()
        dist.all_gather_object(everywhere, found)
    return list(dict.fromkeys(name for names in everywhere for name in names))
