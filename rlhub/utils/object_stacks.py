"""Array columns inside a TensorDict: each row becomes a non-tensor entry, and comes back exactly."""

from __future__ import annotations

import numpy as np
from tensordict import NonTensorData, NonTensorStack

from rlhub.utils.columns import object_array


class _NumberRow(np.ndarray):
    """Marks, inside a TensorDict, a row of a numeric array column, as distinct from an object that is an array."""


def stack_of_array(array: np.ndarray) -> NonTensorStack:
    """Column (rows, ...) -> stack of its rows."""
    rows = (
        array if array.dtype == object and array.ndim == 1 else [np.asarray(array[i]).view(_NumberRow) for i in range(len(array))]
    )
    if not len(array):
        rows = []
    return NonTensorStack(*[NonTensorData(row, batch_size=[]) for row in rows], batch_size=[len(array)])


def array_of_stack(stack: NonTensorStack) -> np.ndarray:
    """The column of `stack_of_array`; a stack made elsewhere becomes an object column."""
    values = [item.data for item in stack.tensordicts]
    if values and all(isinstance(value, _NumberRow) for value in values):
        return np.stack([np.asarray(value) for value in values])
    return object_array(values)
