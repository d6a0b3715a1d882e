"""Writes columns to files, and packs them for transport.

A file is one safetensors file, without pickle.  Tensors and numeric arrays are its entries, a jagged column as its values and
the lengths of its rows; objects and the meta dictionary are
JSON, in one byte entry because the format's own header is limited in size.  JSON has fewer types than Python: the others are
written as `{"$type": ...}`.

Between processes, tensors travel by pickle protocol 5 with out-of-band buffers.  torch pickles a tensor's whole storage through a
byte stream, four copies in all; a PickleBuffer hands the transport the bytes themselves.  The transport (Ray, or
`pickle.dumps(..., buffer_callback=...)`) stores them once, and a reader on the same machine maps them without a copy.  A slice
costs its own rows only.
"""

from __future__ import annotations

import base64
import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhub.protocol.columns import RAW_VIEWS, dense_rows, jagged, object_array
from rlhub.protocol.readonly_tensor import ReadOnlyTensor, guard

_TAG = "$type"
_TENSOR, _LENGTHS, _ARRAY, _JSON = "tensor/", "lengths/", "array/", "json"
_TORCH_KINDS = "biuf"
"""Kinds of numpy dtypes that torch has too."""


@dataclass(slots=True, kw_only=True)
class StoredColumns:
    """The contents of a file."""

    tensors: dict[str, Tensor]
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]
    num_rows: int


def write_columns(
    path: Path, tensors: Mapping[str, Tensor], arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], num_rows: int
) -> None:
    """Writes the file.  Raises TypeError naming a column or key whose value JSON cannot hold."""
    parts: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if tensor.is_nested:
            parts[_TENSOR + key], parts[_LENGTHS + key] = dense_rows(tensor)
        else:
            parts[_TENSOR + key] = tensor
    entries = {name: part.detach().cpu().contiguous().clone() for name, part in parts.items()}
    objects: dict[str, Any] = {}
    for key, array in arrays.items():
        if _torch_holds(array):
            entries[_ARRAY + key] = torch.from_numpy(array.copy())
        else:
            values = array.ravel().tolist() if array.dtype == object else array.ravel().astype(str).tolist()
            objects[key] = {"dtype": array.dtype.str, "shape": array.shape, "values": _encode(values, f"column {key!r}")}
    document = {
        "tensors": list(tensors),
        "arrays": list(arrays),
        "objects": objects,
        "meta": _encode(dict(meta), "meta_info"),
        "rows": num_rows,
    }
    entries[_JSON] = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    save_file(entries, str(path), metadata={"format": "rlhub-columns-1"})


def read_columns(path: Path) -> StoredColumns:
    """Reads a file of `write_columns`."""
    entries = load_file(str(path))
    document = json.loads(entries[_JSON].numpy().tobytes())
    arrays = {}
    for key in document["arrays"]:
        arrays[key] = entries[_ARRAY + key].numpy() if _ARRAY + key in entries else _decode_array(document["objects"][key])

    def column(key: str) -> Tensor:
        values, lengths = entries[_TENSOR + key], entries.get(_LENGTHS + key)
        return values if lengths is None else jagged(values, lengths)

    return StoredColumns(
        tensors={key: column(key) for key in document["tensors"]},
        arrays=arrays,
        meta=_decode(document["meta"]),
        num_rows=document["rows"],
    )


def _torch_holds(array: np.ndarray) -> bool:
    return array.dtype.kind in _TORCH_KINDS and array.dtype.isnative and array.dtype.itemsize <= 8


def _decode_array(stored: Mapping[str, Any]) -> np.ndarray:
    values = _decode(stored["values"])
    dtype = np.dtype(stored["dtype"])
    array = object_array(values) if dtype.hasobject else np.array(values, dtype=str).astype(dtype)
    return array.reshape(stored["shape"])


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {_TAG: kind, "value": value}


def _encode(value: Any, where: str) -> Any:
    """Returns the form of `value` that JSON can hold; `where` is the path named in the TypeError."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return _tagged("tuple", [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)])
    if isinstance(value, dict):
        pairs = [(key, _encode(item, f"{where}[{key!r}]")) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in pairs) and _TAG not in value:
            return dict(pairs)
        return _tagged("dict", [[_encode(key, where), item] for key, item in pairs])
    if isinstance(value, bytes):
        return _tagged("bytes", base64.b64encode(value).decode())
    if isinstance(value, np.generic):
        return _tagged("scalar", [value.dtype.str, _encode(value.item(), where)])
    if isinstance(value, np.ndarray):
        return _tagged("array", [value.dtype.str, value.shape, _encode(value.ravel().tolist(), where)])
    if isinstance(value, Tensor) and value.dtype != torch.bfloat16:
        return _tagged("tensor", _encode(value.detach().cpu().numpy(), where))
    raise TypeError(f"{where} holds a {type(value).__name__}, which JSON cannot hold")


def _decode_numbers(stored: Any) -> np.ndarray:
    dtype, shape, values = stored
    decoded = _decode(values)
    flat = object_array(decoded) if np.dtype(dtype) == object else np.array(decoded, dtype=dtype)
    return flat.reshape(shape)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda stored: tuple(map(_decode, stored)),
    "dict": lambda stored: {_decode(key): _decode(item) for key, item in stored},
    "bytes": base64.b64decode,
    "scalar": lambda stored: np.dtype(stored[0]).type(_decode(stored[1])),
    "array": _decode_numbers,
    "tensor": lambda stored: torch.from_numpy(_decode_numbers(stored["value"])),
}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        return _DECODERS[value[_TAG]](value["value"]) if _TAG in value else {key: _decode(item) for key, item in value.items()}
    return value


Packed = tuple[Any, ...]


def pack_tensor(tensor: Tensor, protocol: int = 5) -> Packed:
    """Returns `tensor` (any device, dtype or strides) as a tuple whose bytes travel out of band from pickle protocol 5 on.

    Gradients do not travel.
    """
    tensor = tensor.detach()
    if tensor.is_nested:
        values, lengths = dense_rows(tensor)
        return "jagged", pack_tensor(values, protocol), pack_tensor(lengths, protocol)
    if tensor.layout != torch.strided:
        return "other", tensor.cpu()
    plain = tensor.plain if isinstance(tensor, ReadOnlyTensor) else tensor
    dense = plain.cpu().resolve_conj().resolve_neg().contiguous()
    raw = dense.reshape(-1)
    array = raw.view(RAW_VIEWS.get(dense.dtype, dense.dtype)).numpy()
    if isinstance(tensor, ReadOnlyTensor):
        array.flags.writeable = False
    buffer: Any = array
    return "dense", dense.dtype, tuple(dense.shape), pickle.PickleBuffer(buffer) if protocol >= 5 else array


def unpack_tensor(packed: Packed) -> Tensor:
    """Returns the tensor of `pack_tensor`: a read-only view where the received bytes are read-only, else a plain tensor."""
    tensor: Tensor
    if packed[0] == "jagged":
        return jagged(unpack_tensor(packed[1]).clone(), unpack_tensor(packed[2]).clone())
    if packed[0] == "other":
        tensor = packed[1]
        return tensor
    _, dtype, shape, buffer = packed
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    view = memoryview(buffer)
    with warnings.catch_warnings():
        # torch warns that it cannot refuse writes to read-only memory; the guard does.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        tensor = torch.frombuffer(view, dtype=dtype).view(shape)
    return guard(tensor) if view.readonly else tensor
