"""The exchange of every process's description of its pieces, as JSON, because nothing from a network is unpickled."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from rlhub.errors import EngineError
from rlhub.protocol.weights.pieces import PieceInfo
from rlhub.sharding_manager.peers import Peers

Side = Literal["sender", "receiver", "both"]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Linux writes one id per start of a machine, which is the same in all its containers."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int32)
}


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of a transfer: its side, its machine and device, and its pieces on each side."""

    side: Side
    node: str
    device: str
    sources: list[PieceInfo]
    destinations: list[PieceInfo]


def exchange_members(peers: Peers | None, member: Member) -> list[Member]:
    """Returns every process's description in the order of their ranks; all of them call it."""
    if peers is None:
        return [member]
    return [_decode(data) for data in peers.all_gather_bytes(_encode(member))]


def this_node() -> str:
    """Returns a name of the machine, which is the same in all its containers."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()


def nodes_of(members: Sequence[Member]) -> dict[int, int]:
    """Returns the number of each process's machine."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(member.node for member in members))}
    return {rank: numbers[member.node] for rank, member in enumerate(members)}


def check_devices(members: Sequence[Member]) -> None:
    """Raises EngineError for devices of different kinds: their fingerprints cannot be compared, and one process group cannot
    reach both."""
    kinds = sorted({member.device for member in members})
    if len(kinds) > 1:
        raise EngineError(
            f"weights must travel between devices of one kind, these processes have {kinds}: set one device for all"
        )


def _encode(member: Member) -> bytes:
    return json.dumps(
        {
            "side": member.side,
            "node": member.node,
            "device": member.device,
            "sources": [encode_info(info) for info in member.sources],
            "destinations": [encode_info(info) for info in member.destinations],
        }
    ).encode()


def _decode(data: bytes) -> Member:
    values = json.loads(data)
    return Member(
        side=values["side"],
        node=values["node"],
        device=values["device"],
        sources=[decode_info(row) for row in values["sources"]],
        destinations=[decode_info(row) for row in values["destinations"]],
    )


def encode_info(info: PieceInfo) -> list[object]:
    """Returns a description as [name, shape, region, dtype], ready for JSON."""
    return [info.name, list(info.shape), [list(bounds) for bounds in info.region], str(info.dtype).removeprefix("torch.")]


def decode_info(row: list[object]) -> PieceInfo:
    """Returns the description that `encode_info` has encoded."""
    name, shape, region, dtype = row
    assert isinstance(name, str) and isinstance(shape, list) and isinstance(region, list) and isinstance(dtype, str)
    kind = DTYPES.get(dtype)
    if kind is None:
        raise EngineError(f"{name} has dtype {dtype}, which is not one of {sorted(DTYPES)}")
    return PieceInfo(
        name=name,
        shape=tuple(int(size) for size in shape),
        region=tuple((int(start), int(stop)) for start, stop in region),
        dtype=kind,
    )
