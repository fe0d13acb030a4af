"""The part of a function that a row program is made of, where others are products and what goes with them.

A router's ops and those of experts meet only at ops of slots: a product makes logits, a dispatch takes picks, a
combine takes weights; the other way round, ``slot.to_picks`` makes the gradient of weights, a product takes that of
logits. So ops between which no op of slots lies belong together, and with a router if one of them is an op of routers.
"""

from __future__ import annotations

from moesaic.ir.core import Block, Op, OpResult, Value
from moesaic.ir.ops import math, row, slot
from moesaic.ir.types import TensorType


def row_part(block: Block) -> set[Op]:
    """The ops of a block that belong to a router."""
    ops = [op for op in block.ops if not op.name.startswith(("slot.", "kernel.", "return", "yield"))]
    inside = set(ops)
    found: set[Op] = set()
    waiting = [op for op in ops if _of_router(block, op)]
    while waiting:
        op = waiting.pop()
        if op in found:
            continue
        found.add(op)
        made_by = [v.op for v in op.operands if isinstance(v, OpResult)]
        users = [user for r in op.results for user in block.users(r)]
        waiting += [o for o in (*made_by, *users) if o in inside]
    return found


def _of_router(block: Block, op: Op) -> bool:
    """Whether only a router has such an op: numbers of all tokens are of its losses; sums of rows are others' too, but
    leave them as a number of the row."""
    if isinstance(op, row.Given):  # a guard in front of a dispatch is part of that
        return not all(isinstance(user, slot.Dispatch) for user in block.users(op.results[0]))
    if isinstance(op, row.Sum):
        return op.x.type.shape[-1] != 1 and _meets(block, op.y, op.x.type)
    return op.name.startswith(("row.", "col.", "moe.")) or all(r.type.rank == 0 for r in op.results)


def _meets(block: Block, number: Value, rows: TensorType) -> bool:
    """Whether rows as long as those that a number is of are computed from it."""
    users = [user for user in block.users(number) if isinstance(user, math.Elementwise)]
    return any(u.results[0].type.shape == rows.shape or _meets(block, u.results[0], rows) for u in users)
