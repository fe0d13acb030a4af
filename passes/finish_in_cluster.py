"""Sums over tokens need no ticket where blocks can wait for each other: those that add them up are one cluster."""

from __future__ import annotations

from moesaic.ir.core import Function, OpResult, Value
from moesaic.ir.errors import InternalError
from moesaic.ir.ops.kernel import Ticket
from moesaic.ir.ops.launch import Alloc, Kernel
from moesaic.passes.clusters import MOST_BLOCKS, has_clusters

TILE_COLUMNS = 32
"""Columns of a sum that a block of a ``col_finish`` adds up: `kTileColumns` of ``columns.cuh``."""


def tiles_of(columns: int) -> int:
    """Blocks that add up the partial rows of one sum."""
    return -(-columns // TILE_COLUMNS)


def cluster_of_finish(op: Kernel, target: str) -> int:
    """Blocks of the cluster that a ``col_finish`` is on a target; 0 where they are none, or wait for nothing."""
    assert op.region is not None
    shapes = [value.type.shape for value in op.region.arguments[: op.partials]]
    columns = [shape[0] for shape in shapes if len(shape) == 1 and isinstance(shape[0], int)]
    if len(columns) < len(shapes) or len(op.region.ops) == 1:  # by sequence; nothing is computed from the sums
        return 0
    blocks = sum(map(tiles_of, columns))
    return blocks if has_clusters(target) and blocks <= MOST_BLOCKS else 0


def drop_tickets(function: Function, target: str) -> None:
    """Takes tickets from kernels that `cluster_of_finish` has a cluster for, and from those that set them to 0.

    Functions are planned without a target; so this is left to ``specialize``.
    """
    kernels = [op for op in function.body.ops if isinstance(op, Kernel)]
    writers: dict[Value, Kernel] = {value: op for op in kernels for value in op.written}
    for finish in kernels:
        if finish.template != "col_finish" or not cluster_of_finish(finish, target):
            continue
        ticket = finish.operands[finish.partials]
        writer = writers[ticket]
        if finish.region is None or writer.region is None:
            raise InternalError(f"{finish.symbol}: a ticket between kernels without regions")
        del finish.operands[finish.partials], finish.region.arguments[finish.partials]
        finish.attributes["reads"] = finish.reads - 1
        number = writer.written.index(ticket)
        zero = writer.region.terminator.operands[number]
        if not isinstance(zero, OpResult) or not isinstance(zero.op, Ticket):
            raise InternalError(f"{finish.symbol}: {writer.symbol} writes no ticket for it")
        del writer.operands[writer.reads + number], writer.region.terminator.operands[number]
        writer.region.ops.remove(zero.op)
        if isinstance(ticket, OpResult) and isinstance(ticket.op, Alloc):
            function.body.ops.remove(ticket.op)
