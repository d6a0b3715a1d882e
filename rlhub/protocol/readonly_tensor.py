"""Tensors over memory that others read: every write raises.

A batch received from another process may be a view of shared memory.  numpy refuses to write to such memory; torch does
not, and one in-place operation would change the batch for every reader on the machine.  `guard` wraps such a tensor in a
subclass that looks at the schema of each operation below autograd, so functional in-place flags, `out=` and writes through
views are caught alike.  Reading costs no copy; every result that is not a view of the shared memory is a plain tensor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

_ADVICE = "received batches are read-only views of shared memory: clone() the tensor (or DataProto.materialize()) first"


class ReadOnlyTensor(Tensor):
    """A tensor that refuses writes.  `plain` is the same memory without the guard, for code that is known only to read."""

    plain: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch documents it

    @staticmethod
    def __new__(cls: type[Self], plain: Tensor) -> Self:
        guarded: Self = torch.Tensor._make_subclass(cls, plain)
        guarded.plain = plain
        return guarded

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub lacks the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            _refuse_guarded_targets(func, args, kwargs)
        storages = {id_of(item) for item in tree_flatten((args, kwargs))[0] if isinstance(item, ReadOnlyTensor)}
        plain_args, plain_kwargs = tree_map_only(ReadOnlyTensor, _plain, (args, kwargs))
        return tree_map_only(Tensor, lambda out: _guard_if_in(out, storages), func(*plain_args, **plain_kwargs))

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Returns an array over the same memory, marked read-only."""
        array: np.ndarray = self.plain.numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def tolist(self) -> Any:
        return self.plain.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves its own unannotated
        return f"read-only {self.plain!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        own_copy: Tensor = memo.setdefault(id(self), self.plain.clone())
        return own_copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __dlpack__(self, **_: Any) -> NoReturn:
        raise BufferError(f"DLPack cannot mark memory read-only; {_ADVICE}")


def guard(tensor: Tensor) -> Tensor:
    """Returns the same memory as a tensor that refuses writes."""
    return tensor if isinstance(tensor, ReadOnlyTensor) else ReadOnlyTensor(tensor)


def id_of(tensor: Tensor) -> int:
    """Returns the identity of the tensor's storage."""
    owner = tensor.plain if isinstance(tensor, ReadOnlyTensor) else tensor
    return int(owner.untyped_storage()._cdata)


def _plain(tensor: ReadOnlyTensor) -> Tensor:
    return tensor.plain


def _guard_if_in(out: Tensor, storages: set[int]) -> Tensor:
    """Guards a view of one of these storages; a tensor with memory of its own stays plain."""
    dense = out.layout == torch.strided and not isinstance(out, ReadOnlyTensor)
    return ReadOnlyTensor(out) if dense and not out.is_nested and id_of(out) in storages else out


@lru_cache(maxsize=1024)
def _written(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns positions and names of the arguments that `func` writes."""
    arguments = func._schema.arguments
    hits = [
        (index, item.name) for index, item in enumerate(arguments) if item.alias_info is not None and item.alias_info.is_write
    ]
    return tuple(index for index, _ in hits), tuple(name for _, name in hits)


def _refuse_guarded_targets(func: Any, args: Any, kwargs: Any) -> None:
    positions, names = _written(func)
    targets = [args[index] for index in positions if index < len(args)] + [kwargs[name] for name in names if name in kwargs]
    if any(isinstance(item, ReadOnlyTensor) for item in tree_flatten(targets)[0]):
        raise RuntimeError(f"{func._schema.name} would write in place: {_ADVICE}")


def own(tensor: Tensor) -> Tensor:
    """Returns the tensor itself, or a private copy if it is guarded."""
    return tensor.plain.clone() if isinstance(tensor, ReadOnlyTensor) else tensor
