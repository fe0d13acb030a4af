"""``--verify-diagnostics``: comments that say which messages a file is expected to give.

``// expected-error@+1 {{text}}`` expects an error whose message contains the text, on the next line. The place is
``@+N`` or ``@-N`` lines away, ``@above``, ``@below``, ``@unknown`` (a message without a place), or, left out, the
comment's own line. Kinds are error, warning and remark; a remark that nobody expects is no failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from moesaic.ir.diagnostics import Diagnostic, Location, Source

KINDS = ("error", "warning", "remark")

_COMMENT = re.compile(r"//.*?expected-(?P<kind>[a-z]+)(?P<place>@[+\-\w]+)?\s*(?:\{\{(?P<text>.*?)\}\})?")


@dataclass(frozen=True)
class Message:
    """Something that was said: an error, a warning or a remark, with a place if it has one."""

    kind: str
    text: str
    location: Location | None = None
    where: str = ""
    notes: tuple[str, ...] = ()

    def render(self) -> str:
        rendered = Diagnostic(self.text, self.location, self.where, self.notes).render()
        return rendered.replace("error:", f"{self.kind}:", 1) if self.kind != "error" else rendered


@dataclass
class _Expected:
    kind: str
    text: str
    line: int | None
    location: Location
    met: bool = False

    def fits(self, message: Message) -> bool:
        line = None if message.location is None else message.location.line
        return message.kind == self.kind and self.text in message.text and line == self.line


def mismatches(source: Source, messages: Iterable[Message]) -> list[Message]:
    """What differs between the comments of a text and the messages it gave; nothing if they agree."""
    wrong: list[Message] = []
    expected = list(_expected(source, wrong))
    for message in messages:
        match = next((e for e in expected if not e.met and e.fits(message)), None)
        if match is not None:
            match.met = True
        elif message.kind != "remark":
            wrong.append(
                Message("error", f"unexpected {message.kind}: {message.text}", message.location, message.where)
            )
    for e in expected:
        if not e.met:
            wrong.append(Message("error", f'expected {e.kind} "{e.text}" was not produced', e.location))
    return wrong


def _expected(source: Source, wrong: list[Message]) -> Iterable[_Expected]:
    for number, line in enumerate(source.text.splitlines(), 1):
        for match in _COMMENT.finditer(line):
            location = Location(source, number, match.start() + line[match.start() :].index("expected-") + 1)
            if match["kind"] not in KINDS:
                wrong.append(Message("error", f"expected-{match['kind']}: kinds are {', '.join(KINDS)}", location))
            elif match["text"] is None:
                wrong.append(Message("error", f"expected-{match['kind']} needs its text as {{{{text}}}}", location))
            elif (place := _place(match["place"] or "", number)) == 0:
                where = "@+N, @-N, @above, @below or @unknown"
                wrong.append(Message("error", f"{match['place']!r} is no place; write {where}", location))
            else:
                yield _Expected(match["kind"], match["text"], place, location)


def _place(text: str, line: int) -> int | None:
    """The line a place stands for; ``None`` for none, 0 for what is not a place."""
    if text == "@unknown":
        return None
    if re.fullmatch(r"@[+-]\d+", text):
        return line + int(text[1:])
    return {"": line, "@above": line - 1, "@below": line + 1}.get(text, 0)
