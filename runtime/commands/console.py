"""What verbs print with: headings, aligned tables, colour on terminals only, and progress on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_WIDEST = 120


def has_color(stream: TextIO) -> bool:
    """Whether to colour what goes to `stream`: a terminal, and ``NO_COLOR`` does not forbid it."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, *styles: str, stream: TextIO | None = None) -> str:
    """The text in the given styles where `stream` (stdout unless said) takes colour, else as it is."""
    if not text or not has_color(sys.stdout if stream is None else stream):
        return text
    return f"\x1b[{';'.join(_CODES[s] for s in styles)}m{text}\x1b[0m"


def width() -> int:
    """Columns to lay text out in."""
    return min(_WIDEST, shutil.get_terminal_size((100, 24)).columns)


def page() -> int | None:
    """Columns of the terminal, however wide; ``None`` where stdout is none and lines may be of any length."""
    return max(80, shutil.get_terminal_size((100, 24)).columns) if sys.stdout.isatty() else None


def heading(title: str, note: str = "") -> str:
    """A line that starts a section: ``── title ── note ───``."""
    room = width() - len(title) - 10
    note = f"  {textwrap.shorten(note, room, placeholder=' ...')}" if note else ""
    rule = "─" * max(3, width() - len(title) - len(note) - 4)
    return f"{styled('──', 'dim')} {styled(title, 'bold', 'cyan')}{styled(note, 'dim')} {styled(rule, 'dim')}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, right: Collection[int] = ()) -> str:
    """Aligned columns under a header (none if it is empty); those in `right` are aligned at their right end.

    Ends without a newline.
    """
    lines = [*([list(header)] if header else []), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]

    def laid_out(line: Sequence[str]) -> str:
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        return "  ".join(cells).rstrip()

    laid = [laid_out(line) for line in lines]
    return "\n".join([styled(laid[0], "bold"), *laid[1:]] if header else laid)


def described_table(header: Sequence[str], rows: Sequence[Sequence[str]], columns: int | None = None) -> str:
    """A table whose last column is text, which goes on below itself where the page ends; no header if it is empty."""
    columns = columns or width()
    *leading, _ = [max(map(len, cells)) for cells in zip(*([header] if header else []), *rows, strict=True)]
    room = max(20, columns - sum(w + 2 for w in leading))
    lines: list[Sequence[str]] = []
    for row in rows:
        pieces = [
            piece
            for line in row[-1].splitlines() or [""]
            for piece in textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]
        ]
        lines += [(*(row[:-1] if i == 0 else [""] * len(leading)), piece) for i, piece in enumerate(pieces)]
    return table(header, lines)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))


def say(text: str, *, kind: str = "") -> None:
    """A line on stderr, for people; `kind` is ``warning``, ``remark`` or ``error`` and is put in front, coloured."""
    if kind:
        color = {"warning": "yellow", "remark": "cyan", "error": "red"}[kind]
        text = f"{styled(f'{kind}:', 'bold', color, stream=sys.stderr)} {text}"
    print(text, file=sys.stderr)


def size(count: int) -> str:
    """A number of bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


@contextlib.contextmanager
def progress(what: str, *, after: float = 1.0) -> Iterator[None]:
    """Says on stderr what is going on, if it goes on for more than `after` seconds."""
    stream = sys.stderr
    said = threading.Event()

    def begin() -> None:
        said.set()
        print(styled(f"... {what}", "dim", stream=stream), end="", file=stream, flush=True)

    timer = threading.Timer(after, begin)
    timer.daemon = True
    start = time.perf_counter()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if said.is_set():
            print(styled(f" {time.perf_counter() - start:.1f} s", "dim", stream=stream), file=stream)
