"""``fuse-score-topk``: everything between the logits and what leaves a token's row becomes one row program.

Sums over tokens stay inside as by-products of the same pass over the rows: the kernel leaves one partial row a block.
Adding these up, and everything computed from the sums (a loss, say), is a second kernel, a ``kernel.col_finish``. Where
that needs what a dispatch has counted, it comes after the dispatch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Block, BlockArgument, Function, Module, Op, OpResult, Value, Yield
from moesaic.ir.ops import col, row
from moesaic.ir.ops.kernel import ColFinish, RowProgram, Ticket, is_column_value
from moesaic.passes.manager import Pass, PassContext


@dataclass(frozen=True)
class FuseScoreTopk(Pass):
    """Outlines the body of each function into a ``kernel.row_program`` and, where needed, a ``kernel.col_finish``."""

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
    return isinstance(indices, OpResult) and isinstance(indices.op, row.TopK | row.Given | row.Append)


def _shown(value: Value) -> str:
    return f"%{value.name}" if value.name else str(value.type)


def _outline(function: Function, blocks_symbol: str) -> bool:
    body = function.body
    before, ops, between, after_kernels = _around(body)
    if not ops:
        return False
    terminator = body.terminator
    after = _after_sums(ops)
    # What leaves: an input or a constant that is returned passes through.
    made = {r for op in ops for r in op.results}
    read = [v for op in (*between, *after_kernels, terminator) for v in op.operands]
    returned = [v for v in dict.fromkeys(read) if v in made]
    late = [v for v in returned if v in after or (v.type.leading != "T" and not is_column_value(v))]
    finish_ops = _needed(ops, late, stop=is_column_value)
    sums = [
        r for op in ops for r in op.results if is_column_value(r) and (r in returned or _used_by(r, finish_ops, late))
    ]
    row_results = [*(v for v in returned if v not in late and v not in sums), *sums]
    row_ops = _needed(ops, row_results)
    _check_order(row_ops, between, late)
    for op in ops:
        op.parent = None
    body.ops = before

    final: dict[Value, Value] = {}
    tickets: list[Value] = []
    if row_ops:
        region, outer, inside = _region(row_ops)
        leaving = [inside[v] for v in row_results]
        names = [f"{v.name}_partial" if v in sums and v.name else v.name for v in row_results]
        if finish_ops and sums:
            leaving.append(region.append(Ticket([])).result)
            names.append("ticket")
        region.append(Yield(leaving))
        kernel = body.append(RowProgram(outer, {"blocks": blocks_symbol}, region=region, result_names=names))
        final.update(zip(row_results, kernel.results, strict=False))
        tickets = list(kernel.results[len(row_results) :])
    for op in between:
        op.operands = [final.get(v, v) for v in op.operands]
        body.append(op)
    if sums or late:
        region, outer, inside = _region(finish_ops, [*sums, *tickets])
        outer = [final.get(v, v) for v in outer]
        # Sums that only go on to be computed with leave, too: the block that does it finds them in memory.
        leaving_late = list(dict.fromkeys([*(v for v in returned if v in sums or v in late), *sums]))
        region.append(Yield([inside[v] for v in leaving_late]))
        finish = body.append(
            ColFinish(outer, {"partials": len(sums)}, region=region, result_names=[v.name for v in leaving_late])
        )
        final.update(zip(leaving_late, finish.results, strict=True))
    for op in (*after_kernels, terminator):
        op.operands = [final.get(v, v) for v in op.operands]
        body.append(op)
    return True


def _around(body: Block) -> tuple[list[Op], list[Op], list[Op], list[Op]]:
    """The kernels before the ops of a router, these, the kernels between them, and those after."""
    ops = body.ops[:-1]
    plain = [i for i, op in enumerate(ops) if not _is_kernel(op)]
    if not plain:
        return ops, [], [], []
    inside = ops[plain[0] : plain[-1] + 1]
    between = [op for op in inside if _is_kernel(op)]
    return ops[: plain[0]], [op for op in inside if not _is_kernel(op)], between, ops[plain[-1] + 1 :]


def _is_kernel(op: Op) -> bool:
    return op.name.startswith("kernel.")


def _check_order(row_ops: list[Op], between: list[Op], late: Sequence[Value]) -> None:
    """Raises a diagnostic unless kernels between the ops of a router read rows of it, and write what sums go with."""
    made = {r for op in between for r in op.results}
    for op in row_ops:
        if any(v in made for v in op.operands):
            op.fail("is separated by kernels from other ops of its router")
    for op in between:
        if any(v in late for v in op.operands):
            op.fail("reads what is computed from sums over tokens, beside the kernel that reads its results")


def _after_sums(ops: list[Op]) -> set[Value]:
    """Values computed from sums over tokens. Raises a diagnostic where such a value goes back into rows."""
    after: set[Value] = set()
    for op in ops:
        if isinstance(op, _TAKES_PICKS) and not _are_picks(op.indices):
            op.fail(
                f"takes its picks from {_shown(op.indices)}, which may hold any numbers",
                "picks made elsewhere come in through row.given, with the number of experts as its size",
            )
        if not any(v in after or is_column_value(v) for v in op.operands):
            continue
        if any(r.type.leading == "T" or is_column_value(r) for r in op.results):
            op.fail(
                "uses a sum over tokens within the same pass over the rows",
                "a value of col.count or col.sum is complete only after the kernel; return it and use it outside",
            )
        after.update(op.results)
    return after


def _needed(ops: list[Op], values: Sequence[Value], stop: Callable[[Value], bool] = lambda v: False) -> list[Op]:
    """The ops that `values` are computed by, in order; not beyond values that `stop` holds for."""
    wanted = set(values)
    kept: list[Op] = []
    for op in reversed(ops):
        if any(r in wanted and not stop(r) for r in op.results):
            kept.append(op)
            wanted.update(op.operands)
    return kept[::-1]


def _used_by(value: Value, ops: Sequence[Op], late: Sequence[Value]) -> bool:
    return value in late or any(value in op.operands for op in ops)


def _region(ops: list[Op], first: Sequence[Value] = ()) -> tuple[Block, list[Value], dict[Value, Value]]:
    """A block of copies of the ops, what it takes from outside, and where each value is inside.

    `first` are values that become arguments in any case, and before the others. Inputs follow in their order, and then
    what kernels before have made.
    """
    region = Block()
    inside: dict[Value, Value] = {}
    outer: list[Value] = []

    def take(value: Value) -> None:
        inside[value] = region.add_argument(value.type, value.name)
        outer.append(value)

    for value in first:
        take(value)
    used = {v for op in ops for v in op.operands if isinstance(v, BlockArgument)}
    for argument in sorted(used, key=lambda v: v.owner.arguments.index(v)):
        take(argument)
    made = {r for op in ops for r in op.results}
    for value in dict.fromkeys(v for op in ops for v in op.operands if isinstance(v, OpResult)):
        if value not in made and value not in inside:
            take(value)
    for op in ops:
        region.append(op.clone(inside))
    return region, outer, inside
