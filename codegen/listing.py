"""A kernel as lines that know where they come from: ops, CUDA, PTX and SASS.

An op's lines of CUDA are told by the comments that the text carries, lines of PTX and SASS by the line tables that the
compiler writes under ``--generate-line-info``. What a helper's code was inlined to belongs to the line of the kernel
that called it.

A comment behind an assignment is about that statement, which may have begun in a line above (``layout.py``). A comment
on a line of its own, or behind anything else, is about what follows, too: up to an empty line, the end of the block, or
the next op. An op on gates and ups has two lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moesaic.codegen.disassemble import disassemble
from moesaic.codegen.kernel import FusedOp, GeneratedKernel

KERNEL = -1
"""In place of an op's number: the loops, addresses and stores around the ops."""

_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"')
_PLACE = re.compile(r'\s*//## File "([^"]*)", line (\d+)')
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s*(.*)")
_DECLARED = re.compile(r"const \w+ (\w+) = ")
_LABEL = re.compile(r"\.L_\w+:")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of PTX or SASS, and the line of the CUDA text that it comes from, counted from 1; 0 for none."""

    text: str
    source: int


@dataclass(frozen=True)
class Listing:
    """One kernel.

    Attributes:
        symbol: of the kernel.
        ops: the fused ops.
        cuda: lines of CUDA.
        owners: for each of these the number of an op, or `KERNEL`; before the kernel itself, too.
        ptx, sass: lines; none of SASS where nothing could disassemble.
    """

    symbol: str
    ops: tuple[FusedOp, ...]
    cuda: tuple[str, ...]
    owners: tuple[int, ...]
    ptx: tuple[Line, ...]
    sass: tuple[Line, ...]

    def cuda_lines(self, op: int) -> list[int]:
        """Numbers of the lines of an op, counted from 1."""
        return [number for number, owner in enumerate(self.owners, 1) if owner == op]

    def lines(self, kind: str, op: int) -> list[Line]:
        """The lines of ``ptx`` or ``sass`` that come from an op."""
        every: Sequence[Line] = {"ptx": self.ptx, "sass": self.sass}[kind]
        wanted = set(self.cuda_lines(op))
        return [line for line in every if line.source in wanted]


def listing(kernel: GeneratedKernel, source: str, ptx: str, cubin: bytes | None) -> Listing:
    """The listing of a kernel compiled with line information.

    Args:
        kernel: as it was generated.
        source: its text, which may have been edited by hand.
        ptx: what NVRTC made of it.
        cubin: the same; ``None`` for a listing without SASS.

    Raises:
        ToolchainError: nothing is found that disassembles.
    """
    lines = tuple(source.splitlines())
    sass = () if cubin is None else tuple(_sass(disassemble(cubin, lines=True), f"{kernel.symbol}.cu"))
    return Listing(kernel.symbol, kernel.ops, lines, _owners(lines, kernel.ops), tuple(_ptx(ptx, kernel.symbol)), sass)


def _owners(lines: Sequence[str], ops: Sequence[FusedOp]) -> tuple[int, ...]:
    numbers = {op.comment: number for number, op in enumerate(ops)}
    owners: list[int] = []
    current, margin = KERNEL, 0
    gate = ""  # what the line before declares, if that is one half of an op on gates and ups
    begun: list[str] = []  # lines of a statement that goes on
    for line in lines:
        code, mark, note = line.partition("// ")
        named = numbers.get(note.strip()) if mark else None
        indent = len(line) - len(line.lstrip())
        stripped = code.strip()
        declared = _DECLARED.match(stripped)
        if named is None and declared is not None and gate and declared[1] == gate + "_up":
            named = owners[-1]
        gate = declared[1].removesuffix("_gate") if declared is not None and declared[1].endswith("_gate") else ""
        if named is not None:
            owners[len(owners) - len(begun) :] = [named] * (len(begun) + 1)
            goes_on = not stripped or not re.search(r"[^=!<>+*/-]=[^=]|\+=", " ".join((*begun, stripped)))
            current, margin = (named, indent) if goes_on else (KERNEL, 0)
            begun = []
            continue
        if not line.strip() or (indent < margin and not line.startswith("#")):
            current = KERNEL
        owners.append(current)
        unfinished = stripped and not stripped.startswith("#") and stripped[-1] not in ";{}:"
        begun = [*begun, stripped] if unfinished else []
    return tuple(owners)


def _ptx(text: str, symbol: str) -> Iterable[Line]:
    """The lines of the entry, without the table of lines itself."""
    lines = text.splitlines()
    files = {match[1]: match[2].rpartition("/")[2] for line in lines if (match := _FILE.match(line))}
    start = next((n for n, line in enumerate(lines) if ".entry" in line), 0)
    found: dict[tuple[str, ...], int] = {}
    current = 0
    for line in lines[start:]:
        if line.startswith("}"):
            yield Line(line, 0)
            return
        match = _LOC.match(line)
        if match is None:
            if line.strip() and not line.lstrip().startswith("//"):  # comments say where inline PTX begins and ends
                yield Line(line.rstrip().removeprefix("\t"), current)
            continue
        file, number, column, *outer = match.groups()
        if outer[0] is not None:  # which itself may have been inlined, as the line that says so before this one tells
            current = found.get(tuple(outer), int(outer[1]) if files.get(outer[0]) == f"{symbol}.cu" else 0)
        else:
            current = int(number) if files.get(file) == f"{symbol}.cu" else 0
        found[file, number, column] = current


def _sass(text: str, file: str) -> Iterable[Line]:
    current = 0
    places: list[tuple[str, int]] = []
    in_text = False
    for line in text.splitlines():
        if line.lstrip().startswith(".section"):
            in_text = ".text." in line
        place = _PLACE.match(line)
        if place is not None:
            places.append((place[1].rpartition("/")[2], int(place[2])))  # the innermost first
            continue
        if places:
            ours = [number for name, number in places if name == file]
            current, places = (ours[-1] if ours else 0), []
        match = _INSTRUCTION.match(line)
        if match is not None and in_text:
            yield Line(f"/*{match[1]}*/  {match[2].rstrip()}", current)
        elif in_text and _LABEL.match(line):
            yield Line(line.rstrip(), 0)
