"""DAPO's soft penalty for overlong responses (Yu et al. 2025, arXiv 2503.14476, section 3.4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhub.registry import suggest
from rlhub.rewards.base import ManagerParts
from rlhub.rewards.naive import NaiveManager

CORRECT_ABOVE = 0.5  # between the wrong and right of both usual scales, 0 to 1 and -1 to 1


@dataclass(slots=True, kw_only=True)
class OverlongBuffer:
    """The last `len` tokens before the response limit, in which the penalty grows from 0 to `penalty_factor`.

    len: tokens, above 0 and at most data.max_response_length; penalty_factor: in units of the score.
    """

    enable: bool = False
    len: int = 0
    penalty_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.enable and self.len < 1:
            raise ValueError(f"overlong_buffer_cfg.len must be at least 1 token, got {self.len!r}")
        if self.penalty_factor < 0:
            raise ValueError(f"overlong_buffer_cfg.penalty_factor must be 0 or more, got {self.penalty_factor!r}")


@dataclass(slots=True, kw_only=True)
class DapoKnobs:
    """overlong_buffer_cfg: given as a mapping of OverlongBuffer's fields."""

    overlong_buffer_cfg: OverlongBuffer = field(default_factory=OverlongBuffer)

    def __post_init__(self) -> None:
        given: Any = self.overlong_buffer_cfg
        if isinstance(given, OverlongBuffer):
            return
        if not isinstance(given, Mapping):
            raise ValueError(f"overlong_buffer_cfg must be a mapping with enable, len, penalty_factor; got {given!r}")
        known = [item.name for item in dataclasses.fields(OverlongBuffer)]
        for name in given:
            if name not in known:
                raise ValueError(
                    f"overlong_buffer_cfg.{name}: no such knob{suggest(str(name), known)}; known: {', '.join(known)}"
                )
        self.overlong_buffer_cfg = OverlongBuffer(**given)


class DapoManager(NaiveManager):
    """The score less the overlong penalty.

    extra: acc (unless the scorer gives its own: whether the score itself is above 0.5, so that validation still counts a right
    but long answer as right), overlong_reward (0 or less) and overlong (0 or 1).
    """

    def __init__(self, parts: ManagerParts, knobs: DapoKnobs) -> None:
        super().__init__(parts, knobs)
        self.buffer = knobs.overlong_buffer_cfg
        if self.buffer.enable and self.buffer.len > parts.max_response_length:
            raise ValueError(
                f"overlong_buffer_cfg.len={self.buffer.len} exceeds data.max_response_length={parts.max_response_length}: "
                "every response would be penalised"
            )

    def adjust(self, scores: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        if not self.buffer.enable:
            return scores, {}
        penalty = overlong_penalty(lengths, limit=self.parts.max_response_length, buffer=self.buffer)
        acc = (scores > CORRECT_ABOVE).astype(np.float64)
        return scores + penalty, {"acc": acc, "overlong_reward": penalty, "overlong": (penalty < 0).astype(np.float64)}


def overlong_penalty(lengths: np.ndarray, *, limit: int, buffer: OverlongBuffer) -> np.ndarray:
    """Returns min(0, (limit - len_b - |y|) / len_b) * factor, (B,) float64: 0 up to limit - len_b tokens, -factor at the limit.

    lengths: (B,) tokens |y|; limit: data.max_response_length.
    """
    over = lengths.astype(np.float64) - (limit - buffer.len)
    return np.clip(-over / buffer.len, -1.0, 0.0) * buffer.penalty_factor
