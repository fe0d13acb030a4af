"""IR and CUDA as people read them: differences, long lines, colours, and two columns."""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from moesaic.runtime.commands import console

if TYPE_CHECKING:
    from moesaic.codegen.listing import Listing

_NUMBERED = re.compile(r"%(\d+)\b")
_ASSIGNMENT = re.compile(r"\s*((?:%\w+,\s*)*%\w+) = (.*)")
_OP_COMMENT = re.compile(r"^(?P<code>.*?)\s*// (?P<op>(?:%\w+(?:, %\w+)* = )?[a-z]+\.[a-z_0-9]+ .*)$")


def readable_difference(before: str, after: str, *, context: int = 1) -> list[str]:
    """What changed between two printed modules, lines marked ``+``, ``-`` or a space.

    Neither indentation nor the numbers of unnamed values count: ops that only moved into a region, or were numbered
    anew, have not changed. Runs of unchanged lines are cut to `context` lines at either end.
    """
    lines: list[str] = []
    runs = [
        (same, list(run)) for same, run in itertools.groupby(difference(before, after), lambda pair: pair[0] == " ")
    ]
    for number, (same, run) in enumerate(runs):
        if same:
            shown = [line for _, line in run]
            lines += _shortened(shown, context, first=number == 0, last=number == len(runs) - 1)
        else:
            lines += [f"{mark} {line}" for mark, line in run]
    return lines if any(line[0] in "+-" for line in lines) else []


def difference(before: str, after: str) -> Iterator[tuple[str, str]]:
    """Every line of `after`, and those of `before` that are gone, with ``+``, ``-`` or a space; empty ones left out."""
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, _line_keys(old), _line_keys(new), autojunk=False)
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        if tag != "equal":
            yield from (("-", line) for line in old[a0:a1] if line.strip())
        mark = " " if tag == "equal" else "+"
        yield from ((mark, line) for line in new[b0:b1] if line.strip())


def _line_keys(lines: Iterable[str]) -> list[str]:
    """A key for each line in which unnamed values stand for the op that makes them, not for their number."""
    maker: dict[str, str] = {}
    keys = []
    for line in lines:
        line = line.strip()
        match = _ASSIGNMENT.fullmatch(line)
        targets, body = match.groups() if match else ("", line)
        body = _NUMBERED.sub(lambda m: maker.get(m[1], m[0]), body)
        for position, name in enumerate(_NUMBERED.findall(targets)):
            maker[name] = f"%{body.split(' ', 1)[0]}#{position}"
        keys.append(f"{_NUMBERED.sub('%', targets)} = {body}")
    return keys


def _shortened(lines: list[str], context: int, *, first: bool, last: bool) -> list[str]:
    lines = [line for line in lines if line.strip()]
    head = [] if first else lines[:context]
    tail = [] if last else lines[max(len(head), len(lines) - context) :]
    hidden = len(lines) - len(head) - len(tail)
    if hidden <= 1:
        return [f"  {line}" for line in lines]
    shown = [f"  {line}" for line in head]
    if not first and not last:
        shown.append(f"    ⋮ {hidden} lines")
    return shown + [f"  {line}" for line in tail]


def colored_difference(lines: Iterable[str]) -> str:
    """A difference wrapped to the width of the page, coloured on a terminal."""
    made = []
    for line in lines:
        style = {"+": ("green",), "-": ("red",)}.get(line[:1], ("dim",))
        made += [console.styled(piece, *style) for piece in wrapped(line, console.width())]
    return "\n".join(made)


def wrapped(line: str, columns: int) -> list[str]:
    """A line of IR in pieces of at most `columns`, broken behind commas; still the same IR."""
    if len(line) <= columns:
        return [line]
    margin = " " * (len(line) - len(line.lstrip(" +-")) + 4)
    pieces: list[str] = []
    rest = line
    while len(rest) > columns:
        cut = rest.rfind(", ", len(margin) + 1, columns) + 1
        if cut <= len(margin):
            cut = rest.rfind(" ", len(margin) + 1, columns)
        if cut <= len(margin):
            break
        pieces.append(rest[:cut])
        rest = margin + rest[cut:].lstrip()
    return [*pieces, rest]


def ir(text: str) -> str:
    """IR for reading: long lines wrapped."""
    return "\n".join(piece for line in text.rstrip().splitlines() for piece in wrapped(line, console.width()))


def cuda(text: str) -> str:
    """CUDA for reading: coloured on a terminal where rich is installed, else as it is."""
    text = text.rstrip()
    if not console.has_color(sys.stdout):
        return text
    try:
        from rich.console import Console
        from rich.syntax import Syntax
    except ModuleNotFoundError:
        return text
    wide = max(len(line) for line in text.splitlines()) + 1
    screen = Console(width=wide, force_terminal=True, color_system="standard")
    with screen.capture() as captured:
        screen.print(Syntax(text, "cuda", theme="ansi_dark", background_color="default"), soft_wrap=True)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def beside(left: str, right: str, columns: int) -> Iterator[str]:
    """Lines of two texts in two columns, matched like a difference: ``|`` changed, ``<`` gone, ``>`` new."""
    half = (columns - 3) // 2
    old, new = left.splitlines(), right.splitlines()
    matcher = difflib.SequenceMatcher(None, _line_keys(old), _line_keys(new), autojunk=False)
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        for i in range(max(a1 - a0, b1 - b0)):
            a = old[a0 + i] if a0 + i < a1 else None
            b = new[b0 + i] if b0 + i < b1 else None
            mark = " " if tag == "equal" else "<" if b is None else ">" if a is None else "|"
            style = {" ": (), "<": ("red",), ">": ("green",), "|": ("yellow",)}[mark]
            yield from _row(a or "", b or "", half, mark, style)


def op_beside_code(source: str, columns: int | None) -> Iterator[str]:
    """A kernel's CUDA on the right, from its signature on, and on the left the IR op that each line comes from."""
    lines = source.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('extern "C"')), 0)
    rows: list[tuple[str, str]] = []
    pending = ""
    for line in lines[start:]:
        match = _OP_COMMENT.match(line)
        op, code = (match["op"], match["code"]) if match else ("", line)
        if op and not code.strip():  # an op on a line of its own belongs to the code below it
            pending = op
            continue
        if not op and pending and code.strip():
            op, pending = pending, ""
        rows.append((op, code))
    longest = max((len(op) for op, _ in rows), default=0)
    left = min(longest, columns * 2 // 5) if columns else longest
    for op, code in rows:
        yield from _row(op, code, left, "│", ("cyan",), columns - left - 3 if columns else len(code))


def four_columns(lines: Listing) -> Iterator[tuple[str, str, str, str]]:
    """Op, CUDA, PTX and SASS: each line of CUDA from the kernel's signature on, beside what comes from it.

    An op stands beside its first line. What comes from no line of CUDA is left out.
    """
    made: dict[str, dict[int, list[str]]] = {"ptx": {}, "sass": {}}
    for kind, found in (("ptx", lines.ptx), ("sass", lines.sass)):
        for line in found:
            made[kind].setdefault(line.source, []).append(line.text.strip().replace("\t", " "))
    start = next((n for n, line in enumerate(lines.cuda) if line.startswith('extern "C"')), 0)
    before = -1
    for number, (code, owner) in enumerate(zip(lines.cuda[start:], lines.owners[start:], strict=True), start + 1):
        ptx, sass = made["ptx"].get(number, []), made["sass"].get(number, [])
        op = str(lines.ops[owner]) if owner >= 0 and owner != before else ""
        before = owner
        for row in range(max(1, len(ptx), len(sass))):
            yield (
                op if row == 0 else "",
                code.partition("  // %")[0] if row == 0 else "",
                ptx[row] if row < len(ptx) else "",
                sass[row] if row < len(sass) else "",
            )


def _row(a: str, b: str, left: int, mark: str, style: tuple[str, ...], right: int | None = None) -> Iterator[str]:
    ours = _folded(a, left)
    theirs = _folded(b, left if right is None else right)
    for i in range(max(len(ours), len(theirs))):
        x = ours[i] if i < len(ours) else ""
        y = theirs[i] if i < len(theirs) else ""
        x, y = x.ljust(left), y.rstrip()
        if mark == "│":
            yield f"{console.styled(x, *style)} {console.styled(mark, 'dim')} {y}".rstrip()
        else:
            yield (console.styled(f"{x} {mark} {y}", *style) if style else f"{x} {mark} {y}").rstrip()


def _folded(line: str, columns: int) -> list[str]:
    """A line cut to pieces of at most `columns`, behind commas or at spaces where there are any."""
    pieces = []
    for piece in wrapped(line, columns):
        while len(piece) > columns:
            pieces.append(piece[:columns])
            piece = "    " + piece[columns:]
        pieces.append(piece)
    return pieces
