"""The same router for another number of experts."""

from __future__ import annotations

from moesaic.ir.core import Block, Function, Module, Value
from moesaic.ir.errors import InputError
from moesaic.ir.types import TensorType
from moesaic.ir.verifier import verify_module

_COUNTS = ("size", "experts")
"""Attributes that say how many experts there are."""


def with_experts(module: Module, experts: int) -> Module:
    """A declared router [T, E] with so many experts in place of E; everything else stays.

    Raises:
        InputError: the function is no router, or `experts` is not positive.
        DiagnosticError: an op does not go with so many, such as more picks than experts.
    """
    old = module.entry
    first = old.arguments[0].type if old.arguments else None
    count = first.shape[-1] if first is not None and first.rank == 2 and first.leading == "T" else None
    if not isinstance(count, int) or any(a.type.rank == 3 for a in old.arguments):
        raise InputError(
            f"@{old.name} is no router: its first input must be logits [T, E], with no matrices beside; declare the "
            "layer with another number of experts instead"
        )
    if experts < 1:
        raise InputError(f"a router has 1 expert or more, found {experts}")

    def resized(type: TensorType) -> TensorType:
        return TensorType(tuple(experts if size == count else size for size in type.shape), type.dtype)

    body = Block()
    values: dict[Value, Value] = {a: body.add_argument(resized(a.type), a.name) for a in old.arguments}
    for op in old.body.ops:
        attributes = {n: experts if n in _COUNTS and v == count else v for n, v in op.attributes.items()}
        operands = [values.get(v, v) for v in op.operands]  # constants are no values of the function
        made = type(op)(operands, attributes, location=op.location, result_names=[r.name for r in op.results])
        body.append(made)
        values |= dict(zip(op.results, made.results, strict=True))
    found = Module([Function(old.name, body, old.result_names)])
    verify_module(found)
    return found
