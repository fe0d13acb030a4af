"""``canonicalize``: identities, constants, and a word about declarations that cannot mean what they say."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Block, Constant, Module, Op, Value, create_one
from moesaic.ir.ops import math, row
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.rewriting import in_every_block, inserting_before, replace_op

_NEGLIGIBLE = 1e-6
"""What a divisor may have added, or be at least, and still be the sum itself for any weight that counts."""


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Applies the rules below until none does."""

    name: ClassVar[str] = "canonicalize"

    def run(self, module: Module, context: PassContext) -> bool:
        return in_every_block(module, lambda block: self._run_block(block, context))

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
    try:
        a, b = _float32(a), _float32(b)  # as the device holds them
        if isinstance(op, math.Div):
            if b == 0:
                return None
            exact = a / b
        else:
            exact = a + b if isinstance(op, math.Add) else a - b if isinstance(op, math.Sub) else a * b
        return Constant(_float32(exact))
    except OverflowError:
        return None  # leave it to the arithmetic of the device


def _float32(x: float) -> float:
    """The nearest float32.

    Raises:
        OverflowError: it would be infinite, and `x` is not.
    """
    rounded: float = struct.unpack("<f", struct.pack("<f", x))[0]
    return rounded


def _negation(op: Op, context: PassContext) -> Value | None:
    x = op.operands[0]
    if isinstance(x, Constant):
        return Constant(-x.value)
    inner = getattr(x, "op", None)
    if isinstance(inner, math.Neg) and inner.x.type == op.results[0].type:  # else the first rounds up to float32
        return inner.x
    return None


def _cast(op: Op, context: PassContext) -> Value | None:
    return op.operands[0] if op.operands[0].type == op.results[0].type else None


def _broadcast(op: Op, context: PassContext) -> Value | None:
    x = op.operands[0]
    return x if x.type == op.results[0].type else None


def _normalize(op: Op, context: PassContext) -> Value | None:
    """One weight divided by itself is 1 (0 stays 0, NaN and infinity give NaN): no gradient reaches the router."""
    assert isinstance(op, row.Normalize | row.LpNormalize)
    if op.x.type.shape[-1] != 1:
        return None
    if isinstance(op, row.Normalize) and max(op.eps, op.min) > _NEGLIGIBLE:
        return None
    _warn(
        context,
        f"{op.name} over one pick is the constant 1: with top_k = 1 the router gets no gradient through its weights; "
        "leave the normalisation out, or pick more experts",
    )
    one: Value | float = 1.0
    if isinstance(op, row.LpNormalize):
        one = create_one("math.select", create_one("math.less", op.x, 0.0), -1.0, 1.0)
    elif op.eps > 0 or op.min > 0:
        return None
    finite = create_one("math.equal", op.x - op.x, 0.0)
    not_a_number = create_one("math.select", finite, one, float("nan"))
    return create_one("math.select", create_one("math.equal", op.x, 0.0), 0.0, not_a_number)


def _softmax(op: Op, context: PassContext) -> Value | None:
    assert isinstance(op, row.Softmax)
    picked = getattr(op.x, "op", None)
    if op.x.type.shape[-1] == 1 and isinstance(picked, row.TopK | row.Gather):
        _warn(
            context,
            f"{op.name} over one pick is the constant 1: with top_k = 1 and order='topk_then_score' the router gets "
            "no gradient through its weights; score before top-k, or pick more experts",
        )
    return None


def _warn(context: PassContext, message: str) -> None:
    """Once, though rules are tried again after every change."""
    if message not in context.warnings:
        context.warnings.append(message)


_RULES: dict[type[Op], Rule] = {
    math.Add: _arithmetic,
    math.Sub: _arithmetic,
    math.Mul: _arithmetic,
    math.Div: _arithmetic,
    math.Neg: _negation,
    math.Cast: _cast,
    math.Broadcast: _broadcast,
    row.Normalize: _normalize,
    row.LpNormalize: _normalize,
    row.Softmax: _softmax,
}
