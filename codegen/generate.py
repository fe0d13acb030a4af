"""From a planned function to the kernels it launches."""

from __future__ import annotations

from moesaic.codegen import col_finish, row_program
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.ir.core import Function
from moesaic.ir.ops.launch import Kernel

_FAMILIES = {"row_program": row_program.generate, "col_finish": col_finish.generate}


def generate_kernels(function: Function) -> list[GeneratedKernel]:
    """One kernel for each ``launch.kernel`` of the function, in order."""
    return [_FAMILIES[op.template](op) for op in function.body.ops if isinstance(op, Kernel)]
