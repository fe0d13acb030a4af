"""The three launches of a dispatch become one, where the target can do that."""

from __future__ import annotations

import re

from moesaic.ir.core import Function, OpResult
from moesaic.ir.ops.launch import Alloc, Kernel
from moesaic.passes.dispatch_shape import in_one_launch


def merge_dispatches(function: Function, target: str) -> None:
    """Replaces the steps of each dispatch by one launch, if `in_one_launch` says so, and drops what lay between them.

    Functions are planned without a target; so this is left to ``specialize``.
    """
    body = function.body
    kernels = [op for op in body.ops if isinstance(op, Kernel)]
    steps = [op for op in kernels if op.template in ("dispatch_count", "dispatch_scan")]
    writers = {value: op for op in steps for value in op.written}
    for scatter in kernels:
        if scatter.template != "dispatch_scatter" or not in_one_launch(target, int(scatter.known["experts"])):
            continue
        indices, bases, found, *results = scatter.operands
        scan = writers[bases]
        count = writers[scan.operands[0]]
        merged = Kernel(
            [indices, *results],
            {
                "symbol": re.sub(r"_scatter(\d*)$", r"\1", scatter.symbol),
                "template": "dispatch",
                "reads": 1,
                "facts": scatter.facts,
            },
            region=scatter.region,
            location=scatter.location,
        )
        body.ops[body.ops.index(scatter)] = merged
        body.ops.remove(count)
        body.ops.remove(scan)
        for value in (scan.operands[0], bases, found):
            if isinstance(value, OpResult) and isinstance(value.op, Alloc) and not body.users(value):
                body.ops.remove(value.op)
