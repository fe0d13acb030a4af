"""``sink-gathers``: a value at the picks is computed from its inputs at the picks; a scattered value where it lands.

Elementwise arithmetic commutes with gather and scatter, so both move to where they cost nothing:

- ``gather(f(x, m), i)`` becomes ``f(gather(x, i), m)``: K evaluations, and the gather reads memory instead of crossing
  lanes. ``gather(x, i)`` of what a top-k ranked is the top-k's values.
- ``scatter(f(gather(x, i), m), i)`` becomes ``select(membership(i), f(x, m), 0)``, which needs no exchange, since each
  lane holds its x and knows which of its experts were picked. But a row that is only written, and mostly zeros, stays
  scattered: arithmetic for experts nobody picked costs more than moving the few picks.

Both sides evaluate the same float32 expression on the same numbers, so no result changes.

Picks may be -1, where a gather is 0 and the expression may be something else, which a select puts right. Picks that are
given may repeat, so that what is scattered adds up, which is no expression over the rows: such a scatter stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Block, BlockArgument, Constant, Module, Op, OpResult, Value, create_one
from moesaic.ir.ops import col, math, row
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.rewriting import in_every_block, inserting_before, replace_op
from moesaic.passes.row_layout import SPARSE, only_written


@dataclass(frozen=True)
class SinkGathers(Pass):
    """Rewrites gathers, then scatters, in every block.

    Options:
        sparse: experts a pick from which a row that is only written stays scattered (0: none does); but see
            `_packs_faster`.
    """

    name: ClassVar[str] = "sink-gathers"
    requires: ClassVar[str | None] = "expanded"
    establishes: ClassVar[str | None] = "expanded"

    sparse: int = SPARSE

    def run(self, module: Module, context: PassContext) -> bool:
        return in_every_block(module, lambda block: sink_block(block, self.sparse))


def sink_block(block: Block, sparse: int = SPARSE) -> bool:
    """Rewrites one block; says whether anything changed."""
    changed = False
    for op in list(block.ops):
        if op.parent is not block:
            continue
        if isinstance(op, row.Gather):
            with inserting_before(block, op):
                value = at_picks(op.x, op.indices)
                if value.type.shape != op.y.type.shape:  # the same number for every pick of a token
                    value = create_one("math.broadcast", value, op.indices)
                if isinstance(value, OpResult) and isinstance(value.op, row.Gather) and value.op.x is op.x:
                    block.ops.remove(value.op)  # nothing to sink: the same gather again
                    continue
                # Picks of unknown origin go no further than fuse-score-topk.
                if isinstance(op.indices, OpResult) and row.may_be_away(op.indices):
                    value = math.select(create_one("math.less", op.indices, 0.0), 0.0, value)
            replace_op(block, op, [value])
            changed = True
        elif isinstance(op, row.Scatter) and not row.are_given(op.indices):
            picks = op.indices.type.shape[-1]
            mostly_zeros = sparse and isinstance(picks, int) and op.size >= sparse * picks
            if mostly_zeros and only_written(block, op.y) and not _packs_faster(block, op):
                continue
            with inserting_before(block, op):
                start = len(block.ops)
                dense = _Spread(op).value(op.x)
                if dense is None:
                    del block.ops[start:]  # what was rebuilt before a leaf without rows was met
                else:
                    member = create_one("row.membership", op.indices, size=op.size)
                    spread = math.select(member, dense, 0.0)
            if dense is not None:
                replace_op(block, op, [spread])
                changed = True
    return changed


def _packs_faster(block: Block, op: row.Scatter) -> bool:
    """Whether lanes pack a row of 16-bit values faster than they take it from shared memory: measured for rows of 256
    and 512 experts in a warp. A group limit or sums over tokens leave no registers for it."""
    rounded = any(isinstance(o, math.Cast) and o.y.type.dtype.bytes == 2 for o in block.users(op.y))
    made_by = op.indices.op if isinstance(op.indices, OpResult) else None
    free = isinstance(made_by, row.TopK) and made_by.allowed is None
    summed = any(isinstance(o, col.Sum) for o in block.ops)
    return rounded and free and not summed and 256 <= op.size <= 1024


def at_picks(x: Value, indices: Value, *, use_values: bool = True) -> Value:
    """``x[..., indices]``, with the gather moved as far towards the inputs as it goes; appends to the open block.

    `use_values` allows the values of the top-k that made the indices to stand for what it ranked.
    """

    def moved(operand: Value) -> Value:
        # One number for all experts (a constant, a [T, 1] value) is the same number for the picks.
        return at_picks(operand, indices, use_values=use_values) if _has_columns(operand) else operand

    if not _has_columns(x) and not isinstance(x, BlockArgument):
        return x
    if isinstance(x, OpResult):
        op = x.op
        if isinstance(op, row.Scatter) and op.indices is indices and not row.are_given(indices):
            return op.x
        if isinstance(op, math.Broadcast):
            return create_one("math.broadcast", moved(op.x), indices)
        if isinstance(op, math.Elementwise) and all(_can_gather(v) for v in op.operands):
            return create_one(op.name, *map(moved, op.operands), block=op.parent, **op.attributes)
    if use_values and isinstance(indices, OpResult) and isinstance(indices.op, row.TopK) and indices.op.x is x:
        return indices.op.values
    return create_one("row.gather", x, indices)


def _has_columns(x: Value) -> bool:
    """Whether a value differs from expert to expert."""
    return x.type.rank > 0 and x.type.shape[-1] != 1


def _can_gather(value: Value) -> bool:
    """Flags cannot be gathered as such; their elementwise origin can be."""
    if value.type.dtype.is_float or not _has_columns(value):
        return True
    if isinstance(value, OpResult) and isinstance(value.op, math.Less | math.Equal):
        return all(_can_gather(v) for v in value.op.operands)
    return False


class _Spread:
    """Rebuilds a value at the picks as the same expression over whole rows, if its leaves have rows."""

    def __init__(self, scatter: row.Scatter) -> None:
        self._indices = scatter.indices
        self._experts = scatter.size
        self._block = scatter.parent
        self._done: dict[Value, Value | None] = {}

    def value(self, x: Value) -> Value | None:
        if isinstance(x, Constant):
            return x
        if x not in self._done:
            self._done[x] = self._build(x)
        return self._done[x]

    def _build(self, x: Value) -> Value | None:
        if not isinstance(x, OpResult):
            return None
        op: Op = x.op
        if isinstance(op, row.Gather) and op.indices is self._indices:
            return op.x if op.x.type.shape[-1] == self._experts else None
        if isinstance(op, row.TopK) and x is op.values and op.indices is self._indices:
            return op.x
        if isinstance(op, row.Reduction):
            return x
        if isinstance(op, math.Broadcast) and op.x.type.dtype.is_float:
            return self.value(op.x)  # the select repeats it; what gave the shape may be no row any more
        if isinstance(op, math.Elementwise):
            parts: list[Value] = []
            for operand in op.operands:
                part = self.value(operand)
                if part is None:
                    return None
                parts.append(part)
            return create_one(op.name, *parts, block=self._block, **op.attributes)
        return None
