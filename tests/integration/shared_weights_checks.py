"""What the ranks of test_shared_weights.py run: updates of engines that keep one copy of their weights."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rlhub.engines.rollout.base import RolloutEngine, SamplingParams
from rlhub.errors import WeightMismatchError
from rlhub.protocol.weights.pieces import Piece
from rlhub.sharding_manager import shared_weights
from rlhub.sharding_manager.execution import Execution
from rlhub.sharding_manager.manager import ShardingManager
from rlhub.sharding_manager.shared_weights import SharedWeights
from tests.integration.reshard_checks import BUCKET, refuses, rollout, step, trainer, wrong_names
from tests.support import rollout_contract as contract

LOOK_S, APPEAR_S = 0.3, 60.0


def fresh(path: str, dtype: str = "float32") -> tuple[ShardingManager, RolloutEngine]:
    """The ranks' trainer, and a manager that has not seen the engine before.  The engine's weights are its own again."""
    train, engine = trainer(path), rollout(path, dtype)
    with engine.overwriting(0):
        engine.move_weights([block.clone() for block in engine.weight_memory()])
    return ShardingManager(train, engine, bucket_bytes=BUCKET, timeout_s=60), engine


def changed(manager: ShardingManager) -> dict[str, Tensor]:
    return step(manager._train)  # type: ignore[arg-type]


def weight(engine: RolloutEngine, name: str) -> Tensor:
    return next(piece.tensor for piece in engine.live_weights() if piece.name == name)


def error_of_sync(manager: ShardingManager, version: int) -> tuple[str, str]:
    """(weight, message) of a WeightMismatchError; ("", "") without."""
    try:
        manager.sync(version)
    except WeightMismatchError as error:
        return error.weight, str(error)
    return "", ""


def updated(path: str, dtype: str) -> dict[str, Any]:
    """Four updates with changed weights."""
    manager, engine = fresh(path, dtype)
    wrong, wire = [], []
    for version in range(4):
        full = changed(manager)
        wire.append(manager.sync(version).wire_bytes)
        dist.barrier()
        wrong += wrong_names(engine, full)
        dist.barrier()  # nobody writes while another looks
    greedy = contract.tokens(engine.generate(contract.requests(), SamplingParams(temperature=0.0, max_new_tokens=8)))
    assert manager._shared is not None
    return {
        "wrong": wrong,
        "wire_bytes": wire,
        "version": engine.version,
        "greedy": greedy,
        "size": manager._shared.size,
        "seen": seen_by_the_other(engine),
    }


def seen_by_the_other(engine: RolloutEngine) -> float:
    """Rank 0 writes a number into a weight; what the last rank then reads."""
    view = weight(engine, "model.norm.weight")
    before = float(view[0])
    dist.barrier()
    if dist.get_rank() == 0:
        view[0] = 123.0
    dist.barrier()
    seen = float(view[0])
    dist.barrier()
    if dist.get_rank() == 0:
        view[0] = before
    dist.barrier()
    return seen


def flipped(path: str, index: int) -> dict[str, Any]:
    """Rank 0 changes one element, which is in the first (0) or the last (-1) rank's part, after an update was written."""
    manager, engine = fresh(path)
    manager.sync(0)
    exchange = Execution._exchange

    def flip_first(self: Execution, sent: dict[int, list[int]]) -> dict[int, list[int]]:
        dist.barrier()
        if dist.get_rank() == 0:
            view = weight(engine, "model.norm.weight")
            view[index] = torch.nextafter(view[index], torch.tensor(torch.inf))
        dist.barrier()
        return exchange(self, sent)

    with mock.patch.object(Execution, "_exchange", flip_first):
        name, _ = error_of_sync(manager, 1)
    out = {"name": name, "refuses": refuses(engine), "version": engine.version}
    manager.sync(2)
    return {**out, "healed": engine.version == 2 and not refuses(engine)}


def waits(path: str, broken: bool) -> bool:
    """Whether an update reached the last rank's engine while that could still generate.  broken: nobody waits."""
    manager, engine = fresh(path)
    manager.sync(0)
    before = {piece.name: piece.tensor.clone() for piece in engine.live_weights()}
    changed(manager)

    def written() -> bool:
        return any(not torch.equal(piece.tensor, before[piece.name]) for piece in engine.live_weights())

    @contextmanager
    def unguarded(self: SharedWeights, pieces: Iterable[Piece]) -> Iterator[None]:
        yield

    reached = False
    with ExitStack() as stack:
        if broken:
            stack.enter_context(mock.patch.object(SharedWeights, "writing", unguarded))
        if dist.get_rank() == dist.get_world_size() - 1:
            until = time.monotonic() + (APPEAR_S if broken else LOOK_S)
            while time.monotonic() < until and not reached:
                reached = written()
                time.sleep(0.01)
        manager.sync(1)
    dist.barrier()
    return reached


def refused(path: str) -> dict[str, Any]:
    """The last rank cannot open the memory: all keep their own, and are right."""
    manager, engine = fresh(path)
    original = shared_weights.open_segment

    def opened(*arguments: Any, **options: Any) -> Tensor | None:
        return None if dist.get_rank() == dist.get_world_size() - 1 else original(*arguments, **options)

    with mock.patch.object(shared_weights, "open_segment", opened):
        manager.sync(0)
    full = changed(manager)
    manager.sync(1)
    return {"shared": manager._shared is not None, "wrong": wrong_names(engine, full), "seen": seen_by_the_other(engine)}


def moved_out(path: str) -> dict[str, Any]:
    """The last rank's engine takes its weights into other memory between two updates."""
    manager, engine = fresh(path)
    manager.sync(0)
    manager.sync(1)
    if dist.get_rank() == dist.get_world_size() - 1:
        with engine.overwriting(1):
            engine.move_weights([block.clone() for block in engine.weight_memory()])
    changed(manager)
    name, message = error_of_sync(manager, 2)
    return {"name": name, "message": message, "first": next(iter(engine.live_weights())).name, "refuses": refuses(engine)}


def die_while_sharing(path: str) -> None:
    """The last rank is killed in an update."""
    manager, _ = fresh(path)
    manager.sync(0)
    run = Execution.run

    def killed(self: Execution, *arguments: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, *arguments)

    with mock.patch.object(Execution, "run", killed):
        manager.sync(1)


def alone_on_a_machine(path: str) -> dict[str, Any]:
    """The last rank says that it is on another machine than the others."""
    manager, engine = fresh(path)
    machine = "other" if dist.get_rank() == dist.get_world_size() - 1 else "this"
    with mock.patch.object(shared_weights, "this_node", lambda: machine):
        manager.sync(0)
    full = changed(manager)
    manager.sync(1)
    dist.barrier()
    shared = manager._shared
    return {"size": 0 if shared is None else shared.size, "wrong": wrong_names(engine, full)}
