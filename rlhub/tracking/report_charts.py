"""Inline SVG charts for the report: lines over steps, stacked columns, and the Gantt of the last steps.

Strings in, strings out, no dependency.

Colours are CSS variables (`--c0` ... `--c7`), so one drawing serves the light and the dark page.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rlhub.tracking.spans import STEPS, Span, lanes_of

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 10, 26
NUM_COLOURS = 8
MAX_POINTS = 400  # more than one per horizontal pixel cannot be seen
SMOOTH_FROM = 40  # points; shorter curves are read as they are
SMOOTH_SHARE = 0.08  # width of the moving average, as a share of the curve

NUM_STEPS = 3
"""Steps of the Gantt: two whole cycles, and how one goes over into the next."""
MAX_BARS = 600
"""More could not be told apart; the longest are drawn."""
MAX_ROWS = 4
"""Rows of one lane; what overlaps more than that shares the last."""
GANTT_WIDTH, LABEL, GANTT_RIGHT, GANTT_TOP, AXIS = 960, 170, 14, 6, 24
ROW, GAP = 15, 7
LETTER = 6.2
"""Pixels a letter of a bar's name takes; a name that does not fit is left to the tip."""


@dataclass(slots=True, kw_only=True)
class Series:
    """A series is one curve: finite values at ascending steps, equally many."""

    name: str
    steps: list[int]
    values: list[float]


@dataclass(slots=True, kw_only=True)
class Chart:
    """Holds curves that share axes.  zero: the value axis starts at 0.  smooth: noisy per-step figures get a smoothed line."""

    title: str
    series: list[Series]
    zero: bool = False
    smooth: bool = True


def number(value: float) -> str:
    """Returns a short form for people: 0.4123, 1.2e-06, 48.2k."""
    size = abs(value)
    if value == int(value) and size < 10_000:
        return str(int(value))
    if size >= 10_000:
        for bound, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= bound:
                return f"{value / bound:.4g}{unit}" if size < 1e12 else f"{value:.3g}"
    return f"{value:.3g}" if size < 1e-3 else f"{value:.4g}"


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Returns round numbers, about `count` of them, that lie within [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)]


def thin(series: Series, limit: int = MAX_POINTS) -> Series:
    """Returns at most `limit` points: means over equally many neighbouring steps, each placed at the last of them."""
    count = len(series.steps)
    if count <= limit:
        return series
    bounds = [round(index * count / limit) for index in range(limit + 1)]
    parts = list(zip(bounds, bounds[1:], strict=False))
    return Series(
        name=series.name,
        steps=[series.steps[stop - 1] for _, stop in parts],
        values=[math.fsum(series.values[start:stop]) / (stop - start) for start, stop in parts],
    )


def smoothed(values: Sequence[float], share: float = SMOOTH_SHARE) -> list[float]:
    """Returns the centred moving average, so that the line does not lag behind what it shows; at the ends, over what there is."""
    reach = max(1, round(share * len(values) / 2))
    sums = list(itertools.accumulate(values, initial=0.0))
    result = []
    for index in range(len(values)):
        start, stop = max(0, index - reach), min(len(values), index + reach + 1)
        result.append((sums[stop] - sums[start]) / (stop - start))
    return result


def line_chart(chart: Chart) -> str:
    """Returns the chart as an HTML figure: title, last values, curves, and the data for the page's hover script."""
    series = [thin(one) for one in chart.series]
    axes = _Axes.around(series, zero=chart.zero)
    lines = "".join(_curve(one, index % NUM_COLOURS, axes, smooth=chart.smooth) for index, one in enumerate(series))
    data = [{"n": one.name, "x": one.steps, "y": [float(f"{value:.6g}") for value in one.values]} for one in series]
    box = {"x": [axes.x_low, axes.x_high], "y": [axes.y_low, axes.y_high], "m": [LEFT, RIGHT, TOP, BOTTOM], "s": [WIDTH, HEIGHT]}
    return (
        f'<figure class="chart"><figcaption><b>{escape(chart.title)}</b>{_legend(chart.series)}</figcaption>'
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)} over steps">'
        f"{axes.drawing()}{lines}</svg></div>"
        f'<script type="application/json">{script_json({"series": data, "box": box})}</script></figure>'
    )


def script_json(value: object) -> str:
    """Returns JSON that cannot end the script element it is put in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _legend(series: Sequence[Series]) -> str:
    if len(series) == 1:
        return f'<span class="last">{number(series[0].values[-1])}</span>'
    items = (
        f'<span class="key"><i style="background:var(--c{index % NUM_COLOURS})"></i>{escape(one.name)} '
        f"<em>{number(one.values[-1])}</em></span>"
        for index, one in enumerate(series)
    )
    return f'<span class="keys">{"".join(items)}</span>'


@dataclass(slots=True, kw_only=True)
class _Axes:
    """Maps the data window to the drawing's coordinates."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @classmethod
    def around(cls, series: Sequence[Series], *, zero: bool) -> _Axes:
        values = [value for one in series for value in one.values]
        steps = [step for one in series for step in one.steps]
        low, high = min(values), max(values)
        margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low, high = low - margin, high + margin
        if zero and min(values) >= 0:
            low = 0.0
        return cls(x_low=min(steps), x_high=max(max(steps), min(steps) + 1), y_low=low, y_high=high)

    def x(self, step: float) -> float:
        return LEFT + (step - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def drawing(self) -> str:
        """Draws grid, value labels, step labels and base line."""
        ticks = [tick for tick in nice_ticks(self.x_low, self.x_high, 6) if tick == int(tick)]
        return self.values_axis() + "".join(_step_label(self.x(tick), number(tick)) for tick in ticks)

    def values_axis(self) -> str:
        parts = []
        for tick in nice_ticks(self.y_low, self.y_high):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}</text>')
        base = HEIGHT - BOTTOM
        return "".join(parts) + f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'


def _step_label(x: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{text}</text>'


def _curve(series: Series, colour: int, axes: _Axes, *, smooth: bool) -> str:
    stroke = f'style="stroke:var(--c{colour})"'
    if len(series.values) == 1:
        x, y = axes.x(series.steps[0]), axes.y(series.values[0])
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:var(--c{colour})"/>'
    path = _path(series.steps, series.values, axes)
    if not smooth or len(series.values) < SMOOTH_FROM:
        return f'<path class="line" d="{path}" {stroke}/>'
    average = _path(series.steps, smoothed(series.values), axes)
    return f'<path class="raw" d="{path}" {stroke}/><path class="line" d="{average}" {stroke}/>'


def _path(steps: Sequence[int], values: Sequence[float], axes: _Axes) -> str:
    return "M" + "L".join(f"{axes.x(step):.1f} {axes.y(value):.1f}" for step, value in zip(steps, values, strict=True))


def stacked_columns(title: str, steps: Sequence[int], parts: Sequence[Series], *, unit: str) -> str:
    """Draws one column per step, divided among the parts (bottom up, in order); every part has a value at every step."""
    limit = 80  # columns narrower than about 5 pixels blur
    thinned = [thin(one, limit) for one in parts]
    shown = thin(Series(name="", steps=list(steps), values=[0.0] * len(steps)), limit).steps
    totals = [math.fsum(one.values[index] for one in thinned) for index in range(len(shown))]
    axes = _Axes(x_low=0, x_high=len(shown), y_low=0.0, y_high=max(totals) * 1.06 or 1.0)
    width = (WIDTH - LEFT - RIGHT) / len(shown)
    bars = [_step_label(axes.x(i + 0.5), str(shown[i])) for i in range(0, len(shown), math.ceil(len(shown) / 7))]
    for index, step in enumerate(shown):
        bottom = 0.0
        tip = f"step {step}: {number(totals[index])} {unit}"
        for colour, one in enumerate(thinned):
            y0, y1 = axes.y(bottom), axes.y(bottom + one.values[index])
            bottom += one.values[index]
            if y0 - y1 > 0.05:
                text = escape(f"{tip}\n{one.name}: {number(one.values[index])} {unit}")
                bars.append(
                    f'<rect x="{axes.x(index) + width * 0.08:.1f}" y="{y1:.1f}" '
                    f'width="{width * 0.84:.1f}" height="{y0 - y1:.1f}" '
                    f'style="fill:var(--c{colour % NUM_COLOURS})"><title>{text}</title></rect>'
                )
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b></figcaption><div class="plot">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{axes.values_axis()}{"".join(bars)}</svg>'
        "</div></figure>"
    )


@dataclass(slots=True, kw_only=True)
class Window:
    """Holds what a Gantt draws: spans that lie, in part at least, between two moments."""

    spans: list[Span]
    start: float
    end: float
    left_out: int

    def x(self, moment: float) -> float:
        inside = min(max(moment, self.start), self.end)
        return LABEL + (inside - self.start) / (self.end - self.start) * (GANTT_WIDTH - LABEL - GANTT_RIGHT)


def last_steps(spans: Sequence[Span], num_steps: int = NUM_STEPS) -> Window | None:
    """Returns the window of the last steps that have ended, of all spans where no step has; None of no span."""
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
    """Returns what ran when in the last steps as an HTML figure; "" when nothing was recorded.

    A row for each lane, a bar for each span; spans of one lane that overlap lie below each other.
    """
    window = last_steps(spans)
    if window is None:
        return ""
    colours = _colours_of(window.spans)
    parts: list[str] = []
    top = float(GANTT_TOP)
    for lane in lanes_of(window.spans):
        rows = stack([span for span in window.spans if span.lane == lane])
        parts.append(f'<text x="{LABEL - 8}" y="{top + ROW - 4:.1f}" text-anchor="end">{escape(_cut(lane, 26))}</text>')
        for index, row in enumerate(rows):
            parts += [_span_bar(span, top + index * ROW, window, colours) for span in row]
        top += len(rows) * ROW + GAP
    height = top + AXIS
    left_out = f'<span class="last">{window.left_out} short ones are left out</span>' if window.left_out else ""
    return (
        f'<figure class="chart"><figcaption><b>Last steps</b>{left_out}</figcaption><div class="plot">'
        f'<svg viewBox="0 0 {GANTT_WIDTH} {height:.0f}" role="img" aria-label="what ran when in the last steps">'
        f"{_time_axis(window, top)}{''.join(parts)}</svg></div></figure>"
    )


def stack(spans: Sequence[Span]) -> list[list[Span]]:
    """Returns rows without overlap, as few as that takes and MAX_ROWS at most."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: one.start):
        free = next((row for row in rows if row[-1].end <= span.start), None)
        if free is None and len(rows) < MAX_ROWS:
            rows.append([span])
        else:
            (free if free is not None else rows[-1]).append(span)
    return rows


def _colours_of(spans: Sequence[Span]) -> dict[str, int]:
    """Returns each name's colour: the names that take most time get colours of their own."""
    seconds: dict[str, float] = {}
    for span in spans:
        if span.lane != STEPS:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.end - span.start
    ordered = sorted(seconds, key=lambda name: -seconds[name])
    return {name: min(index, NUM_COLOURS - 1) for index, name in enumerate(ordered)}


def _span_bar(span: Span, y: float, window: Window, colours: dict[str, int]) -> str:
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


def _time_axis(window: Window, bottom: float) -> str:
    parts = []
    for tick in nice_ticks(0.0, window.end - window.start, 8):
        x = window.x(window.start + tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{GANTT_TOP}" y2="{bottom:.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14:.1f}" text-anchor="middle">{number(tick)} s</text>')
    return "".join(parts)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
