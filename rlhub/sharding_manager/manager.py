"""Moves the policy's weights from the training engine into the rollout engine and proves that they arrived.

The weights stream in buckets of full tensors, so that neither side ever holds a second model.  While a bucket passes, the
slices this rank's engine will hold are fingerprinted; afterwards the engine's live parameters are read back and compared.
Every step of a policy gradient is wrong when the two differ, and nothing else would say so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhub.engines.rollout.base import RolloutEngine, WeightBucket
from rlhub.engines.training.base import TrainEngine
from rlhub.errors import WeightMismatchError
from rlhub.utils.fingerprint import combine, fingerprint
from rlhub.utils.regions import Region, take


@dataclass(slots=True, kw_only=True)
class SyncReport:
    """One sync.  bytes: of the full weights in the engine's dtype; fingerprint: of this rank's slices, empty when the
    check is off."""

    seconds: float
    bytes: int
    num_weights: int
    version: int
    fingerprint: str


@dataclass(slots=True, kw_only=True)
class _Sent:
    """What has passed so far: fingerprints of this rank's slices in stream order, names, and bytes."""

    fingerprints: dict[str, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    bytes: int = 0


@dataclass(slots=True, kw_only=True)
class _Target:
    """Where a weight goes: device of the live parameter and the slice of the full tensor it is."""

    device: torch.device
    region: Region


class ShardingManager:
    """One a rank, between its training engine and its rollout engine.

    bucket_bytes: size of the stream's buckets; extra memory is at most two buckets, or the largest tensor.
    check: False skips fingerprints and the reading back (names are still compared).
    """

    def __init__(self, train: TrainEngine, rollout: RolloutEngine, *, bucket_bytes: int, check: bool = True) -> None:
        self._train = train
        self._rollout = rollout
        self._bucket_bytes = bucket_bytes
        self._check = check

    def sync(self, version: int) -> SyncReport:
        """Give the rollout engine the trainer's present weights as policy `version`.

        Every rank calls it, and it blocks.  The trainer is brought to the device for the transfer and offloaded after it;
        the engine takes its weights' memory before and its cache's memory after that, so the two never add up.
        Raises WeightMismatchError, on every rank, naming the first weight that differs, is missing or is not expected.
        """
        start = time.perf_counter()
        self._train.onload()
        self._rollout.wake_up(weights_only=True)
        targets = {p.name: _Target(device=p.tensor.device, region=p.region) for p in self._rollout.live_weights()}
        sent = _Sent()
        self._rollout.update_weights(self._stream(targets, sent), version)
        if self._check:
            self._compare(sent)
        self._train.offload()
        self._rollout.wake_up()
        return SyncReport(
            seconds=time.perf_counter() - start,
            bytes=sent.bytes,
            num_weights=len(sent.names),
            version=version,
            fingerprint=combine(sent.fingerprints.items()),
        )

    def _stream(self, targets: dict[str, _Target], sent: _Sent) -> Iterator[WeightBucket]:
        """The trainer's buckets in the engine's dtype and on its device; notes what passes in `sent`."""
        for bucket in self._train.named_weights(bucket_bytes=self._bucket_bytes):
            yield [(name, self._send(name, tensor, targets, sent)) for name, tensor in bucket]
        missing = [name for name in targets if name not in sent.names]
        if missing:
            raise WeightMismatchError(
                f"the trainer sent {len(sent.names)} weights, but not {missing[0]}, which the rollout engine has "
                f"({len(missing)} missing in all): do both run the same model?",
                weight=missing[0],
            )

    def _send(self, name: str, tensor: Tensor, targets: dict[str, _Target], sent: _Sent) -> Tensor:
        if targets and name not in targets:
            raise WeightMismatchError(
                f"the trainer sent {name}, which the rollout engine does not have: do both run the same model?", weight=name
            )
        sent.names.add(name)
        tensor = part = tensor.detach()
        if targets:  # before its first update an engine may have no weights of its own and take what comes
            target = targets[name]
            tensor = tensor.to(device=target.device, dtype=self._rollout.weight_dtype(name))
            part = take(tensor, target.region)
        sent.bytes += tensor.nbytes
        if self._check:
            sent.fingerprints[name] = fingerprint(part)
        return tensor

    def _compare(self, sent: _Sent) -> None:
        """Read the engine's live parameters back; all ranks agree on the first weight that differs on any of them."""
        live = {p.name: fingerprint(p.tensor) for p in self._rollout.live_weights() if p.name in sent.fingerprints}
        names = list(sent.fingerprints)
        differing = [i for i, name in enumerate(names) if live.get(name) != sent.fingerprints[name]]
        first = torch.tensor(differing[0] if differing else len(names), device=self._train.device)
        index = int(self._train.reduce(first, "min", every_rank=True))
        if index == len(names):
            return
        here = f"{len(differing)} of {len(names)} weights differ on this rank" if differing else "another rank's part differs"
        raise WeightMismatchError(
            f"after the weight update the rollout engine does not hold the trainer's {names[index]}: {here}; its samples "
            "would not come from the policy that is being trained",
            weight=names[index],
        )
