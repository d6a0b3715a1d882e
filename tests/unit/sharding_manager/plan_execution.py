"""A plan carried out on real tensors in one process, message by message, and the checks of every property it claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhub.protocol.weights.pieces import Piece, PieceInfo, by_name, num_elements, sizes, take, views
from rlhub.sharding_manager.plan import Plan, Transfer
from rlhub.sharding_manager.schedule import Part, Round

Layout = Sequence[Sequence[PieceInfo]]
Held = list[dict[str, list[Piece]]]


def full_weights(layout: Layout) -> dict[str, Tensor]:
    """Distinct values, exact in every dtype that the tests send."""
    shapes = {piece.name: piece.shape for pieces in layout for piece in pieces}
    return {
        name: ((torch.arange(num_elements(tuple((0, size) for size in shape))) + 31 * i) % 251 - 125).float().reshape(shape)
        for i, (name, shape) in enumerate(sorted(shapes.items()))
    }


def hold(layout: Layout, weights: Mapping[str, Tensor] | None = None) -> Held:
    """Pieces as the layout says, with the weights' values, or NaN for a destination."""
    held = []
    for pieces in layout:
        filled = []
        for info in pieces:
            tensor = torch.full(sizes(info.region), float("nan"), dtype=info.dtype)
            if weights is not None:
                tensor.copy_(take(weights[info.name], info.region))
            filled.append(Piece(name=info.name, tensor=tensor, shape=info.shape, region=info.region))
        held.append(by_name(filled))
    return held


def read(held: dict[str, list[Piece]], transfer: Transfer) -> Tensor:
    out = torch.empty(sizes(transfer.region), dtype=transfer.dtype)
    filled = 0
    for view, place in views(held[transfer.name], transfer.region):
        take(out, place).copy_(view)
        filled += view.numel()
    assert filled == out.numel(), f"{transfer} asks for more than its source holds"
    return out


def write(held: dict[str, list[Piece]], transfer: Transfer, value: Tensor) -> None:
    written = 0
    for view, place in views(held[transfer.name], transfer.region):
        assert view.isnan().all(), f"{transfer} writes what was already written"
        view.copy_(take(value, place))
        written += view.numel()
    assert written == value.numel(), f"{transfer} brings more than its destination holds"


def pack(held: dict[str, list[Piece]], part: Part) -> Tensor:
    return torch.cat([read(held, transfer).reshape(-1).view(torch.uint8) for transfer in part.transfers])


def unpack(held: dict[str, list[Piece]], part: Part, packed: Tensor) -> None:
    offset = 0
    for transfer in part.transfers:
        data = packed[offset : offset + transfer.num_bytes].view(transfer.dtype)  # fails where it is not aligned
        write(held, transfer, data.reshape(sizes(transfer.region)))
        offset += transfer.num_bytes
    assert offset == packed.numel()


def execute(plan: Plan, rounds: Sequence[Round], sources: Held, destinations: Held) -> None:
    for copied in plan.copies:
        for transfer in copied:
            write(destinations[transfer.destination], transfer, read(sources[transfer.source], transfer))
    for one in rounds:
        for message in one.messages:
            assert [transfer for part in message.parts for transfer in part.transfers] == message.transfers
            for part in message.parts:
                unpack(destinations[message.destination], part, pack(sources[message.source], part))


def assert_holds(destinations: Held, weights: Mapping[str, Tensor]) -> None:
    """Every destination slice equals the full weight's slice."""
    for rank, tensors in enumerate(destinations):
        for name, pieces in tensors.items():
            for piece in pieces:
                expected = take(weights[name], piece.region).to(piece.tensor.dtype)
                assert torch.equal(piece.tensor, expected), f"rank {rank} has other values of {name} {piece.region}"


def slow_lower_bound(
    sources: Layout, destinations: Layout, source_processes: Sequence[int], destination_processes: Sequence[int]
) -> int:
    """Element by element: what a destination needs and no source of its process has."""
    total = 0
    for pieces, process in zip(destinations, destination_processes, strict=True):
        here = [info for held, where in zip(sources, source_processes, strict=True) if where == process for info in held]
        for info in pieces:
            missing = torch.zeros(info.shape, dtype=torch.bool)
            take(missing, info.region).fill_(True)
            for near in here:
                if near.name == info.name:
                    take(missing, near.region).fill_(False)
            total += int(missing.sum()) * info.dtype.itemsize
    return total


def assert_fits(rounds: Sequence[Round], bucket_bytes: int) -> None:
    for one in rounds:
        sent, received = Counter[int](), Counter[int]()
        for message in one.messages:
            assert message.transfers
            sent[message.source] += message.num_bytes
            received[message.destination] += message.num_bytes
        pairs = [(message.source, message.destination) for message in one.messages]
        assert pairs == sorted(set(pairs))
        assert max([*sent.values(), *received.values()]) <= bucket_bytes
