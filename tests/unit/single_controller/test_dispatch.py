"""Every mode's way from arguments to ranks and back, on a group that only records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlhub.config.sections.trainer import DeadlineConfig
from rlhub.errors import DispatchError
from rlhub.protocol import DataProto, DataProtoFuture
from rlhub.single_controller import Dispatch, Execute, Worker, make_nd_compute_dataproto_dispatch_fn, register
from rlhub.single_controller.calls import Deadline, ObservedCall, PendingCall, RankRequest, Request, Watch, WorkerInfo
from rlhub.single_controller.worker import MeshInfo
from rlhub.single_controller.worker_group import WorkerGroup, build_mesh


def _custom_dispatch(group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    return [[f"{value}{rank}" for rank in range(group.world_size)] for value in args], {}


def _wrong_dispatch(group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    return list(args), kwargs


class Role(Worker):
    @register(Dispatch.RANK_ZERO)
    def rank_zero(self, *args: Any, **kwargs: Any) -> None: ...

    @register(Dispatch.ONE_TO_ALL)
    def one_to_all(self, *args: Any, **kwargs: Any) -> None: ...

    @register()
    def all_to_all(self, *args: Any, **kwargs: Any) -> None: ...

    @register(execute_mode=Execute.RANK_ZERO)
    def all_to_all_on_zero(self, *args: Any, **kwargs: Any) -> None: ...

    @register(Dispatch.DP_COMPUTE)
    def dp_compute(self, *args: Any, **kwargs: Any) -> None: ...

    @register(Dispatch.DP_COMPUTE_PROTO)
    def dp_compute_proto(self, *args: Any, **kwargs: Any) -> None: ...

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def dp_compute_proto_later(self, *args: Any, **kwargs: Any) -> None: ...

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def with_func(self, *args: Any, **kwargs: Any) -> None: ...

    @register(Dispatch.DP_COMPUTE_METRIC, deadline="infer")
    def metric(self, *args: Any, **kwargs: Any) -> None: ...

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self, *args: Any, **kwargs: Any) -> None: ...

    @register(make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def on_mesh(self, *args: Any, **kwargs: Any) -> None: ...

    @register({"dispatch_fn": _custom_dispatch, "collect_fn": lambda group, outputs: tuple(outputs)})
    def custom(self, *args: Any, **kwargs: Any) -> None: ...

    @register({"dispatch_fn": _wrong_dispatch, "collect_fn": lambda group, outputs: outputs})
    def custom_wrong(self, *args: Any, **kwargs: Any) -> None: ...


class _Answered(PendingCall):
    def __init__(self, outputs: dict[int, Any]) -> None:
        self.outputs = outputs

    def wait(self) -> dict[int, Any]:
        return self.outputs

    def done(self) -> bool:
        return True

    def data_future(self, ranks: Sequence[int], watch: Watch) -> DataProtoFuture:
        return DataProtoFuture([self.outputs[rank] for rank in ranks], lambda references: references)


class RecordingGroup(WorkerGroup):
    """Keeps the request; each rank answers with the first batch it was given, else with its rank."""

    def __init__(self, world_size: int = 4, tp: int = 1) -> None:
        super().__init__("actor", Role)
        self._infos = tuple(WorkerInfo(rank=rank, node="n", pid=rank) for rank in range(world_size))
        self.tp = tp
        self.queries = 0
        self.sent: list[RankRequest] = []
        self.request: Request | None = None

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._infos

    def _send(self, request: Request) -> PendingCall:
        if request.method == "query_mesh":
            self.queries += 1
            infos = {r: MeshInfo(dp_rank=r // self.tp, is_collect=r % self.tp == self.tp - 1) for r in range(self.world_size)}
            return _Answered(infos if request.ranks[0].args == ("actor",) else dict.fromkeys(infos, ("actor",)))
        self.request, self.sent = request, request.ranks
        return _Answered({rank.rank: self._answer(rank) for rank in request.ranks})

    def _answer(self, rank: RankRequest) -> Any:
        if not rank.reply:
            return None
        values = [*rank.args, *rank.kwargs.values()]
        return next((value for value in values if isinstance(value, DataProto)), rank.rank)

    def close(self, deadline_s: float = 60.0) -> None:
        self._closed = True

    def args(self) -> list[tuple[Any, ...]]:
        return [rank.args for rank in self.sent]

    def rows(self) -> list[list[int]]:
        return [self._answer_rows(rank) for rank in self.sent]

    def _answer_rows(self, rank: RankRequest) -> list[int]:
        batch = next(value for value in [*rank.args, *rank.kwargs.values()] if isinstance(value, DataProto))
        return batch.batch["x"].tolist()


def batch(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)})


def test_rank_zero_calls_rank_zero_alone_and_gives_its_single_result() -> None:
    group = RecordingGroup()
    assert group.rank_zero([1, 2, 3, 4], key=5) == 0
    assert [rank.rank for rank in group.sent] == [0]
    assert group.args() == [([1, 2, 3, 4],)] and group.sent[0].kwargs == {"key": 5}


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_one_to_all_never_shards_whatever_the_list_length(world_size: int) -> None:
    group = RecordingGroup(world_size)
    assert group.one_to_all([1, 2, 3], key=(4, 5, 6)) == list(range(world_size))
    assert group.args() == [([1, 2, 3],)] * world_size
    assert all(rank.kwargs == {"key": (4, 5, 6)} for rank in group.sent)


def test_all_to_all_gives_one_list_item_per_rank_and_other_values_to_all() -> None:
    group = RecordingGroup(3)
    assert group.all_to_all([10, 11, 12], "same", key=[1, 2, 3]) == [0, 1, 2]
    assert group.args() == [(10, "same"), (11, "same"), (12, "same")]
    assert [rank.kwargs["key"] for rank in group.sent] == [1, 2, 3]


def test_all_to_all_with_a_list_of_another_length_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(DispatchError, match=r"argument 0 has 2 items, actor has 3 ranks.*ONE_TO_ALL"):
        RecordingGroup(3).all_to_all([1, 2])


def test_all_to_all_on_rank_zero_passes_arguments_unchanged() -> None:
    group = RecordingGroup(3)
    assert group.all_to_all_on_zero([1, 2, 3]) == 0
    assert group.args() == [([1, 2, 3],)]


def test_dp_compute_takes_lists_of_the_groups_size_only() -> None:
    group = RecordingGroup(2)
    group.dp_compute([1, 2], key=(3, 4))
    assert group.args() == [(1,), (2,)] and [rank.kwargs["key"] for rank in group.sent] == [3, 4]
    with pytest.raises(DispatchError, match="key is a int"):
        group.dp_compute([1, 2], key=3)
    with pytest.raises(DispatchError, match="3 items"):
        group.dp_compute([1, 2, 3])


@pytest.mark.parametrize("rows", [8, 7, 5, 3, 0])
def test_proto_splits_unevenly_without_padding_and_joins_in_order(rows: int) -> None:
    group = RecordingGroup(4)
    joined = group.dp_compute_proto(batch(rows), "same", scale=2)
    assert joined.batch["x"].tolist() == list(range(rows))
    sizes = [len(part) for part in group.rows()]
    assert sum(sizes) == rows and max(sizes) - min(sizes) <= 1
    assert all(rank.args[1] == "same" and rank.kwargs == {"scale": 2} for rank in group.sent)


def test_proto_works_with_keywords_only() -> None:
    group = RecordingGroup(2)
    assert len(group.dp_compute_proto(data=batch(5))) == 5
    assert group.rows() == [[0, 1, 2], [3, 4]]


def test_proto_with_func_replicates_the_function() -> None:
    group = RecordingGroup(2)
    group.with_func(len, batch(4))
    assert [rank.args[0] for rank in group.sent] == [len, len] and group.rows() == [[0, 1], [2, 3]]
    with pytest.raises(DispatchError, match="first positional"):
        group.with_func(batch(4))


def test_metric_returns_the_raw_list() -> None:
    parts = RecordingGroup(2).metric(batch(4))
    assert [len(part) for part in parts] == [2, 2]


def test_direct_methods_are_refused() -> None:
    with pytest.raises(DispatchError, match="inside the worker"):
        RecordingGroup().direct()


def test_mesh_gives_ranks_of_a_shard_the_same_object_and_collects_from_the_declared_ones() -> None:
    group = RecordingGroup(4, tp=2)
    joined = group.on_mesh(data=batch(5))
    chunks = [rank.kwargs["data"] for rank in group.sent]
    assert chunks[0] is chunks[1] and chunks[2] is chunks[3]
    assert [rank.reply for rank in group.sent] == [False, True, False, True]
    assert joined.batch["x"].tolist() == list(range(5))
    group.on_mesh(batch(2))
    assert group.queries == 1, "the mesh is asked for once"


def test_non_blocking_proto_gives_a_future_that_can_be_dispatched_again() -> None:
    group = RecordingGroup(2)
    future = group.dp_compute_proto_later(batch(5))
    assert isinstance(future, DataProtoFuture) and group.request is not None and group.request.as_data
    group.dp_compute_proto_later(future)
    chunks = [rank.args[0] for rank in group.sent]
    assert all(isinstance(chunk, DataProtoFuture) for chunk in chunks)
    assert [chunk.get().batch["x"].tolist() for chunk in chunks] == [[0, 1, 2], [3, 4]]


def test_submit_makes_any_method_non_blocking() -> None:
    group = RecordingGroup(2)
    assert isinstance(group.dp_compute_proto.submit(batch(2)), DataProtoFuture)
    assert group.one_to_all.submit(1).get() == [0, 1]


def test_collecting_something_else_than_batches_is_an_error() -> None:
    with pytest.raises(DispatchError, match="returned int"):
        RecordingGroup(2).dp_compute_proto(1)


def test_a_dict_mode_is_used_and_its_dispatch_must_give_one_item_per_rank() -> None:
    group = RecordingGroup(2)
    assert group.custom("a") == (0, 1)
    assert group.args() == [("a0",), ("a1",)]
    with pytest.raises(DispatchError, match="one item per rank"):
        group.custom_wrong("a")


def test_execute_methods_reach_any_method_and_keep_lists_whole() -> None:
    group = RecordingGroup(2)
    assert group.execute_all_sync("anything", [1, 2]) == [0, 1]
    assert group.args() == [([1, 2],), ([1, 2],)]
    assert group.execute_rank_zero_sync("anything", [1, 2]) == 0
    assert group.execute_all("anything").get() == [0, 1] and group.execute_rank_zero("anything").get() == 0


def test_unknown_methods_name_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean 'one_to_all'"):
        RecordingGroup().one_to_al()


def test_the_deadline_that_a_method_names_reaches_the_backend() -> None:
    group = RecordingGroup(1)
    group.deadline_s = DeadlineConfig(infer=5.0, update=9.0)
    group.metric(batch(1))
    assert group.request is not None and group.request.deadline == Deadline(seconds=5.0, setting="trainer.deadline_s.infer")
    for call in (lambda: group.one_to_all(1), lambda: group.execute_all_sync("anything")):
        call()
        assert group.request.deadline == Deadline(seconds=9.0, setting="trainer.deadline_s.update")


def test_a_closed_group_refuses_calls() -> None:
    group = RecordingGroup()
    group.close()
    with pytest.raises(DispatchError, match="closed"):
        group.one_to_all(1)


def test_a_method_may_not_hide_a_member_of_the_group() -> None:
    class Bad(Worker):
        @register()
        def workers(self) -> None: ...

    with pytest.raises(DispatchError, match="rename the method"):
        WorkerGroup.__init__(RecordingGroup(1), "bad", Bad)


def test_observers_see_start_and_end_of_every_call() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.events: list[tuple[str, str, object]] = []

        def on_start(self, call: ObservedCall) -> None:
            self.events.append(("start", f"{call.role}.{call.method}", len(call.workers)))

        def on_end(self, call: ObservedCall, seconds: float, error: BaseException | None) -> None:
            assert seconds >= 0
            self.events.append(("end", f"{call.role}.{call.method}", type(error)))

        def on_transfer(self, call: ObservedCall, *, sent: int = 0, received: int = 0) -> None: ...

    group, recorder = RecordingGroup(2), Recorder()
    group.observers.append(recorder)
    group.one_to_all(1)
    future = group.one_to_all.submit(1)
    assert recorder.events[-1][0] == "start"
    future.get()
    future.get()
    with pytest.raises(DispatchError):
        group.dp_compute_proto(1)
    kinds = [(kind, name) for kind, name, _ in recorder.events]
    assert kinds == [
        ("start", "actor.one_to_all"), ("end", "actor.one_to_all"),
        ("start", "actor.one_to_all"), ("end", "actor.one_to_all"),
        ("start", "actor.dp_compute_proto"), ("end", "actor.dp_compute_proto"),
    ]  # fmt: skip
    assert recorder.events[-1][2] is DispatchError


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([MeshInfo(dp_rank=0, is_collect=True), ("other",)], "rank 1 declared no mesh 'm'.*other"),
        ([MeshInfo(dp_rank=0, is_collect=True), MeshInfo(dp_rank=0, is_collect=True)], "exactly one collecting"),
        ([MeshInfo(dp_rank=0, is_collect=True), MeshInfo(dp_rank=2, is_collect=True)], "shard 1"),
    ],
)
def test_mesh_declarations_are_checked(infos: list[Any], message: str) -> None:
    with pytest.raises(DispatchError, match=message):
        build_mesh("actor", "m", infos)


def test_results_come_in_shard_order_not_rank_order() -> None:
    infos = [MeshInfo(dp_rank=1, is_collect=True), MeshInfo(dp_rank=0, is_collect=True)]
    mesh = build_mesh("actor", "m", infos)
    assert mesh.collecting == (1, 0) and mesh.dp_size == 2


@pytest.mark.parametrize("call", ["dp_compute_proto", "metric", "on_mesh"])
def test_a_bare_tensordict_is_refused_where_batches_are_cut_and_not_given_whole_to_every_rank(call: str) -> None:
    group = RecordingGroup()
    columns = TensorDict({"x": torch.arange(8)}, batch_size=[8])
    for arguments, keywords, name in (((columns,), {}, "argument 0"), ((), {"data": columns}, "data")):
        with pytest.raises(DispatchError, match=rf"{name} is a TensorDict.*DataProto\.from_tensordict"):
            getattr(group, call)(*arguments, **keywords)
    assert group.request is None
    group.dp_compute_proto(DataProto.from_tensordict(columns))
    assert group.rows() == [[0, 1], [2, 3], [4, 5], [6, 7]]
