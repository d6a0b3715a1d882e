"""The report's Gantt of the last steps: a row for each lane, a bar for each stretch of time, as inline SVG.

Stretches of one lane that overlap lie below each other.  Strings in, strings out, no dependency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rlhub.tracking.report_charts import NUM_COLOURS, nice_ticks, number
from rlhub.tracking.spans import STEPS, Span, lanes_of

NUM_STEPS = 3
"""Steps shown: two whole cycles, and how one goes over into the next."""
MAX_BARS = 600
"""More could not be told apart; the longest are drawn."""
MAX_ROWS = 4
"""Of one lane: what overlaps more than that shares the last row."""
WIDTH, LABEL, RIGHT, TOP, AXIS = 960, 170, 14, 6, 24
ROW, GAP = 15, 7
LETTER = 6.2
"""Pixels a letter of a bar's name takes; a name that does not fit is left to the tip."""


@dataclass(slots=True, kw_only=True)
class Window:
    """What is drawn: spans that lie, in part at least, between two moments."""

    spans: list[Span]
    start: float
    end: float
    left_out: int

    def x(self, moment: float) -> float:
        inside = min(max(moment, self.start), self.end)
        return LABEL + (inside - self.start) / (self.end - self.start) * (WIDTH - LABEL - RIGHT)


def last_steps(spans: Sequence[Span], num_steps: int = NUM_STEPS) -> Window | None:
    """The window of the last steps that have ended; of a run without any, all there is; None of an empty one."""
    steps = [span for span in spans if span.lane == STEPS][-num_steps:] or list(spans)
    if not steps:
        return None
    start, end = min(span.start for span in steps), max(span.end for span in steps)
    inside = [span for span in spans if span.end > start and span.start < end]
    shown = sorted(inside, key=lambda span: span.start - span.end)[:MAX_BARS]
    if not shown or end <= start:
        return None
    return Window(spans=sorted(shown, key=lambda span: span.start), start=start, end=end, left_out=len(inside) - len(shown))


def gantt(spans: Sequence[Span]) -> str:
    """The chart as an HTML figure; "" when nothing was recorded."""
    window = last_steps(spans)
    if window is None:
        return ""
    colours = _colours(window.spans)
    parts: list[str] = []
    top = float(TOP)
    for lane in lanes_of(window.spans):
        rows = stack([span for span in window.spans if span.lane == lane])
        parts.append(f'<text x="{LABEL - 8}" y="{top + ROW - 4:.1f}" text-anchor="end">{escape(_cut(lane, 26))}</text>')
        for index, row in enumerate(rows):
            parts += [_bar(span, top + index * ROW, window, colours) for span in row]
        top += len(rows) * ROW + GAP
    height = top + AXIS
    left_out = f'<span class="last">{window.left_out} short ones are left out</span>' if window.left_out else ""
    return (
        f'<figure class="chart"><figcaption><b>Last steps</b>{left_out}</figcaption><div class="plot">'
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="what ran when in the last steps">'
        f"{_axis(window, top)}{''.join(parts)}</svg></div></figure>"
    )


def stack(spans: Sequence[Span]) -> list[list[Span]]:
    """Rows without overlap, as few as that takes and MAX_ROWS at most."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: one.start):
        free = next((row for row in rows if row[-1].end <= span.start), None)
        if free is None and len(rows) < MAX_ROWS:
            rows.append([span])
        else:
            (free if free is not None else rows[-1]).append(span)
    return rows


def _colours(spans: Sequence[Span]) -> dict[str, int]:
    """Each name's colour: the names that take most time get colours of their own."""
    seconds: dict[str, float] = {}
    for span in spans:
        if span.lane != STEPS:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.end - span.start
    ordered = sorted(seconds, key=lambda name: -seconds[name])
    return {name: min(index, NUM_COLOURS - 1) for index, name in enumerate(ordered)}


def _bar(span: Span, y: float, window: Window, colours: dict[str, int]) -> str:
    x, end = window.x(span.start), window.x(span.end)
    width = max(end - x, 0.5)
    said = [f"{span.name}: {number(span.end - span.start)} s", *(f"{name}: {value}" for name, value in span.args.items())]
    title = escape("\n".join(said))
    fill = f"fill:var(--c{colours[span.name]})" if span.name in colours else "fill:var(--line)"
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW - 2}"'
    rectangle = f'<rect {place} rx="2" style="{fill}"><title>{title}</title></rect>'
    if len(span.name) * LETTER > width - 6:
        return rectangle
    ink = "" if span.lane == STEPS else ";fill:var(--card)"
    label = f'<text x="{x + 4:.1f}" y="{y + ROW - 5:.1f}" style="pointer-events:none{ink}">{escape(span.name)}</text>'
    return rectangle + label


def _axis(window: Window, bottom: float) -> str:
    parts = []
    for tick in nice_ticks(0.0, window.end - window.start, 8):
        x = window.x(window.start + tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom:.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14:.1f}" text-anchor="middle">{number(tick)} s</text>')
    return "".join(parts)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
