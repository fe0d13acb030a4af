"""Elementwise ops of a region as lines of CUDA: operands and conversions that kernels over picks and tokens share.

A thread has an element of each value, or a few neighbouring ones. Row programs and tiles are another matter: there each
value has a layout, over lanes or over a tile, which decides on its loop; see ``row_program`` and ``epilogue``.
"""

from __future__ import annotations

from collections.abc import Iterable

from moesaic.codegen.kernel import FusedOp
from moesaic.codegen.lines import STORAGE, comment, definition, fused_ops, literal, register
from moesaic.codegen.parameters import Parameters, storage
from moesaic.ir.core import Block, BlockArgument, Constant, Op, Value
from moesaic.ir.errors import InternalError
from moesaic.ir.ops import math, slot
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType
from moesaic.passes.row_layout import operands_read

_ROUNDED = (DType.BF16, DType.F16)


class Region:
    """The region of a kernel with the names its values have in the text.

    Attributes:
        op: the kernel.
        body: its region.
        parameters: of the kernel.
        arrays: values of which a thread has several, in an array with the index `v`.
        pointers: parameters of what is read, and of the distance between rows ("" where there are no rows).
    """

    def __init__(self, op: Kernel, taken: Iterable[str]) -> None:
        if op.region is None:
            raise InternalError(f"{op.symbol}: a kernel without a region")
        self.op = op
        self.body: Block = op.region
        self.parameters = Parameters(op, ("v", "rows", *taken))
        self.arrays: set[Value] = set()
        self.pointers: dict[Value, tuple[str, str]] = {}
        self._rounded: dict[Value, Value] = {
            inner.results[0]: inner.operands[0] for inner in self.body.ops if is_store_cast(self.body, inner)
        }

    def add_pointers(self, values: Iterable[Value]) -> None:
        """Parameters for those arguments of the region that are among the values, in their order."""
        wanted = set(values)
        for index, argument in enumerate(self.body.arguments):
            if argument not in wanted:
                continue
            if self.op.operands[index].type.rank == 2:
                self.pointers[argument] = self.parameters.rows_pointer(index)
            else:
                self.pointers[argument] = (self.parameters.pointer(index), "")

    def values_read(self) -> set[Value]:
        """What elementwise ops and results need the elements of."""
        read = set(self.body.terminator.operands)
        for inner in self.body.ops:
            if isinstance(inner, math.Elementwise):
                read.update(inner.operands[: operands_read(inner)])
        return read

    def align(self, value: Value) -> int:
        """Bytes that the address of every row of an argument is aligned to, at most 16."""
        assert isinstance(value, BlockArgument)
        index = self.body.arguments.index(value)
        known = self.parameters.alignment[index] if index < len(self.parameters.alignment) else 16
        return max(self.op.operands[index].type.dtype.bytes, min(known, aligned_rows(self.op, index)))

    def name(self, value: Value) -> str:
        return self.parameters.of(value)

    def unique(self, base: str) -> str:
        return self.parameters.unique(base)

    def read(self, value: Value) -> str:
        """An element of a value that is there."""
        if isinstance(value, Constant):
            return literal(value.value)
        value = self._rounded.get(value, value)
        return f"{self.name(value)}[v]" if value in self.arrays else self.name(value)

    def comment(self, op: Op) -> str:
        return comment(op, self.name)

    def results(self) -> list[tuple[int, Value, str]]:
        """Each value that is written: the number of its operand, itself, and the name of the pointer."""
        values = enumerate(self.body.terminator.operands, self.op.reads)
        return [(index, value, self.parameters.pointer(index)) for index, value in values]

    def fused_ops(self) -> tuple[FusedOp, ...]:
        """All ops of the region."""
        return fused_ops(self.body, self.name)

    def assignment(self, op: math.Elementwise) -> str:
        """A line that declares the result; empty where the store converts."""
        if op.results[0] in self._rounded:
            return ""
        return definition(op, self.read, self.name)

    def widened(self, value: Value, element: str) -> str:
        """An element as it is stored, in the type it has in registers."""
        return f"moesaic::to_float({element})" if register(value) == "float" else element

    def stored(self, index: int, value: Value) -> str:
        """An element of a value, in the type of the buffer it goes to."""
        return f"moesaic::to_element<{storage(self.op, index)}>({self.read(value)})"

    def storage(self, value: Value) -> str:
        return STORAGE[value.type.dtype]


def is_store_cast(body: Block, op: Op) -> bool:
    """Whether an op is a rounding whose only reader is the store, which converts: two numbers at a time, where the
    rounding would take one."""
    if not isinstance(op, math.Cast) or op.y.type.dtype not in _ROUNDED or isinstance(op.x, Constant | BlockArgument):
        return False
    if register(op.x) != "float":
        return False

    def is_stored(value: Value) -> bool:
        users = body.users(value)
        return all(u is body.terminator or (isinstance(u, slot.Join) and is_stored(u.y)) for u in users)

    return is_stored(op.y)


def aligned_rows(op: Kernel, index: int) -> int:
    """Bytes that every row of an operand is aligned to, at most 16, where rows follow one another in a buffer."""
    type = op.operands[index].type
    columns = type.shape[-1] if type.shape else 1
    assert isinstance(columns, int)
    size = columns * type.dtype.bytes
    return min(16, size & -size)
