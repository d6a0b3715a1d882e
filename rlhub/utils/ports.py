"""Chooses a TCP port to listen on that other processes learn of before it is used."""

from __future__ import annotations

import random
import socket
from itertools import islice
from pathlib import Path

RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST = 20_000
"""Lowest port to choose; Ray's workers listen below it."""
TRIES = 100


def free_port(host: str = "") -> int:
    """Returns a port of `host` ("": all addresses) on which no process listens.

    If possible it lies below the range from which the system gives outgoing connections their port: another process may take a
    port of that range before this one is used.
    """
    drawn = random.SystemRandom()  # not the run's numbers
    candidates = range(FIRST, _first_of_connections())
    for port in islice(iter(lambda: drawn.choice(candidates), None), TRIES if candidates else 0):
        if _bound(host, port):
            return port
    return _bound(host, 0)


def _first_of_connections() -> int:
    try:
        return int(RANGE_OF_CONNECTIONS.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # another system
        return 0


def _bound(host: str, port: int) -> int:
    """Returns the port, a free one for 0, or 0 if it is in use."""
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            if port:
                return 0
            raise
        return int(probe.getsockname()[1])
