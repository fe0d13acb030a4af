"""``lower-aux-loss``: each declared loss becomes sums over tokens and a few operations on their results.

The sums are by-products of the pass over the rows, and their gradients are broadcasts, so that ``differentiate``, which
runs afterwards, puts a loss's term into the router's backward by itself. They are ordered two-stage sums: equal input
gives equal bits. What a loss sums can come in from outside instead (counts reduced over ranks, say).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Block, Module
from moesaic.ir.ops.moe import Loss
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.rewriting import in_every_block, inserting_before, replace_op


@dataclass(frozen=True)
class LowerAuxLoss(Pass):
    """Replaces each loss by what it decomposes into."""

    name: ClassVar[str] = "lower-aux-loss"
    requires: ClassVar[str | None] = "declared"
    establishes: ClassVar[str | None] = "summed"

    def run(self, module: Module, context: PassContext) -> bool:
        return in_every_block(module, lower_losses)


def lower_losses(block: Block) -> bool:
    """Rewrites one block; says whether anything changed."""
    changed = False
    for op in list(block.ops):
        if isinstance(op, Loss):
            with inserting_before(block, op):
                value = op.decompose()
            replace_op(block, op, [value])
            changed = True
    return changed
