"""Sums over tokens need no ticket where blocks can wait for each other: those that add them up are one cluster."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.ir.core import Function, OpResult, Value, columns_of
from moesaic.ir.ops.kernel import Ticket
from moesaic.ir.ops.launch import Alloc, Kernel
from moesaic.passes.clusters import MOST_BLOCKS, has_clusters

_TILES = (32, 64, 128)
"""Columns of a sum that a block of a ``col_finish`` may add up, a tile."""

# Threads of a block: few find room beside the last blocks of the kernel before, and wait there; what follows long sums
# takes more.
_THREADS = {"few": 512, "many": 1024}
_FEW_COLUMNS = 512


def tiles_of(columns: int, tile: int) -> int:
    """Tiles of a sum."""
    return -(-columns // tile)


def _tile_of_cluster(columns: Sequence[int]) -> int:
    """Columns of a tile where the sums' blocks are one cluster, with a tile each; 0 where that is not possible."""
    return next((t for t in _TILES if sum(tiles_of(c, t) for c in columns) <= MOST_BLOCKS), 0)


def cluster_of_finish(op: Kernel, target: str) -> int:
    """Blocks of the cluster that a ``col_finish`` is on a target; 0 where they are none, or wait for nothing."""
    assert op.region is not None
    shapes = [value.type.shape for value in op.region.arguments[: op.partials]]
    columns = [shape[0] for shape in shapes if len(shape) == 1 and isinstance(shape[0], int)]
    if len(columns) < len(shapes) or len(op.region.ops) == 1:  # by sequence; nothing is computed from the sums
        return 0
    tile = _tile_of_cluster(columns)
    return sum(tiles_of(c, tile) for c in columns) if tile and has_clusters(target) else 0


def finish_config(op: Kernel, target: str) -> dict[str, str]:
    """The configuration of a ``col_finish`` on a target."""
    columns = [columns_of(partial) for partial in op.operands[: op.partials]]
    cluster = cluster_of_finish(op, target)
    return {
        "threads": str(_THREADS["few" if sum(columns) <= _FEW_COLUMNS else "many"]),
        "columns": str(_tile_of_cluster(columns) if cluster else _TILES[0]),
        **({"cluster": str(cluster)} if cluster else {}),
    }


def drop_tickets(function: Function, target: str) -> None:
    """Takes tickets from kernels that `cluster_of_finish` has a cluster for, and from those that set them to 0.

    Functions are planned without a target; so this is left to ``specialize``. What has none stays as it is.
    """
    kernels = [op for op in function.body.ops if isinstance(op, Kernel)]
    tickets = {value: (op, zero) for op in kernels for value, zero in _tickets(op)}
    for finish in kernels:
        ticket = finish.operands[finish.partials] if finish.partials < finish.reads else None
        if ticket not in tickets or finish.template != "col_finish" or not cluster_of_finish(finish, target):
            continue
        assert ticket is not None and finish.region is not None
        writer, zero = tickets[ticket]
        assert writer.region is not None
        del finish.operands[finish.partials], finish.region.arguments[finish.partials]
        finish.attributes["reads"] = finish.reads - 1
        number = writer.written.index(ticket)
        del writer.operands[writer.reads + number], writer.region.terminator.operands[number]
        writer.region.ops.remove(zero)
        if isinstance(ticket, OpResult) and isinstance(ticket.op, Alloc):
            function.body.ops.remove(ticket.op)


def _tickets(op: Kernel) -> list[tuple[Value, Ticket]]:
    """What a kernel writes for blocks of a later one to count up, and the op that it is."""
    if op.region is None or not op.region.ops:
        return []
    pairs = zip(op.written, op.region.terminator.operands, strict=False)
    return [(v, zero.op) for v, zero in pairs if isinstance(zero, OpResult) and isinstance(zero.op, Ticket)]
