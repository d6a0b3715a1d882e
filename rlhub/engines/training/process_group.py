"""The process group that training engines communicate over; made once per process."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist


def ensure_process_group(device: torch.device, *, timeout_s: float = 1800.0) -> None:
    """Join the default process group unless this process has one already.

    One rank (WORLD_SIZE absent or 1) rendezvous with itself in memory, without a port.  More ranks read RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT from the environment; every rank must call, and it blocks until all have.
    timeout_s bounds every later collective too.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, init_method="env://", timeout=timeout)
