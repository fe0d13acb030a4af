"""``kernel.``: one launch each; the region still holds the ops that were fused.

A region's arguments match the operands of the kernel. A value that the region of a row program reduces over tokens
leaves the kernel as one partial row per block, ``[blocks, E]``; a ``kernel.col_finish`` adds these up in order, and
does whatever is left to be done with the sums. Where the blocks of a row program are one cluster, its region ends with
the ``kernel.col_finish``, and no partial rows leave.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.ir import core
from moesaic.ir.core import Block, Op, OpResult, Value, result
from moesaic.ir.ops import slot
from moesaic.ir.ops.col import ColumnReduction, Spread
from moesaic.ir.ops.slot import Dispatch
from moesaic.ir.types import Dim, DType, TensorType, symbol

SUM_COLUMNS = 128
"""Columns that a partial sum of a row in a product's epilogue is over."""


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
    computed from sums, a ticket follows: the block that finishes last computes it. In the region of a row program, the
    first operands are the sums themselves: the first block of its cluster finishes them.
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
            if number >= self.partials or is_column_value(given):
                if given.type != inside.type:
                    self.fail(f"operand {number + 1} is {given.type}, but {inside.type} in the region")
            elif given.type.shape[1:] != inside.type.shape[-1:] or given.type.dtype is not inside.type.dtype:
                self.fail(f"operand {number + 1} must be partial rows of {inside.type}, found {given.type}")


def finish_in(region: Block) -> ColFinish | None:
    """What the first block of a cluster does at the end of a row program; ``None`` where its blocks are no cluster."""
    return next((op for op in region.ops if isinstance(op, ColFinish)), None)


class Ticket(Op):
    """A zero in memory, which the blocks of a later kernel count up to find out which of them is the last."""

    name = "kernel.ticket"
    y = result("scalar, i32")

    def infer(self) -> Sequence[TensorType]:
        return [TensorType((), DType.I32)]


class DispatchKernel(Op):
    """Base of a ``slot.dispatch`` and of its three steps, with its attributes."""

    experts = core.integer("E", minimum=1)
    align = core.integer("rows that each expert's first slot is a multiple of", minimum=1, default=1)
    capacity = core.number("C over an even share of the picks; 0 for no bound", minimum=0.0, default=0.0)
    pad = core.boolean("whether every expert has C rows, in use or not", default=False)


class DispatchCount(DispatchKernel):
    """table_{b,e} = picks of expert e among those of block b, which has a run of tokens of its own."""

    name = "kernel.dispatch_count"
    indices = core.operand("[T, K]")
    table = result("[blocks, E] i32")
    blocks = core.string("symbol of the number of blocks")

    def infer(self) -> Sequence[TensorType]:
        return [TensorType((symbol(self.blocks), self.experts), DType.I32)]


class DispatchScan(DispatchKernel):
    """bases_{b,e} = sum_{b' < b} table_{b',e}; found_e = the sum over all blocks."""

    name = "kernel.dispatch_scan"
    table = core.operand("[blocks, E] i32")
    bases = result("[blocks, E] i32")
    found = result("[E] i32")

    def infer(self) -> Sequence[TensorType]:
        return [self.table.type, TensorType((self.experts,), DType.I32)]


class DispatchAtOnce(DispatchKernel):
    """The results of ``slot.dispatch`` by all three steps in one launch, which ``specialize`` makes of theirs where the
    target has clusters of blocks."""

    name = "kernel.dispatch"
    indices = core.operand("[T, K]")
    counts = result("[E] i32")
    offsets = result("[E + 1] i32")
    tokens = result("[M] i32")
    picks = result("[M] i32")
    slots = result("[T, K] i32")
    dropped = result("[1] i32")

    def infer(self) -> Sequence[TensorType]:
        return _dispatch_of(self, self.indices).infer()


class DispatchScatter(DispatchKernel):
    """The results of ``slot.dispatch``; its blocks have the tokens that those of ``kernel.dispatch_count`` had."""

    name = "kernel.dispatch_scatter"
    indices = core.operand("[T, K]")
    bases = core.operand("[blocks, E] i32")
    found = core.operand("[E] i32")
    counts = result("[E] i32")
    offsets = result("[E + 1] i32")
    tokens = result("[M] i32")
    picks = result("[M] i32")
    slots = result("[T, K] i32")
    dropped = result("[1] i32")

    def infer(self) -> Sequence[TensorType]:
        return self.as_declared().infer()

    def as_declared(self) -> Dispatch:
        """The op it carries out."""
        return _dispatch_of(self, self.indices)


def _dispatch_of(op: DispatchKernel, indices: Value) -> Dispatch:
    return Dispatch([indices], {k: v for k, v in op.attributes.items() if k in Dispatch.attribute_defs})


class Region(Op):
    """Base of kernels over slots or tokens: the region's arguments stand for operands, its yield for the results."""

    variadic = True
    has_region = True

    def infer(self) -> Sequence[TensorType]:
        if self.region is None:
            self.fail("needs a region")
        return [self.result_type(value) for value in self.region.terminator.operands]

    def result_type(self, value: Value) -> TensorType:
        """The type of the buffer that a value of the region leaves in."""
        return value.type

    def verify(self) -> None:
        if self.region is None or len(self.region.arguments) != len(self.operands):
            self.fail("the region must have one argument for each operand")
        for number, (given, inside) in enumerate(zip(self.operands, self.region.arguments, strict=True)):
            if given.type != inside.type and not is_partial_sum(given.type, inside.type):
                self.fail(f"operand {number + 1} is {given.type}, but {inside.type} in the region")


def is_partial_sum(given: TensorType, wanted: TensorType) -> bool:
    """Whether a buffer [R, n] of float32 holds sums of rows, [R, 1], in n parts."""
    rows = given.rank == 2 and wanted.rank == 2 and given.shape[0] == wanted.shape[0]
    return rows and wanted.shape[1] == 1 and given.dtype is wanted.dtype is DType.F32


class Product(Region):
    """A product of rows and a weight, or two that share the rows, and what is elementwise after it.

    The region holds the ``slot.gather`` of the rows, if they are gathered, the product, and the epilogue. A sum of rows
    leaves as partial sums over `SUM_COLUMNS` columns each.
    """

    name = "kernel.product"

    def result_type(self, value: Value) -> TensorType:
        if isinstance(value, OpResult) and value.op.name == "row.sum":
            assert self.region is not None
            parts: Dim = -(-narrow_columns(self.region) // SUM_COLUMNS)
            return TensorType((value.type.shape[0], parts), value.type.dtype)
        return value.type


def narrow_columns(region: Block) -> int:
    """How many columns the tiles of a product's epilogue go over: those of gates, where there are gates and ups."""
    for op in region.ops:
        if isinstance(op, slot.Split | slot.Join):
            columns = (op.gate if isinstance(op, slot.Join) else op.results[0]).type.shape[-1]
            break
    else:
        columns = next(op for op in region.ops if isinstance(op, slot.Product)).sizes()[1]
    assert isinstance(columns, int)
    return columns


class Wgrad(Region):
    """A weight's gradient, cast; the region may hold the ``slot.gather`` of its operands, and sums of one's rows."""

    name = "kernel.wgrad"


class SumParts(Region):
    """A ``slot.sum_parts`` of what a ``kernel.wgrad`` has left in parts, and what is elementwise after it.

    ``specialize`` makes both of one gradient that would keep few multiprocessors busy.
    """

    name = "kernel.sum_parts"


class Combine(Region):
    """A ``slot.combine`` and what is elementwise after it, rows of tokens."""

    name = "kernel.combine"


class ToPicks(Region):
    """Numbers of slots, each the sum of a row of its operand, what is elementwise on them, and a ``slot.to_picks``."""

    name = "kernel.to_picks"


class SlotRows(Region):
    """Gathers, elementwise ops and sums of rows over slots; zeros in rows that are dead."""

    name = "kernel.slot_rows"
