"""``dce``: ops whose results nobody uses go, and kernels hand out and take in only what is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Block, Module, Op, Value
from moesaic.ir.ops.kernel import RowProgram
from moesaic.passes.manager import Pass, PassContext


@dataclass(frozen=True)
class DeadCode(Pass):
    """Removes unused pure ops, unused results of row programs, and operands their regions do not read."""

    name: ClassVar[str] = "dce"

    def run(self, module: Module, context: PassContext) -> bool:
        changed = False
        for function in module.functions:
            changed |= sweep(function.body)
        return changed


def sweep(block: Block) -> bool:
    """Removes what is dead in a block and in its regions; says whether anything was."""
    changed = False
    used: set[Value] = set()
    kept: list[Op] = []
    for op in reversed(block.ops):
        if op.pure and not any(r in used for r in op.results):
            op.parent = None
            changed = True
            continue
        if isinstance(op, RowProgram) and any(r not in used for r in op.results):
            op = _without_unused_results(block, op, used)
            changed = True
        if op.region is not None:
            changed |= sweep(op.region)
            if isinstance(op, RowProgram):
                changed |= _drop_unread_operands(op)
        used.update(op.operands)
        kept.append(op)
    block.ops = kept[::-1]
    return changed


def _without_unused_results(block: Block, op: RowProgram, used: set[Value]) -> Op:
    assert op.region is not None
    keep = [i for i, r in enumerate(op.results) if r in used]
    terminator = op.region.terminator
    terminator.operands = [terminator.operands[i] for i in keep]
    names = [op.results[i].name for i in keep]
    smaller = RowProgram(op.operands, op.attributes, region=op.region, location=op.location, result_names=names)
    smaller.parent = block
    mapping: dict[Value, Value] = {op.results[i]: smaller.results[n] for n, i in enumerate(keep)}
    block.replace(mapping)
    used.update(smaller.results)
    return smaller


def _drop_unread_operands(op: RowProgram) -> bool:
    assert op.region is not None
    read = {v for inner in op.region.ops for v in inner.operands}
    keep = [i for i, a in enumerate(op.region.arguments) if a in read]
    changed = len(keep) != len(op.operands)
    op.operands = [op.operands[i] for i in keep]
    op.region.arguments = [op.region.arguments[i] for i in keep]
    return changed
