"""What came of tuning: as a table, as a plot in a terminal, and as a plot in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.ir.errors import InputError

if TYPE_CHECKING:
    from moesaic.runtime.tuning.tuner import Tuned

LINES = {"floor": "·", "default": "o", "tuned": "*"}
"""What a plot shows, and by which mark in a terminal; of marks in one place the last is seen."""

_COLORS = {"floor": "#888888", "default": "#d08020", "tuned": "#2060c0"}
_WIDTH, _HEIGHT = 60, 14  # of a plot in a terminal
_SIZE = (720, 400)  # of a plot in a file
_MARGIN = (70, 20, 40, 50)  # left, right, top, bottom


@dataclass(frozen=True)
class Times:
    """Microseconds of a function's kernels together, at a number of experts and tokens."""

    experts: int
    tokens: int
    floor: float
    default: float
    tuned: float


@dataclass
class Report:
    """Kernels that were tuned, or looked up, in order."""

    tuned: list[Tuned] = field(default_factory=list)

    def add(self, found: Sequence[Tuned]) -> None:
        """Adds kernels; one that is there already is left out."""
        known = {(t.key, t.kind, t.experts) for t in self.tuned}
        self.tuned += [t for t in found if (t.key, t.kind, t.experts) not in known]

    def __len__(self) -> int:
        return len(self.tuned)

    def rows(self) -> list[dict[str, Any]]:
        """A record for each kernel."""
        return [
            {
                "kernel": t.kernel,
                "function": t.kind,
                **t.key.as_dict(),
                "us": t.entry.us,
                "default_us": t.entry.default_us,
                "floor_us": round(t.floor_us, 3),
                "tuned_at": t.entry.tuned_at,
                "trials": t.entry.trials,
                "points": t.entry.points,
                "point": dict(t.entry.point),
                "default": dict(t.default),
                "searched": t.found is not None,
            }
            for t in self.tuned
        ]

    def table(self) -> str:
        """A line for each kernel: times, what they gain, their share of the floor, and what differs from the rule."""
        from moesaic.runtime.commands import console

        rows = []
        for t in self.tuned:
            changed = {n: v for n, v in t.entry.point.items() if t.default.get(n) != v}
            rows.append(
                (
                    t.kernel,
                    t.kind,
                    t.experts,
                    t.entry.tuned_at,
                    f"{t.floor_us:.2f}",
                    f"{t.entry.default_us:.2f}",
                    f"{t.entry.us:.2f}",
                    f"{100 * (1 - t.entry.us / t.entry.default_us):.1f} %",
                    f"{t.entry.trials}/{t.entry.points}" if t.found is not None else "known",
                    " ".join(f"{n}={v}" for n, v in changed.items()) or "as the rule says",
                )
            )
        header = ("kernel", "function", "E", "T", "floor us", "default us", "tuned us", "gain", "tried", "choice")
        return console.table(header, rows, right={2, 3, 4, 5, 6, 7, 8}) if rows else "nothing was tuned"

    def times(self, kind: str) -> list[Times]:
        """The sums over a function's kernels that were tuned, by tokens and experts."""
        sums: dict[tuple[int, int], list[float]] = {}
        for t in self.tuned:
            if t.kind == kind:
                total = sums.setdefault((t.entry.tuned_at, t.experts), [0.0, 0.0, 0.0])
                for place, us in enumerate((t.floor_us, t.entry.default_us, t.entry.us)):
                    total[place] += us
        return [Times(e, tokens, *found) for (tokens, e), found in sorted(sums.items())]

    @property
    def kinds(self) -> list[str]:
        """The functions that there are."""
        return list(dict.fromkeys(t.kind for t in self.tuned))

    def plot(self) -> str:
        """Time over the number of experts, for a terminal: a plot for each function and number of tokens."""
        plots = []
        for kind in self.kinds:
            for tokens in sorted({t.tokens for t in self.times(kind)}):
                found = [t for t in self.times(kind) if t.tokens == tokens]
                plots.append(_terminal_plot(f"{kind}, T = {tokens}", found))
        return "\n\n".join(plots)

    def save(self, path: Path | str) -> None:
        """Writes the plot: ``.svg``, or ``.png`` where matplotlib is installed.

        Raises:
            InputError: another ending, a PNG without matplotlib, or the file cannot be written.
        """
        path = Path(path)
        series = {
            f"{kind}, T = {tokens}": [t for t in self.times(kind) if t.tokens == tokens]
            for kind in self.kinds
            for tokens in sorted({t.tokens for t in self.times(kind)})
        }
        try:
            if path.suffix == ".svg":
                path.write_text(svg(series), encoding="utf-8")
            elif path.suffix == ".png":
                _save_png(path, series)
            else:
                raise InputError(f"a plot is .svg or .png, found {path}")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from None


# ------------------------------------------------------------------------------------------------------------ terminal


def _terminal_plot(title: str, times: Sequence[Times]) -> str:
    values = [getattr(t, line) for t in times for line in LINES]
    scale_x = _scale([t.experts for t in times], _WIDTH - 1)
    scale_y = _scale(values, _HEIGHT - 1)
    canvas = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for line, mark in LINES.items():
        for t in times:
            canvas[_HEIGHT - 1 - round(scale_y(getattr(t, line)))][round(scale_x(t.experts))] = mark
    highest, lowest = max(values), min(values)
    labels = {0: f"{highest:.4g} us", _HEIGHT - 1: f"{lowest:.4g} us"}
    lines = [f"{labels.get(n, ''):>12} |{''.join(row).rstrip()}" for n, row in enumerate(canvas)]
    below = [" "] * (_WIDTH + 8)
    for t in times:
        text = str(t.experts)
        start = round(scale_x(t.experts))
        if all(c == " " for c in below[max(0, start - 1) : start + len(text) + 1]):
            below[start : start + len(text)] = text
    key = ", ".join(f"{mark} {line}" for line, mark in LINES.items())
    axis = [f"{'':12} +{'-' * _WIDTH}", f"{'experts':>12}  {''.join(below).rstrip()}"]
    return "\n".join([f"{title}   ({key})", *lines, *axis])


def _scale(values: Sequence[float], length: float) -> Any:
    """From a value to its place on an axis of that length, by logarithms."""
    low, high = math.log(max(min(values), 1e-9)), math.log(max(max(values), 1e-9))
    span = high - low
    return lambda value: 0.0 if span == 0 else (math.log(max(value, 1e-9)) - low) / span * length


# --------------------------------------------------------------------------------------------------------------- files


def svg(series: Mapping[str, Sequence[Times]]) -> str:
    """A plot for each of the series, one below the other, both axes by logarithms. Readable on light and on dark."""
    width, height = _SIZE
    parts = [_svg_plot(title, times, n * height) for n, (title, times) in enumerate(series.items())]
    total = max(1, len(series)) * height
    style = (
        "text{font:13px sans-serif;fill:#222}.a{stroke:#222}.b{fill:#fff}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.a{stroke:#ddd}.b{fill:#161616}}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" height="{total}">'
    background = f'<rect class="b" width="{width}" height="{total}"/>'
    return "\n".join([head, f"<style>{style}</style>", background, *parts, "</svg>", ""])


def _svg_plot(title: str, times: Sequence[Times], top: float) -> str:
    width, height = _SIZE
    left, right, above, below = _MARGIN
    values = [getattr(t, line) for t in times for line in LINES]
    to_x, to_y = _scale([t.experts for t in times], width - left - right), _scale(values, height - above - below)

    def x(t: Times) -> float:
        return left + float(to_x(t.experts))

    def y(value: float) -> float:
        return top + height - below - float(to_y(value))

    bottom = top + height - below
    lines = [
        f'<text x="{left}" y="{top + 22:.0f}">{title}</text>',
        f'<path class="a" fill="none" d="M{left} {top + above}V{bottom}H{width - right}"/>',
        f'<text x="{(left + width - right) / 2:.0f}" y="{bottom + 38:.0f}" text-anchor="middle">experts</text>',
    ]
    for t in times:
        lines.append(f'<text x="{x(t):.1f}" y="{bottom + 18:.0f}" text-anchor="middle">{t.experts}</text>')
    for value in sorted({min(values), max(values)}):
        lines.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g} us</text>')
    for number, (line, color) in enumerate(_COLORS.items()):
        points = " ".join(f"{x(t):.1f},{y(getattr(t, line)):.1f}" for t in times)
        lines.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{points}"/>')
        for t in times:
            told = f"{line}: {getattr(t, line):.4g} us, {t.experts} experts"
            at = f'cx="{x(t):.1f}" cy="{y(getattr(t, line)):.1f}"'
            lines.append(f'<circle {at} r="3.5" fill="{color}"><title>{told}</title></circle>')
        place = width - right - 230 + 85 * number
        lines.append(f'<circle cx="{place}" cy="{top + 18:.0f}" r="4" fill="{color}"/>')
        lines.append(f'<text x="{place + 9}" y="{top + 22:.0f}">{line}</text>')
    return "\n".join(lines)


def _save_png(path: Path, series: Mapping[str, Sequence[Times]]) -> None:
    try:
        import matplotlib
    except ImportError:
        raise InputError(f"{path} needs matplotlib: pip install matplotlib, or write .svg instead") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    width, height = _SIZE
    count = max(1, len(series))
    figure, axes = pyplot.subplots(count, figsize=(width / 100, count * height / 100), squeeze=False)
    for (title, times), axis in zip(series.items(), axes.flat, strict=False):
        for line, color in _COLORS.items():
            found = [getattr(t, line) for t in times]
            axis.loglog([t.experts for t in times], found, "o-", color=color, label=line)
        axis.set_title(title)
        axis.set_xlabel("experts")
        axis.set_ylabel("us")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
