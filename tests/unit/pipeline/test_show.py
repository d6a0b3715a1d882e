"""Every form in which a graph is shown has all nodes and edges; the picture in the package's README is that of ppo."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rlhub.pipeline.builtin import dapo, dpo, ppo, sft
from rlhub.pipeline.graph import SCHEMA_VERSION, TaskGraph
from rlhub.pipeline.nodes import ancestors
from rlhub.pipeline.show import FORMS, direct, layers_of, to_json, to_mermaid, to_svg, to_text
from tests.support.pipelines import SomeNeeds, graph_of

ROOT = Path(__file__).resolve().parents[3]
Parsed = tuple[set[str], set[tuple[str, str]]]
ODD = graph_of([('a<b>&"c"', {"writes": "x"}), ("d", {"reads": "x"}), ("lonely", {})])
GRAPHS = [*(function(None, SomeNeeds()).build() for function in (ppo, dapo, sft, dpo)), ODD]


def parse_text(text: str) -> Parsed:
    nodes: list[str] = []
    edges = set()
    for line in text.splitlines()[1:]:
        if line.startswith("    <- "):
            edges.add((line.removeprefix("    <- ").partition(": ")[0], nodes[-1]))
        elif "  [" in line:
            nodes.append(line.partition("  [")[0])
    return set(nodes), edges


def parse_mermaid(text: str) -> Parsed:
    names = dict(re.findall(r'^    (n\d+)\["(.*?)<br/>', text, re.M))
    edges = re.findall(r'^    (n\d+) -(?:-|\.-)>\|".*"\| (n\d+)$', text, re.M)
    return set(names.values()), {(names[source], names[target]) for source, target in edges}


def parse_json(text: str) -> Parsed:
    graph = json.loads(text)
    return {node["name"] for node in graph["nodes"]}, {(edge["from"], edge["to"]) for edge in graph["edges"]}


def parse_svg(text: str) -> Parsed:
    elements = list(ElementTree.fromstring(text).iter())
    nodes = {element.attrib["data-node"] for element in elements if "data-node" in element.attrib}
    return nodes, {(e.attrib["data-source"], e.attrib["data-target"]) for e in elements if "data-source" in e.attrib}


PARSERS: dict[str, Callable[[str], Parsed]] = {
    "text": parse_text,
    "mermaid": parse_mermaid,
    "json": parse_json,
    "svg": parse_svg,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_every_form_has_all_nodes_and_edges(form: str, graph: TaskGraph) -> None:
    nodes, edges = PARSERS[form](FORMS[form](graph))
    quoted = {node.name: node.name.replace('"', "#quot;") if form == "mermaid" else node.name for node in graph.nodes}
    assert nodes == set(quoted.values())
    assert edges == {(quoted[edge.source], quoted[edge.target]) for edge in graph.edges}


def test_json_has_schema_hash_and_times() -> None:
    graph = GRAPHS[0]
    shown = json.loads(to_json(graph, {"score": 1.5}))
    assert shown["schema_version"] == SCHEMA_VERSION and shown["hash"] == graph.hash and shown["seconds"] == {"score": 1.5}
    update = next(node for node in shown["nodes"] if node["name"] == "update_actor")
    assert update["type"] == "model_train" and update["role"] == "actor" and update["when"] == "step > trainer.critic_warmup"


def test_times_are_shown() -> None:
    graph = GRAPHS[0]
    assert "score  [compute on driver]  0.500 s\n" in to_text(graph, {"score": 0.5, "update_actor": 2.0})


def test_layers_hold_what_does_not_wait_for_each_other() -> None:
    layers = [[node.name for node in layer] for layer in layers_of(GRAPHS[0])]
    assert layers[:4] == [
        ["publish"],
        ["sample"],
        ["score", "balance"],
        ["compute_log_prob", "compute_ref_log_prob", "compute_values"],
    ]
    assert to_svg(graph_of([])).startswith("<svg")


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_direct_edges_give_the_same_order(graph: TaskGraph) -> None:
    fewer = direct(graph)
    assert set(fewer.edges) <= set(graph.edges) and ancestors(fewer.edges) == ancestors(graph.edges)
    assert graph.name != "ppo" or len(fewer.edges) < len(graph.edges) / 2
    for edge in fewer.edges:
        less = [other for other in fewer.edges if other != edge]
        assert ancestors(less) != ancestors(fewer.edges), f"{edge} is implied"


def test_the_readme_shows_the_graph_of_ppo() -> None:
    picture = to_mermaid(direct(ppo(None, SomeNeeds(selection=False, correction=False)).build()))
    assert f"```mermaid\n{picture}```" in (ROOT / "rlhub" / "pipeline" / "README.md").read_text()
