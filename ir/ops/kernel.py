"""``kernel.``: one launch each; the region still holds the ops that were fused.

A region's arguments match the operands of the kernel. A value that the region of a row program reduces over tokens
leaves the kernel as one partial row per block, ``[blocks, E]``; a ``kernel.col_finish`` adds these up in order, and
does whatever is left to be done with the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.ir import core
from moesaic.ir.core import Block, Op, OpResult, Value, result
from moesaic.ir.ops.col import ColumnReduction, Spread
from moesaic.ir.types import DType, TensorType, symbol


def is_column_value(value: Value) -> bool:
    """Whether a value of a region is a reduction over tokens."""
    return isinstance(value, OpResult) and isinstance(value.op, ColumnReduction)


def segments_of(region: Block) -> str:
    """How the tokens of sequences lie, if the region of a row program reduces or spreads by sequence; else empty."""
    found = {op.segments for op in region.ops if isinstance(op, ColumnReduction | Spread)} - {""}
    if len(found) > 1:
        region.ops[0].fail("stands beside sums by sequence of both orders of tokens; one kernel goes through one order")
    return found.pop() if found else ""


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
                # By sequence or not: with sequences, blocks of one sequence follow one another.
                types.append(TensorType((symbol(self.blocks), value.type.shape[-1]), value.type.dtype))
            else:
                types.append(value.type)
        return types

    def verify(self) -> None:
        if self.region is None:
            self.fail("needs a region")
        if [v.type for v in self.operands] != [a.type for a in self.region.arguments]:
            self.fail("the region's arguments differ in type from the operands")


class ColFinish(Op):
    """Sums over tokens from partial rows, y_e = sum_b partial_{b,e} in the order of the blocks, and what follows.

    The region's first arguments stand for the finished sums of the first operands, the partial rows. Where anything is
    computed from sums, a ticket follows: the block that finishes last computes it.
    """

    name = "kernel.col_finish"
    variadic = True
    has_region = True
    partials = core.integer("how many operands are partial rows: the first", minimum=0)

    def infer(self) -> Sequence[TensorType]:
        if self.region is None:
            self.fail("needs a region")
        return [v.type for v in self.region.terminator.operands]

    def verify(self) -> None:
        if self.region is None or len(self.region.arguments) != len(self.operands):
            self.fail("the region must have one argument for each operand")
        for number, (given, inside) in enumerate(zip(self.operands, self.region.arguments, strict=True)):
            if number >= self.partials:
                if given.type != inside.type:
                    self.fail(f"operand {number + 1} is {given.type}, but {inside.type} in the region")
            elif given.type.shape[1:] != inside.type.shape[-1:] or given.type.dtype is not inside.type.dtype:
                self.fail(f"operand {number + 1} must be partial rows of {inside.type}, found {given.type}")


class Ticket(Op):
    """A zero in memory, which the blocks of a later kernel count up to find out which of them is the last."""

    name = "kernel.ticket"
    y = result("scalar, i32")

    def infer(self) -> Sequence[TensorType]:
        return [TensorType((), DType.I32)]
