"""``cse``: equal pure ops on equal operands are computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.attributes import format_attributes
from moesaic.ir.core import Block, Module, Op, Value
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.rewriting import in_every_block


@dataclass(frozen=True)
class CommonSubexpressions(Pass):
    """Keeps the first of equal pure ops and lets it stand for the others."""

    name: ClassVar[str] = "cse"

    def run(self, module: Module, context: PassContext) -> bool:
        return in_every_block(module, _merge)


def _merge(block: Block) -> bool:
    seen: dict[tuple[str, str, tuple[Value, ...]], Op] = {}
    replaced: dict[Value, Value] = {}
    kept: list[Op] = []
    for op in block.ops:
        op.operands = [replaced.get(v, v) for v in op.operands]
        if op.pure and op.region is None:
            key = (op.name, format_attributes(op.attributes), tuple(op.operands))
            first = seen.setdefault(key, op)
            if first is not op:
                replaced.update(zip(op.results, first.results, strict=True))
                op.parent = None
                continue
        kept.append(op)
    changed = len(kept) != len(block.ops)
    block.ops = kept
    return changed
