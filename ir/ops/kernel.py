"""``kernel.``: one launch each; the region still holds the ops that were fused.

A region's arguments match the operands of the kernel. A value that the region reduces over tokens leaves the kernel as
one partial row per block, ``[blocks, E]``; a ``kernel.col_finish`` adds these up in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.ir import core
from moesaic.ir.arrays import Array, ArrayNamespace
from moesaic.ir.core import Op, OpResult, Value, operand, result
from moesaic.ir.types import TensorType, symbol


def is_column_value(value: Value) -> bool:
    """Whether a value of a region is a reduction over tokens."""
    return isinstance(value, OpResult) and value.op.name.startswith("col.")


class RowProgram(Op):
    """Everything between the logits of a token and what leaves its row, and the sums over tokens beside it."""

    name = "kernel.row_program"
    variadic = True
    has_region = True
    blocks = core.string("symbol of the number of blocks that leave partial sums")

    def infer(self) -> Sequence[TensorType]:
        if self.region is None:
            self.fail("needs a region")
        types = []
        for value in self.region.terminator.operands:
            if is_column_value(value):
                types.append(TensorType((symbol(self.blocks), *value.type.shape), value.type.dtype))
            else:
                types.append(value.type)
        return types

    def verify(self) -> None:
        if self.region is None:
            self.fail("needs a region")
        if [v.type for v in self.operands] != [a.type for a in self.region.arguments]:
            self.fail("the region's arguments differ in type from the operands")


class ColFinish(Op):
    """y_e = sum over blocks b of partial_{b,e}, in the order of the blocks."""

    name = "kernel.col_finish"
    partial = operand("[B, E] one row per block")
    y = result("[E]")

    def infer(self) -> Sequence[TensorType]:
        if self.partial.type.rank != 2:
            self.fail(f"expected partial rows [B, E], found {self.partial.type}")
        return [TensorType(self.partial.type.shape[1:], self.partial.type.dtype)]

    def reference(self, xp: ArrayNamespace, *operands: Array) -> Array:
        return xp.sum(operands[0], 0)
