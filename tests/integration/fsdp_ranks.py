"""Real torch.distributed ranks for tests: persistent processes that run named functions together."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rlhub.utils.ports import free_port

CALL_DEADLINE_S = 240.0


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    while (call := pipe.recv()) is not None:
        module, function, args = call
        try:
            pipe.send((True, getattr(importlib.import_module(module), function)(*args)))
        except Exception:  # noqa: BLE001 - the process boundary: the test raises it again
            pipe.send((False, traceback.format_exc()))


class Ranks:
    """`world` processes; `call` runs a function of a module on all of them and returns their results by rank."""

    def __init__(self, world: int, preload: str = "tests.integration.fsdp_checks") -> None:
        """preload: a module imported once for all ranks, if no ranks were started before."""
        self.world = world
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([preload])
        port = free_port()
        self.processes, self.pipes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, port, theirs), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(ours)

    def call(self, function: Any, *args: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, args))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(CALL_DEADLINE_S):
                raise TimeoutError(f"{function.__name__}: rank {rank} of {self.world} gave no answer in {CALL_DEADLINE_S} s")
            good, value = pipe.recv()
            if not good:
                raise AssertionError(f"{function.__name__} failed on rank {rank} of {self.world}:\n{value}")
            results.append(value)
        return results

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                with suppress(BrokenPipeError):  # it may end just now, after a rank that it needs
                    pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
