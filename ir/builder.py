"""Building a function from Python, equal in power to the text.

For example::

    b = Builder("route")
    x = b.input("logits", "tensor<Tx8xf32>")
    values, indices = b.op("row.topk", b.op("math.sigmoid", x), k=2)
    module = b.build(weights=values, indices=indices)
"""

from __future__ import annotations

from typing import Any

from moesaic.ir.core import Block, BlockArgument, Function, Module, OpResult, Return, Value, create
from moesaic.ir.errors import InputError
from moesaic.ir.types import TensorType
from moesaic.ir.verifier import verify_module


class Builder:
    """Collects one function. Values also take operators (``a * 2.5``) and the functions of ``moesaic.math``."""

    def __init__(self, name: str = "route") -> None:
        self.function = Function(name, Block())
        self._built = False

    def input(self, name: str, type: TensorType | str) -> BlockArgument:
        """Declares an input.

        Raises:
            InputError: the type does not parse, or the name is taken.
        """
        if any(a.name == name for a in self.function.arguments):
            raise InputError(f"input {name!r} is declared twice")
        parsed = TensorType.parse(type) if isinstance(type, str) else type
        return self.function.body.add_argument(parsed, name)

    def op(self, name: str, *operands: Value | float, named: str = "", **attributes: Any) -> Any:
        """Appends an op by name: its result, or a tuple of results if it has several.

        Raises:
            InputError, DiagnosticError: the op is unknown or its operands or attributes do not fit.
        """
        op = create(name, *operands, block=self.function.body, **attributes)
        results: list[OpResult] = op.results
        if named and len(results) == 1:
            results[0].name = named
        return results[0] if len(results) == 1 else tuple(results)

    def build(self, **results: Value) -> Module:
        """The module of this function with the given named results; may be called once.

        Raises:
            DiagnosticError: the function is not legal.
        """
        if self._built:
            raise InputError("build() was called before; make a new Builder")
        self._built = True
        for name, value in results.items():
            if isinstance(value, OpResult) and not value.name:
                value.name = name
        self.function.body.append(Return(list(results.values())))
        self.function.result_names = list(results)
        module = Module([self.function])
        verify_module(module)
        return module
