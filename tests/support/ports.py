"""Ports that are free when they are used: below those that the system gives to any connection, which may take one between the
look and the use; a block for each of the processes that run tests at the same time, and none twice."""

from __future__ import annotations

import itertools
import os
import socket

LOOPBACK = "127.0.0.1"
FIRST, BLOCK, BLOCKS = 20_000, 1_000, 12
"""Ray's workers have those below, Linux's connections those above."""
_offsets = itertools.count(os.getpid())


def free_port() -> int:
    """One that nobody listens on."""
    block = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % BLOCKS
    for offset in itertools.islice(_offsets, BLOCK):
        port = FIRST + block * BLOCK + offset % BLOCK
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        return port
    raise OSError(f"all {BLOCK} ports of block {block} are in use")
