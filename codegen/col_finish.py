"""The kernel that adds up the partial rows a row program left, in order."""

from __future__ import annotations

from moesaic.codegen.kernel import Argument, GeneratedKernel
from moesaic.codegen.render import banner, render
from moesaic.codegen.row_program import STORAGE
from moesaic.ir.errors import InternalError
from moesaic.ir.ops.launch import Kernel

COLUMNS_PER_BLOCK = 32


def generate(op: Kernel) -> GeneratedKernel:
    """CUDA of one finish kernel."""
    type = op.operands[0].type
    columns = type.shape[-1]
    if not isinstance(columns, int):
        raise InternalError(f"{op.symbol}: partial rows without a constant length: {type}")
    threads = int(op.configuration["threads"])
    source = render(
        "col_finish.cu.j2",
        {
            "banner": banner(op, "sums over tokens from the partial rows of a row program"),
            "symbol": op.symbol,
            "columns": columns,
            "threads": threads,
            "type": STORAGE[type.dtype],
        },
    )
    return GeneratedKernel(
        symbol=op.symbol,
        source=source,
        arguments=(Argument("pointer", 0), Argument("pointer", 1), Argument("blocks", 0)),
        threads=threads,
        rows_per_block=COLUMNS_PER_BLOCK,
        grid="columns",
        columns=columns,
    )
