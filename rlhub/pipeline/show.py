"""A graph to look at: text, mermaid (for documents), JSON (for programs) and SVG (for reports).

Each form has all nodes and edges.  JSON has a schema version and the graph's hash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from xml.sax.saxutils import escape, quoteattr

from rlhub.pipeline.graph import TaskGraph
from rlhub.pipeline.nodes import Edge, Node, ancestors

Seconds = Mapping[str, float]
"""The time of each node by its name."""
COLORS = {
    "compute": "#e8eaed",
    "data_load": "#e6f4ea",
    "env_interact": "#fef7e0",
    "model_inference": "#e8f0fe",
    "model_train": "#fce8e6",
}
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 230, 46, 30, 46, 16
NO_BAR = 'style="visibility:hidden"'
"""The style of a node's bar in a picture without times."""
MOST_IN_LABEL = 3
"""A label names so many columns of an edge, and counts the others."""


def to_text(graph: TaskGraph, seconds: Seconds | None = None) -> str:
    """Returns one line a node, and below it one for each node it waits for, with the reason."""
    lines = [f"pipeline {graph.name}  {graph.hash}"]
    for node in graph.nodes:
        time = f"  {seconds[node.name]:.3f} s" if seconds and node.name in seconds else ""
        condition = f"  when {node.when}" if isinstance(node.when, str) else ""
        lines.append(f"{node.name}  [{node.type} on {node.role}]{condition}{time}")
        lines += [f"    <- {edge.source}: {edge.label}" for edge in graph.edges if edge.target == node.name]
    if graph.skipped:
        lines.append(f"not in this configuration: {', '.join(graph.skipped)}")
    return "\n".join(lines) + "\n"


def to_mermaid(graph: TaskGraph) -> str:
    """Returns a mermaid flowchart; edges without a column are dotted."""
    number = {node.name: f"n{index}" for index, node in enumerate(graph.nodes)}
    lines = ["flowchart TD"]
    for node in graph.nodes:
        name = node.name.replace('"', "#quot;")
        lines.append(f'    {number[node.name]}["{name}<br/><i>{node.type} on {node.role}</i>"]')
    for edge in graph.edges:
        arrow = "-->" if edge.columns else "-.->"
        lines.append(f'    {number[edge.source]} {arrow}|"{_short(edge)}"| {number[edge.target]}')
    return "\n".join(lines) + "\n"


def to_json(graph: TaskGraph, seconds: Seconds | None = None) -> str:
    """Returns the graph with its hash, and the times where they are given."""
    timings = {} if seconds is None else {"seconds": dict(seconds)}
    return json.dumps({**graph.as_dict(), "hash": graph.hash, **timings}, indent=2) + "\n"


def to_svg(graph: TaskGraph) -> str:
    """Returns a picture that stands inside an HTML page: nodes in layers from top to bottom.

    A node is a group with data-node, an edge a path with data-source and data-target.  The report of a run (tracking/report.py)
    adds each node's time to its last text, and shows its bar as long as the time is beside the longest one.
    """
    layers = layers_of(graph)
    widest = max(map(len, layers), default=1)
    width = 2 * MARGIN + widest * WIDTH + (widest - 1) * GAP_X
    height = 2 * MARGIN + len(layers) * HEIGHT + (len(layers) - 1) * GAP_Y
    places = {
        node.name: (
            (width - len(layer) * WIDTH - (len(layer) - 1) * GAP_X) / 2 + column * (WIDTH + GAP_X),
            MARGIN + row * (HEIGHT + GAP_Y),
        )
        for row, layer in enumerate(layers)
        for column, node in enumerate(layer)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" data-graph={quoteattr(graph.name)} data-hash="{graph.hash}">',
        *(_svg_edge(edge, places) for edge in graph.edges),
        *(_svg_node(node, places[node.name]) for node in graph.nodes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def direct(graph: TaskGraph) -> TaskGraph:
    """Returns the graph without the edges that others imply: the same order, and easier to read."""
    before = ancestors(graph.edges)

    def implied(edge: Edge) -> bool:
        others = (other for other in graph.sources(edge.target) if other != edge.source)
        return any(edge.source in before.get(other, ()) for other in others)

    return replace(graph, edges=tuple(edge for edge in graph.edges if not implied(edge)))


def layers_of(graph: TaskGraph) -> list[list[Node]]:
    """Returns the nodes by the length of the longest way to them; those of one layer do not wait for each other."""
    depth: dict[str, int] = {}
    for node in graph.nodes:  # in an order in which sources come first
        depth[node.name] = max((depth[source] + 1 for source in graph.sources(node.name)), default=0)
    return [[node for node in graph.nodes if depth[node.name] == row] for row in range(max(depth.values(), default=-1) + 1)]


def _svg_node(node: Node, place: tuple[float, float]) -> str:
    x, y = place
    below = f"{node.type} on {node.role}"
    line = f'<text x="{x + WIDTH / 2:g}" text-anchor="middle" style="fill:#202124" y='  # readable in a dark page too
    return (
        f"<g data-node={quoteattr(node.name)}>"
        f"<title>{escape(_tooltip(node))}</title>"
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{COLORS[node.type]}" stroke="#5f6368"/>'
        f'<rect x="{x:g}" y="{y + HEIGHT - 5:g}" width="{WIDTH}" height="5" fill="#d93025" {NO_BAR}/>'
        f'{line}"{y + 17:g}" font-weight="bold">{escape(node.name)}</text>'
        f'{line}"{y + 33:g}" font-size="10">{escape(below)}</text></g>'
    )


def _svg_edge(edge: Edge, places: Mapping[str, tuple[float, float]]) -> str:
    (x1, y1), (x2, y2) = places[edge.source], places[edge.target]
    start, end = (x1 + WIDTH / 2, y1 + HEIGHT), (x2 + WIDTH / 2, y2)
    bend = (start[1] + end[1]) / 2
    path = f"M{start[0]:g} {start[1]:g}C{start[0]:g} {bend:g} {end[0]:g} {bend:g} {end[0]:g} {end[1]:g}"
    dashes = "" if edge.columns else ' stroke-dasharray="4 3"'
    return (
        f"<path data-source={quoteattr(edge.source)} data-target={quoteattr(edge.target)} "
        f'd="{path}" fill="none" stroke="#9aa0a6"{dashes}><title>{escape(edge.label)}</title></path>'
    )


def _tooltip(node: Node) -> str:
    words: Sequence[tuple[str, str]] = (
        ("runs", node.run),
        ("reads", " ".join(map(str, node.reads))),
        ("writes", " ".join(map(str, node.writes))),
        ("trains", node.trains),
        ("when", node.when if isinstance(node.when, str) else ""),
    )
    return "\n".join(f"{name} {text}" for name, text in words if text)


def _short(edge: Edge) -> str:
    if len(edge.columns) <= MOST_IN_LABEL:
        return edge.label
    return f"{' '.join(edge.columns[: MOST_IN_LABEL - 1])} and {len(edge.columns) - MOST_IN_LABEL + 1} more"


FORMS: Mapping[str, Callable[[TaskGraph], str]] = {"text": to_text, "mermaid": to_mermaid, "json": to_json, "svg": to_svg}
"""The forms by name."""
