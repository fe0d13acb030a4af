"""``differentiate``: derives the backward function from the ops' gradient rules.

``@f(inputs) -> (results)`` gets a sibling ``@f_backward(inputs, d_<result>..., sums...) -> (d_<input>...)`` that
recomputes what it needs from the inputs. ``choose-saved`` decides later what forward keeps for it instead. Only sums
over tokens are handed over from the start, since a row cannot wait for what all rows make. An input that no gradient
reaches (a selection bias, say) has no ``d_`` result: its gradient is structurally zero.

The gradient of an input named in ``into`` is added to an input ``main_<name>`` of float32 instead, without being
rounded before. The sum is a result of that name, and is written into the input. That of an input named in ``without``
nobody asks for, and nothing is computed for it alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.ir.core import Block, Constant, Function, Module, OpResult, Return, Value, create_one
from moesaic.ir.errors import InputError, UnsupportedError
from moesaic.ir.ops import math
from moesaic.ir.ops.col import ColumnReduction, Total
from moesaic.ir.types import Dim, DType, TensorType, broadcast_shapes
from moesaic.passes.dce import sweep
from moesaic.passes.manager import Pass, PassContext

SUFFIX = "_backward"


@dataclass(frozen=True)
class Differentiate(Pass):
    """Reverse mode over the first function of the module.

    Options:
        cotangents: names of the results that have a cotangent; empty for every float result.
        into: inputs whose gradient is added to a sum that exists.
        without: inputs that get no gradient.
        kept: what a backward function that was lowered before takes: sums among it are handed out by the same names,
            for the passes that decide what else is kept.
    """

    name: ClassVar[str] = "differentiate"
    requires: ClassVar[str | None] = "summed"
    establishes: ClassVar[str | None] = "summed"

    cotangents: tuple[str, ...] = ()
    into: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def run(self, module: Module, context: PassContext) -> bool:
        forward = module.entry
        if module.has_function(forward.name + SUFFIX):
            return False
        backward = derive(forward, self.cotangents, self.into, self.without)
        if backward is None:
            context.remarks.append("differentiate: no gradient reaches an input; there is no backward function")
            return False
        module.functions.append(backward)
        taken = {a.name for a in backward.arguments}
        for value, name in _sums(forward).items():
            if name in (*taken, *self.kept) and name not in forward.result_names:
                forward.returned.append(value)
                forward.result_names.append(name)
        return True


def derive(
    forward: Function, cotangents: tuple[str, ...] = (), into: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> Function | None:
    """The backward function, or ``None`` if no gradient reaches any input.

    It takes the sums over tokens that it needs by the names of the results of `forward`, or by ``saved_<name>``.

    Raises:
        InputError: a name in `cotangents` is not a float result, or one in `into` or `without` no float input.
    """
    block = Block()
    copies: dict[Value, Value] = {a: block.add_argument(a.type, a.name) for a in forward.arguments}
    for op in forward.body.ops[:-1]:
        block.append(op.clone(copies))
    originals = list(block.ops)

    flowing: dict[Value, Value] = {}
    results = dict(zip(forward.result_names, forward.returned, strict=True))
    floats = [n for n, v in results.items() if v.type.dtype.is_float]
    for name in cotangents:
        if name not in floats:
            raise InputError(f"differentiate: {name!r} is not a float result of @{forward.name}; these are: {floats}")
    for name in cotangents or floats:
        value = results[name]
        if any(a.name == f"d_{name}" for a in block.arguments):
            raise InputError(
                f"differentiate: two inputs of @{forward.name}{SUFFIX} would be called 'd_{name}'; name each result "
                "once in cotangents, and no input after a cotangent"
            )
        argument = block.add_argument(value.type, f"d_{name}")
        if not isinstance(value, Constant):
            _accumulate(flowing, copies[value], argument)

    inputs = [a.name for a in forward.arguments if a.type.dtype.is_float]
    for name in (*into, *without):
        if name not in inputs:
            raise InputError(f"differentiate: {name!r} is not a float input of @{forward.name}; these are: {inputs}")

    for op in reversed(originals):
        incoming = [flowing.get(r) for r in op.results]
        if all(c is None for c in incoming):
            continue
        shaped = [
            c if c is None or c.type.shape == r.type.shape else create_one("math.broadcast", c, r, block=block)
            for c, r in zip(incoming, op.results, strict=True)
        ]
        for used, gradient in zip(op.operands, op.gradient(*shaped), strict=True):
            if gradient is not None and not isinstance(used, Constant) and used.type.dtype.is_float:
                _accumulate(flowing, used, _reduced(gradient, used.type.shape, op.name))
                _name(flowing[used], used)

    names: list[str] = []
    returned: list[Value] = []
    for argument in block.arguments[: len(forward.arguments)]:
        total = flowing.get(argument)
        if total is None or argument.name in without:
            continue
        if total.type.shape != argument.type.shape:
            total = create_one("math.broadcast", total, argument, block=block)
        if argument.name in into:
            main = block.add_argument(TensorType(argument.type.shape, DType.F32), f"main_{argument.name}")
            names.append(main.name)
            returned.append(create_one("slot.accumulate", main, total, block=block))
            continue
        if total.type.dtype is not argument.type.dtype:
            total = create_one("math.cast", total, dtype=argument.type.dtype.value, block=block)
        total.name = total.name or f"d_{argument.name}"
        names.append(f"d_{argument.name}")
        returned.append(total)
    if not returned:
        return None
    block.append(Return(returned))
    _skip_repetitions(block)
    sweep(block)
    for value, name in _sums(forward).items():
        copy = copies[value]
        if isinstance(copy, OpResult) and copy.op in block.ops:
            block.replace({copy: block.add_argument(copy.type, name)})
    sweep(block)
    return Function(forward.name + SUFFIX, block, names)


def _skip_repetitions(block: Block) -> None:
    """Lets column values be repeated where they are used: a broadcast would need a sum for its shape alone."""
    for op in block.ops:
        if not isinstance(op, math.Elementwise) or isinstance(op, math.Broadcast) or op.results[0].type.leading == "T":
            continue
        for number, value in enumerate(op.operands):
            if isinstance(value, OpResult) and isinstance(value.op, math.Broadcast):
                others = [v.type.shape for i, v in enumerate(op.operands) if i != number]
                if broadcast_shapes(value.op.x.type.shape, *others) == op.results[0].type.shape:
                    op.operands[number] = value.op.x


def _sums(forward: Function) -> dict[Value, str]:
    """The sums over tokens of a function, and what each is called when it is handed out."""
    named: dict[Value, str] = {}
    for op in forward.body.ops:
        if isinstance(op, ColumnReduction | Total):
            value = op.result
            if value in forward.returned:
                named[value] = forward.result_names[forward.returned.index(value)]
                continue
            name = f"saved_{value.name or 'sums'}"
            while name in forward.result_names or name in named.values():
                name += "_"
            named[value] = name
    return named


def _accumulate(flowing: dict[Value, Value], value: Value, gradient: Value) -> None:
    before = flowing.get(value)
    flowing[value] = gradient if before is None else before + gradient


def _name(gradient: Value, value: Value) -> None:
    """Calls the gradient of an intermediate value after it, for whoever reads what is generated."""
    if isinstance(value, OpResult) and value.name and isinstance(gradient, OpResult) and not gradient.name:
        gradient.name = f"d_{value.name}"


def _reduced(gradient: Value, shape: tuple[Dim, ...], op: str) -> Value:
    """Sums a cotangent over the axes along which its operand was repeated."""
    found = gradient.type.shape
    if found == shape or len(found) < len(shape):
        return gradient
    if len(found) == 2 and len(shape) == 2 and shape[1] == 1:
        return create_one("row.sum", gradient)
    if len(found) == 2 and found[1:] == shape:
        return create_one("col.sum", gradient)
    if shape == () and gradient.type.leading != "T":
        return create_one("col.total", gradient)
    if shape == () and len(found) == 2:
        return create_one("col.total", create_one("col.sum", create_one("row.sum", gradient)))
    raise UnsupportedError(
        f"differentiate: {op} repeats an operand of shape {list(map(str, shape))} to {list(map(str, found))}; "
        "gradients are summed over experts ([T, 1]), over tokens ([E]), or over both"
    )
