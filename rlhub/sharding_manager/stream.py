"""An update through the rollout engine's own loader, compared with both engines' description of what they hold.

The loader and the training engine's stream know nothing of regions.  So an engine's first update goes this way: it proves the
geometry that later, planned updates write and read back through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from rlhub.engines.rollout.base import RolloutEngine, WeightBucket
from rlhub.errors import WeightMismatchError
from rlhub.protocol.weights.fingerprint import fingerprint, nonfinite_names
from rlhub.protocol.weights.pieces import Piece
from rlhub.protocol.weights.regions import take

Agree = Callable[[int], int]
"""The smallest of all ranks' numbers; every rank calls it."""


class StreamedDescription:
    """Whether the pieces that a training engine says this rank holds are the parts of the full weights that it streams."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append(piece)
        self._wrong: set[str] = set()
        self.names: list[str] = []

    def see(self, name: str, tensor: Tensor) -> None:
        """A full weight that passes."""
        self.names.append(name)
        for piece in self._pieces.get(name, ()):
            if piece.shape != tuple(tensor.shape) or fingerprint(take(tensor, piece.region)) != fingerprint(piece.tensor):
                self._wrong.add(name)

    def confirm(self, names: list[str], agree: Agree) -> None:
        """Raise WeightMismatchError on every rank for the first weight that any rank describes wrongly."""
        first = agree(min((names.index(name) for name in self._wrong), default=len(names)))
        if first < len(names):
            raise WeightMismatchError(
                f"the training engine's description of the part of {names[first]} that a rank holds does not fit the weight that "
                "it streams: planned updates would move the wrong part",
                weight=names[first],
            )


class CheckedStream:
    """One update by full tensors.

    own: the training engine's pieces on this rank, compared with the stream that passes; none where it streams only.
    check: False leaves out fingerprints (names are still compared).
    """

    def __init__(self, rollout: RolloutEngine, *, own: Iterable[Piece] = (), check: bool) -> None:
        self._rollout, self._check = rollout, check
        self._targets = {piece.name: piece for piece in rollout.live_weights()}
        self._description = StreamedDescription(own if check else ())
        self.names: list[str] = []
        self.fingerprints: dict[str, int] = {}
        self.bytes = 0

    def passing(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """The buckets in the engine's dtype and on its device; notes what passes."""
        for bucket in buckets:
            yield [(name, self._pass(name, tensor.detach())) for name, tensor in bucket]
        seen = set(self.names)
        missing = [name for name in self._targets if name not in seen]
        if missing:
            raise WeightMismatchError(
                f"the trainer sent {len(seen)} weights, but not {missing[0]}, which the rollout engine has "
                f"({len(missing)} missing in all): do both run the same model?",
                weight=missing[0],
            )

    def _pass(self, name: str, tensor: Tensor) -> Tensor:
        if self._targets and name not in self._targets:
            raise WeightMismatchError(
                f"the trainer sent {name}, which the rollout engine does not have: do both run the same model?", weight=name
            )
        self._description.see(name, tensor)
        self.names.append(name)
        part = tensor
        if self._targets:  # before its first update an engine may have no weights of its own and take what comes
            target = self._targets[name]
            tensor = tensor.to(device=target.tensor.device, dtype=target.tensor.dtype)
            part = take(tensor, target.region)
        self.bytes += tensor.nbytes
        if self._check:
            self.fingerprints[name] = fingerprint(part)
        return tensor

    def compare(self, agree: Agree) -> None:
        """Read the live weights back.  Raises WeightMismatchError on every rank, for the first weight that differs on any."""
        sent = self.fingerprints
        live = {piece.name: fingerprint(piece.tensor) for piece in self._rollout.live_weights() if piece.name in sent}
        names = list(sent)
        raise_first(names, [name for name in names if live.get(name) != sent[name]], agree)
        self._description.confirm(names, agree)


def check_range(rollout: RolloutEngine) -> None:
    """Raise WeightMismatchError for a weight that became infinite on its way: float16 ends at 65504, and what is sent and what
    arrives are compared after the cast."""
    pieces = (piece for piece in rollout.live_weights() if piece.tensor.dtype == torch.float16)
    if found := nonfinite_names((piece.name, piece.tensor) for piece in pieces):
        raise WeightMismatchError(
            f"{found[0]} is beyond what the rollout engine's float16 can hold ({len(found)} weights in all): set "
            "actor_rollout_ref.rollout.dtype=bfloat16 or float32",
            weight=found[0],
        )


def raise_first(names: list[str], differing: list[str], agree: Agree) -> None:
    """Raise WeightMismatchError on every rank for the first of `names` that differs on any rank; nothing if none does."""
    place = {name: index for index, name in enumerate(names)}
    index = agree(min((place[name] for name in differing), default=len(names)))
    if index == len(names):
        return
    count = len(set(differing))
    here = f"{count} of {len(names)} weights differ on this rank" if count else "another rank's part differs"
    raise WeightMismatchError(
        f"after the weight update the rollout engine does not hold the trainer's {names[index]}: {here}; its samples "
        "would not come from the policy that is being trained",
        weight=names[index],
    )
