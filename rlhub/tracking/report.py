"""report.html: a run at a glance, in one file that needs no network and no program but a browser.

It is written from the files of the run folder (metrics.jsonl, trace.json, generations/, config.yaml), so that it can be written
again at any time, also for a run that was killed.  All text from a model or a user is escaped.
"""

from __future__ import annotations

import datetime
import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

from rlhub.tracking.generations import list_generations, read_generations
from rlhub.tracking.metrics_log import read_metrics
from rlhub.tracking.report_charts import (
    MAX_POINTS,
    NUM_COLOURS,
    Chart,
    Series,
    episode_chart,
    gantt,
    line_chart,
    number,
    page,
    stacked_columns,
)
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.spans import is_episode, read_trace
from rlhub.tracking.tracker import GenerationRow, RunInfo, Status
from rlhub.utils.atomic import write_text
from rlhub.utils.timing import NODE_TIME

QUIET_S, QUIET_STEPS = 60.0, 3
"""The page says that a run has probably ended when its report is older than QUIET_STEPS times its longest step, or times QUIET_S
seconds where that is more."""
SAMPLE_STEPS = 6  # first, last, and some between
SAMPLE_ROWS = 8
SAMPLE_CHARACTERS = 4000
STEP_TIME = "timing_s/step"
STALENESS_SHARE = "staleness/share_"  # begins the metrics that say which share of a step's samples is how many versions behind
GRAPH_NODE = re.compile(r"""(?P<node><g data-node=(?P<q>["'])(?P<name>.*?)(?P=q)>.*?)</text></g>""", re.DOTALL)
"""A node in graph.svg; its last text ends the group."""
BASE64 = re.compile(r"[A-Za-z0-9+/=]+")
NO_BAR = 'style="visibility:hidden"'
"""The style of a node's bar there."""
GRAPH_NOTE = '<p class="note">The mean seconds of each node, with a bar; those of nodes that run at the same time overlap.</p>'
GANTT_NOTE = "What ran when, a row for each role, replica or thread; trace.json has more of it, for ui.perfetto.dev."
EPISODES_NOTE = (
    "The slowest episodes and some drawn at random, by prompt and sample, each from its start: queue (until its first "
    "generation), generate, tool (its own code, its environment or application) and reward (the scoring of its group, when the "
    "others of its prompt have ended)."
)
CURVES_NOTE = (
    "Steps run from left to right. Of noisy figures the pale line is the value of each step and the strong one a moving average. "
    f"A curve of more than {MAX_POINTS} steps is drawn from means of neighbouring steps; metrics.jsonl has them all."
)


@dataclass(slots=True, kw_only=True, frozen=True)
class Panel:
    """A chart at the top of the page, shared by all metrics that match `pattern`."""

    title: str
    pattern: str
    zero: bool = False
    smooth: bool = True
    at_least: int = 1  # curves; with fewer there is no chart


PANELS = (
    Panel(title="Validation", pattern=r"val/(pass@\d+|accuracy)", zero=True, smooth=False),
    Panel(title="Validation by data source", pattern=r"val/(.+/pass@1|pass@1/.+)", zero=True, smooth=False, at_least=2),
    Panel(title="Validation: mean, best and majority", pattern=r"val-core/.+/(mean|best|maj)@\d+(/mean)?", smooth=False),
    Panel(title="Validation: success, with its 95 % interval", pattern=r"val/success(_low|_high)?", zero=True, smooth=False),
    Panel(title="Success of the episodes that train", pattern=r"rollout/success", zero=True),
    Panel(title="Reward", pattern=r"reward/mean"),
    Panel(title="Loss", pattern=r"((train|sft|val)/)?loss"),
    Panel(title="Response length (tokens)", pattern=r"response_length/mean", zero=True),
    Panel(title="Responses cut at the length limit", pattern=r"response_length/clip_ratio", zero=True),
    Panel(title="Policy entropy", pattern=r"actor/entropy"),
    Panel(title="KL of the policy step", pattern=r"actor/ppo_kl"),
    Panel(title="Rollout/trainer mismatch (KL)", pattern=r"mismatch/kl"),
    Panel(title="Mismatch (KL) by versions behind", pattern=r"mismatch/kl/staleness_\d+"),
    Panel(title="Staleness (versions)", pattern=r"staleness/(mean|p50|p95|max)", zero=True),
    Panel(title="Samples that train, of prompts with short and long responses", pattern=r"rollout/trained_share(_short|_long)?"),
    Panel(title="Share of time without work", pattern=r"(trainer|rollout)/idle_share", zero=True),
    Panel(title="Replicas of the rollout service", pattern=r"rollout/replicas", zero=True, smooth=False),
    Panel(title="Policy loss", pattern=r"actor/pg_loss"),
    Panel(title="Clipped fraction", pattern=r"actor/pg_clipfrac(_lower)?", zero=True),
    Panel(title="Gradient norm", pattern=r"((actor|critic|train)/)?grad_norm"),
    Panel(title="Value loss", pattern=r"critic/vf_loss(/mean)?"),
    Panel(title="Explained variance of the values", pattern=r"critic/vf_explained_var(/mean)?"),
    Panel(title="Throughput (tokens/s per device)", pattern=r"perf/throughput", zero=True),
    Panel(title="Model FLOP utilisation", pattern=r"perf/mfu/.+", zero=True),
)


@dataclass(slots=True, kw_only=True, frozen=True)
class Tile:
    """A headline figure.  better: +1 where a rising value is good, -1 where a falling one is, 0 for neither."""

    title: str
    metric: str
    better: int = 0
    seconds: bool = False


TILES = (
    Tile(title="Validation pass@1", metric="val/pass@1", better=1),
    Tile(title="Validation success", metric="val/success", better=1),
    Tile(title="Mean reward", metric="reward/mean", better=1),
    Tile(title="Loss", metric="train/loss", better=-1),
    Tile(title="Response length", metric="response_length/mean"),
    Tile(title="Mismatch KL", metric="mismatch/kl"),
    Tile(title="Time per step", metric=STEP_TIME, seconds=True),
    Tile(title="Tokens per second and device", metric="perf/throughput"),
)


def write_report(folder: RunFolder, info: RunInfo, status: Status, message: str = "") -> Path:
    """Writes report.html from the files of the run folder, in place of the old one, and returns its path."""
    series = collect(read_metrics(folder.metrics))
    sections = [_header(series, info, status), _alert(status, message), _tiles(series)]
    sections += [_panels(series), _timing(series), _graph(folder, series), *_charts_of_spans(folder), _staleness(series)]
    sections += [_samples(folder.generations), _others(series), _config(folder)]
    body = "\n".join(section for section in sections if section)
    document = page(f"{info.experiment} · {info.project}", body)
    write_text(folder.report, document.encode("utf-8", errors="replace").decode("utf-8"))
    return folder.report


def collect(rows: Sequence[dict[str, Any]]) -> dict[str, Series]:
    """Returns the finite values over steps of each metric, by its name, without text metrics and non-finite values."""
    found: dict[str, Series] = {}
    for row in rows:
        for name, value in row.items():
            if name == "step" or isinstance(value, str | bool) or value is None or not math.isfinite(value):
                continue
            one = found.setdefault(name, Series(name=name, steps=[], values=[]))
            one.steps.append(row["step"])
            one.values.append(float(value))
    return found


def _header(series: dict[str, Series], info: RunInfo, status: Status) -> str:
    last = max((one.steps[-1] for one in series.values()), default=0)
    parts = [escape(info.project), f"step {last}" + (f" of {info.total_steps}" if info.total_steps else "")]
    if STEP_TIME in series:
        parts.append(f"{duration(math.fsum(series[STEP_TIME].values))} in steps")
    if info.resumed_step is not None:
        parts.append(f"resumed after step {info.resumed_step}")
    parts.append(f"written {datetime.datetime.now().strftime('%Y-%m-%d %H:%M')}")
    return (
        f"<header><div><h1>{escape(info.experiment)}{_badge(series, status)}</h1>"
        f'<p class="sub">{" · ".join(parts)}</p></div><button id="theme">Light / dark</button></header>'
    )


def _badge(series: dict[str, Series], status: Status) -> str:
    """Returns the run's status.  A run that is killed cannot change it: the page itself says so when it has not been written
    again for long."""
    if status != "running":
        return f'<span class="badge {status}">{status}</span>'
    quiet_s = QUIET_STEPS * max(QUIET_S, *series[STEP_TIME].values) if STEP_TIME in series else QUIET_STEPS * QUIET_S
    return f'<span class="badge running" data-written="{time.time():.0f}" data-quiet="{quiet_s:.0f}">running</span>'


def duration(seconds: float) -> str:
    """Returns a time for people: 1.4 s, 3 min 5 s, 2 h 4 min."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left} min" if hours else f"{minutes} min {rest} s"


def _alert(status: Status, message: str) -> str:
    return f'<div class="alert">{escape(message)}</div>' if message and status != "finished" else ""


def _tiles(series: dict[str, Series]) -> str:
    shown = [_tile(tile, series[tile.metric]) for tile in TILES if tile.metric in series]
    return f'<div class="tiles">{"".join(shown)}</div>' if shown else '<p class="sub">No step has finished yet.</p>'


def _tile(tile: Tile, one: Series) -> str:
    if tile.seconds:
        typical = statistics.median(one.values)
        return f'<div class="tile"><span>{tile.title}</span><strong>{duration(typical)}</strong><small>median</small></div>'
    first, last = one.values[0], one.values[-1]
    if len(one.values) == 1:
        tail = f"<small>at step {one.steps[0]}</small>"
    else:
        tail = f"<small>from {_three_digits(first)}</small>"
        if tile.better:
            mood = "good" if (last - first) * tile.better >= 0 else "bad"
            tail = f'<small class="{mood}">{"+" if last >= first else "−"}{_three_digits(abs(last - first))}</small> {tail}'
    return f'<div class="tile"><span>{tile.title}</span><strong>{_three_digits(last)}</strong>{tail}</div>'


def _three_digits(value: float) -> str:
    return number(float(f"{value:.3g}"))


def _matching(series: dict[str, Series], panel: Panel) -> list[Series]:
    names = [name for name in series if re.fullmatch(panel.pattern, name)]
    found = [series[name] for name in sorted(names, key=_natural)][:NUM_COLOURS]
    return found if len(found) >= panel.at_least else []


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key in which pass@8 comes before pass@16."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _panels(series: dict[str, Series]) -> str:
    charts = []
    for panel in PANELS:
        if found := _matching(series, panel):
            charts.append(line_chart(Chart(title=panel.title, series=found, zero=panel.zero, smooth=panel.smooth)))
    return f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div><p class="note">{CURVES_NOTE}</p>' if charts else ""


def _others(series: dict[str, Series]) -> str:
    in_panels = {one.name for panel in PANELS for one in _matching(series, panel)}
    shown = ("timing_s/", STALENESS_SHARE, NODE_TIME)
    left = [name for name in series if name not in in_panels and not name.startswith(shown)]
    charts = [line_chart(Chart(title=name, series=[series[name]])) for name in sorted(left, key=_natural)]
    if not charts:
        return ""
    opened = "" if in_panels else " open"
    return (
        f'<details class="plain"{opened}><summary><h2 style="display:inline">All other metrics ({len(charts)})</h2></summary>'
        f'<div class="charts">{"".join(charts)}</div></details>'
    )


def _timing(series: dict[str, Series]) -> str:
    """Returns the section that shows where the time of a step goes.  `timing_s/step` is the whole; what no phase accounts for is
    called the rest."""
    phases = [one for name, one in series.items() if name.startswith("timing_s/") and name != STEP_TIME]
    if not phases:
        return ""
    phases.sort(key=lambda one: -math.fsum(one.values))
    whole = series.get(STEP_TIME)
    steps = whole.steps if whole else sorted({step for one in phases for step in one.steps})
    shown, small = phases[: NUM_COLOURS - 1], phases[NUM_COLOURS - 1 :]
    columns = [_at(one, steps) for one in shown]
    if whole:
        rest = [max(0.0, total - math.fsum(part.values[i] for part in columns)) for i, total in enumerate(whole.values)]
        columns.append(Series(name="the rest", steps=steps, values=rest))
    elif small:
        parts = [_at(one, steps) for one in small]
        columns.append(
            Series(name="other phases", steps=steps, values=[math.fsum(p.values[i] for p in parts) for i in range(len(steps))])
        )
    chart = stacked_columns("Seconds per step", steps, columns, unit="s")
    return f'<h2>Time</h2><div class="charts wide">{chart}<div class="chart">{_time_table(columns, len(steps))}</div></div>'


def _graph(folder: RunFolder, series: dict[str, Series]) -> str:
    """Returns the section with the graph of a step, where it is one, and the mean time of each node."""
    if not folder.graph.is_file():
        return ""
    of_nodes = [one for name, one in series.items() if name.startswith(NODE_TIME)]
    times = {one.name.removeprefix(NODE_TIME): statistics.fmean(one.values) for one in of_nodes}
    longest = max(times.values(), default=0.0) or 1.0

    def with_time(match: re.Match[str]) -> str:
        seconds = times.get(unescape(match["name"]))
        if seconds is None:
            return match[0]
        bar = f'style="transform-box:fill-box;transform:scaleX({seconds / longest:.3f})"'
        return f"{match['node'].replace(NO_BAR, bar)}: {seconds:.3f} s</text></g>"

    picture = GRAPH_NODE.sub(with_time, folder.graph.read_text(encoding="utf-8"))
    return f'<h2>The step as a graph</h2><div class="charts wide"><div class="chart">{picture}</div></div>{GRAPH_NOTE}'


def _charts_of_spans(folder: RunFolder) -> list[str]:
    """Returns the sections of the steps and of single episodes."""
    spans = read_trace(folder.trace)
    steps = gantt([span for span in spans if not is_episode(span)])
    episodes = episode_chart([span for span in spans if is_episode(span)])
    return [
        f'<h2>Steps</h2>{steps}<p class="note">{GANTT_NOTE}</p>' if steps else "",
        f'<h2>Episodes</h2>{episodes}<p class="note">{EPISODES_NOTE}</p>' if episodes else "",
    ]


def _staleness(series: dict[str, Series]) -> str:
    """Returns the section that shows how many versions each step's samples were behind the policy they trained."""
    found = [series[name] for name in sorted(series, key=_natural) if name.startswith(STALENESS_SHARE)]
    if not found:
        return ""
    steps = sorted({step for one in found for step in one.steps})
    columns = [_at(one, steps) for one in found]
    for one in columns:
        one.name = f"{one.name.removeprefix(STALENESS_SHARE)} behind"
    chart = stacked_columns("Share of the samples by versions behind", steps, columns, unit="of the samples")
    keys = "".join(
        f'<span class="key"><i style="background:var(--c{index % NUM_COLOURS})"></i>{escape(one.name)}</span>'
        for index, one in enumerate(columns)
    )
    return f'<h2>Staleness</h2><div class="charts wide">{chart}</div><p class="keys">{keys}</p>'


def _at(one: Series, steps: Sequence[int]) -> Series:
    """Returns the series at the given steps, 0 where it has no value (a phase that does not run in every step)."""
    known = dict(zip(one.steps, one.values, strict=True))
    return Series(name=one.name.removeprefix("timing_s/"), steps=list(steps), values=[known.get(step, 0.0) for step in steps])


def _time_table(columns: Sequence[Series], num_steps: int) -> str:
    total = math.fsum(math.fsum(one.values) for one in columns) or 1.0
    rows = []
    for index, one in enumerate(columns):
        seconds = math.fsum(one.values)
        rows.append(
            f'<tr><td><i style="background:var(--c{index % NUM_COLOURS})"></i>{escape(one.name)}</td>'
            f"<td>{number(seconds / num_steps)}</td><td>{duration(seconds)}</td><td>{seconds / total:.1%}</td></tr>"
        )
    return f"<table><tr><th>phase</th><th>s per step</th><th>in all</th><th>share</th></tr>{''.join(rows)}</table>"


def _samples(folder: Path) -> str:
    found = list_generations(folder)
    if not found:
        return ""
    count = len(found)
    picked = sorted({round(index * (count - 1) / max(1, SAMPLE_STEPS - 1)) for index in range(SAMPLE_STEPS)}, reverse=True)
    blocks = []
    for position, index in enumerate(picked):
        split, step, path = found[index]
        rows = read_generations(path)
        scores = [row.score for row in rows if row.score is not None]
        mean = f" · mean score {_three_digits(statistics.fmean(scores))}" if scores else ""
        head = f"Step {step} <span class='chip'>{escape(split)}</span> <small class='sub'>{len(rows)} samples{mean}</small>"
        body = "".join(_sample(row) for row in rows[:SAMPLE_ROWS])
        blocks.append(
            f'<details class="card"{" open" if position == 0 else ""}><summary>{head}</summary>'
            f'<div class="samples">{body}</div></details>'
        )
    return f"<h2>Sample completions</h2>{''.join(blocks)}"


def _sample(row: GenerationRow) -> str:
    chips = []
    if row.score is not None:
        chips.append(f'<span class="chip {"good" if row.score > 0 else "bad"}">score {_three_digits(row.score)}</span>')
    else:
        chips.append('<span class="chip bad">not scored</span>')
    for label, text in (("truth", row.ground_truth), ("source", row.data_source), ("ended by", row.finish_reason)):
        if text:
            chips.append(f'<span class="chip">{label} {escape(_cut(text, 80))}</span>')
    film = row.extra.get("film")
    if isinstance(film, str) and BASE64.fullmatch(film):
        picture = f'<img class="film" alt="what the policy saw" src="data:image/png;base64,{film}">'
    else:
        picture = ""
    return (
        f'<div class="sample"><div class="chips">{"".join(chips)}</div><h4>Prompt</h4><pre>{escape(_cut(row.prompt))}</pre>'
        f"<h4>Response</h4><pre>{escape(_cut(row.response)) or '(empty)'}</pre>{picture}</div>"
    )


def _cut(text: str, limit: int = SAMPLE_CHARACTERS) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} characters more in generations/)"


def _config(folder: RunFolder) -> str:
    if not folder.config.exists():
        return ""
    text = escape(folder.config.read_text(encoding="utf-8"))
    return f'<h2>Configuration</h2><details class="card"><summary>config.yaml</summary><pre>{text}</pre></details>'
