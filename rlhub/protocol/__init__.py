"""Batches (`DataProto`), which cross process boundaries, and the language in which weights are described.

data_proto.py   DataProto, a batch of tensor and array columns
columns.py      indexing, stacking and comparing columns, and a batch as one TensorDict
future.py       DataProtoFuture, a batch that workers still compute
batch_ref.py    BatchRef, a batch whose wide columns stay in the processes that made them, and ColumnStore, which keeps them
sequences.py    rows of tokens without padding, as they are stored, and with it
layout.py       where the rows of a BatchRef are and what their columns are, and how both travel in few bytes
exchange.py     brings the rows of a BatchRef to the ranks that will compute on them, once a step
serialization.py  columns in files, without pickle, and tensors on the wire, out of band
readonly_tensor.py  views of received memory
weights/        pieces and regions of named tensors, and their fingerprint: engines, checkpoints and resharding share them
"""

from rlhub.protocol.batch_ref import Batch, BatchRef, ColumnStore, Retain
from rlhub.protocol.data_proto import (
    DataProto,
    DataProtoItem,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from rlhub.protocol.future import DataProtoFuture

__all__ = [
    "Batch",
    "BatchRef",
    "ColumnStore",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "Retain",
    "collate_fn",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "unpad_dataproto",
]
