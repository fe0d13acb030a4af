"""Locations in IR text and the messages that point at them.

A rendered diagnostic has the form editors understand, the source line, and a caret::

    router.moe:4:33: error: row.topk: attribute 'k' expects an integer >= 1, found string 'eight'
      %v, %i = row.topk %s {k = "eight"}
                            ^
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moesaic.ir.errors import InputError


@dataclass(frozen=True)
class Source:
    """IR text with the name it is reported under."""

    text: str
    name: str = "<text>"

    def line(self, number: int) -> str:
        lines = self.text.split("\n")  # as the lexer counts: other characters that end a line elsewhere do not here
        return lines[number - 1].rstrip("\r") if 0 < number <= len(lines) else ""


@dataclass(frozen=True)
class Location:
    """A place in a :class:`Source`; line and column count from 1."""

    source: Source
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Diagnostic:
    """One message about one place. `where` names the op if the IR was built rather than read."""

    message: str
    location: Location | None = None
    where: str = ""
    notes: tuple[str, ...] = field(default=())

    def render(self) -> str:
        lines = []
        if self.location is not None:
            lines.append(f"{self.location}: error: {self.message}")
            text = self.location.source.line(self.location.line)
            if text.strip():
                lines.append(text)
                # Tabs are kept so that the caret stays under its column in any viewer.
                lead = "".join("\t" if c == "\t" else " " for c in text[: self.location.column - 1])
                lines.append(lead + "^")
        else:
            lines.append(f"error: {self.message}")
            if self.where:
                lines.append(f"  in: {self.where}")
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)


class DiagnosticError(InputError):
    """IR that cannot be read or is not legal; carries every diagnostic found."""

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(d.render() for d in self.diagnostics))
