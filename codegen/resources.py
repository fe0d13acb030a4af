"""What a compiled kernel needs of the hardware, read from the log that ptxas writes under ``-v``.

No tool and no GPU is needed: NVRTC hands the log over with the cubin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_STACK = re.compile(r"(\d+) bytes cumulative stack size")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
_CONSTANT = re.compile(r"(\d+)(?:\+\d+)? bytes cmem\[\d+\]")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel uses. `registers` and the spill and stack bytes are per thread; shared memory is per block.

    `static_shared_bytes` counts what the source declares; cuobjdump and profilers may add the 1 KiB that the system
    keeps. `constant_bytes` counts what ptxas reports for the kernel: constant tables, and its arguments where ptxas
    lists them.
    """

    registers: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    stack_bytes: int = 0
    static_shared_bytes: int = 0
    constant_bytes: int = 0
    barriers: int = 0

    @property
    def uses_local_memory(self) -> bool:
        """Whether registers are spilled, or an array lives in local memory because its index is not a constant."""
        return bool(self.spill_store_bytes or self.spill_load_bytes or self.stack_bytes)

    def __str__(self) -> str:
        local = "no spills"
        if self.uses_local_memory:
            spills = f"{self.spill_store_bytes} bytes spilled, {self.spill_load_bytes} reloaded"
            local = f"{spills}, {self.stack_bytes} bytes of stack"
        return f"{self.registers} registers, {self.static_shared_bytes} bytes static shared, {local}"


def parse_ptxas_log(log: str) -> dict[str, Resources]:
    """The resources of each entry function in a ptxas ``-v`` log, in the order of the log; empty if it holds none.

    Spills of functions that were not inlined count towards the entry they were compiled with.
    """
    found: dict[str, Resources] = {}
    entry = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = match[1]
            found[entry] = Resources()
        elif not entry:
            continue
        elif match := _FRAME.search(line):
            old = found[entry]
            found[entry] = replace(
                old,
                stack_bytes=max(old.stack_bytes, int(match[1])),
                spill_store_bytes=old.spill_store_bytes + int(match[2]),
                spill_load_bytes=old.spill_load_bytes + int(match[3]),
            )
        elif match := _USED.search(line):
            old = found[entry]
            found[entry] = replace(
                old,
                registers=int(match[1]),
                barriers=_number(_BARRIERS, line),
                stack_bytes=max(old.stack_bytes, _number(_STACK, line)),
                static_shared_bytes=_number(_SHARED, line),
                constant_bytes=sum(int(size) for size in _CONSTANT.findall(line)),
            )
    return found


def largest(resources: Iterable[Resources]) -> Resources:
    """The maximum of each field over several kernels; all zero for none."""
    listed = list(resources)
    return Resources(**{f.name: max((getattr(r, f.name) for r in listed), default=0) for f in fields(Resources)})


def table(resources: Mapping[str, Resources]) -> str:
    """A table, one line a kernel, ready to print. Ends without a newline."""
    header = ["kernel", "registers", "spill stores", "spill loads", "stack", "shared", "constant", "barriers"]
    lines = [header]
    for name, used in resources.items():
        lines.append([name, *(str(getattr(used, f.name)) for f in fields(Resources))])
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(row))
        for row in (list(zip(line, widths, strict=True)) for line in lines)
    )


def _number(pattern: re.Pattern[str], line: str) -> int:
    match = pattern.search(line)
    return int(match[1]) if match else 0
