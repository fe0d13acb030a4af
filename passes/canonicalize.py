"""``canonicalize``: identities, constants, and a word about declarations that cannot mean what they say."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Block, Constant, Module, Op, Value, create_one
from moesaic.ir.ops import math, row
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.rewriting import blocks, inserting_before, replace_op


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Applies the rules below until none does."""

    name: ClassVar[str] = "canonicalize"

    def run(self, module: Module, context: PassContext) -> bool:
        return any([self._run_block(block, context) for block in blocks(module)])

    def _run_block(self, block: Block, context: PassContext) -> bool:
        changed = False
        while True:
            for op in block.ops:
                rule = _RULES.get(type(op))
                if rule is None:
                    continue
                with inserting_before(block, op):
                    value = rule(op, context)
                if value is not None:
                    replace_op(block, op, [value])
                    changed = True
                    break
            else:
                return changed


Rule = Callable[[Op, PassContext], Value | None]


def _arithmetic(op: Op, context: PassContext) -> Value | None:
    a, b = op.operands
    if isinstance(a, Constant) and isinstance(b, Constant):
        return _folded(op, a.value, b.value)
    neutral = 1.0 if isinstance(op, math.Mul | math.Div) else None
    if neutral is not None and isinstance(b, Constant) and b.value == neutral and a.type == op.results[0].type:
        return a
    if isinstance(op, math.Mul) and isinstance(a, Constant) and a.value == 1.0 and b.type == op.results[0].type:
        return b
    return None


def _folded(op: Op, a: float, b: float) -> Value | None:
    if isinstance(op, math.Div):
        if b == 0:
            return None
        exact = a / b
    else:
        exact = a + b if isinstance(op, math.Add) else a - b if isinstance(op, math.Sub) else a * b
    try:
        return Constant(struct.unpack("<f", struct.pack("<f", exact))[0])
    except OverflowError:
        return None  # leave it to the arithmetic of the device


def _negation(op: Op, context: PassContext) -> Value | None:
    x = op.operands[0]
    if isinstance(x, Constant):
        return Constant(-x.value)
    inner = getattr(x, "op", None)
    return inner.operands[0] if isinstance(inner, math.Neg) else None


def _cast(op: Op, context: PassContext) -> Value | None:
    return op.operands[0] if op.operands[0].type == op.results[0].type else None


def _broadcast(op: Op, context: PassContext) -> Value | None:
    x = op.operands[0]
    return x if x.type == op.results[0].type else None


def _normalize(op: Op, context: PassContext) -> Value | None:
    """One weight divided by itself is 1 (0 stays 0, NaN stays NaN): no gradient reaches the router."""
    assert isinstance(op, row.Normalize)
    if op.x.type.shape[-1] != 1:
        return None
    context.warnings.append(
        f"{op.name} over one pick is the constant 1: with top_k = 1 the router gets no gradient through its weights; "
        "leave the normalisation out, or pick more experts"
    )
    if op.eps > 0 or op.min > 0:
        return None
    not_a_number = create_one("math.select", create_one("math.equal", op.x, op.x), 1.0, float("nan"))
    return create_one("math.select", create_one("math.equal", op.x, 0.0), 0.0, not_a_number)


def _softmax(op: Op, context: PassContext) -> Value | None:
    assert isinstance(op, row.Softmax)
    picked = getattr(op.x, "op", None)
    if op.x.type.shape[-1] == 1 and isinstance(picked, row.TopK | row.Gather):
        message = (
            f"{op.name} over one pick is the constant 1: with top_k = 1 and order='topk_then_score' the router gets "
            "no gradient through its weights; score before top-k, or pick more experts"
        )
        if message not in context.warnings:
            context.warnings.append(message)
    return None


_RULES: dict[type[Op], Rule] = {
    math.Add: _arithmetic,
    math.Sub: _arithmetic,
    math.Mul: _arithmetic,
    math.Div: _arithmetic,
    math.Neg: _negation,
    math.Cast: _cast,
    math.Broadcast: _broadcast,
    row.Normalize: _normalize,
    row.Softmax: _softmax,
}
