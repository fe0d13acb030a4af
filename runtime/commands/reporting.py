"""Errors, warnings and remarks on stderr, in the form that editors read."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from moesaic.ir.core import Module
from moesaic.ir.diagnostics import DiagnosticError
from moesaic.ir.errors import MoesaicError
from moesaic.passes.manager import PassContext
from moesaic.runtime.commands import console
from moesaic.runtime.commands.expectations import Message
from moesaic.runtime.reproducer import path_of

_COLORS = {"error": "red", "warning": "yellow", "remark": "cyan"}


def messages(error: MoesaicError, module: Module | None = None) -> list[Message]:
    """What an error says, placed at the function of `module` where it has no place of its own."""
    reproducer = path_of(error)
    notes = (f"reproducer written: {reproducer}",) if reproducer else ()
    if isinstance(error, DiagnosticError):
        listed = [Message("error", d.message, d.location, d.where, d.notes) for d in error.diagnostics]
        if listed and notes:
            last = listed[-1]
            listed[-1] = Message("error", last.text, last.location, last.where, (*last.notes, *notes))
        return listed
    location = module.entry.location if module is not None and module.functions else None
    return [Message("error", str(error), location, notes=notes)]


def remarks(context: PassContext, name: str) -> list[Message]:
    """What passes had to say about the file `name`."""
    return [
        *(Message("warning", text, where=name) for text in context.warnings),
        *(Message("remark", text, where=name) for text in context.remarks),
    ]


def show(found: Iterable[Message]) -> None:
    """Prints messages to stderr, coloured on a terminal."""
    for message in found:
        if message.kind != "error" and message.location is None:
            mark = console.styled(f"{message.kind}:", "bold", _COLORS[message.kind], stream=sys.stderr)
            place = console.styled(f"{message.where}:", "bold", stream=sys.stderr) + " " if message.where else ""
            print(f"{place}{mark} {message.text}", file=sys.stderr)
            continue
        lines = message.render().splitlines()
        mark = f"{message.kind}: "
        place, _, text = lines[0].partition(mark)
        place = console.styled(place.rstrip(), "bold", stream=sys.stderr) + (" " if place else "")
        mark = console.styled(mark.strip(), "bold", _COLORS[message.kind], stream=sys.stderr)
        print(f"{place}{mark} {text}", file=sys.stderr)
        for line in lines[1:]:
            caret = line.strip() == "^"
            print(console.styled(line, "bold", "green", stream=sys.stderr) if caret else line, file=sys.stderr)
