"""The parameters of a kernel, as a generator adds them, and what a launch passes for each."""

from __future__ import annotations

from collections.abc import Iterable

from moesaic.codegen.kernel import Argument
from moesaic.codegen.row_program import STORAGE, Line
from moesaic.ir.core import BlockArgument
from moesaic.ir.errors import UnsupportedError
from moesaic.ir.ops.launch import Kernel


class Parameters:
    """Declarations for the template, arguments for the launch, and names that no other has."""

    def __init__(self, op: Kernel, taken: Iterable[str] = ()) -> None:
        self.op = op
        self.lines: list[Line] = []
        self.arguments: list[Argument] = []
        self.taken = {"tokens", "rows", "moesaic", *taken}

    def pointer(self, index: int) -> str:
        """The address of an operand; names the parameter after it."""
        given = self.op.operands[index]
        read = index < self.op.reads
        name = self.unique(f"{given.name or ('in' if read else 'out')}_ptr")
        shape = f"[{', '.join(map(str, given.type.shape))}]"
        declaration = f"{'const ' if read else ''}{storage(self.op, index)}* __restrict__ {name}"
        self._add(declaration, Argument("pointer", index), shape)
        return name

    def rows_pointer(self, index: int) -> tuple[str, str]:
        """The address of an operand, and the elements between its rows: what a kernel has written is dense."""
        name = self.pointer(index)
        given = self.op.operands[index]
        if not isinstance(given, BlockArgument):
            return name, f"{given.type.shape[1]}LL"
        stride = self.unique(f"{name.removesuffix('_ptr')}_stride")
        self._add(f"long long {stride}", Argument("stride", index), "elements between rows")
        return name, stride

    def rows(self, name: str, index: int, why: str) -> str:
        """The number of rows of an operand."""
        self._add(f"long long {name}", Argument("rows", index), why)
        return name

    def tokens(self) -> None:
        self._add("long long tokens", Argument("tokens"), "")

    def unique(self, base: str) -> str:
        name, number = base, 2
        while name in self.taken:
            name = f"{base}{number}"
            number += 1
        self.taken.add(name)
        return name

    def _add(self, declaration: str, argument: Argument, why: str) -> None:
        self.lines.append(Line(declaration=declaration, why=why))
        self.arguments.append(argument)


def storage(op: Kernel, index: int) -> str:
    """C++ type of the elements of an operand."""
    dtype = op.operands[index].type.dtype
    if dtype not in STORAGE:
        known = ", ".join(d.value for d in STORAGE)
        raise UnsupportedError(
            f"{op.symbol}: {op.operands[index].type} has no form in a kernel; element types: {known}"
        )
    return STORAGE[dtype]
