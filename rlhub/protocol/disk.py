"""Columns in one safetensors file, without pickle.

Tensors and numeric arrays are safetensors entries; objects and the meta dictionary are JSON, held as one byte entry because
the format's own header is limited in size.  JSON has fewer types than Python: the others are written as `{"$type": ...}`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhub.protocol.columns import object_array

_TAG = "$type"
_TENSOR, _ARRAY, _JSON = "tensor/", "array/", "json"
_TORCH_KINDS = "biuf"
"""numpy kinds that torch can hold as they are."""


@dataclass(slots=True, kw_only=True)
class StoredColumns:
    """Contents of a file."""

    tensors: dict[str, Tensor]
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]
    num_rows: int


def write_columns(
    path: Path, tensors: Mapping[str, Tensor], arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], num_rows: int
) -> None:
    """Write the file.  Raises TypeError naming a column or key whose value JSON cannot hold."""
    entries = {_TENSOR + key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
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
    """Read a file of `write_columns`."""
    entries = load_file(str(path))
    document = json.loads(entries[_JSON].numpy().tobytes())
    arrays = {}
    for key in document["arrays"]:
        arrays[key] = entries[_ARRAY + key].numpy() if _ARRAY + key in entries else _decode_array(document["objects"][key])
    return StoredColumns(
        tensors={key: entries[_TENSOR + key] for key in document["tensors"]},
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
    """JSON-able form of `value`; `where` is the path named in the TypeError."""
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
