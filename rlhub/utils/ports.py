"""Chooses a TCP port to listen on that other processes learn of before it is used."""

from __future__ import annotations

import random
import socket
from collections import deque
from itertools import islice
from pathlib import Path

RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST = 20_000
"""Lowest port to choose; Ray's workers listen below it."""
TRIES = 100
NUM_KEPT = 64

_kept: deque[socket.socket] = deque(maxlen=NUM_KEPT)


def free_port(host: str = "", *, keep: bool = True) -> int:
    """Returns a port of `host` ("": all addresses) on which no process listens.

    If possible it lies below the range from which the system gives outgoing connections their port.

    keep: it stays bound here, without listening, until this process has kept NUM_KEPT more, so that no one else is given it in
        the meantime.  With SO_REUSEADDR, which torch, asyncio, ZeroMQ and gRPC set, a server can listen on it all the same; one
        that looks first without it, such as `ray start`, cannot.
    """
    drawn = random.SystemRandom()  # not the run's numbers
    candidates = range(FIRST, _first_of_connections())
    for port in islice(iter(lambda: drawn.choice(candidates), None), TRIES if candidates else 0):
        if _bound(host, port, keep):
            return port
    return _bound(host, 0, keep)


def _first_of_connections() -> int:
    try:
        return int(RANGE_OF_CONNECTIONS.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # another system
        return 0


def _bound(host: str, port: int, keep: bool) -> int:
    """Returns the port, a free one for 0, or 0 if it is in use."""
    probe = socket.socket()
    try:
        probe.bind((host, port))  # without SO_REUSEADDR, with which a port that another process keeps would be had, too
    except OSError:
        probe.close()
        if port:
            return 0
        raise
    port = int(probe.getsockname()[1])
    if not keep:
        probe.close()
        return port
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if len(_kept) == NUM_KEPT:
        _kept.popleft().close()
    _kept.append(probe)
    return port
