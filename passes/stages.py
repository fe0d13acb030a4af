"""The stages a module goes through, as data: which ops are legal at the top of a function in each.

A pass names the stage it requires and the one it establishes; the manager checks both ends against this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moesaic.ir.core import Module
from moesaic.ir.diagnostics import Diagnostic, DiagnosticError

STAGES: dict[str, tuple[str, ...]] = {
    # What a person writes, and its derivative.
    "declared": ("math.", "row.", "col.", "moe.", "slot."),
    # Losses are column reductions.
    "summed": ("math.", "row.", "col.", "slot."),
    # Composite row ops are spelled out; what belongs to experts may be fused before what belongs to a router.
    "expanded": ("math.", "row.", "col.", "slot.", "kernel."),
    # One op a launch; regions hold the rest.
    "fused": ("kernel.",),
    # Buffers and launches.
    "planned": ("launch.",),
}

# A region inside a kernel holds what the "expanded" stage allows.
_REGION: dict[str, tuple[str, ...]] = {
    "expanded": ("math.", "row.", "slot."),
    "fused": ("math.", "row.", "col.", "slot.", "kernel.ticket"),
    "planned": ("math.", "row.", "col.", "slot.", "kernel.ticket", "kernel.col_finish"),
}


_SHOWN = 3
"""Ops at fault that are named, at most: in the wrong stage all of them are."""


def check_stage(module: Module, stage: str, hint: Callable[[], str] | None = None) -> None:
    """Checks that a module holds only what is legal in a stage.

    Args:
        hint: says what to do about it, where that is known.

    Raises:
        DiagnosticError: it holds something else; names the first ops at fault.
    """
    found: list[Diagnostic] = []
    for function in module.functions:
        for op in function.body.ops[:-1]:
            if not op.name.startswith(STAGES[stage]):
                found.append(op.diagnostic(f"not legal in stage {stage!r}, which allows {', '.join(STAGES[stage])}"))
            elif op.region is not None:
                allowed = _REGION.get(stage, ())
                found.extend(
                    inner.diagnostic(f"not legal inside {op.name} in stage {stage!r}")
                    for inner in op.region.ops[:-1]
                    if not inner.name.startswith(allowed)
                )
    if found:
        shown, more = found[:_SHOWN], len(found) - _SHOWN
        notes = (*([f"so are {more} more"] if more > 0 else ()), *([hint()] if hint is not None else ()))
        raise DiagnosticError([*shown[:-1], replace(shown[-1], notes=(*shown[-1].notes, *notes))])
