"""``drop-sentinel-groups``: no pick whose expert is not here reaches a product.

A pick that is no expert has no slot, so it costs no row, no product and no traffic, forward and backward. The pass
makes that hold, and checks that it does:

- picks that may hold any number go through ``row.given``, which makes -1 of every one outside [0, E);
- values of slots are read, from outside of slots, only by ops that know which rows are dead.

Source of the rule: expert parallelism in transformers, where an id that is not here is E_local, and unwritten rows
behind the last group leaked into the gradients of weights and inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Block, Module, Op, OpResult, Value, create_one
from moesaic.ir.ops import math, row, slot
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.rewriting import blocks, inserting_before

_READS_LIVE_ROWS = (slot.Combine, slot.ToPicks, slot.ExpertSums, slot.GroupedWgrad)
_STAYS_IN_ROWS = (slot.GroupedLinear, slot.Split, slot.Join, math.Elementwise, row.Sum, row.Max)


@dataclass(frozen=True)
class DropSentinelGroups(Pass):
    """Guards the picks of every dispatch, and checks that dead rows are never read."""

    name: ClassVar[str] = "drop-sentinel-groups"

    def run(self, module: Module, context: PassContext) -> bool:
        changed = False
        for block in blocks(module):
            changed |= _guard(block)
            check_dead_rows(block)
        return changed


def _guard(block: Block) -> bool:
    changed = False
    for op in list(block.ops):
        if isinstance(op, slot.Dispatch) and not _are_experts(op.indices, op.experts):
            with inserting_before(block, op):
                op.operands[0] = create_one("row.given", op.indices, block=block, size=op.experts)
            changed = True
    return changed


def _are_experts(indices: Value, experts: int) -> bool:
    """Whether indices are known to lie in [0, E), or to be -1."""
    if not isinstance(indices, OpResult):
        return False
    made_by = indices.op
    if isinstance(made_by, row.Given):
        return made_by.size <= experts
    return isinstance(made_by, row.TopK) and made_by.x.type.shape[-1] == experts


def check_dead_rows(block: Block) -> None:
    """Checks that what leaves slots leaves through ops that know which rows are dead.

    Raises:
        DiagnosticError: an op reads rows of slots as if all were in use, or rows of two dispatches; names it.
    """
    belongs: dict[Value, Op | None] = {}
    for op in block.ops:
        if isinstance(op, slot.Dispatch):
            belongs.update(dict.fromkeys(op.results, op))
            continue
        found = {belongs[v] for v in op.operands if belongs.get(v) is not None}
        if len(found) > 1:
            op.fail("takes values of two dispatches", "rows of one dispatch are not those of another")
        rows = [v for v in op.operands if v.type.rank == 2 and v.type.leading == slot.SLOTS]
        leaves = [r for r in op.results if r.type.leading != slot.SLOTS]
        if rows and leaves and op.name not in ("return", "yield") and not isinstance(op, _READS_LIVE_ROWS):
            op.fail(
                f"reads {rows[0].type} as if all rows were in use",
                "values of slots go back to tokens through slot.combine or slot.to_picks, and to experts through "
                "slot.expert_sums or slot.grouped_wgrad",
            )
        if rows and not leaves and not isinstance(op, (*_STAYS_IN_ROWS, *_READS_LIVE_ROWS)) and op.results:
            op.fail("has no meaning over rows of slots, some of which are dead")
        made_by = next(iter(found), None)
        belongs.update({r: made_by for r in op.results if made_by is not None and r.type.leading == slot.SLOTS})
