"""IR to text. What is printed parses back to an equal module; values keep their names where these are free.

::

    moe.func @route(%logits: tensor<Tx8xf32>) -> (weights: tensor<Tx2xf32>) {
      %s = math.sigmoid %logits : tensor<Tx8xf32>
      %v, %i = row.topk %s {k = 2} : tensor<Tx2xf32>, tensor<Tx2xi32>
      return %v
    }
"""

from __future__ import annotations

import re

from moesaic.ir.attributes import format_attributes, format_float
from moesaic.ir.core import Block, Constant, Function, Module, Op, Value

_INDENT = "  "


def print_module(module: Module) -> str:
    """Text of all functions, separated by blank lines."""
    return "\n".join(print_function(f) for f in module.functions)


def print_function(function: Function) -> str:
    """Text of one function."""
    names = _Names()
    arguments = ", ".join(f"%{names.define(a)}: {a.type}" for a in function.arguments)
    results = ", ".join(f"{n}: {t}" for n, t in zip(function.result_names, function.result_types, strict=True))
    lines = [f"moe.func @{function.name}({arguments}) -> ({results}) {{"]
    _print_ops(function.body, names, 1, lines)
    lines.append("}")
    return "\n".join(lines) + "\n"


def print_op(op: Op) -> str:
    """Text of one op on its own, for messages."""
    names = _Names()
    lines: list[str] = []
    for operand in op.operands:
        names.use(operand)
    _print_op(op, names, 0, lines)
    return "\n".join(lines)


def _print_ops(block: Block, names: _Names, depth: int, lines: list[str]) -> None:
    for op in block.ops:
        _print_op(op, names, depth, lines)


def _print_op(op: Op, names: _Names, depth: int, lines: list[str]) -> None:
    operands = ", ".join(names.use(v) for v in op.operands)
    results = ", ".join(f"%{names.define(r)}" for r in op.results)
    text = f"{results} = {op.name}" if results else op.name
    if operands:
        text += f" {operands}"
    if op.attributes:
        text += f" {format_attributes(op.attributes)}"
    types = ", ".join(str(r.type) for r in op.results)
    tail = f" : {types}" if types else ""
    if op.region is None:
        lines.append(_INDENT * depth + text + tail)
        return
    inner = _Names()  # regions see nothing from outside, so their names start afresh
    arguments = ", ".join(f"%{inner.define(a)}: {a.type}" for a in op.region.arguments)
    lines.append(_INDENT * depth + f"{text} ({arguments}) {{")
    _print_ops(op.region, inner, depth + 1, lines)
    lines.append(_INDENT * depth + "}" + tail)


class _Names:
    """Unique names in one block: the value's own if free, else with a number behind it."""

    def __init__(self) -> None:
        self._names: dict[Value, str] = {}
        self._taken: set[str] = set()
        self._next = 0

    def define(self, value: Value) -> str:
        if value in self._names:
            return self._names[value]
        base = re.sub(r"[^A-Za-z0-9_]", "_", value.name)
        name = base
        if base and not base[0].isdigit():
            number = 1
            while name in self._taken:
                name = f"{base}_{number}"
                number += 1
        else:
            while not name or name[0].isdigit():
                candidate = str(self._next)
                self._next += 1
                if candidate not in self._taken:
                    name = candidate
                    break
        self._taken.add(name)
        self._names[value] = name
        return name

    def use(self, value: Value) -> str:
        if isinstance(value, Constant):
            return format_float(value.value)
        return "%" + self.define(value)
