"""Plots of the performance page: drawn from its tables, current, and readable in both colour schemes."""

import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLOTS = runpy.run_path(str(ROOT / "benchmarks" / "plots.py"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def page() -> str:
    return PLOTS["PAGE"].read_text(encoding="utf-8")


def test_plots_are_current(page: str) -> None:
    """`python benchmarks/plots.py` writes them again."""
    for name, plot in PLOTS["plots"](page).items():
        assert f"({name})" in page
        found = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert found == PLOTS["drawn"](plot), f"docs/{name}: run python benchmarks/plots.py"


def test_numbers_are_those_of_the_page(page: str) -> None:
    plots = PLOTS["plots"](page)
    first = plots["routers.svg"].panels[0].bars[0]
    assert first.label == "(128,8) softmax"
    assert f"| **{first.times['ours']:.1f}** | {first.times['floor']} |" in page
    changed = page.replace("| **12.7** | 9.87 |", "| **27.5** | 9.87 |")
    assert changed != page
    assert PLOTS["plots"](changed)["routers.svg"].panels[0].bars[0].times["ours"] == 27.5
    qwen = plots["experts.svg"].panels[1].bars[0]
    assert qwen.times == {"floor": 5.71, "ours": 7.19, "peer": 9.90}
    assert [len(panel.bars) for plot in plots.values() for panel in plot.panels] == [8, 8, 8, 8, 9, 9]
    with pytest.raises(ValueError, match="no table after"):
        PLOTS["table"](page, "no such text")


@pytest.mark.parametrize("name", ["routers.svg", "experts.svg"])
def test_a_plot_is_whole(page: str, name: str) -> None:
    plot = PLOTS["plots"](page)[name]
    text = PLOTS["drawn"](plot)
    root = ElementTree.fromstring(text)
    width, height = (float(root.get(side)) for side in ("width", "height"))
    style = root.findtext(f"{SVG}style")
    assert "prefers-color-scheme: dark" in style
    light, dark = (set(re.findall(r"\.(\w+) \{", part)) for part in style.partition("@media")[::2])
    used = {c for element in root.iter() for c in (element.get("class") or "").split()}
    assert used - {"title"} <= dark and used <= light | {"title"}
    assert not re.search(r"href|url\(|http(?!://www\.w3\.org/2000/svg)", text)
    marks = [e for e in root.iter() if e.tag in (f"{SVG}circle", f"{SVG}rect") and e.find(f"{SVG}title") is not None]
    assert len(marks) == 3 * sum(len(panel.bars) for panel in plot.panels) + 3
    for mark in marks:
        x, y = (float(mark.get(f"c{axis}") or mark.get(axis)) for axis in "xy")
        assert 0 < x < width and 0 < y < height
    # Slower is further to the right.
    bar = plot.panels[0].bars[0]
    place = {
        series: next(
            float(m.get("cx") or m.get("x")) for m in marks if f"{plot.series[series]} {time:.4g} " in m[0].text
        )
        for series, time in bar.times.items()
    }
    assert place["floor"] < place["ours"] < place["peer"]
