"""Two charts of a run's report as one picture, which a README can show.

python recipes/arithmetic/curve.py outputs/arithmetic/seed1/grpo/report.html recipes/arithmetic/curve.svg
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhub.tracking.report_charts import HEIGHT, STYLE, WIDTH

TITLES = {"Validation": "validation pass@1", "Response length (tokens)": "response length, tokens"}
HEAD = 30  # pixels for the titles
COLOURS = re.compile(r":root\{.*?\}|@media \(prefers-color-scheme:dark\)\{.*?\}\}", re.DOTALL)
LINES = re.compile(r"^svg .*?(?=^\.cross)", re.DOTALL | re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """Reads the report, writes the picture."""
    report, out = map(Path, arguments)
    out.write_text(picture(report.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def picture(report: str) -> str:
    """The charts named in TITLES next to each other, with the page's own colours, light or dark."""
    parts = []
    for number, (title, shown) in enumerate(TITLES.items()):
        drawing = re.search(rf"<b>{re.escape(title)}</b>.*?<svg[^>]*>(.*?)</svg>", report, re.DOTALL)
        if drawing is None:
            raise SystemExit(f"the report has no chart {title!r}: is it of a run with validation?")
        text = f'<text class="title" x="{WIDTH / 2}" y="20" text-anchor="middle">{shown}</text>'
        parts.append(
            f'<g transform="translate({number * WIDTH} 0)">{text}<g transform="translate(0 {HEAD})">{drawing[1]}</g></g>'
        )
    colours, lines = COLOURS.findall(STYLE), LINES.search(STYLE)
    assert lines is not None and len(colours) == 2, "the page's style has another order"
    frame = "rect.frame{fill:var(--card)} text{font-family:system-ui,sans-serif} svg text.title{font-size:13px;fill:var(--ink)}"
    size = f'width="{2 * WIDTH}" height="{HEIGHT + HEAD}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT + HEAD}" {size}>\n'
        f"<style>{''.join(colours)}\n{lines[0]}{frame}</style>\n"
        f'<rect class="frame" {size}/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
