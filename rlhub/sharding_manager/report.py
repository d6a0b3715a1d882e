"""What one update of the rollout engine's weights says about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SyncReport:
    """One sync.  bytes: of the full weights in the engine's dtype; wire_bytes: what this rank received from other processes
    (None when the weights were streamed); fingerprint: of this rank's parts, empty when the check is off or the process holds
    no engine's weights; equal for equal weights moved the same way."""

    seconds: float
    bytes: int
    num_weights: int
    version: int
    fingerprint: str
    wire_bytes: int | None = None
