"""Every node runs once, when all its inputs are there, beside those that do not depend on it, and sees only what it declares."""

from __future__ import annotations

import pickle
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from types import FrameType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhub.errors import ProtocolError, RewardError, WorkerDiedError, WorkerError
from rlhub.pipeline.columns import Use
from rlhub.pipeline.executor import Executor, Output, RoleCalls, StepResult, declared, names_of
from rlhub.pipeline.graph import TaskGraph
from rlhub.pipeline.nodes import Edge, Node, NodeFields
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.protocol.layout import Layout
from rlhub.single_controller import ClassWithInitArgs, LaunchOptions, launch, register
from scripts.bench.graph import ready
from tests.support.batch_refs import same_batch
from tests.support.pipelines import NUM_ROWS, FunctionCalls, graph_of, mix, mixed
from tests.support.row_workers import ROWS_MESH, RowWorker

WAIT_S = 60.0


def run(graph: TaskGraph, function: Callable[[Node, Batch], Output], *, step: int = 1, in_order: bool = False) -> StepResult:
    return Executor(graph, FunctionCalls(function), in_order=in_order)(step)


# --- random graphs ---------------------------------------------------------------------------------------------------------


@st.composite
def random_nodes(draw: st.DrawFn) -> list[tuple[str, NodeFields]]:
    """Up to nine nodes, each with one or two columns, that read any columns of those above them."""
    columns: list[str] = []
    nodes: list[tuple[str, NodeFields]] = []
    for index in range(draw(st.integers(1, 9))):
        reads = draw(st.lists(st.sampled_from(columns), unique=True, max_size=4)) if columns else []
        writes = [f"c{index}_{number}" for number in range(draw(st.integers(1, 2)))]
        on = draw(st.sampled_from(["driver", "actor", "critic"]))
        trains = on if on != "driver" and draw(st.booleans()) else ""
        nodes.append((f"node{index}", {"reads": reads, "writes": writes, "on": on, "trains": trains}))
        columns += writes
    return nodes


def serial(graph: TaskGraph) -> DataProto:
    """One node after the other, in the order of the text."""
    columns: dict[str, torch.Tensor] = {}
    for node in graph.nodes:
        columns |= mixed(node, {use.name: columns[use.name] for use in node.reads}).tensors()
    return DataProto.from_dict(columns)


def check_equals_serial(graph: TaskGraph, seed: int, *, in_order: bool = False) -> None:
    """The executor gives what serial evaluation gives, and runs each node once; nodes take random times."""
    rng = random.Random(seed)
    naps = {node.name: rng.choice((0.0, 0.0, 0.0, 0.001)) for node in graph.nodes}

    def function(node: Node, batch: Batch) -> Output:
        time.sleep(naps[node.name])
        return mix(node, batch)

    calls = FunctionCalls(function)
    result = Executor(graph, calls, in_order=in_order)(1)
    assert Counter(calls.started) == Counter(node.name for node in graph.nodes)
    assert isinstance(result.batch, DataProto)
    assert same_batch(result.batch.select(meta_info_keys=[]), serial(graph))
    ended: set[str] = set()
    for what, name in calls.events:
        if what == "start":
            assert ended >= set(graph.sources(name)), f"{name} started before {graph.sources(name)} had ended"
        else:
            ended.add(name)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(random_nodes(), st.integers(0, 1 << 30), st.booleans())
def test_random_graphs_equal_serial_evaluation(nodes: list[tuple[str, NodeFields]], seed: int, in_order: bool) -> None:
    check_equals_serial(graph_of(nodes), seed, in_order=in_order)


DIAMOND: list[tuple[str, NodeFields]] = [
    ("a", {"writes": "x"}),
    ("b", {"reads": "x", "writes": "y"}),
    ("c", {"reads": "x", "writes": "z"}),
    ("d", {"reads": "y z", "writes": "w"}),
]


def chains_of(graph: TaskGraph) -> list[TaskGraph]:
    """What dissolves joins: a chain for each way from a first node to a last one, each with its own copy of the nodes."""
    below = {node.name: [edge.target for edge in graph.edges if edge.source == node.name] for node in graph.nodes}
    ways = [[node.name] for node in graph.nodes if not graph.sources(node.name)]
    while any(below[way[-1]] for way in ways):
        ways = [[*way, name] for way in ways for name in below[way[-1]] or [""] if name] + [w for w in ways if not below[w[-1]]]
    return [
        TaskGraph(
            name="-".join(way),
            nodes=tuple(graph.node(name) for name in way),
            edges=tuple(Edge(source=source, target=target) for source, target in pairwise(way)),
        )
        for way in ways
    ]


def run_as_chains(nodes: list[tuple[str, NodeFields]]) -> Counter[str]:
    """How often each node runs."""
    calls = FunctionCalls(lambda node, batch: mixed(node, batch.tensors()) if isinstance(batch, DataProto) else None)
    for chain in chains_of(graph_of(nodes)):
        Executor(chain, calls)(1)
    return Counter(calls.started)


def without_joins(graph: TaskGraph) -> TaskGraph:
    """Each node waits for its first source only."""
    kept: dict[str, Edge] = {}
    for edge in graph.edges:
        kept.setdefault(edge.target, edge)
    return TaskGraph(name="one source", nodes=graph.nodes, edges=tuple(kept.values()))


def test_a_diamond_has_a_real_join() -> None:
    for seed in range(20):
        check_equals_serial(graph_of(DIAMOND), seed)


def test_joins_dissolved_into_chains_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: the diamond as two chains runs nodes twice, and without what the other chain wrote."""
    with pytest.raises(ProtocolError, match=r"reads 'z', which is not there.*node 'd' of pipeline 'a-b-d'"):
        run_as_chains(DIAMOND)
    whatever_is_there: list[tuple[str, NodeFields]] = [*DIAMOND[:3], ("d", {"reads": "y? z?", "writes": "w"})]
    assert run_as_chains(whatever_is_there) == {"a": 2, "b": 1, "c": 1, "d": 2}
    over = threading.Event()
    monkeypatch.setattr("rlhub.pipeline.executor.GRACE_S", 0.0)

    def function(node: Node, batch: Batch) -> Output:
        assert node.name != "c" or over.wait(WAIT_S), "it ends after the step"
        return mix(node, batch)

    with pytest.raises(ProtocolError, match=r"reads 'z', which is not there.*node 'd'"):
        run(without_joins(graph_of(DIAMOND)), function)
    over.set()


# --- at the same time ------------------------------------------------------------------------------------------------------

STEP: list[tuple[str, NodeFields]] = [
    ("sample", {"writes": "x"}),
    ("score", {"reads": "x", "writes": "s"}),
    ("first_pass", {"reads": "x", "writes": "p"}),
    ("second_pass", {"reads": "x", "writes": "q"}),
    ("update", {"reads": "s p q"}),
]


def test_independent_nodes_run_at_the_same_time() -> None:
    """All three are inside their functions at once: none ends before all have begun."""
    together = threading.Barrier(3, timeout=WAIT_S)

    def function(node: Node, batch: Batch) -> Output:
        if node.name in ("score", "first_pass", "second_pass"):
            together.wait()
        return mix(node, batch)

    calls = FunctionCalls(function)
    result = Executor(graph_of(STEP), calls)(1)
    events = calls.events
    assert events[:2] == [("start", "sample"), ("end", "sample")] and events[-2:] == [("start", "update"), ("end", "update")]
    assert events[2:5] == [("start", "score"), ("start", "first_pass"), ("start", "second_pass")]
    spans = result.timings
    assert list(spans) == ["sample", "score", "first_pass", "second_pass", "update"]
    assert max(spans[name].start_s for name in list(spans)[1:4]) < min(spans[name].end_s for name in list(spans)[1:4])


def test_a_false_edge_makes_them_serial() -> None:
    nodes = [(name, {**fields, "after": "score"} if name.endswith("pass") else fields) for name, fields in STEP]
    calls = FunctionCalls(mix)
    Executor(graph_of(nodes), calls)(1)  # type: ignore[arg-type]
    assert calls.events.index(("end", "score")) < calls.events.index(("start", "first_pass"))


@pytest.mark.parametrize("in_order", [False, True])
def test_ties_are_broken_by_the_order_of_the_text(in_order: bool) -> None:
    names = [f"n{index}" for index in random.Random(0).sample(range(20), 20)]
    nodes: list[tuple[str, NodeFields]] = [(name, {"writes": name}) for name in names]
    for _ in range(5):
        calls = FunctionCalls(mix)
        Executor(graph_of(nodes), calls, in_order=in_order)(1)
        assert calls.started == names


RANKS: list[tuple[str, NodeFields]] = [
    ("load", {"writes": "x"}),
    ("reward", {"reads": "x", "writes": "s"}),
    ("critic_pass", {"reads": "s", "writes": "v", "on": "critic"}),
    ("actor_pass", {"reads": "x", "writes": "p", "on": "actor"}),
    ("train", {"reads": "p v", "on": "actor", "trains": "actor"}),
]


@pytest.mark.parametrize("slow", ["reward", "actor_pass"])
def test_where_every_rank_runs_the_loop_collectives_have_one_order(slow: str) -> None:
    """Whatever is ready first: nodes run as in the text, one at a time."""

    def function(node: Node, batch: Batch) -> Output:
        time.sleep(0.05 * (node.name == slow))
        return mix(node, batch)

    calls = FunctionCalls(function)
    Executor(graph_of(RANKS), calls, in_order=True)(1)
    assert calls.started == [name for name, _ in RANKS]
    free = FunctionCalls(function)
    Executor(graph_of(RANKS), free)(1)
    assert free.started.index("actor_pass") < free.started.index("critic_pass"), "the control: else what is ready starts"


# --- columns ---------------------------------------------------------------------------------------------------------------


def rows(**columns: list[float]) -> DataProto:
    return DataProto.from_dict({name: torch.tensor(column) for name, column in columns.items()})


def by_name(**functions: Callable[[Batch], Output]) -> Callable[[Node, Batch], Output]:
    return lambda node, batch: functions[node.name](batch)


def test_a_node_sees_the_columns_that_it_reads_and_no_others() -> None:
    seen: list[tuple[list[str], dict[str, object]]] = []

    def look(batch: Batch) -> None:
        seen.append((names_of(batch), dict(batch.meta_info)))

    graph = graph_of([("a", {"writes": "x y reward/*?"}), ("b", {"reads": "step x? z? reward/*?", "after": "a"})])
    made = DataProto.from_dict({"x": torch.zeros(2), "y": torch.zeros(2), "reward/acc": torch.zeros(2)})
    run(graph, by_name(a=lambda _: made, b=look), step=7)
    assert seen == [(["reward/acc", "x"], {"step": 7})]


def test_columns_of_objects_and_of_the_step_travel_too() -> None:
    made = DataProto.from_dict({"x": torch.zeros(2)}, {"text": ["p", "q"]}, {"weights_version": 3})
    graph = graph_of([("a", {"writes": "x text weights_version"}), ("b", {"reads": "text weights_version", "writes": "n"})])

    def read(batch: Batch) -> Output:
        assert isinstance(batch, DataProto) and list(batch.non_tensor_batch["text"]) == ["p", "q"]
        return rows(n=[float(batch.meta_info["weights_version"])] * 2)

    result = run(graph, by_name(a=lambda _: made, b=read))
    assert result.batch.meta_info == {"step": 1, "weights_version": 3} and names_of(result.batch) == ["n", "text", "x"]


def test_what_a_node_changes_in_its_view_stays_there() -> None:
    def spoil(batch: Batch) -> None:
        assert isinstance(batch, DataProto)
        batch.batch["x"] = torch.ones(2)

    result = run(graph_of([("a", {"writes": "x"}), ("b", {"reads": "x"})]), by_name(a=lambda _: rows(x=[0, 0]), b=spoil))
    assert isinstance(result.batch, DataProto) and result.batch.batch["x"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (rows(advantage=[1, 2]), r"returned column 'advantage', which it does not declare to write; did you mean 'advantages'\?"),
        (rows(advantages=[1, 2], x=[0, 0]), "returned column 'x'"),
        (None, "did not return column 'advantages'"),
        (rows(advantages=[1]), "2 and 1 rows"),
    ],
)
def test_a_node_writes_what_it_declares_and_nothing_else(returned: Output, message: str) -> None:
    graph = graph_of([("a", {"writes": "x"}), ("estimate", {"reads": "x", "writes": "advantages"})])
    with pytest.raises(ProtocolError, match=message) as caught:
        run(graph, by_name(a=lambda _: rows(x=[0, 0]), estimate=lambda _: returned))
    assert "node 'estimate' of pipeline 'test'" in str(caught.value)


def test_metrics_are_kept_by_node_in_the_order_of_the_text() -> None:
    def function(node: Node, batch: Batch) -> Output:
        time.sleep(0.02 * (node.name == "n0"))
        return DataProto(meta_info={"metrics": {"loss": [1.0]}}) if node.name != "n1" else None

    result = run(graph_of([(f"n{index}", {}) for index in range(3)]), function)
    assert list(result.metrics.items()) == [("n0", {"loss": [1.0]}), ("n2", {"loss": [1.0]})]


def test_a_condition_is_asked_at_every_step() -> None:
    nodes: list[tuple[str, NodeFields]] = [
        ("a", {"writes": "x"}),
        ("b", {"reads": "x", "writes": "y", "when": "step > trainer.warmup"}),
        ("c", {"reads": "x y?", "when": "step % 2 == 0"}),
    ]
    config = SimpleNamespace(trainer=SimpleNamespace(warmup=2))
    started = []
    for step in range(1, 5):
        calls = FunctionCalls(lambda node, batch: rows(**{use.name: [1.0] for use in node.writes}))
        Executor(graph_of(nodes), calls, config)(step)
        started.append("".join(calls.started))
    assert started == ["a", "ac", "ab", "abc"]


# --- the order of rows -----------------------------------------------------------------------------------------------------

REARRANGED: list[tuple[str, NodeFields]] = [
    ("sample", {"writes": "x length"}),
    ("score", {"reads": "x", "writes": "scores"}),
    ("quick", {"reads": "x", "writes": "early"}),
    ("balance", {"reads": "length", "writes": "row_order mini_batch"}),
    ("passes", {"reads": "x row_order", "writes": "p"}),
    ("join", {"reads": "scores p mini_batch early", "writes": "both"}),
]


@pytest.mark.parametrize("slow", ["score", "balance", "quick"])
def test_rows_in_another_order_take_late_columns_along(slow: str) -> None:
    """Scores that come after the rows were put in order belong to the same rows as those that came before."""
    dealt, scored = threading.Event(), threading.Event()

    def balance(batch: Batch) -> Output:
        assert isinstance(batch, DataProto) and {"x", "length"} <= set(names_of(batch))
        if slow == "balance":
            assert scored.wait(WAIT_S)
        order = batch.batch["length"].argsort()
        batch.reorder(order)
        batch.batch["row_order"] = order
        batch.batch["mini_batch"] = torch.arange(len(batch))
        return batch

    def own(name: str, into: str, times: int) -> Callable[[Batch], Output]:
        def function(batch: Batch) -> Output:
            assert isinstance(batch, DataProto)
            if slow == name:
                assert dealt.wait(WAIT_S)
            column = batch.batch["x"] * times
            if name == "score":
                scored.set()
            return DataProto.from_dict({into: column})

        return function

    def passes(batch: Batch) -> Output:
        dealt.set()
        assert names_of(batch) == ["x"]
        return own("passes", "p", 3)(batch)

    def combine(batch: Batch) -> Output:
        assert isinstance(batch, DataProto)
        columns = batch.batch
        return DataProto.from_dict({"both": columns["scores"] + columns["p"] + columns["early"] + columns["mini_batch"]})

    made = rows(x=[10.0, 20.0, 30.0, 40.0], length=[3, 1, 4, 2])
    result = run(
        graph_of(REARRANGED),
        by_name(
            sample=lambda _: made,
            score=own("score", "scores", 2),
            quick=own("quick", "early", 1),
            balance=balance,
            passes=passes,
            join=combine,
        ),
    )
    assert isinstance(result.batch, DataProto)
    columns = result.batch.batch
    assert columns["x"].tolist() == [20, 40, 10, 30] and "row_order" not in columns.keys()
    assert columns["both"].tolist() == [20 * 6, 40 * 6 + 1, 10 * 6 + 2, 30 * 6 + 3]


def test_late_columns_by_reference_belong_to_the_same_rows_too() -> None:
    """A call names the rows that it was given, and those of before are void."""
    dealt = threading.Event()

    def held(key: str, **columns: list[float]) -> BatchRef:
        return BatchRef((key,), rows(**columns), {}, Layout.of(0, np.arange(2)))

    def score(batch: Batch) -> Output:
        assert isinstance(batch, BatchRef) and dealt.wait(WAIT_S)
        return held("before", scores=[10.0, 20.0])

    def passes(batch: Batch) -> Output:
        dealt.set()
        return held("after", p=[5.0, 6.0])

    result = run(
        graph_of([node for node in REARRANGED if node[0] in ("sample", "score", "balance", "passes")]),
        by_name(
            sample=lambda _: held("before", x=[1.0, 2.0], length=[2, 1]),
            score=score,
            balance=lambda _: held("after", x=[2.0, 1.0], length=[1, 2], row_order=[1, 0], mini_batch=[0, 1]),
            passes=passes,
        ),
    )
    assert isinstance(result.batch, BatchRef) and result.batch.keys == ("after",)
    assert result.batch.batch["scores"].tolist() == [20.0, 10.0] and result.batch.batch["p"].tolist() == [5.0, 6.0]


@pytest.mark.parametrize(("name", "known"), [("prompts", True), ("style", False)])
def test_rows_that_move_may_be_stored_in_another_form(name: str, known: bool) -> None:
    """What a node above may write, and has not written, can come with the rows in their new order; other columns cannot."""
    graph = graph_of([("sample", {"writes": "x prompts?"}), ("balance", {"reads": "x", "writes": "row_order"})])
    moved = rows(x=[1, 2], row_order=[0, 1], **{name: [0, 0]})
    with nullcontext() if known else pytest.raises(ProtocolError, match="returned column 'style', which it does not declare"):
        result = run(graph, by_name(sample=lambda _: rows(x=[1, 2]), balance=lambda _: moved))
        assert names_of(result.batch) == sorted([name, "x"])


# --- worker groups, rows here and by reference -------------------------------------------------------------------------------

READ_ROWS: list[tuple[str, NodeFields]] = [
    ("sample", {"on": "rollout", "writes": "padded keep tokens length made_by"}),
    ("length_twice", {"reads": "length", "writes": "twice"}),
    ("double", {"on": "rollout", "reads": "tokens padded", "writes": "sum wide"}),
    ("spread", {"reads": "sum twice", "writes": "spread"}),
]


class AddingWorker(RowWorker):
    """Adds columns to a batch, those of several numbers a row to its own store."""

    @register(ROWS_MESH, adds_columns=True)
    def double(self, batch: DataProto) -> DataProto:
        sums = torch.stack([row.sum() * 2 for row in batch.batch["tokens"].unbind()])
        return DataProto.from_dict({"sum": sums, "wide": batch.batch["padded"] * 2})


@pytest.mark.parametrize("by_reference", [False, True])
def test_rows_here_and_rows_by_reference_are_the_same(by_reference: bool) -> None:
    prompts = DataProto.from_dict({"number": torch.arange(3, 9)})
    with launch({"rollout": ClassWithInitArgs(AddingWorker)}, LaunchOptions(backend="local")) as started:
        group = started.groups["rollout"]

        calls = RoleCalls(
            {
                "sample": lambda _: group.generate.retain(key="k")(prompts) if by_reference else group.generate(prompts),
                "length_twice": lambda batch: DataProto.from_dict({"twice": batch.batch["length"] * 2}),
                "spread": lambda batch: DataProto.from_dict({"spread": batch.batch["sum"] - batch.batch["twice"]}),
            },
            {"rollout": group},
        )
        result = Executor(graph_of(READ_ROWS), calls)(1)
        assert isinstance(result.batch, BatchRef) == by_reference
        whole = group.generate(prompts)
        summed = group.double(whole)
        expected = summed.batch["sum"] - whole.batch["length"] * 2
        assert torch.equal(result.batch.batch["spread"], expected)
        if isinstance(result.batch, BatchRef):
            assert set(result.batch.columns) == {"padded", "keep", "tokens", "wide"}
            assert torch.equal(result.batch.fetch(["wide"]).batch["wide"], summed.batch["wide"])
        assert result.metrics["sample"]


# --- failures --------------------------------------------------------------------------------------------------------------


def raise_(error: Exception) -> Output:
    raise error


def test_an_error_names_its_node_and_keeps_its_type() -> None:
    cause = RewardError("too many failed")
    error = WorkerError("failed", role="actor", rank=1, remote_type="RewardError")
    error.__cause__ = cause
    graph = graph_of([("a", {"writes": "x"}), ("update_actor", {"reads": "x", "on": "actor"})])
    with pytest.raises(WorkerError, match=r"node 'update_actor' of pipeline 'test', on actor") as caught:
        run(graph, by_name(a=lambda _: rows(x=[1.0]), update_actor=lambda _: raise_(error)))
    assert caught.value is error and caught.value.__cause__ is cause
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(error)


def test_errors_of_other_libraries_carry_a_note() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run(graph_of([("a", {})]), lambda node, batch: raise_(ZeroDivisionError("x")))
    assert caught.value.__notes__ == ["(node 'a' of pipeline 'test', on driver)"]


def test_a_death_explains_what_fails_beside_it() -> None:
    died = WorkerDiedError("died", role="actor", rank=0, remote_type="SIGKILL")

    def function(node: Node, batch: Batch) -> Output:
        time.sleep(0.1 * (node.name == "b"))
        return raise_(died if node.name == "b" else WorkerError("lost its peer", role="critic", rank=0))

    with pytest.raises(WorkerDiedError, match="node 'b'") as caught:
        run(graph_of([("a", {}), ("b", {})]), function)
    assert caught.value is died


def test_nothing_starts_after_a_failure() -> None:
    calls = FunctionCalls(lambda node, batch: raise_(RewardError("no")) if node.name == "a" else mix(node, batch))
    with pytest.raises(RewardError):
        Executor(graph_of([("a", {"writes": "x"}), ("b", {"reads": "x"})]), calls)(1)
    assert calls.started == ["a"]


def test_a_lone_node_runs_in_the_callers_thread() -> None:
    threads = []
    run(graph_of([("a", {}), ("b", {"after": "a"})]), lambda node, batch: threads.append(threading.current_thread()))
    assert threads == [threading.main_thread()] * 2


def num_calls(action: Callable[[], object]) -> int:
    """How many functions it calls, those in its threads and those of C included."""
    count = Counter[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        count[event] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count["call"] + count["c_call"]


@pytest.mark.parametrize("times", [1, 150])
def test_a_step_of_ppo_costs_a_few_thousand_calls(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what its nodes call, 4700; were every choice of columns longer, it would be more.  The time that they take is
    measured by scripts/bench/graph.py, on an idle machine."""

    def slow(uses: Sequence[Use], names: Sequence[str]) -> list[str]:
        return [declared(uses, names) for _ in range(times)][0]

    monkeypatch.setattr("rlhub.pipeline.executor.declared", slow)
    parts = ready()
    executor = Executor(parts.graph, FunctionCalls(parts.function), SimpleNamespace(trainer=SimpleNamespace(critic_warmup=0)))
    executor(1)  # what only the first one does
    needed = num_calls(lambda: executor(2)) - num_calls(lambda: [parts.output(node) for node in parts.graph.nodes])
    assert (needed <= 7000) == (times == 1), f"{needed} calls"


def test_num_rows_of_random_graphs() -> None:
    assert len(serial(graph_of(DIAMOND))) == NUM_ROWS
