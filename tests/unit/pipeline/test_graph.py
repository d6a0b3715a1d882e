"""Edges follow from columns and from weights; a pipeline is edited as text is."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import ConfigError, LoadError
from rlhub.pipeline import builtin
from rlhub.pipeline.builtin import dapo, dpo, ppo, rm, sft
from rlhub.pipeline.checks import ROLES, methods_of
from rlhub.pipeline.columns import COLUMNS, DIMS, DTYPES, Use, parse_uses
from rlhub.pipeline.conditions import condition_problem, holds
from rlhub.pipeline.graph import Pipeline, TaskGraph
from rlhub.pipeline.load import SUPERVISED_ROLES, build_pipeline, load_pipeline, problems_of
from rlhub.pipeline.nodes import Edge, NodeFields
from rlhub.trainer.ppo.requirements import Requirements, requirements
from tests.support.pipelines import SomeNeeds, graph_of


def ppo_graph(**needs: bool) -> TaskGraph:
    return ppo(None, SomeNeeds(**needs)).build()


# --- columns ---------------------------------------------------------------------------------------------------------------


def test_every_column_has_a_type_a_meaning_and_a_writer() -> None:
    for name, column in COLUMNS.items():
        assert (
            column.name == name and column.dtype in DTYPES and set(column.dims) <= set(DIMS) and column.meaning and column.writer
        )
        assert not column.dims or column.dims[0] == "rows"
    assert COLUMNS["advantages"].wide and not COLUMNS["scores"].wide and not COLUMNS["step"].wide


def test_the_usual_writers_are_nodes_of_the_built_in_pipelines() -> None:
    writes = {use.name: node.name for function in (sft, ppo) for node in function(None, SomeNeeds()).nodes for use in node.writes}
    for name, writer in writes.items():
        if writer != "next_batch":
            assert COLUMNS[name].writer == writer


def test_columns_are_written_as_text() -> None:
    assert parse_uses("values? scores") == (Use("values", True), Use("scores"))
    assert parse_uses(["a b", "style:float32(rows response)?"])[2].name == "style:float32(rows response)?", "what is odd stays"
    assert parse_uses("style?:float32(rows response) x:int64") == (
        Use("style", True, "float32", ("rows", "response")),
        Use("x", False, "int64"),
    )
    assert [str(use) for use in parse_uses("style?:float32(rows response) x:int64 reward/*?")] == [
        *("style?:float32(rows response)", "x:int64", "reward/*?"),
    ]
    assert parse_uses("a b a") == (Use("a"), Use("b"))
    assert Use("reward/*").covers("reward/acc") and not Use("reward/*").covers("rewards")


# --- conditions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("step > trainer.critic_warmup", True),
        ("step % 2 == 0", False),
        ("not step % 2 == 0 and step >= -1", True),
        ("0 < step <= trainer.critic_warmup + 3 * 1", True),
        ("trainer.device == 'cuda' or trainer.balance_batch", True),
    ],
)
def test_conditions(text: str, value: bool) -> None:
    assert condition_problem(text, PPOConfig()) is None
    assert holds(text, 3, PPOConfig()) is value


@pytest.mark.parametrize("text", ["step >", "step()", "[step]", "step.real", "open('x')", "step if step else 1", "x := 1"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    assert condition_problem(text, PPOConfig()) is not None


# --- edges -----------------------------------------------------------------------------------------------------------------


def test_edges_follow_from_columns_weights_and_what_a_node_says() -> None:
    nodes: list[tuple[str, NodeFields]] = [
        ("pass", {"on": "actor", "reads": "x", "writes": "y z"}),
        ("load", {"writes": "x"}),
        ("update", {"on": "actor", "reads": "z y w?", "trains": "actor"}),
        ("again", {"on": "actor", "trains": "actor"}),
        ("log", {"after": "update"}),
    ]
    assert list(graph_of(nodes).edges) == [
        Edge(source="load", target="pass", columns=("x",)),
        Edge(source="pass", target="update", columns=("z", "y"), trains="actor"),
        Edge(source="pass", target="again", trains="actor"),
        Edge(source="update", target="again", trains="actor"),
        Edge(source="update", target="log", after=True),
    ]


def test_reward_and_passes_of_ppo_do_not_wait_for_each_other() -> None:
    graph = ppo_graph()
    passes = ("compute_log_prob", "compute_ref_log_prob", "compute_values")
    for name in passes:
        assert graph.sources(name) == ["sample", "balance"]
    assert graph.sources("score") == ["sample"]
    assert {*passes, "score"} <= set(graph.sources("compute_advantages"))


def test_both_updates_of_ppo_do_not_wait_for_each_other() -> None:
    graph = ppo_graph()
    assert "update_critic" not in graph.sources("update_actor") and "update_actor" not in graph.sources("update_critic")


def test_types_and_roles_are_derived() -> None:
    assert {node.name: (node.type, node.role) for node in ppo_graph().nodes if node.on != "driver"} == {
        "publish": ("model_inference", "actor"),
        "sample": ("model_inference", "rollout"),
        "compute_log_prob": ("model_inference", "actor"),
        "compute_ref_log_prob": ("model_inference", "reference"),
        "compute_values": ("model_inference", "critic"),
        "compute_advantages": ("model_inference", "actor"),
        "rollout_correction": ("model_inference", "actor"),
        "select_tokens": ("model_inference", "actor"),
        "update_critic": ("model_train", "critic"),
        "update_actor": ("model_train", "actor"),
    }
    assert {node.type for node in ppo_graph().nodes if node.on == "driver"} == {"compute"}
    assert sft(None).build().node("next_batch").type == "compute" and dpo(None).build().node("train_step").type == "model_train"
    assert graph_of([("load", {"writes": "x"})]).node("load").type == "data_load"
    assert graph_of([("act", {"on": "environment", "writes": "x"})]).node("act").type == "env_interact"


@pytest.mark.parametrize("function", [ppo, dapo, sft, dpo])
def test_built_in_pipelines_are_short(function: object) -> None:
    assert len(inspect.getsource(function).splitlines()) <= 60  # type: ignore[arg-type]


def test_needs_take_nodes_out() -> None:
    graph = ppo_graph(values=False, reference=False, correction=False, selection=False)
    assert [node.name for node in graph.nodes] == [
        *("publish", "sample", "score", "balance", "compute_log_prob", "compute_advantages", "update_actor"),
    ]
    assert graph.skipped == (*("compute_ref_log_prob", "compute_values", "update_critic", "rollout_correction", "select_tokens"),)


def test_needs_of_a_configuration_are_what_the_pipelines_ask_for() -> None:
    needs: builtin.Needs = requirements(PPOConfig())
    assert isinstance(needs, Requirements) and ppo(PPOConfig(), needs).build(PPOConfig()).name == "ppo"


def test_dapo_samples_and_scores_in_one_node() -> None:
    names = [node.name for node in dapo(None, SomeNeeds()).build().nodes]
    assert names[:3] == ["publish", "dynamic_sampling", "balance"] and "score" not in names


def test_a_driver_has_every_method_that_the_built_in_pipelines_call() -> None:
    nodes = [node for function in (ppo, dapo, sft, dpo, rm) for node in function(None, SomeNeeds()).nodes]
    called = {node.run for node in nodes if node.on == "driver" or node.run in dir(builtin.Driver)}
    assert called == methods_of(ROLES["driver"], True) and methods_of(SUPERVISED_ROLES["driver"], True) == {"next_batch"}


# --- a pipeline as text ------------------------------------------------------------------------------------------------------


def test_nodes_are_inserted_replaced_and_removed() -> None:
    pipeline = Pipeline("mine").add("a", writes="scores").add("c", reads="scores")
    pipeline.insert("b", above="c").insert("d", below="c").replace("b", "e", reads="values").remove("a")
    assert [node.name for node in pipeline.nodes] == ["e", "c", "d"]
    assert pipeline.nodes[0].reads == (Use("values"),) and pipeline.nodes[0].run == "e"


def test_the_hash_is_that_of_what_runs() -> None:
    assert ppo_graph().hash == ppo_graph().hash != ppo_graph(values=False).hash
    assert len(ppo_graph().hash) == 16


# --- loading ---------------------------------------------------------------------------------------------------------------

MINE = '''"""Adds a second scorer and a shaping node, replaces the advantages and removes the reference."""

from typing import Any

from rlhub.pipeline.builtin import PREDICTED, SCORED, TEXT, ppo
from rlhub.pipeline.graph import Pipeline
from rlhub.protocol import DataProto


def brevity(batch: Any) -> DataProto:
    return DataProto.from_dict({"brevity": 1.0 / batch.batch["response_length"]})


def shape(batch: Any) -> DataProto:
    return DataProto.from_dict({"shaped": batch.batch["scores"] + batch.batch["brevity"]})


def estimate(batch: Any) -> DataProto:
    mask = batch.batch["response_mask"]
    shaped = batch.batch["shaped"][:, None] * mask
    return DataProto.from_dict({"advantages": shaped, "returns": shaped, "learn_mask": mask})


def mine(config: Any, needs: Any) -> Pipeline:
    step, here = ppo(config, needs), __file__
    step.insert("brevity", below="score", run=f"{here}:brevity", reads=TEXT, writes="brevity:float32(rows)")
    step.insert("shape", below="brevity", run=f"{here}:shape", reads="scores brevity", writes="shaped:float32(rows)")
    reads, writes = ["shaped", SCORED, PREDICTED], "advantages returns learn_mask"
    step.replace("compute_advantages", "estimate", run=f"{here}:estimate", reads=reads, writes=writes)
    return step.remove("compute_ref_log_prob")
'''


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    """At most 40 lines; checked, with the functions it names, before it is run."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    assert len(MINE.splitlines()) <= 40
    graph = load_pipeline(f"{file}:mine")(None, SomeNeeds()).build()
    assert graph.sources("shape") == ["score", "brevity"] and "shape" in graph.sources("estimate")
    assert "compute_ref_log_prob" not in [node.name for node in graph.nodes]
    assert problems_of(lambda: build_pipeline(f"{file}:mine", PPOConfig(), SomeNeeds())) == []


def test_pipelines_by_name_and_module() -> None:
    assert load_pipeline("dapo") is dapo and load_pipeline("rlhub.pipeline.builtin:sft") is sft


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("ppoo", "trainer.pipeline: no pipeline 'ppoo'; did you mean 'ppo'?"),
        ("rlhub.pipeline.builtin:ppoo", "trainer.pipeline=rlhub.pipeline.builtin:ppoo: not defined in"),
        ("no_such_module:mine", "trainer.pipeline=no_such_module:mine: no module 'no_such_module'"),
        ("nowhere/mine.py:mine", "trainer.pipeline=nowhere/mine.py:mine: no such file"),
    ],
)
def test_what_cannot_be_loaded_is_named(target: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pipeline(target)
    assert str(caught.value).startswith(message)
    assert problems_of(lambda: build_pipeline(target, None, SomeNeeds())) == list(caught.value.problems)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "it returned int; expected a rlhub.pipeline.graph.Pipeline"),
        ("return needs.valeus", "it raised AttributeError"),
        (
            "from rlhub.pipeline.graph import Pipeline\n    return Pipeline('x').add('a', on='nobody')",
            "node 'a' is on role 'nobody'",
        ),
    ],
)
def test_a_function_of_the_users_own_that_fails_is_a_problem(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"def mine(config, needs):\n    {body}\n")
    problems = problems_of(lambda: build_pipeline(f"{tmp_path}/mine.py:mine", PPOConfig(), SomeNeeds()))
    assert problems and problems[0].startswith(f"trainer.pipeline={tmp_path}/mine.py:mine: {message}")


def test_a_file_that_cannot_be_run_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import no_such_module\ndef mine(config, needs): ...\n")
    with pytest.raises(LoadError):
        load_pipeline(f"{tmp_path}/mine.py:mine")
    assert "no_such_module" in problems_of(lambda: build_pipeline(f"{tmp_path}/mine.py:mine", PPOConfig(), SomeNeeds()))[0]
