"""``save-products``: forward hands over what backward must not compute twice: a dispatch, products, picks' weights.

A product leaves in the storage type of its operands, before anything elementwise is done with it: that is computed
again in the epilogue which needs it, from bytes that are loaded anyway. With ``recompute=h`` backward computes
products again, too, and only the dispatch is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Block, Function, Module, OpResult, Value, create_one
from moesaic.ir.errors import InputError
from moesaic.ir.ops import math, slot
from moesaic.passes.choose_saved import value_keys
from moesaic.passes.dce import sweep
from moesaic.passes.differentiate import SUFFIX
from moesaic.passes.manager import Pass, PassContext
from moesaic.passes.rewriting import inserting_before
from moesaic.passes.row_part import row_part


@dataclass(frozen=True)
class SaveProducts(Pass):
    """Makes arguments of backward, and results of forward, of a dispatch and of products.

    Options:
        recompute: ``h`` if backward is to compute products again; empty if they are kept.
        kept: what a backward function that was lowered before takes, inputs and results of its forward function, from
            which this one must do; empty if this pass is free to choose.
    """

    name: ClassVar[str] = "save-products"

    recompute: str = ""
    kept: tuple[str, ...] = ()

    def run(self, module: Module, context: PassContext) -> bool:
        if self.recompute not in ("", "h"):
            raise InputError(f"save-products: recompute must be h or nothing, found {self.recompute!r}")
        forward = module.entry
        if not module.has_function(forward.name + SUFFIX):
            return False
        backward = module.function(forward.name + SUFFIX)
        if not any(op.name.startswith("slot.") for op in backward.body.ops):
            return False  # a router alone: choose-saved does it
        known = {key: value for value, key in value_keys(forward.body).items()}
        keys = value_keys(backward.body)
        kept: list[str] = []

        def hand_over(wanted: Value) -> None:
            if name := self._hand_over(forward, backward, known[keys[wanted]], wanted):
                kept.append(name)

        for value in _repeated(backward.body, keys, known):
            if isinstance(value.op, slot.Dispatch):
                hand_over(value)
        sweep(backward.body)
        part = row_part(backward.body)
        for value in _repeated(backward.body, keys, known):
            users = backward.body.users(value)
            if isinstance(value.op, slot.Product):
                is_logits = value.type.shape[-1] == 1 or any(user in part for user in users)  # of a gate, of a router
                if not self.recompute or is_logits:
                    hand_over(value)
            elif value.op in part and not all(user in part for user in users):
                hand_over(value)  # what a router gives to experts: their backward comes before its own
        sweep(backward.body)
        used = {v for op in backward.body.ops for v in op.operands}
        backward.body.arguments = [a for a in backward.body.arguments if a in used]
        if kept:
            context.remarks.append(f"save-products: keeps {', '.join(kept)}")
        return bool(kept)

    def _hand_over(self, forward: Function, backward: Function, made: Value, wanted: Value) -> str:
        assert isinstance(made, OpResult)
        stored = _stored(forward.body, made)
        name = _name(forward, stored, made)
        if self.kept and name not in self.kept:
            return ""
        if stored not in forward.returned:
            if isinstance(stored, OpResult):
                stored.name = stored.name or name
            forward.returned.append(stored)
            forward.result_names.append(name)
        given = (a for a in backward.body.arguments if a.name == name)  # a sum over tokens that a loss needs, too
        replaced: Value = next(given, None) or backward.body.add_argument(stored.type, name)
        if replaced.type.dtype is not wanted.type.dtype:
            with inserting_before(backward.body, backward.body.ops[0]):
                replaced = create_one("math.cast", replaced, dtype=wanted.type.dtype.value)
        backward.body.replace({wanted: replaced})
        return name


def _repeated(body: Block, keys: Mapping[Value, str], known: Mapping[str, Value]) -> list[OpResult]:
    """The values in use that backward computes again."""
    values = [r for op in body.ops for r in op.results]
    return [v for v in values if v in keys and keys[v] in known and body.users(v)]


def _stored(body: Block, made: OpResult) -> Value:
    """A value as it is kept: a product in the type of its operands, but logits (of routers, of gates) as they are."""
    if not isinstance(made.op, slot.Product) or made.op.x.type.dtype is made.type.dtype or made.type.shape[-1] == 1:
        return made
    part = row_part(body)
    if any(user in part for user in body.users(made)):
        return made
    dtype = made.op.x.type.dtype
    for user in body.users(made):
        if isinstance(user, math.Cast) and user.result.type.dtype is dtype:
            return user.result
    after = body.ops[body.ops.index(made.op) + 1]
    with inserting_before(body, after):
        return create_one("math.cast", made, dtype=dtype.value)


def _name(forward: Function, stored: Value, made: OpResult) -> str:
    if stored in forward.returned:
        return forward.result_names[forward.returned.index(stored)]
    base = f"saved_{made.name or ('product' if isinstance(made.op, slot.Product) else 'value')}"
    name, number = base, 2
    while name in forward.result_names:
        name = f"{base}{number}"
        number += 1
    return name
