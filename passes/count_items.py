"""Blocks of a product take tiles when they have room for them, where a kernel before can set the count to 0."""

from __future__ import annotations

from moesaic.ir.core import Function
from moesaic.ir.ops import slot
from moesaic.ir.ops.launch import Alloc, Kernel
from moesaic.ir.types import DType, TensorType
from moesaic.passes.begin_early import ended_before
from moesaic.passes.product_shape import ProductShape

_ZEROING = ("dispatch", "dispatch_scatter", "product", "wgrad")  # templates that can
_COUNT = TensorType((), DType.I32)


def count_items(function: Function) -> None:
    """Gives products of experts, where `takes_by_count`, a count of items, set to 0 by the last kernel that can and has
    ended before.

    To be called once kernels are configured, and known which begin early. A kernel with none before it has its tiles
    in turn, as the first of a backward has.
    """
    body = function.body
    slots = [op.slot for op in body.ops if isinstance(op, Alloc) and op.space == "workspace"]
    number = max(slots, default=-1) + 1
    kernels = [op for op in body.ops if isinstance(op, Kernel)]
    for op, ended in zip(kernels, ended_before(kernels), strict=True):
        before = next((k for k in reversed(kernels[:ended]) if k.template in _ZEROING), None)
        if before is not None and takes_by_count(op):
            count = Alloc(
                [],
                {"type": str(_COUNT), "space": "workspace", "slot": number},
                result_names=[f"{op.symbol}_items"],
                location=op.location,
            )
            number += 1
            body.insert(body.ops.index(before), count)
            before.operands.append(count.buffer)
            before.attributes["zeroes"] = before.zeroes + 1
            op.operands.append(count.buffer)
            op.attributes["counted"] = True


def takes_by_count(op: Kernel) -> bool:
    """Whether a kernel is a product over experts whose blocks are told their next tile, and has no count yet."""
    if op.template not in ("product", "wgrad") or op.region is None or op.counted:
        return False
    grouped = any(isinstance(inner, slot.GroupedLinear | slot.GroupedWgrad) for inner in op.region.ops)
    return grouped and ProductShape.parse(op.configuration).told
