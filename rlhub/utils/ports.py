"""A TCP port to listen on that others learn of before it is used."""

from __future__ import annotations

import random
import socket
from itertools import islice
from pathlib import Path

RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST = 20_000
"""Ray's workers listen below."""
TRIES = 100


def free_port(host: str = "") -> int:
    """Returns a port of `host` ("": all addresses) on which nobody listens.

    It lies below the range from which the system gives any connection its port, where it can: of that range another process
    may have taken it by the time it is used, as its own end of some connection.
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
    """Returns the port, any for 0; 0 where it is taken."""
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            if port:
                return 0
            raise
        return int(probe.getsockname()[1])
