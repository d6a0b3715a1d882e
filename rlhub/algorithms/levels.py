"""The unit whose probability a policy loss compares: a token, an action of several tokens, or a whole response (chunk).

A unit's log-probability is the sum over its tokens, so its ratio pi / pi_old is that of the joint choice.  The columns of a
micro-batch are turned into one value a unit before the loss, so every loss works at every level without knowing of it: with
`chunk`, PPO clips the ratio of the whole response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhub.algorithms.masked import masked, masked_sum

Level = Literal["token", "action", "chunk"]
SUMMED = frozenset({"log_probs", "entropy", "old_log_probs", "ref_log_prob", "rollout_log_probs"})
"""Columns of which a unit has the sum over its tokens: logarithms of probabilities, and their expectation."""
FIRST = frozenset({"values", "advantages", "returns", "importance_weights", "selected", "staleness"})
"""Columns of which a unit has the value at its first token, before which nothing of the unit was chosen."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Units:
    """The units of a response.  action_dim: the tokens of an action; the last unit may be shorter."""

    level: Level = "token"
    action_dim: int = 1

    def _grouped(self, column: Tensor) -> Tensor:
        """Returns (rows, units, tokens of a unit), with zeros behind the last token."""
        size = max(column.shape[1], 1) if self.level == "chunk" else self.action_dim
        padded = torch.nn.functional.pad(column, (0, -column.shape[1] % size))
        return padded.reshape(len(column), padded.shape[1] // size, size)

    def mask(self, mask: Tensor) -> Tensor:
        """Returns (rows, units), non-zero where any token of the unit is in the mask (rows, response)."""
        return mask if self.level == "token" else self._grouped(mask).bool().any(-1).to(mask.dtype)

    def sums(self, values: Tensor, mask: Tensor) -> Tensor:
        """Returns the sum over each unit's tokens in the mask, (rows, units).  values, mask: (rows, response)."""
        return values if self.level == "token" else masked_sum(self._grouped(values), self._grouped(mask), dim=-1)

    def firsts(self, values: Tensor, mask: Tensor) -> Tensor:
        """Returns the value at each unit's first token in the mask, 0 for a unit without any; shapes as for `sums`."""
        if self.level == "token":
            return values
        inside = self._grouped(mask).bool()
        first = inside.to(torch.uint8).argmax(-1, keepdim=True)
        return masked(self._grouped(values).gather(-1, first).squeeze(-1), inside.any(-1))

    def tokens(self, units: Tensor, mask: Tensor) -> Tensor:
        """Returns each unit's value on all of its tokens in the mask, (rows, response).  units: (rows, units)."""
        if self.level == "token":
            return units
        size = max(mask.shape[1], 1) if self.level == "chunk" else self.action_dim
        return masked(units.repeat_interleave(size, 1)[:, : mask.shape[1]], mask)

    def columns(self, rows: Mapping[str, Tensor], mask: Tensor) -> Mapping[str, Tensor]:
        """Returns the columns (rows, response) named in SUMMED and FIRST, and response_mask, with one value a unit; others as
        they are.  mask: (rows, response)."""
        if self.level == "token":
            return rows
        found = {name: self.sums(column, mask) for name, column in rows.items() if name in SUMMED}
        found |= {name: self.firsts(column, mask) for name, column in rows.items() if name in FIRST}
        found |= {"response_mask": self.mask(mask)} if "response_mask" in rows else {}
        return {**rows, **found}


TOKENS = Units()
"""Every token is a unit of its own."""
