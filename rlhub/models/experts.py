"""The weights of a mixture of experts under checkpoint names.

transformers stores the experts of a layer in two tensors, `mlp.experts.gate_up_proj` (experts, 2 x intermediate, hidden) and
`mlp.experts.down_proj` (experts, hidden, intermediate); checkpoints of the Qwen families, vLLM and Megatron-core use one
weight for each expert and projection.  The mapping is by name and holds for models whose checkpoints name experts as Qwen's
do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from rlhub.protocol.weights.pieces import Piece, Region, intersection, relative, take, whole_piece

GATE_UP = ".mlp.experts.gate_up_proj"
DOWN = ".mlp.experts.down_proj"


def is_fused(name: str, shape: tuple[int, ...]) -> bool:
    """Returns whether this is a tensor of all experts of a layer."""
    return len(shape) == 3 and name.endswith((GATE_UP, DOWN))


def unfused(piece: Piece) -> Iterator[Piece]:
    """Yields the piece under its checkpoint names: the piece itself, or a view for each expert and projection of which it has
    a part."""
    if not is_fused(piece.name, piece.shape):
        yield piece
        return
    _, rows, columns = piece.shape
    first, last = piece.region[0]
    for expert in range(first, last):
        for name, (start, stop) in _projections(piece.name, expert, rows):
            box: Region = ((expert, expert + 1), (start, stop), (0, columns))
            common = intersection(box, piece.region)
            if common is not None:
                view = take(piece.tensor, relative(common, piece.region))[0]
                region = relative(common, box)[1:]
                yield Piece(name=name, tensor=view, shape=(stop - start, columns), region=region)


def _projections(name: str, expert: int, rows: int) -> list[tuple[str, tuple[int, int]]]:
    """Returns (checkpoint name, rows of the expert's matrix) for each projection."""
    if name.endswith(DOWN):
        return [(f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", (0, rows))]
    prefix, half = f"{name.removesuffix('gate_up_proj')}{expert}", rows // 2
    return [(f"{prefix}.gate_proj.weight", (0, half)), (f"{prefix}.up_proj.weight", (half, rows))]


def unfused_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields whole tensors as `unfused` yields pieces."""
    for name, tensor in named:
        for piece in unfused(whole_piece(name, tensor)):
            yield piece.name, piece.tensor
