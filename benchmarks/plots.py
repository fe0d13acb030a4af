"""Plots of the numbers on docs/performance.md, as SVG beside it.

    python benchmarks/plots.py            write them
    python benchmarks/plots.py --check    write nothing; exit with 1 and name those that are not current

They are drawn from the tables of the page, so that a number is corrected in one place. Each row has a mark for the
floor, for ours and for a peer, on a logarithmic axis: equal distances are equal factors. Needs nothing but Python. The
pictures follow the reader's colour scheme.
"""

from __future__ import annotations

import argparse
import html
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "performance.md"

WIDTH, LEFT, RIGHT, ROW, TITLE, AXIS = 860, 330, 40, 22, 34, 46


@dataclass(frozen=True)
class Bar:
    """One row: its label, and times in one unit by series."""

    label: str
    times: dict[str, float]


@dataclass(frozen=True)
class Panel:
    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Plot:
    """A picture: what it shows, its unit, what the series are called, and its panels."""

    title: str
    unit: str
    series: dict[str, str]
    panels: tuple[Panel, ...]


# The page's numbers ---------------------------------------------------------------------------------------------------


def table(page: str, after: str) -> list[dict[str, str]]:
    """The first table after a text, each row by column; columns of one name get a number behind it.

    Raises:
        ValueError: the page has no such text, or no table after it.
    """
    start = page.find(after)
    match = re.search(r"^\|.*\n\|[ :|-]+\|\n((?:\|.*\n)+)", page[max(start, 0) :], re.MULTILINE)
    if start < 0 or match is None:
        raise ValueError(f"{PAGE.name} has no table after {after!r}")
    header = _cells(match[0].splitlines()[0])
    names = [
        name if header[:n].count(name) == 0 else f"{name} {header[:n].count(name) + 1}" for n, name in enumerate(header)
    ]
    return [dict(zip(names, _cells(line), strict=True)) for line in match[1].splitlines()]


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("*").strip() for cell in line.strip().strip("|").split("|")]


def number(text: str) -> float:
    """A number, or the middle of ``a to b``."""
    found = [float(part) for part in re.findall(r"\d+(?:\.\d+)?", text)]
    if not found:
        raise ValueError(f"no number in {text!r}")
    return sum(found[:2]) / len(found[:2]) if " to " in text else found[0]


def plots(page: str) -> dict[str, Plot]:
    """The plots by file name."""
    return {"routers.svg": routers(page), "experts.svg": experts(page)}


def routers(page: str) -> Plot:
    """Routers, bf16 logits: floors, ours, eager torch."""
    panels = []
    for outputs in ("dense", "compact"):
        rows = table(page, f"bf16 logits, {outputs} outputs:")
        for direction, suffix in (("forward", ""), ("forward + backward", " 2")):
            bars = []
            for row in rows:
                ours = number(row[f"{direction}, us"])
                eager = ours * number(row[f"eager{suffix}"])
                bars.append(Bar(row["router"], {"floor": number(row[f"floor{suffix}"]), "ours": ours, "peer": eager}))
            panels.append(Panel(f"{outputs} outputs, {direction}", tuple(bars)))
    series = {"floor": "fewest bytes", "ours": "moesaic", "peer": "eager torch"}
    return Plot("Routers, bf16, T = 65536, one H200", "us", series, tuple(panels))


def experts(page: str) -> Plot:
    """Experts: floors, ours, transformers' grouped_mm under torch.compile."""
    bars: dict[str, list[Bar]] = {"forward": [], "with backward": []}
    model = tokens = ""
    for row in table(page, "| H / I / E / K |"):
        model, tokens = row["H / I / E / K"] or model, row["T"] or tokens
        name, _, _ = model.partition(",")
        times = {
            "floor": number(row["floor, ms"]),
            "ours": number(row["ours, ms"]),
            "peer": number(row["compiled, ms"]),
        }
        bars[row["pass"]].append(Bar(f"{name}, T = {tokens}", times))
    series = {"floor": "FLOPs or bytes", "ours": "moesaic", "peer": "grouped_mm, compiled"}
    panels = tuple(Panel(direction, tuple(found)) for direction, found in bars.items())
    return Plot("Experts, bf16, one H200", "ms", series, panels)


# Drawing --------------------------------------------------------------------------------------------------------------

_STYLE = """\
    .back { fill: #ffffff; } .text { fill: #1b1f24; } .dim { fill: #5b6570; } .grid { stroke: #d5dae0; }
    .floor { fill: #5b6570; stroke: #5b6570; } .ours { fill: #0a58ca; stroke: #0a58ca; }
    .peer { fill: #b35900; stroke: #b35900; }
    .gap { stroke: #5b6570; }
    @media (prefers-color-scheme: dark) {
      .back { fill: #14171b; } .text { fill: #e2e6ea; } .dim { fill: #98a2ad; } .grid { stroke: #333a42; }
      .floor { fill: #98a2ad; stroke: #98a2ad; } .ours { fill: #79b4ff; stroke: #79b4ff; }
      .peer { fill: #f0a860; stroke: #f0a860; }
      .gap { stroke: #98a2ad; }
    }
    text { font: 13px system-ui, sans-serif; } .title { font-weight: 600; font-size: 15px; }
"""


def drawn(plot: Plot) -> str:
    """The plot as SVG."""
    rows = sum(len(panel.bars) for panel in plot.panels)
    height = 2 * TITLE + rows * ROW + len(plot.panels) * TITLE + AXIS
    every = [time for panel in plot.panels for bar in panel.bars for time in bar.times.values()]
    low, high = _decade(min(every), math.floor), _decade(max(every), math.ceil)
    bottom = height - AXIS + 4

    def x(time: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(time) - low) / (high - low)

    body = [_text(16, 24, plot.title, "title text"), *_legend(plot)]
    for exponent in range(low, high + 1):
        place = x(10.0**exponent)
        body.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{TITLE + 8}" y2="{bottom}"/>')
        body.append(_text(place, bottom + 18, f"{10.0**exponent:g} {plot.unit}", "dim", "middle"))
    y = TITLE + 10
    for panel in plot.panels:
        y += TITLE
        body.append(_text(16, y - 6, panel.title, "dim"))
        for bar in panel.bars:
            y += ROW
            middle = y - 5
            body.append(_text(LEFT - 16, y, bar.label, "text", "end"))
            first, last = x(bar.times["floor"]), x(bar.times["ours"])
            body.append(
                f'<line class="gap" x1="{first:.1f}" x2="{last:.1f}" y1="{middle}" y2="{middle}" stroke-width="2"/>'
            )
            for series in ("peer", "floor", "ours"):
                body.append(_mark(series, x(bar.times[series]), middle, _said(bar, series, plot)))
    summary = html.escape(f"{plot.title}: times in {plot.unit} beside floors, on a logarithmic axis")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{summary}">\n  <style>\n{_STYLE}  </style>\n'
        f'  <rect class="back" width="{WIDTH}" height="{height}"/>\n'
        + "".join(f"  {line}\n" for line in body)
        + "</svg>\n"
    )


def _decade(time: float, towards: Callable[[float], int]) -> int:
    return towards(math.log10(time))


def _said(bar: Bar, series: str, plot: Plot) -> str:
    share = f", {100 * bar.times['floor'] / bar.times[series]:.0f} % of the floor" if series != "floor" else ""
    return f"{bar.label}: {plot.series[series]} {bar.times[series]:.4g} {plot.unit}{share}"


def _legend(plot: Plot) -> Iterator[str]:
    place = float(WIDTH - RIGHT)
    for series, name in reversed(plot.series.items()):
        yield _text(place, 24, name, "text", "end")
        place -= 8 * len(name) + 14
        yield _mark(series, place, 19, name)
        place -= 24


def _mark(series: str, x: float, y: float, said: str) -> str:
    """A bar for the floor, a disc for ours, a ring for the peer: shapes differ, not only colours."""
    shape = {
        "floor": f'<rect class="floor" x="{x - 1.5:.1f}" y="{y - 7}" width="3" height="14"',
        "ours": f'<circle class="ours" cx="{x:.1f}" cy="{y}" r="5"',
        "peer": f'<circle class="peer" cx="{x:.1f}" cy="{y}" r="4.5" fill-opacity="0" stroke-width="2"',
    }[series]
    element = shape[1:].partition(" ")[0]
    return f"{shape}><title>{html.escape(said)}</title></{element}>"


def _text(x: float, y: float, content: str, style: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{html.escape(content)}</text>'


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draws the numbers of docs/performance.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a plot is not current")
    given = parser.parse_args(arguments)
    stale = []
    for name, plot in plots(PAGE.read_text(encoding="utf-8")).items():
        path, content = DOCS / name, drawn(plot)
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            stale.append(name)
            if not given.check:
                path.write_text(content, encoding="utf-8")
                print(f"wrote docs/{name}")
    if stale and given.check:
        print(f"not current: {', '.join(stale)}; run python benchmarks/plots.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
