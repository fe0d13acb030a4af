"""``fuse-score-topk``: everything between the logits and what leaves a token's row becomes one row program.

Sums over tokens stay inside as by-products of the same pass over the rows: the kernel leaves one partial row a block,
and a ``kernel.col_finish`` adds these up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Block, Constant, Function, Module, Op, OpResult, Value, Yield
from moesaic.ir.ops import col, row
from moesaic.ir.ops.kernel import ColFinish, RowProgram, is_column_value
from moesaic.passes.manager import Pass, PassContext


@dataclass(frozen=True)
class FuseScoreTopk(Pass):
    """Outlines the body of each function into one ``kernel.row_program``."""

    name: ClassVar[str] = "fuse-score-topk"
    requires: ClassVar[str | None] = "expanded"
    establishes: ClassVar[str | None] = "fused"

    def run(self, module: Module, context: PassContext) -> bool:
        changed = False
        for number, function in enumerate(module.functions):
            changed |= _outline(function, f"B{number or ''}")
        return changed


_TAKES_PICKS = (row.Gather, row.Scatter, row.Membership, row.Bitmap, col.Count)


def _are_picks(indices: Value) -> bool:
    """Whether indices are known to lie in [0, E), or to be -1."""
    return isinstance(indices, OpResult) and isinstance(indices.op, row.TopK | row.Given)


def _shown(value: Value) -> str:
    return f"%{value.name}" if value.name else str(value.type)


def _outline(function: Function, blocks_symbol: str) -> bool:
    body = function.body
    ops = body.ops[:-1]
    if not ops:
        return False
    for op in ops:
        hidden = [v for v in op.operands if is_column_value(v)]
        if hidden:
            op.fail(
                "uses a sum over tokens within the same pass over the rows",
                "a value of col.count or col.sum is complete only after the kernel; return it and use it outside",
            )
        if isinstance(op, _TAKES_PICKS) and not _are_picks(op.indices):
            op.fail(
                f"takes its picks from {_shown(op.indices)}, which may hold any numbers",
                "picks made elsewhere come in through row.given, with the number of experts as its size",
            )

    region = Block()
    inside: dict[Value, Value] = {}
    outer: list[Value] = []
    for argument in body.arguments:
        if body.users(argument):
            inside[argument] = region.add_argument(argument.type, argument.name)
            outer.append(argument)
    for op in ops:
        region.append(op.clone(inside))
        op.parent = None

    # Values that leave, each once; an input or a constant that is returned passes through.
    terminator = body.terminator
    leaving: list[Value] = []
    for value in terminator.operands:
        if value in inside and value not in leaving and value not in body.arguments:
            leaving.append(value)
    region.append(Yield([inside[v] for v in leaving]))

    kernel: Op = RowProgram(outer, {"blocks": blocks_symbol}, region=region, result_names=[v.name for v in leaving])
    body.ops = [kernel]
    kernel.parent = body
    final: dict[Value, Value] = {}
    for value, result in zip(leaving, kernel.results, strict=True):
        final[value] = result
        if is_column_value(value):
            finish = body.append(ColFinish([result], result_names=[value.name]))
            result.name = f"{value.name}_partial" if value.name else ""
            final[value] = finish.results[0]
    terminator.operands = [v if isinstance(v, Constant) else final.get(v, v) for v in terminator.operands]
    body.append(terminator)
    return True
