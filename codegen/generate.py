"""From a planned function to the kernels it launches."""

from __future__ import annotations

from moesaic.codegen import (
    col_finish,
    combine,
    dispatch,
    product,
    row_program,
    slot_rows,
    sum_parts,
    to_picks,
    wgrad,
)
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.ir.core import Function
from moesaic.ir.ops.launch import Kernel

FAMILIES = {
    "row_program": row_program.generate,
    "col_finish": col_finish.generate,
    "dispatch": dispatch.generate_at_once,
    "dispatch_count": dispatch.generate_count,
    "dispatch_scan": dispatch.generate_scan,
    "dispatch_scatter": dispatch.generate_scatter,
    "product": product.generate,
    "wgrad": wgrad.generate,
    "sum_parts": sum_parts.generate,
    "combine": combine.generate,
    "to_picks": to_picks.generate,
    "slot_rows": slot_rows.generate,
}
"""What makes the text of a launch, by its template."""


def generate_kernel(op: Kernel) -> GeneratedKernel:
    """The kernel of one ``launch.kernel``, as it is configured."""
    return FAMILIES[op.template](op)


def generate_kernels(function: Function) -> list[GeneratedKernel]:
    """One kernel for each ``launch.kernel`` of the function, in order."""
    return [generate_kernel(op) for op in function.body.ops if isinstance(op, Kernel)]
