"""Source positions in reports.

The runtime writes a position as ``«file:line|offset,offset,...»``: the line of the call that noticed the problem, and
the return addresses that lead there, as hexadecimal offsets into the kernel's library, innermost first. A helper
header often holds that line; ``addr2line`` finds the line of the kernel that called it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path, PurePosixPath

_PLACE = re.compile(r"«(?P<file>[^|»]*):(?P<line>\d+)\|(?P<offsets>[0-9a-f,]*)»")


def resolve_places(report: str, library: Path, source_name: str) -> str:
    """`report` with positions as ``name.cu:12`` or ``name.cu:12 (in helpers.cuh:40)``.

    Args:
        report: text from the runtime.
        library: the kernel's library, with line tables.
        source_name: file name of the kernel's text.
    """
    offsets = sorted({item for match in _PLACE.finditer(report) for item in match["offsets"].split(",") if item})
    lines = _lines_of(library, offsets)

    def readable(match: re.Match[str]) -> str:
        path = [line for item in match["offsets"].split(",") if item for line in lines.get(item, [])]
        noticed = (_short(match["file"]), int(match["line"])) if match["file"] else None
        if noticed is None:
            noticed = next(((name, line) for name, line in path if not _is_shim(name)), None)
        if noticed is None:
            return "(line unknown)"
        text = f"{noticed[0]}:{noticed[1]}"
        if noticed[0] == source_name:
            return text
        calling = next(((name, line) for name, line in path if name == source_name), None)
        return f"{source_name}:{calling[1]} (in {text})" if calling is not None else text

    return _PLACE.sub(readable, report)


def _short(path: str) -> str:
    return PurePosixPath(path).name


def _is_shim(name: str) -> bool:
    return name in {"context.h", "shim.h", "memory.h", "block.h", "warp.h", "atomics.h", "intrinsics.h", "entry.h"}


def _lines_of(library: Path, offsets: list[str]) -> dict[str, list[tuple[str, int]]]:
    """For each offset the lines it belongs to, inlined calls first to last. Empty where nothing can be found."""
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None or not offsets:
        return {}
    command = [tool, "-a", "-i", "-e", str(library), *(f"0x{offset}" for offset in offsets)]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, list[tuple[str, int]]] = {}
    current: list[tuple[str, int]] = []
    for line in output.splitlines():
        if line.startswith("0x"):
            current = found.setdefault(line[2:].lstrip("0") or "0", [])
            continue
        name, _, number = line.partition(" (discriminator")[0].rpartition(":")
        if number.isdigit():
            current.append((_short(name), int(number)))
    return found
