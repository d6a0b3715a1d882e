"""What an engine of each kind computes and reads: the same for every backend."""

from __future__ import annotations

from collections.abc import Iterable

from rlhub.errors import EngineError
from rlhub.models.hf import ModelKind

OUTPUTS: dict[ModelKind, frozenset[str]] = {
    "policy": frozenset({"log_probs", "entropy", "sum_pi_squared"}),
    "value": frozenset({"values"}),
    "reward": frozenset({"scores"}),
}


def check_outputs(kind: ModelKind, outputs: Iterable[str]) -> frozenset[str]:
    """The outputs asked for; raises EngineError for none, or for one that the kind does not compute."""
    wanted = frozenset(outputs)
    if not wanted or not wanted <= OUTPUTS[kind]:
        raise EngineError(f"a {kind} engine computes {sorted(OUTPUTS[kind])}, not {sorted(wanted)}")
    return wanted


def columns_read(kind: ModelKind) -> tuple[str, ...]:
    """What a forward pass reads."""
    ids = ("input_ids", "attention_mask")
    return ids if kind == "reward" else (*ids, "response_mask")
