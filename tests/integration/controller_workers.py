"""Workers for the tests of worker groups: a module of its own, so that worker processes can import them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from rlhub.errors import DataError
from rlhub.protocol import DataProto
from rlhub.single_controller import Dispatch, Execute, Worker, make_nd_compute_dataproto_dispatch_fn, register

logger = logging.getLogger(__name__)


class Probe(Worker):
    """Reports what it was given and where it runs.  tp: ranks that share one data-parallel shard."""

    def __init__(self, base: int = 0, tp: int = 1, fail_on_rank: int | None = None) -> None:
        if self.rank == fail_on_rank:
            raise ValueError(f"rank {self.rank} cannot be built")
        self.base = base
        self._register_dispatch_collect_info("actor", self.rank // tp, self.rank % tp == 0)

    @register(Dispatch.RANK_ZERO)
    def only_zero(self, value: object) -> tuple[int, object]:
        return self.rank, value

    @register(Dispatch.ONE_TO_ALL)
    def replicate(self, value: object) -> tuple[int, object]:
        return self.rank, value

    @register()
    def spread(self, value: object, *, other: object = None) -> tuple[int, object, object]:
        return self.rank, value, other

    @register(Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def spread_on_zero(self, value: object) -> tuple[int, object]:
        return self.rank, value

    @register(Dispatch.DP_COMPUTE)
    def per_rank(self, value: int) -> int:
        return self.base + value

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto, scale: int = 2) -> DataProto:
        tensors = {"x": batch.batch["x"] * scale, "rank": torch.full((len(batch),), self.rank)}
        return DataProto.from_dict(tensors, meta_info={"metrics": {f"rows{self.rank}": len(batch)}})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double_later(self, batch: DataProto, delay: float = 0.0, after: str = "") -> DataProto:
        """After a delay, or when there is a file of that name; a minute without it is an error."""
        time.sleep(delay)
        deadline = time.monotonic() + 60
        while after and not os.path.exists(after):
            if time.monotonic() > deadline:
                raise TimeoutError(after)
            time.sleep(0.01)
        return self.double(batch)

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Callable[[DataProto], DataProto], batch: DataProto) -> DataProto:
        return function(batch)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def count(self, batch: DataProto) -> int:
        return len(batch)

    @register(make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def on_mesh(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"x": batch.batch["x"], "rank": torch.full((len(batch),), self.rank)})

    @register(make_nd_compute_dataproto_dispatch_fn(mesh_name="elsewhere"))
    def on_unknown_mesh(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self) -> None: ...

    @register(Dispatch.DP_COMPUTE_PROTO)
    def not_a_batch(self, batch: DataProto) -> int:
        return len(batch)

    @register(Dispatch.ONE_TO_ALL)
    async def slowly(self, value: int) -> int:
        await asyncio.sleep(0.01)
        return value + self.rank

    @register(Dispatch.DP_COMPUTE_PROTO)
    def write_in_place(self, batch: DataProto) -> DataProto:
        batch.batch["x"].fill_(7)
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    @register(Dispatch.ONE_TO_ALL)
    def niceness(self) -> int:
        return os.nice(0)

    @register(Dispatch.ONE_TO_ALL)
    def loaded(self, module: str) -> bool:
        return module in sys.modules

    @register(Dispatch.ONE_TO_ALL)
    def say(self, text: str) -> None:
        logger.warning("logged %s", text)
        sys.stdout.write(f"printed {text}\n")
        os.write(2, f"native {text}\n".encode())

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int, kind: str = "value") -> int:
        """Raise on one rank; the others would answer."""
        if self.rank == rank:
            if kind == "data":
                raise DataError("row 3 is bad")
            raise ValueError("no such luck")
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int, others_sleep_s: float = 0.0) -> int:
        """Kill one rank; the others answer, or hang as in a collective."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(others_sleep_s)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def die_and_break_peers(self, rank: int) -> int:
        """One rank dies; its peers notice first and raise, as with a broken connection."""
        if self.rank == rank:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("connection reset by peer")

    @register(Dispatch.ONE_TO_ALL, deadline="infer")
    def sleep_on(self, rank: int, seconds: float) -> int:
        if self.rank == rank:
            time.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def start_child(self) -> int:
        """A child in a session of its own, which would outlive this process."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    @register(Dispatch.ONE_TO_ALL)
    def all_reduce(self) -> float:
        """Rendezvous through the environment, as the engines do."""
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method="env://")
        value = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(value)
        return float(value)

    def unregistered(self, value: object) -> object:
        return value

    def root_log_level(self) -> int:
        return logging.getLogger().level


class Second(Worker):
    """Another role, to be colocated with Probe."""

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def total(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"total": batch.batch["x"] + 1, "second_rank": torch.full((len(batch),), self.rank)})
