"""``expand-rows``: composite row ops (softmax, logsumexp, divisions by a norm) become maxima, sums and elementwise ops.

Afterwards everything between two collectives is elementwise, so that it can be computed wherever its operands are:
for a whole row or for the picks only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Module
from moesaic.ir.ops import row
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.rewriting import blocks, inserting_before, replace_op


@dataclass(frozen=True)
class ExpandRows(Pass):
    """Replaces each op that has a ``decompose`` by what it returns."""

    name: ClassVar[str] = "expand-rows"
    requires: ClassVar[str | None] = "summed"
    establishes: ClassVar[str | None] = "expanded"

    def run(self, module: Module, context: PassContext) -> bool:
        changed = False
        for block in blocks(module):
            for op in list(block.ops):
                if isinstance(op, row.Softmax | row.LogSumExp | row.Normalize | row.LpNormalize):
                    with inserting_before(block, op):
                        value = op.decompose()
                    replace_op(block, op, [value])
                    changed = True
        return changed
