"""Tokens of IR text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moesaic.ir.diagnostics import Diagnostic, DiagnosticError, Location, Source


@dataclass(frozen=True)
class Token:
    """A piece of text and where it stands. Kinds: value, symbol, name, number, string, type, punct, end."""

    kind: str
    text: str
    location: Location


_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\n]+|//[^\n]*)
  | (?P<type>tensor\s*<[^<>\n]*>)
  | (?P<value>%[A-Za-z0-9_]+)
  | (?P<symbol>@[A-Za-z_][A-Za-z0-9_]*)
  | (?P<number>-?(?:\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+|(?:inf|nan)(?![A-Za-z0-9_.\-])))
  | (?P<name>[A-Za-z_][A-Za-z0-9_.\-]*)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<punct>->|[()\[\]{}<>,:=])
    """,
    re.VERBOSE,
)


def tokenize(source: Source) -> list[Token]:
    """All tokens, the last of kind ``end``.

    Raises:
        DiagnosticError: a character that starts no token.
    """
    tokens: list[Token] = []
    position, line, line_start = 0, 1, 0
    text = source.text
    while position < len(text):
        location = Location(source, line, position - line_start + 1)
        match = _TOKEN.match(text, position)
        if match is None:
            found = text[position]
            message = "a string is not closed" if found == '"' else f"unexpected character {found!r}"
            raise DiagnosticError([Diagnostic(message, location)])
        kind = match.lastgroup or ""
        if kind != "space":
            tokens.append(Token(kind, match.group(), location))
        newlines = match.group().count("\n")
        if newlines:
            line += newlines
            line_start = position + match.group().rindex("\n") + 1
        position = match.end()
    tokens.append(Token("end", "end of text", Location(source, line, position - line_start + 1)))
    return tokens
