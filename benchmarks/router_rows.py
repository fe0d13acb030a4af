"""What is timed of a router, and its numbers in a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from router_bounds import Bounds, Work, bounds, bytes_per_token, total_work
from router_cases import (
    CASES,
    DTYPES,
    OUTPUTS,
    Case,
    Inputs,
    Route,
    forward,
    forward_backward,
)
from timing import (
    Machine,
    Timing,
)
from torch import Tensor

from moesaic.codegen.target import Target
from moesaic.ir.core import Op
from moesaic.ir.ops.launch import Kernel
from moesaic.runtime.program import Executable, Program, program_of

PASSES: dict[str, Callable[[Route, Inputs, Tensor | None], tuple[Tensor, ...]]] = {
    "fwd": forward,
    "fwd+bwd": forward_backward,
}
KINDS = {"fwd": ("forward",), "fwd+bwd": ("training", "backward")}

Tuned = Mapping[str, Mapping[str, Mapping[str, str]]]
"""By function and kernel, what a table chose in the rule's place."""


@dataclass(frozen=True)
class Variant:
    """A case in one dtype with one kind of outputs: what is compiled once and run at several numbers of tokens."""

    case: Case
    dtype: str
    outputs: str
    passes: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.case.name} {self.dtype} {self.outputs}" + (f" [{self.passes}]" if self.passes else "")

    @property
    def program(self) -> Program:
        """What moesaic makes of it; the one that the layer runs."""
        return program_of(self.case.module(self.outputs, self.dtype), self.passes)

    def executable(self, kind: str, target: Target) -> Executable:
        """``forward``, ``training`` or ``backward``, for aligned inputs, as the layer asks for it."""
        cotangents = (OUTPUTS[self.outputs][0],) if kind == "backward" else ()
        return self.program.executable(kind, target.name, (), cotangents)

    def bytes_per_token(self, which: str) -> int:
        """Of one pass: ``fwd`` or ``fwd+bwd``."""
        one, other = bytes_per_token(
            self.case.experts, self.case.top_k, DTYPES[self.dtype].itemsize, self.outputs == "dense"
        )
        return one if which == "fwd" else one + other

    def bounds(self, which: str, tokens: int, machine: Machine, target: Target) -> Bounds:
        """Of one pass."""
        kernels = [op for kind in KINDS[which] for op in kernel_ops(self.executable(kind, target))]
        work: Work = total_work(kernels)
        return bounds(machine, tokens, self.bytes_per_token(which), work, launches=len(kernels))


@dataclass
class Row:
    """One pass of a variant at one number of tokens, with the cell of each implementation: a timing, or a reason."""

    variant: Variant
    tokens: int
    which: str
    bounds: Bounds
    cold: bool = True
    sets: int = 0
    cells: dict[str, Timing | str] = field(default_factory=dict)
    tuned: Tuned = field(default_factory=dict)

    def us(self, implementation: str) -> float | None:
        """A time, if there is one."""
        cell = self.cells.get(implementation)
        return cell.us if isinstance(cell, Timing) else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        case = self.variant.case
        ours = self.us("ours")
        return {
            "case": case.name,
            "experts": case.experts,
            "top_k": case.top_k,
            "dtype": self.variant.dtype,
            "outputs": self.variant.outputs,
            "passes": self.variant.passes,
            "tokens": self.tokens,
            "pass": self.which,
            "bytes_per_token": self.bounds.bytes_per_token,
            "floor_us": self.bounds.memory_us,
            "issue_us": self.bounds.issue_us,
            "shuffle_us": self.bounds.shuffle_us,
            "launch_us": self.bounds.launch_us,
            "bound_by": self.bounds.limit,
            "warp_instructions_per_token": self.bounds.work.instructions,
            "shuffles_per_token": self.bounds.work.shuffles,
            "sets": self.sets,
            "data": "memory" if self.cold else "L2",
            "tuned": self.tuned,
            "of_floor": self.bounds.memory_us / ours if ours else None,
            "of_bound": self.bounds.us / ours if ours else None,
            **{name: asdict(c) if isinstance(c, Timing) else c for name, c in self.cells.items()},
        }


def variants(args: argparse.Namespace) -> Iterator[Variant]:
    """In the order in which they matter, so that what runs out of time is what matters least."""
    for dtype in args.dtype:
        for outputs in args.outputs:
            for case in CASES:
                if case.name in args.cases:
                    for number, passes in enumerate(args.variants):
                        yield Variant(case, dtype, outputs, passes, number)


def kernel_ops(executable: Executable) -> list[Kernel]:
    ops: list[Op] = list(executable.module.entry.body.ops)
    return [op for op in ops if isinstance(op, Kernel)]


_WIDTHS = (
    ("case", -12), ("dtype", -5), ("outputs", -7), ("T", 5), ("pass", -7), ("B/token", 7), ("floor", 7), ("issue", 7),
    ("shuffle", 7), ("ours", 8), ("+-", 5), ("of floor", 8), ("of bound", 8), ("eager", 8), ("x", 6), ("compile", 8),
    ("x", 6), ("data", -6), ("tuned", 5), ("variant", -7),
)  # fmt: skip


def print_header() -> None:
    """Names of the columns."""
    print(_line([name for name, _ in _WIDTHS]))


def print_row(row: Row) -> None:
    """One line of the table."""
    found, ours = row.bounds, row.us("ours")
    mine = row.cells.get("ours", "-")
    cells = [
        row.variant.case.name,
        row.variant.dtype,
        row.variant.outputs,
        str(row.tokens),
        row.which,
        f"{found.bytes_per_token:.0f}",
        _number(found.memory_us),
        _number(found.issue_us),
        _number(found.shuffle_us),
        _number(mine.us) if isinstance(mine, Timing) else mine.partition(":")[0],
        f"{50 * mine.spread:.1f}%" if isinstance(mine, Timing) else "-",
        f"{found.memory_us / ours:.0%}" if ours else "-",
        f"{found.us / ours:.0%}" if ours else "-",
    ]
    for name in ("eager", "compile"):
        cell, peer = row.cells.get(name, "-"), row.us(name)
        cells.append(_number(peer) if peer is not None else str(cell).partition(":")[0])
        cells.append(f"{peer / ours:.1f}x" if peer is not None and ours else "-")
    cells.append(("memory" if row.cold else "L2") if row.sets else "-")
    cells.append(str(sum(map(len, row.tuned.values()))) if isinstance(mine, Timing) else "-")
    cells.append(str(row.variant.number) if row.variant.number else "")
    print(_line(cells), flush=True)
    for name, cell in row.cells.items():
        if isinstance(cell, str) and ":" in cell:
            print(f"    {name}: {cell}", flush=True)


def _line(cells: Sequence[str]) -> str:
    return "  ".join(
        c.ljust(-width) if width < 0 else c.rjust(width) for c, (_, width) in zip(cells, _WIDTHS, strict=True)
    ).rstrip()


def _number(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def write_json(args: argparse.Namespace, machine: Machine, rows: Sequence[Row]) -> None:
    """All rows, where asked for."""
    if not args.json:
        return
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump({"machine": machine.as_dict(), "rows": [r.as_dict() for r in rows]}, file, indent=1)
