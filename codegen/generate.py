"""From a planned function to the kernels it launches."""

from __future__ import annotations

from moesaic.codegen import col_finish, combine, dispatch, row_program, to_picks
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.ir.core import Function
from moesaic.ir.ops.launch import Kernel

_FAMILIES = {
    "row_program": row_program.generate,
    "col_finish": col_finish.generate,
    "dispatch_count": dispatch.generate_count,
    "dispatch_scan": dispatch.generate_scan,
    "dispatch_scatter": dispatch.generate_scatter,
    "combine": combine.generate,
    "to_picks": to_picks.generate,
}


def generate_kernels(function: Function) -> list[GeneratedKernel]:
    """One kernel for each ``launch.kernel`` of the function, in order."""
    return [_FAMILIES[op.template](op) for op in function.body.ops if isinstance(op, Kernel)]
