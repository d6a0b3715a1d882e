"""Sizes of what a worker-group call carries out of the driver and into it.

Both backends count the tensors and arrays of a batch by their sizes, which are the bytes of the out-of-band buffers in which they
travel.  Under Ray the objects of a batch (texts, identifiers, `meta_info`) are pickled once more for their size; in process
nothing is serialized, and they count as their column of pointers.  Futures carry references and count nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from rlhub.protocol import BatchRef, DataProto
from rlhub.protocol.columns import num_bytes
from rlhub.protocol.exchange import RankMoves

SHARE_BYTES = 32 * 1024
"""Values at least this large are stored once when several ranks get them; smaller ones cost less inside the call."""


def column_bytes(value: Any) -> int:
    """Returns the bytes of the arrays and strings in a value, down to containers of containers; other objects count nothing."""
    if isinstance(value, DataProto):
        return column_bytes(value.non_tensor_batch) + column_bytes(value.tensors())
    if isinstance(value, BatchRef):  # the columns that stay with the ranks cross nothing
        return column_bytes(value.small) + sum(array.nbytes for array in value.layout.arrays())
    if isinstance(value, RankMoves):
        return int(value.rows.nbytes + value.sources.nbytes)
    if isinstance(value, Tensor):
        return num_bytes(value)
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(column_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(column_bytes, value))
    return 0


def pickled_bytes(value: Any) -> int:
    """Returns the bytes of a value between processes: of a batch the tensors, and its pickled arrays and meta dictionary with
    their out-of-band buffers; of anything else `column_bytes`."""
    if not isinstance(value, DataProto):
        return column_bytes(value)
    buffers: list[pickle.PickleBuffer] = []
    try:
        head = pickle.dumps((value.non_tensor_batch, value.meta_info), protocol=5, buffer_callback=buffers.append)
    except Exception:  # noqa: BLE001 - a user's object may raise anything while it is pickled; the transport then says what
        return column_bytes(value)
    return column_bytes(value.tensors()) + len(head) + sum(buffer.raw().nbytes for buffer in buffers)
