"""The built-in dispatch modes: pure functions from a call's arguments to one argument list per rank, and back.

Two rules hold for all of them.  Whether a list is spread over the ranks depends on the mode alone, never on the list
happening to be as long as the group.  And an uneven batch is dispatched as it is: every rank sees exactly its rows, so
nothing has to be stripped afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from rlhub.errors import DispatchError
from rlhub.protocol import BatchRef, DataProto, DataProtoFuture
from rlhub.single_controller.decorator import Dispatch, DispatchMode, DispatchTarget, add_dispatch_mode

PerRank = tuple[list[list[Any]], dict[str, list[Any]]]


def _map_arguments(spread: Callable[[str, Any], list[Any]], args: Sequence[Any], kwargs: Mapping[str, Any]) -> PerRank:
    """Applies `spread(argument name, value)` to every argument."""
    return [spread(f"argument {i}", value) for i, value in enumerate(args)], {k: spread(k, v) for k, v in kwargs.items()}


def _need_one_per_rank(group: DispatchTarget, mode: str, name: str, value: Sequence[Any]) -> list[Any]:
    if len(value) != group.world_size:
        raise DispatchError(
            f"{mode} takes a list with one item per rank: {name} has {len(value)} items, {group.role} has {group.world_size} "
            "ranks. To give every rank the whole list use Dispatch.ONE_TO_ALL"
        )
    return list(value)


def dispatch_one_to_all(group: DispatchTarget, *args: Any, **kwargs: Any) -> PerRank:
    """Gives every rank every argument whole."""
    return _map_arguments(lambda _, value: [value] * group.world_size, args, kwargs)


def dispatch_all_to_all(group: DispatchTarget, *args: Any, **kwargs: Any) -> PerRank:
    """Spreads a list over the ranks, one item each (any other length is an error); anything else is the same for all."""

    def spread(name: str, value: Any) -> list[Any]:
        if isinstance(value, list):
            return _need_one_per_rank(group, Dispatch.ALL_TO_ALL, name, value)
        return [value] * group.world_size

    return _map_arguments(spread, args, kwargs)


def dispatch_dp_compute(group: DispatchTarget, *args: Any, **kwargs: Any) -> PerRank:
    """Spreads every argument, which must be a list or tuple with one item per rank."""

    def spread(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise DispatchError(f"DP_COMPUTE takes lists or tuples only: {name} is a {type(value).__name__}")
        return _need_one_per_rank(group, Dispatch.DP_COMPUTE, name, value)

    return _map_arguments(spread, args, kwargs)


def _split(name: str, value: Any, shards: Sequence[int], homes: Sequence[int]) -> list[Any]:
    """Gives rank r chunk `shards[r]` of a batch, the SAME object as its fellow ranks; other values are replicated.

    homes: by shard, the rank that has the rows of a batch by reference.
    """
    if isinstance(value, TensorDictBase):
        raise DispatchError(
            f"{name} is a {type(value).__name__}, which would go whole to every rank of a method that cuts batches: pass "
            "DataProto.from_tensordict(...) to have it cut, or register the method with Dispatch.ONE_TO_ALL"
        )
    if not isinstance(value, DataProto | DataProtoFuture | BatchRef):
        return [value] * len(shards)
    chunks: Sequence[Any] = value.by_home(homes) if isinstance(value, BatchRef) else value.chunk(len(homes))
    return [chunks[shard] for shard in shards]


def dispatch_dp_compute_proto(group: DispatchTarget, *args: Any, **kwargs: Any) -> PerRank:
    """Cuts batches into one chunk per rank; all else is the same for all."""
    ranks = range(group.world_size)
    return _map_arguments(lambda name, value: _split(name, value, ranks, ranks), args, kwargs)


def dispatch_dp_compute_proto_with_func(group: DispatchTarget, *args: Any, **kwargs: Any) -> PerRank:
    """Cuts batches as DP_COMPUTE_PROTO does; the first positional argument is a function."""
    if not args or not callable(args[0]):
        raise DispatchError("DP_COMPUTE_PROTO_WITH_FUNC takes a function as its first positional argument")
    return dispatch_dp_compute_proto(group, *args, **kwargs)


def _dispatch_refused(group: DispatchTarget, *args: Any, **kwargs: Any) -> PerRank:
    raise DispatchError(f"{group.role}: a DIRECT_ROLLOUT_METHOD is called inside the worker, not from the driver")


def collect_list(group: DispatchTarget, outputs: list[Any]) -> list[Any]:
    """Returns one output per rank, as they are."""
    return outputs


def collect_rank_zero(group: DispatchTarget, outputs: list[Any]) -> Any:
    """Returns the single output of rank 0."""
    return outputs[0]


def collect_dp_compute_proto(group: DispatchTarget, outputs: list[Any]) -> DataProto | BatchRef:
    """Returns one DataProto of all outputs, in shard order; one BatchRef where columns of them stayed with the ranks."""
    if all(isinstance(output, BatchRef) for output in outputs):
        return BatchRef.concat(outputs)
    wrong = sorted({type(output).__name__ for output in outputs if not isinstance(output, DataProto)})
    if wrong:
        raise DispatchError(
            f"{group.role}: a method whose results are joined to one DataProto returned {', '.join(wrong)}; "
            "return a DataProto, or register it with DP_COMPUTE_METRIC or ONE_TO_ALL to get the list"
        )
    return DataProto.concat(outputs)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """Returns the mode of methods that run on a mesh with more than the data-parallel dimension.

    Batches are cut over the DP dimension of the mesh that the workers declared as `mesh_name`
    (`Worker._register_dispatch_collect_info`); all ranks of one DP shard get the same chunk, and only the ranks that
    declared themselves collecting send theirs back.
    """

    def dispatch(group: DispatchTarget, *args: Any, **kwargs: Any) -> PerRank:
        mesh = group.mesh(mesh_name)
        return _map_arguments(lambda name, value: _split(name, value, mesh.dp_ranks, mesh.collecting), args, kwargs)

    def collect(group: DispatchTarget, outputs: list[Any]) -> DataProto | BatchRef:
        joined = collect_dp_compute_proto(group, outputs)
        if isinstance(joined, BatchRef):  # the other ranks of a shard have kept the same columns
            joined.copies = group.mesh(mesh_name).copies
        return joined

    return DispatchMode(
        name=f"mesh {mesh_name}",
        dispatch_fn=dispatch,
        collect_fn=collect,
        ranks_fn=lambda group: group.mesh(mesh_name).collecting,
        proto=True,
        mesh=mesh_name,
    )


def _add_builtin_modes() -> None:
    proto, plain = collect_dp_compute_proto, collect_list
    for mode in (
        DispatchMode(name=Dispatch.RANK_ZERO, dispatch_fn=dispatch_one_to_all, collect_fn=collect_rank_zero, rank_zero=True),
        DispatchMode(name=Dispatch.ONE_TO_ALL, dispatch_fn=dispatch_one_to_all, collect_fn=plain),
        DispatchMode(name=Dispatch.ALL_TO_ALL, dispatch_fn=dispatch_all_to_all, collect_fn=plain),
        DispatchMode(name=Dispatch.DP_COMPUTE, dispatch_fn=dispatch_dp_compute, collect_fn=plain),
        DispatchMode(name=Dispatch.DP_COMPUTE_PROTO, dispatch_fn=dispatch_dp_compute_proto, collect_fn=proto, proto=True),
        DispatchMode(
            name=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC,
            dispatch_fn=dispatch_dp_compute_proto_with_func,
            collect_fn=proto,
            proto=True,
        ),
        DispatchMode(name=Dispatch.DP_COMPUTE_METRIC, dispatch_fn=dispatch_dp_compute_proto, collect_fn=plain),
        DispatchMode(name=Dispatch.DIRECT_ROLLOUT_METHOD, dispatch_fn=_dispatch_refused, collect_fn=plain, callable=False),
    ):
        add_dispatch_mode(mode)


_add_builtin_modes()
