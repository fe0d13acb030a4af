"""``commute-weights``: a factor of rows moves past the linear op it goes into.

With s a number a row:

- ``linear(s x)`` becomes ``s linear(x)`` where x is gathered, or an input: its rows are then read where they are.
- ``wgrad(s a, b)`` becomes ``wgrad(a, s b)`` where that holds for a, and not for b.
- ``row.sum(x * linear(a))`` becomes ``row.sum(linear_transposed(x) * a)``, in backward, where the transposed product is
  computed anyway: the gradient of a weight needs no output of the product. A vector that was added to the product
  leaves a sum of its own.

In exact arithmetic nothing changes; one rounding of s x to the storage type is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Block, BlockArgument, Module, Op, OpResult, Value, create_one
from moesaic.ir.ops import math, row, slot
from moesaic.passes.dce import sweep
from moesaic.passes.differentiate import SUFFIX
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.rewriting import inserting_before, replace_op


@dataclass(frozen=True)
class CommuteWeights(Pass):
    """Rewrites products, gradients of weights, and sums over their rows."""

    name: ClassVar[str] = "commute-weights"

    def run(self, module: Module, context: PassContext) -> bool:
        changed = False
        for function in module.functions:
            block = function.body
            for op in list(block.ops):
                if op.parent is not block:
                    continue
                if isinstance(op, slot.Product):
                    changed |= _past_product(block, op)
                elif isinstance(op, slot.GroupedWgrad | slot.Wgrad):
                    changed |= _past_wgrad(block, op)
                elif isinstance(op, row.Sum) and function.name.endswith(SUFFIX):
                    changed |= _through_product(block, op)
            if changed:
                sweep(block)
        return changed


def _op(value: Value) -> Op | None:
    return value.op if isinstance(value, OpResult) else None


def _unrounded(value: Value) -> Value:
    """The value before it was rounded to a storage type."""
    op = _op(value)
    return op.x if isinstance(op, math.Cast) and op.x.type.dtype.is_float else value


def _factored(value: Value) -> tuple[Value, Value] | None:
    """x and s of ``s x`` with s a number a row, and x of the type of the value; looks through casts of both."""
    op = _op(_unrounded(value))
    if isinstance(op, math.Mul):
        for x, s in ((op.a, op.b), (op.b, op.a)):
            if s.type.rank == 2 and s.type.shape[1] == 1 and x.type.shape != s.type.shape:
                x = x if x.type.dtype is value.type.dtype else _unrounded(x)
                return (x, s) if x.type.dtype is value.type.dtype else None
    return None


def _is_there(value: Value) -> bool:
    """Whether rows are read where they lie, and need not be written before."""
    return isinstance(value, BlockArgument) or isinstance(_op(value), slot.Gather)


def _past_product(block: Block, op: slot.Product) -> bool:
    found = _factored(op.x)
    if found is None or not _is_there(found[0]):
        return False
    with inserting_before(block, op):
        plain = create_one(op.name, found[0], *op.operands[1:], block=block, **op.attributes)
        plain.name = op.result.name
        value = plain * found[1]
    replace_op(block, op, [value])
    return True


def _past_wgrad(block: Block, op: slot.GroupedWgrad | slot.Wgrad) -> bool:
    for number in (0, 1):
        mine, other = op.operands[number], op.operands[1 - number]
        found = _factored(mine)
        if found is None or not _is_there(found[0]) or _is_there(other):
            continue
        with inserting_before(block, op):
            op.operands[1 - number] = slot.stored(_unrounded(other) * found[1], other.type.dtype)
        op.operands[number] = found[0]
        return True
    return False


def _through_product(block: Block, op: row.Sum) -> bool:
    product = _op(op.x)
    if not isinstance(product, math.Mul):
        return False
    for x, y in ((product.a, product.b), (product.b, product.a)):
        linear, added = _linear(y)
        if linear is None or not _has_transposed(block, x, linear):
            continue
        with inserting_before(block, op):
            back = create_one(
                linear.name,
                x,
                *linear.operands[1:],
                block=block,
                **{**linear.attributes, "transposed": not linear.transposed},
            )
            total = create_one("row.sum", back * linear.x)
            for vector in added:
                total = total + create_one("row.sum", x * vector)
        replace_op(block, op, [total])
        return True
    return False


def _linear(value: Value) -> tuple[slot.Product | None, list[Value]]:
    """The product that a value is, and what was added to it."""
    op = _op(_unrounded(value))
    if isinstance(op, slot.Product):
        return op, []
    if isinstance(op, math.Add):
        for a, b in ((op.a, op.b), (op.b, op.a)):
            product = _op(a)
            if isinstance(product, slot.Product) and isinstance(_op(b), slot.ExpertRows):
                return product, [b]
    return None, []


def _has_transposed(block: Block, x: Value, linear: slot.Product) -> bool:
    """Whether backward computes the transposed product of x anyway, perhaps of x times a number a row."""
    for op in block.ops:
        if isinstance(op, slot.Product) and op.weight is linear.weight and op.transposed is not linear.transposed:
            found = _factored(op.x)
            if op.x is x or (found is not None and found[0] is x):
                return True
    return False
