"""The report's page and its inline SVG charts: lines over steps, stacked columns, and the Gantt chart of the last steps.

All functions return strings and need no other package.  Colours are CSS variables (`--c0` ... `--c7`), so that one drawing
serves the light and the dark page.  Styles and the small script are part of the page, which loads nothing from anywhere; its
content security policy forbids that.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from rlhub.tracking.spans import STEPS, Span, lanes_of

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 10, 26
NUM_COLOURS = 8
MAX_POINTS = 400  # more than one per horizontal pixel cannot be seen
SMOOTH_FROM = 40  # points; shorter curves are not smoothed
SMOOTH_SHARE = 0.08  # width of the moving average, as a fraction of the curve

NUM_STEPS = 3
"""Steps of the Gantt chart: they show two whole cycles and the transition between them."""
MAX_BARS = 600
"""Largest number of bars, since a reader cannot tell more apart; the longest are drawn."""
MAX_ROWS = 4
"""Rows of one lane; further overlapping spans share the last row."""
GANTT_WIDTH, LABEL, GANTT_RIGHT, GANTT_TOP, AXIS = 960, 170, 14, 6, 24
ROW, GAP = 15, 7
LETTER = 6.2
"""Width in pixels of a letter of a bar's name; a name that does not fit is in the bar's tooltip alone."""


@dataclass(slots=True, kw_only=True)
class Series:
    """One curve: finite values, one for each of the ascending steps."""

    name: str
    steps: list[int]
    values: list[float]


@dataclass(slots=True, kw_only=True)
class Chart:
    """Curves that share axes.  zero: the value axis starts at 0.  smooth: long curves get a moving average as a second line."""

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
    """Returns the centred moving average, which does not lag behind the values; at the ends the window is shorter."""
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
    """Returns JSON that cannot end the script element around it."""
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
    """The content of a Gantt chart: spans that overlap the time between two moments."""

    spans: list[Span]
    start: float
    end: float
    left_out: int

    def x(self, moment: float) -> float:
        inside = min(max(moment, self.start), self.end)
        return LABEL + (inside - self.start) / (self.end - self.start) * (GANTT_WIDTH - LABEL - GANTT_RIGHT)


def last_steps(spans: Sequence[Span], num_steps: int = NUM_STEPS) -> Window | None:
    """Returns the window of the last steps that have ended, or of all spans where no step has ended; None without spans."""
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
    """Returns the Gantt chart of the last steps as an HTML figure; "" when nothing was recorded.

    A row for each lane, a bar for each span; spans of one lane that overlap lie below each other.
    """
    window = last_steps(spans)
    if window is None:
        return ""
    left_out = f"{window.left_out} short ones are left out" if window.left_out else ""
    return _bars(window, lanes_of(window.spans), "Last steps", left_out)


def episode_chart(spans: Sequence[Span]) -> str:
    """Returns the timelines of single episodes as an HTML figure, each from 0 and the longest first; "" when there are none."""
    starts: dict[str, float] = {}
    for span in spans:
        starts[span.lane] = min(span.start, starts.get(span.lane, span.start))
    moved = [replace(span, start=span.start - starts[span.lane], end=span.end - starts[span.lane]) for span in spans]
    ends: dict[str, float] = {}
    for span in moved:
        ends[span.lane] = max(span.end, ends.get(span.lane, 0.0))
    if not any(ends.values()):
        return ""
    window = Window(spans=sorted(moved, key=lambda span: span.start), start=0.0, end=max(ends.values()), left_out=0)
    return _bars(window, sorted(ends, key=lambda lane: -ends[lane]), "Single episodes", "")


def _bars(window: Window, lanes: Sequence[str], title: str, note: str) -> str:
    """Returns a chart of spans over time as an HTML figure."""
    colours = _colours_of(window.spans)
    parts: list[str] = []
    top = float(GANTT_TOP)
    for lane in lanes:
        rows = stack([span for span in window.spans if span.lane == lane])
        parts.append(f'<text x="{LABEL - 8}" y="{top + ROW - 4:.1f}" text-anchor="end">{escape(_cut(lane, 26))}</text>')
        for index, row in enumerate(rows):
            parts += [_span_bar(span, top + index * ROW, window, colours) for span in row]
        top += len(rows) * ROW + GAP
    said = f'<span class="last">{escape(note)}</span>' if note else ""
    return (
        f'<figure class="chart"><figcaption><b>{title}</b>{said}</figcaption><div class="plot">'
        f'<svg viewBox="0 0 {GANTT_WIDTH} {top + AXIS:.0f}" role="img" aria-label="{title}: what ran when">'
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


STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b1f27;--soft:#5d6674;--line:#e1e5eb;--good:#12805c;
--bad:#c03535;
--c0:#2b6fd4;--c1:#e0662b;--c2:#159a78;--c3:#8458cf;--c4:#c79200;--c5:#cf4476;--c6:#3aa3c4;--c7:#8a93a1}
@media (prefers-color-scheme:dark){:root:not([data-theme=light]){--bg:#14171c;--card:#1d2128;--ink:#e8ebf0;--soft:#9aa4b2;
--line:#2f353f;
--good:#4cc79b;--bad:#f07f7f;--c0:#6aa5f5;--c1:#f29363;--c2:#4cc9a6;--c3:#b194ee;--c4:#e3b93e;--c5:#ee82a8;--c6:#74c8e2;
--c7:#7c8696}}
:root[data-theme=dark]{--bg:#14171c;--card:#1d2128;--ink:#e8ebf0;--soft:#9aa4b2;--line:#2f353f;
--good:#4cc79b;--bad:#f07f7f;--c0:#6aa5f5;--c1:#f29363;--c2:#4cc9a6;--c3:#b194ee;--c4:#e3b93e;--c5:#ee82a8;--c6:#74c8e2;
--c7:#7c8696}
:root[data-theme=light]{color-scheme:light}:root[data-theme=dark]{color-scheme:dark}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 24px 60px}
header{display:flex;align-items:flex-start;gap:16px;margin-bottom:20px}
header div{flex:1;min-width:0}
h1{font-size:24px;line-height:1.25;margin:0;overflow-wrap:anywhere}h2{font-size:17px;margin:34px 0 12px}
.sub{color:var(--soft);margin:4px 0 0;font-size:14px}
.badge{display:inline-block;font-size:12px;font-weight:600;padding:2px 9px;border-radius:20px;border:1px solid currentColor;
vertical-align:4px;margin-left:10px;color:var(--soft)}
.badge.finished{color:var(--good)}.badge.failed{color:var(--bad)}
button{font:inherit;font-size:13px;color:var(--soft);background:var(--card);border:1px solid var(--line);border-radius:7px;
padding:5px 11px;cursor:pointer}
.alert{border:1px solid var(--bad);color:var(--bad);border-radius:10px;padding:10px 14px;margin:0 0 18px;white-space:pre-wrap;
overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(180px,1fr));gap:12px}
.tile,.chart,.card{background:var(--card);border:1px solid var(--line);border-radius:11px}
.tile{padding:12px 16px}.tile span{color:var(--soft);font-size:13px}.tile strong{display:block;font-size:25px;line-height:1.3;
font-weight:650}
.tile small{color:var(--soft);font-size:13px}.tile small.good{color:var(--good)}.tile small.bad{color:var(--bad)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(370px,100%),1fr));gap:14px}
.chart{margin:0;padding:12px 14px 6px;min-width:0}
figcaption{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline;font-size:14px;min-height:24px}
figcaption b{overflow-wrap:anywhere}
.last{margin-left:auto;color:var(--soft)}.keys{display:flex;flex-wrap:wrap;gap:0 12px;font-size:12.5px;color:var(--soft)}
.key i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:5px}.key em{font-style:normal;
color:var(--ink)}
.plot{position:relative}.plot svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--soft);font-size:11px}svg .grid{stroke:var(--line);stroke-width:1}svg .base{stroke:var(--soft);
stroke-width:1;opacity:.6}
svg path{fill:none;stroke-linejoin:round;stroke-linecap:round}svg .line{stroke-width:2}svg .raw{stroke-width:1;opacity:.3}
.cross{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 3}
.tip{position:absolute;pointer-events:none;background:var(--ink);color:var(--bg);font-size:12px;line-height:1.45;
padding:5px 9px;border-radius:6px;
white-space:pre;z-index:2;display:none}
table{border-collapse:collapse;width:100%;font-size:14px}td,th{padding:5px 10px;text-align:right;
border-bottom:1px solid var(--line)}
td:first-child,th:first-child{text-align:left}th{color:var(--soft);font-weight:500}tr:last-child td{border-bottom:0}
td i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:8px}
details>summary{cursor:pointer;padding:9px 14px;font-weight:550}details.card{margin-bottom:10px;overflow:hidden}
details.plain>summary{padding-left:0}
.charts.wide{grid-template-columns:repeat(auto-fill,minmax(min(500px,100%),1fr))}td:first-child{overflow-wrap:anywhere}
td:not(:first-child),th{white-space:nowrap}
.film{display:block;width:100%;max-width:640px;image-rendering:pixelated;margin-top:8px}
.samples{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(420px,100%),1fr))}.sample{padding:12px 16px;
border-top:1px solid var(--line);min-width:0}.sample h4{font-size:12px;margin:8px 0 2px;color:var(--soft);font-weight:550}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.chips{display:flex;flex-wrap:wrap;gap:6px}.chip{font-size:12px;border:1px solid var(--line);border-radius:20px;
padding:1px 9px;color:var(--soft)}
.chip.good{color:var(--good);border-color:currentColor}.chip.bad{color:var(--bad);border-color:currentColor}
details.card>pre{padding:4px 16px 14px}.note{color:var(--soft);font-size:13px;margin:8px 0 0}
@media print{button{display:none}}
"""

SCRIPT = """
document.getElementById('theme').onclick=()=>{const r=document.documentElement,
 dark=r.dataset.theme?r.dataset.theme==='dark':matchMedia('(prefers-color-scheme:dark)').matches;r.dataset.theme=dark?'light':'dark'};
const badge=document.querySelector('.badge.running');
if(badge){const quiet=Date.now()/1e3-badge.dataset.written;if(quiet>badge.dataset.quiet){
 badge.className='badge interrupted';
 badge.textContent='no word for '+(quiet>7200?(quiet/3600).toFixed()+' h':(quiet/60).toFixed()+' min')}}
const short=v=>Math.abs(v)>=1e4||(v!==0&&Math.abs(v)<1e-3)?v.toExponential(3):String(+v.toPrecision(5));
for(const figure of document.querySelectorAll('figure.chart')){
 const holder=figure.querySelector('script');if(!holder)continue;
 const {series,box}=JSON.parse(holder.textContent),plot=figure.querySelector('.plot'),svg=plot.querySelector('svg');
 const [left,right,top,bottom]=box.m,[width,height]=box.s,tip=document.createElement('div');tip.className='tip';plot.append(tip);
 const cross=document.createElementNS('http://www.w3.org/2000/svg','line');cross.setAttribute('class','cross');
 cross.setAttribute('y1',top);cross.setAttribute('y2',height-bottom);cross.style.display='none';svg.append(cross);
 const nearest=(xs,x)=>{let a=0,b=xs.length-1;while(b-a>1){const m=(a+b)>>1;xs[m]<x?a=m:b=m}return x-xs[a]<xs[b]-x?a:b};
 plot.onmousemove=event=>{const r=svg.getBoundingClientRect(),u=(event.clientX-r.left)/r.width*width;
  const x=box.x[0]+(u-left)/(width-left-right)*(box.x[1]-box.x[0]);
  const hits=series.map(s=>({s,i:nearest(s.x,x)}));
  const step=hits.map(h=>h.s.x[h.i]).reduce((a,b)=>Math.abs(a-x)<=Math.abs(b-x)?a:b);
  const at=left+(step-box.x[0])/(box.x[1]-box.x[0])*(width-left-right);
  cross.setAttribute('x1',at);cross.setAttribute('x2',at);cross.style.display='';
  const shown=hits.filter(h=>h.s.x[h.i]===step).map(h=>(series.length>1?h.s.n+'  ':'')+short(h.s.y[h.i]));
  tip.textContent=['step '+step,...shown].join('\\n');
  tip.style.display='block';const px=at/width*r.width;tip.style.top='6px';
  tip.style.left=px>r.width/2?'auto':(px+10)+'px';tip.style.right=px>r.width/2?(r.width-px+10)+'px':'auto'};
 plot.onmouseleave=()=>{tip.style.display='none';cross.style.display='none'};
}
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';style-src 'unsafe-inline';script-src 'unsafe-inline'">
<title>__TITLE__</title><style>__STYLE__</style></head>
<body><main>
__BODY__
</main><script>__SCRIPT__</script></body></html>
"""


def page(title: str, body: str) -> str:
    """Returns the whole document; `title` is text, `body` is HTML."""
    frame = PAGE.replace("__TITLE__", escape(title)).replace("__STYLE__", STYLE.strip()).replace("__SCRIPT__", SCRIPT.strip())
    return frame.replace("__BODY__", body)
