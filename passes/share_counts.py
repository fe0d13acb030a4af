"""``share-counts``: the counts of a router are those of the dispatch of its picks.

A dispatch counts its picks in any case: by blocks, in the order of tokens, which is what it needs to give them slots.
So where a router's picks go to as many experts, ``col.count`` of them becomes the dispatch's ``counts``: the router's
kernel keeps no histogram, and where nothing else is summed over tokens, no kernel adds up partial rows.

A bound on the rows of an expert cuts the dispatch's counts, but not the router's: those stay two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Module
from moesaic.ir.ops import col, slot
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.rewriting import replace_op


@dataclass(frozen=True)
class ShareCounts(Pass):
    """Replaces each ``col.count`` of picks that a dispatch counts anyway."""

    name: ClassVar[str] = "share-counts"
    requires: ClassVar[str | None] = "expanded"

    def run(self, module: Module, context: PassContext) -> bool:
        changed = False
        for function in module.functions:
            body = function.body
            dispatches = [op for op in body.ops if isinstance(op, slot.Dispatch) and not op.capacity]
            for count in [op for op in body.ops if isinstance(op, col.Count) and not op.segments]:
                for dispatch in dispatches:
                    if dispatch.indices is count.indices and dispatch.experts == count.size:
                        body.ops.remove(dispatch)  # it needs the picks alone, and comes first from now on
                        body.ops.insert(body.ops.index(count), dispatch)
                        replace_op(body, count, [dispatch.counts])
                        changed = True
                        break
        return changed
