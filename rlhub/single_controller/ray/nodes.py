"""Finds the head of a cluster that is to be joined, checks that it answers, and lists the nodes as typed rows.

The head is checked before Ray is called, which tries a wrong address for minutes; Ray's own functions for nodes carry no types.
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import ray
from ray._private import state
from ray._private.services import canonicalize_bootstrap_address

from rlhub.errors import ConfigError, ResourceError

AUTO, LOCAL, CLIENT = "auto", "local", "ray://"
VARIABLE, SETTING = "RAY_ADDRESS", "trainer.ray_init.address"
CLIENT_PORT = 10001
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The beginning of a client of HTTP/2, and so of gRPC: its preface and empty settings, which a server answers with its own.
https://www.rfc-editor.org/rfc/rfc9113#section-3.4"""
FRAME_HEADER_BYTES, FRAME_TYPE_AT, SETTINGS = 9, 3, 4
TRUE = ("1", "true", "True")


@dataclass(slots=True, kw_only=True, frozen=True)
class ClusterAddress:
    """A cluster to join.  given: the address as Ray takes it.  source: the setting or the variable it is from."""

    given: str
    host: str
    port: int
    source: str

    def refusal(self, why: str) -> ResourceError:
        """Returns the error that names address, source and remedy."""
        remedy = f"start that cluster, correct {self.source}, or leave it out to start a cluster of the run's own here"
        if self.source == VARIABLE:
            remedy = f"{VARIABLE} is set in the environment: unset it to start a cluster of the run's own here, or correct it"
        elif self.given == AUTO:
            remedy = f"run `ray start` on this machine first, or leave {self.source} out to start a cluster of the run's own here"
        return ResourceError(f"cannot join the Ray cluster at {self.given} ({self.source}): {why}; {remedy}")


def read_address(given: str | None) -> ClusterAddress | None:
    """Returns the cluster to join, by the setting or RAY_ADDRESS (which Ray prefers to "auto"); None: start one here."""
    variable = os.environ.get(VARIABLE)
    source = VARIABLE if given in (None, "", AUTO) and variable else SETTING
    address = (variable if source == VARIABLE else given) or LOCAL
    if address == LOCAL:
        return None
    found = address
    if address == AUTO:
        try:
            found = canonicalize_bootstrap_address(AUTO) or ""
        except ConnectionError as error:
            nowhere = ClusterAddress(given=AUTO, host="", port=0, source=source)
            raise nowhere.refusal("no Ray cluster runs on this machine") from error
    try:
        parts = urlsplit(f"//{found.removeprefix(CLIENT)}")
        port = parts.port or (CLIENT_PORT if found.startswith(CLIENT) else None)
    except ValueError:
        parts, port = urlsplit(""), None
    if not parts.hostname or port is None:
        raise ConfigError(
            f"{source}={address!r} is no address of a Ray cluster; expected host:port, ray://host:port, auto or local"
        )
    return ClusterAddress(given=address, host=parts.hostname, port=port, source=source)


def silence(host: str, port: int, timeout_s: float) -> OSError | None:
    """Returns why no server of Ray's answers there in time; None if one does.  Bounded also where a name is looked up for ever,
    or a server was stopped that the kernel still accepts connections for."""
    answer: Future[OSError | None] = Future()
    Thread(target=_ask, args=(host, port, timeout_s, answer), name="ask-ray", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except FutureTimeoutError:
        return TimeoutError(f"no answer within {timeout_s:g} s")


def _ask(host: str, port: int, timeout_s: float, answer: Future[Any]) -> None:
    try:
        answer.set_result(_greet(host, port, timeout_s))
    except ConnectionRefusedError:
        answer.set_result(ConnectionRefusedError("nothing listens there (connection refused)"))
    except socket.gaierror as error:
        answer.set_result(OSError(f"the host {host} is not known ({error.strerror})"))
    except TimeoutError:
        answer.set_result(TimeoutError(f"no answer within {timeout_s:g} s"))
    except OSError as error:
        answer.set_result(error)


def _greet(host: str, port: int, timeout_s: float) -> OSError | None:
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        if os.environ.get("RAY_USE_TLS", "0") in TRUE:
            return None  # it speaks when it has been shown a certificate
        connection.sendall(PREFACE)
        header = b""
        while len(header) < FRAME_HEADER_BYTES and (more := connection.recv(FRAME_HEADER_BYTES - len(header))):
            header += more
    if len(header) == FRAME_HEADER_BYTES and header[FRAME_TYPE_AT] == SETTINGS:
        return None
    return OSError("something listens there that is not Ray's (no gRPC)")


@dataclass(slots=True, kw_only=True, frozen=True)
class Node:
    """A live node.  total, free: amounts by resource name ("CPU", "GPU", ...)."""

    node_id: str
    address: str
    total: dict[str, float]
    free: dict[str, float]


def live_nodes() -> list[Node]:
    """Returns the nodes that are alive now."""
    free = state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        Node(
            node_id=row["NodeID"],
            address=row["NodeManagerAddress"],
            total=dict(row["Resources"]),
            free=dict(free.get(row["NodeID"], {})),
        )
        for row in ray.nodes()  # type: ignore[no-untyped-call]
        if row["Alive"]
    ]


def own_address() -> str:
    """Returns the address of the node that this process runs on."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def head_address() -> str:
    """Returns host:port of the cluster's head (its GCS)."""
    return str(ray.get_runtime_context().gcs_address)


def describe_nodes() -> str:
    """Returns one phrase per live node: address, free and total CPUs and GPUs."""
    return "; ".join(_describe(node) for node in live_nodes()) or "no live node"


def _describe(node: Node) -> str:
    counts = [f"{node.free.get(kind, 0):g} of {node.total[kind]:g} {kind}s free" for kind in ("CPU", "GPU") if kind in node.total]
    return f"node {node.address}: {', '.join(counts) or 'no CPUs or GPUs'}"
