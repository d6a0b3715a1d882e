"""The report: self-contained, escaped, right numbers, small for long runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlhub.pipeline.show import NO_BAR, to_svg
from rlhub.tracking.generations import write_generations
from rlhub.tracking.metrics_log import MetricsLog
from rlhub.tracking.report import collect, duration, write_report
from rlhub.tracking.report_charts import MAX_POINTS, Series, nice_ticks, number, smoothed, stacked_columns, thin
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.tracker import GenerationRow, RunInfo
from rlhub.utils.timing import NODE_TIME
from tests.support.pipelines import graph_of

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Collects elements, attributes and the text of scripts of type application/json."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.data: list[str] = []
        self._in_data = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._in_data = tag == "script" and ("type", "application/json") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data.append(data)


@pytest.fixture
def info(tmp_path: Path) -> RunInfo:
    return RunInfo(project="rlhub", experiment=f"run {HOSTILE}", folder=tmp_path, total_steps=3)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    log = MetricsLog(folder.metrics)
    log.append(0, {"val/pass@1": 0.25, "timing_s/validate": 1.0})
    for step in (1, 2, 3):
        log.append(
            step,
            {
                "reward/mean": 0.1 * step, "timing_s/step": 2.0, "timing_s/generate_sequences": 1.5,
                "actor/pg_loss": float("nan"), f"own/{HOSTILE}": float(step), "val/pass@1": 0.25 * (step + 1), "note": "text",
            },
        )  # fmt: skip
    folder.write_config({"prompt": HOSTILE, "api_key": "hunter2"})
    write_generations(
        folder.generations, 3, "val", [GenerationRow(prompt=HOSTILE, response=HOSTILE * 200, score=None, ground_truth=HOSTILE)]
    )
    return folder


def test_one_file_that_loads_nothing_and_runs_no_foreign_text(folder: RunFolder, info: RunInfo) -> None:
    text = write_report(folder, info, "failed", HOSTILE).read_text(encoding="utf-8")
    page = Page(text)
    assert {"img", "link", "iframe"}.isdisjoint(page.elements)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "srcset") or name.startswith("on")]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import", text)
    assert "alert(1)</script>" not in text and text.count("<script") == len(page.data) + 1
    assert "hunter2" not in text and "default-src 'none'" in text
    assert all(json.loads(data)["series"] for data in page.data)


def test_it_shows_the_figures(folder: RunFolder, info: RunInfo) -> None:
    text = write_report(folder, info, "running").read_text(encoding="utf-8")
    assert "<strong>1</strong>" in text and "+0.75" in text and "from 0.25" in text  # pass@1 0.25 -> 1
    assert "step 3 of 3" in text and "6 s in steps" in text
    assert "generate_sequences</td><td>1.5</td><td>4.5 s</td><td>75.0%" in text
    assert "the rest</td><td>0.5</td>" in text
    assert "characters more in generations/" in text and "not scored" in text


def test_the_script_uses_every_piece_of_the_page(folder: RunFolder, info: RunInfo) -> None:
    """A cheap guard for what only a browser can run: balanced brackets, and the element ids and classes it asks for exist."""
    text = write_report(folder, info, "running").read_text(encoding="utf-8")
    script = text[text.rindex("<script>") : text.rindex("</script>")]
    for opening, closing in ("()", "{}", "[]"):
        assert script.count(opening) == script.count(closing)
    assert "tip.textContent=" in script and 'id="theme"' in text and 'class="plot"' in text and 'class="chart"' in text


def test_the_graph_of_a_step_has_the_mean_time_of_each_node(folder: RunFolder, info: RunInfo) -> None:
    assert "The step as a graph" not in write_report(folder, info, "running").read_text()
    graph = graph_of([("a", {"writes": "x"}), ('b<">', {"reads": "x"}), ("never", {})])
    folder.graph.write_text(to_svg(graph))
    log = MetricsLog(folder.metrics)
    for step, seconds in ((4, 1.0), (5, 2.0)):
        log.append(step, {f"{NODE_TIME}a": seconds, f'{NODE_TIME}b<">': 0.25})
    text = write_report(folder, info, "running").read_text()
    assert re.findall(r"compute on driver[^<]*|data_load on driver[^<]*", text) == [
        *("data_load on driver: 1.500 s", "compute on driver: 0.250 s", "compute on driver"),
    ]
    assert re.findall(r"scaleX\(([\d.]+)\)", text) == ["1.000", "0.167"] and text.count(NO_BAR) == 1
    assert NODE_TIME not in text, "they have no charts of their own"
    assert not [value for name, value in Page(text).attributes if name in ("src", "href")]


def test_an_empty_run_has_a_report(tmp_path: Path, info: RunInfo) -> None:
    assert "No step has finished yet" in write_report(RunFolder(tmp_path), info, "running").read_text()


def test_long_runs_stay_small(tmp_path: Path, info: RunInfo) -> None:
    folder = RunFolder(tmp_path)
    lines = (
        json.dumps({"step": s, "reward/mean": s * 0.001, "timing_s/step": 1.0, "timing_s/reward": 0.1}) for s in range(1, 6001)
    )
    folder.metrics.write_text("\n".join(lines) + "\n")
    assert write_report(folder, info, "running").stat().st_size < 120_000


def test_collect_leaves_out_what_cannot_be_drawn() -> None:
    found = collect([{"step": 1, "x": 1, "flag": True, "name": "a", "bad": float("inf")}, {"step": 4, "x": 2.5}])
    assert found == {"x": Series(name="x", steps=[1, 4], values=[1.0, 2.5])}


def test_thinning_keeps_mean_and_end() -> None:
    series = Series(name="x", steps=list(range(1000)), values=[float(i) for i in range(1000)])
    small = thin(series, 10)
    assert small.steps == [99 + 100 * i for i in range(10)] and small.values[0] == pytest.approx(49.5)
    assert thin(series, 3000) is series and len(thin(series).steps) == MAX_POINTS


def test_smoothing_keeps_lines_straight() -> None:
    line = [0.5 * i for i in range(100)]
    assert smoothed(line)[4:-4] == pytest.approx(line[4:-4]) and smoothed(line)[0] == pytest.approx(1.0)
    noisy = [(-1.0) ** i for i in range(101)]
    assert max(abs(value) for value in smoothed(noisy)[10:-10]) < 0.2


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.2, 0.8), (-3e-7, 5e-7), (0, 123456), (1, 5000), (-1, 1), (0.99999, 1.00001)]
)
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    span = high - low
    assert 2 <= len(ticks) <= 6 and ticks == sorted(set(ticks))
    assert all(low - 1e-9 * span <= tick <= high + 1e-9 * span for tick in ticks)
    assert all(len(f"{tick / span:.12g}".lstrip("-")) <= 14 for tick in ticks)
    assert nice_ticks(3, 3) == [3]


def test_numbers_and_durations_for_people() -> None:
    assert [number(x) for x in (0, 60, 0.41234567, 1.2e-6, 48213.0, 3.2e6, -0.5)] == [
        "0",
        "60",
        "0.4123",
        "1.2e-06",
        "48.21k",
        "3.2M",
        "-0.5",
    ]
    assert [duration(x) for x in (1.44, 59, 185, 7440)] == ["1.4 s", "59 s", "3 min 5 s", "2 h 4 min"]


def test_columns_stack_to_the_total() -> None:
    parts = [Series(name="a", steps=[1, 2], values=[1.0, 3.0]), Series(name="b", steps=[1, 2], values=[2.0, 0.0])]
    drawn = stacked_columns("t", [1, 2], parts, unit="s")
    assert drawn.count("<rect") == 3 and "step 1: 3 s" in drawn and "step 2: 3 s" in drawn
