"""Sums over tokens need no ticket where blocks can wait for each other: those that add them up are one cluster."""

from __future__ import annotations

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


def _in_cluster(op: Kernel, target: str) -> tuple[int, int] | None:
    """Columns of a tile of a ``col_finish``, and blocks, where these are one cluster on a target with a tile each; None
    where that is not possible, or they wait for nothing."""
    assert op.region is not None
    sums = op.region.arguments[: op.partials]
    by_sequence = any(len(value.type.shape) > 1 for value in sums)
    if not has_clusters(target) or by_sequence or len(op.region.ops) == 1:  # nothing is computed from the sums
        return None
    counts = ((tile, sum(tiles_of(columns_of(value), tile) for value in sums)) for tile in _TILES)
    return next(((tile, blocks) for tile, blocks in counts if 0 < blocks <= MOST_BLOCKS), None)


def finish_config(op: Kernel, target: str) -> dict[str, str]:
    """The configuration of a ``col_finish`` on a target."""
    columns = sum(columns_of(partial) for partial in op.operands[: op.partials])
    tile, cluster = _in_cluster(op, target) or (_TILES[0], 0)
    return {
        "threads": str(_THREADS["few" if columns <= _FEW_COLUMNS else "many"]),
        "columns": str(tile),
        **({"cluster": str(cluster)} if cluster else {}),
    }


def drop_tickets(function: Function, target: str) -> None:
    """Takes tickets from kernels whose blocks are a cluster, and from those that set them to 0.

    Functions are planned without a target; so this is left to ``specialize``. What has none stays as it is.
    """
    kernels = [op for op in function.body.ops if isinstance(op, Kernel)]
    tickets = {value: (op, zero) for op in kernels for value, zero in _tickets(op)}
    for finish in kernels:
        ticket = finish.operands[finish.partials] if finish.partials < finish.reads else None
        if ticket not in tickets or finish.template != "col_finish" or _in_cluster(finish, target) is None:
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
