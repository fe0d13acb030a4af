"""How generated CUDA is laid out: statements that are too wide go on in further lines, as a person would write them.

Only white space changes. A comment stays behind its statement, however wide it is; lines that are nothing else, and
those of the preprocessor, are left as they are.
"""

from __future__ import annotations

import itertools
import re

WIDTH = 120
"""Columns of a statement, without the comment behind it."""

_END = 3  # what is no more than the end of a statement
_FURTHER = 4  # what goes on below, from where the statement begins
_DEEP = 60  # a bracket that opens further to the right than this has its content in a line below
_OPERATORS = ((" ? ", " : "), (" || ",), (" && ",), (" + ", " - "), (" * ",))  # those that bind least first
_CLOSING = {"(": ")", "{": "}", "[": "]", "<": ">"}
_ASSIGNMENT = re.compile(r" [+]?= ")
_LAMBDA = re.compile(r"(.*\[&\]\([^()]*\)(?: -> [^{}]+)? \{) (.*;) (\}.*)")


def laid_out(source: str) -> str:
    """The text of a kernel, with no statement wider than `WIDTH` that has a place to be broken at."""
    return "\n".join(part for line in source.split("\n") for part in _lines(line))


def _lines(line: str) -> list[str]:
    code, mark, comment = line.partition("  // ")
    stripped = code.strip()
    if len(code) <= WIDTH or stripped.startswith(("//", "#")):
        return [line]
    margin = len(code) - len(code.lstrip())
    parts = _statement(stripped, margin)
    parts[-1] += mark + comment
    return parts


def _statement(text: str, margin: int) -> list[str]:
    """The lines of a statement that begins at a margin."""
    if margin + len(text) <= WIDTH:
        return [" " * margin + text]
    lambda_ = _LAMBDA.fullmatch(text)
    if lambda_ is not None:
        begin, body, end = lambda_.groups()
        return [" " * margin + begin, *_statement(body, margin + 2), " " * margin + end]
    if text.startswith('extern "C"'):  # the name of the kernel, with what opens its parameters
        before, _, name = text.rpartition(" ")
        attributes, _, bounds = before.partition(" __launch_bounds__")
        if margin + len(before) <= WIDTH or not bounds:
            return [" " * margin + before, " " * margin + name]
        return [" " * margin + part for part in (attributes, f"__launch_bounds__{bounds}", name)]
    if text.startswith("using ") and "<" in text:
        line = " " * margin + text
        opened, closed = line.index("<"), line.rindex(">")
        return _filled(line, opened, closed, _pieces(line[opened + 1 : closed]) or [line[opened + 1 : closed]], margin)
    return _broken(" " * margin + text, margin, margin)


def _broken(line: str, margin: int, start: int) -> list[str]:
    """A line that is too wide, from `start` on, in several: broken between the operands of what is assigned, else in
    its outermost brackets that do not fit, else behind an assignment, else as it is."""
    assigned = _ASSIGNMENT.search(line, start)
    if assigned is not None and _depths(line[start : assigned.end()])[-1] > 0:
        assigned = None  # in a loop's head
    operands = _pieces(line[assigned.end() :]) if assigned is not None else []
    if assigned is not None and len(operands) > 1:
        return _assigned(line, assigned.end(), operands, margin)
    for opened, closed in _brackets(line, start):
        if closed < WIDTH and len(line) - closed > _END:
            continue  # it is what comes after it that does not fit
        pieces = _pieces(line[opened + 1 : closed])
        if pieces:
            return _filled(line, opened, closed, pieces, margin)
    return [line] if assigned is None else _assigned(line, assigned.end(), [line[assigned.end() :]], margin)


def _filled(line: str, opened: int, closed: int, pieces: list[str], margin: int) -> list[str]:
    """A line with the content of brackets in as many lines as it takes, below each other."""
    below = opened > _DEEP + margin or opened + 1 + max(map(len, pieces)) > WIDTH
    indent = margin + _FURTHER if below else opened + 1
    lines = [line[: opened + 1]] if below else []
    current = " " * indent if below else line[: opened + 1]
    pieces = [*pieces[:-1], pieces[-1] + line[closed:]]
    for piece in pieces:
        if len(current) > indent and len(current) + len(piece.rstrip()) > WIDTH:
            lines.append(current.rstrip())
            current = " " * indent + piece.lstrip()
        else:
            current += piece
    return [part for found in (*lines, current) for part in _again(found, indent, line)]


def _assigned(line: str, end: int, operands: list[str], margin: int) -> list[str]:
    """A line with what is assigned below, or its operands below each other."""
    begin, value, indent = line[:end], line[end:], " " * (margin + _FURTHER)
    if len(operands) == 1 or len(indent + value) <= WIDTH:
        return [begin.rstrip(), *_again(indent + value, margin + _FURTHER, line)]
    first, *others = (operand.strip() for operand in operands)
    lines = [begin + first, *(indent + operand for operand in others)]
    return [part for found in lines for part in _again(found, margin + _FURTHER, line)]


def _again(line: str, margin: int, before: str) -> list[str]:
    """Lines of one that may still be too wide, and is not the one that was broken."""
    if len(line) <= WIDTH or line == before:
        return [line]
    return _broken(line, margin, len(line) - len(line.lstrip()))


def _depths(text: str) -> list[int]:
    """In how many brackets each place of a text is, counting one that opens or closes there; those of template
    arguments, too."""
    found: list[int] = []
    closing: list[str] = []
    for at, symbol in enumerate(text):
        if symbol in "({[" or (symbol == "<" and _is_template(text, at)):
            closing.append(_CLOSING[symbol])
        found.append(len(closing))
        if closing and symbol == closing[-1] and text[at - 1 : at + 1] != "->":
            closing.pop()
    return found


def _is_template(text: str, at: int) -> bool:
    """Whether a `<` opens template arguments: comparisons have spaces around them."""
    return at > 0 and (text[at - 1].isalnum() or text[at - 1] == "_") and text[at + 1 : at + 2] not in (" ", "<", "=")


def _brackets(line: str, start: int) -> list[tuple[int, int]]:
    """Where outermost brackets open and close; of calls, not of template arguments."""
    ends = [at for at, depth in enumerate(_depths(line[start:]), start) if depth == 1 and line[at] in "(){}"]
    return [(a, b) for a, b in itertools.pairwise(ends) if _CLOSING.get(line[a]) == line[b]]


def _pieces(content: str) -> list[str]:
    """The content of brackets in pieces that may each begin a line: arguments, or else operands of the one there is."""
    for separator in ("; ", ", "):
        places = _places(content, (separator,))
        if places:
            return _cut(content, [at + 2 for at in places])
    for operators in _OPERATORS:
        places = _places(content, operators)
        if places:
            return _cut(content, [at + 1 for at in places])
    return []


def _places(content: str, wanted: tuple[str, ...]) -> list[int]:
    """Where one of some texts is outside of all brackets."""
    return [at for at, depth in enumerate(_depths(content)) if depth == 0 and content.startswith(wanted, at)]


def _cut(content: str, places: list[int]) -> list[str]:
    ends = [*places, len(content)]
    return [content[begin:end] for begin, end in zip([0, *places], ends, strict=True)]
