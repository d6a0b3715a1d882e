"""The picture in the README is made of a report's own charts."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from recipes.arithmetic.curve import main, picture
from rlhub.tracking.metrics_log import MetricsLog
from rlhub.tracking.report import write_report
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.tracker import RunInfo

SVG = "{http://www.w3.org/2000/svg}"


def test_two_charts_of_a_report_become_one_picture(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    log = MetricsLog(folder.metrics)
    for step in range(3):
        log.append(step, {"val/pass@1": 0.25 * step, "response_length/mean": 3.0 + step, "reward/mean": 0.5})
    report = write_report(folder, RunInfo(project="p", experiment="e", folder=folder.path), "finished")
    assert main([str(report), str(tmp_path / "curve.svg")]) == 0
    drawing = ElementTree.parse(tmp_path / "curve.svg").getroot()
    assert len(drawing.findall(f".//{SVG}path")) == 2
    texts = [text.text for text in drawing.iter(f"{SVG}text")]
    assert "validation pass@1" in texts and "response length, tokens" in texts
    style = drawing.find(f"{SVG}style")
    assert style is not None and style.text is not None
    assert "prefers-color-scheme:dark" in style.text and "--c0" in style.text and "svg .line{" in style.text


def test_a_report_without_validation_is_named() -> None:
    with pytest.raises(SystemExit, match="no chart 'Validation'"):
        picture("<html></html>")
