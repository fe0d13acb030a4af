"""The parameters of a kernel, as its text asks for them, and what a launch passes for each."""

from __future__ import annotations

import math
from collections.abc import Iterable

from moesaic.codegen.kernel import Argument, TensorMap
from moesaic.codegen.lines import STORAGE, Line
from moesaic.codegen.names import Names
from moesaic.ir.core import Block, BlockArgument, Value, columns_of
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops import slot
from moesaic.ir.ops.launch import Kernel


class Parameters(Names):
    """Declarations for the template and arguments for the launch, in the order of asking; and all other names.

    Args:
        op: the kernel.
        taken: names that its template or its helpers use.
    """

    def __init__(self, op: Kernel, taken: Iterable[str] = ()) -> None:
        super().__init__(("tokens", *taken))
        self.op = op
        aligned = op.configuration.get("alignment", "")
        self.alignment = [int(a) for a in aligned.split(",")] if aligned else []
        self.lines: list[Line] = []
        self.arguments: list[Argument] = []
        self._asked: dict[tuple[str, int, TensorMap | None], str] = {}

    @property
    def region(self) -> Block:
        if self.op.region is None:
            raise InternalError(f"{self.op.symbol}: a kernel without a region")
        return self.op.region

    def index(self, value: Value) -> int:
        """The operand that an argument of the region stands for."""
        assert isinstance(value, BlockArgument)
        return self.region.arguments.index(value)

    def given(self, index: int) -> Value:
        return self.op.operands[index]

    def align(self, index: int) -> int:
        """Bytes that the rows of an operand are aligned to."""
        given = self.given(index)
        size = given.type.dtype.bytes
        if index < self.op.reads and isinstance(given, BlockArgument) and index < len(self.alignment):
            return self.alignment[index]
        return math.gcd(16, columns_of(given) * size)

    def pointer(self, index: int, *, written: bool | None = None) -> str:
        """The address of an operand; `written` where it is not as its number says."""
        const = index < self.op.reads if written is None else not written
        declared = f"{'const ' if const else ''}{storage(self.op, index)}* __restrict__ "
        return self._ask("pointer", index, f"{self._base(index)}_ptr", declared, _shape(self.given(index)))

    def stride(self, index: int, name: str = "") -> str:
        """Elements between rows of an operand, or its matrices: a parameter where the caller decides, and a number
        elsewhere."""
        given = self.given(index)
        if index < self.op.reads and isinstance(given, BlockArgument) and given.type.rank > 1:
            why = f"elements between {'matrices' if given.type.rank == 3 else 'rows'}"
            return self._ask("stride", index, name or f"{self._base(index)}_stride", "long long ", why)
        columns = 1
        for size in given.type.shape[1:]:
            assert isinstance(size, int)
            columns *= size
        return f"{columns}LL"

    def rows_pointer(self, index: int) -> tuple[str, str]:
        """The address of an operand, and the elements between its rows."""
        return self.pointer(index), self.stride(index)

    def counts_and_offsets(self, op: slot.GroupedLinear | slot.GroupedWgrad) -> tuple[str, str]:
        """The addresses of the rows in use of each expert, and of its first one."""
        return self.pointer(self.index(op.counts)), self.pointer(self.index(op.offsets))

    def row_stride(self, index: int) -> str:
        """Elements between the rows of the matrices [E, m, n] of an operand."""
        name = f"{self.given(index).name}_row_stride"
        return self._ask("inner_stride", index, name, "long long ", "elements between rows")

    def tensor_map(self, index: int, box_rows: int, box_columns: int = 64) -> str:
        """How the copy engine finds an operand [E, m, n] or [R, n]; boxes have so many rows and columns."""
        given = self.given(index)
        *outer, rows, columns = given.type.shape
        matrices = outer[0] if outer else 1
        assert isinstance(columns, int) and isinstance(matrices, int)
        known = rows if isinstance(rows, int) else 0
        map = TensorMap(columns, known, matrices, box_rows, box_columns, given.type.dtype.value)
        name = f"{given.name or ('in' if index < self.op.reads else 'out')}_map"
        return self._ask(
            "tensor_map", index, name, "const __grid_constant__ moesaic::TensorMap ", _shape(given), map=map
        )

    def rows(self, name: str, index: int, why: str = "") -> str:
        """The number of rows of an operand."""
        return self._ask("rows", index, name, "long long ", why, keep=True)

    def tokens(self) -> str:
        """T."""
        return self._ask("tokens", -1, "tokens", "long long ", "", keep=True)

    def counter(self) -> str:
        """The address of the count of items that blocks have taken; empty where they have them in turn."""
        index = self.op.counter
        return "" if index is None else self._ask("pointer", index, "items_taken", "int* __restrict__ ", "0 at first")

    def zeroed(self) -> list[str]:
        """Lines that set the counters of later kernels to 0."""
        first = len(self.op.operands) - self.op.zeroes
        pointers = [
            self._ask("pointer", index, "items_of_later", "int* __restrict__ ", "a later kernel's count")
            for index in range(first, len(self.op.operands))
        ]
        if not pointers:
            return []
        stores = [f"  moesaic::store_one({pointer}, 0);" for pointer in pointers]
        return ["if (blockIdx.x == 0 && threadIdx.x == 0) {", *stores, "}"]

    def _base(self, index: int) -> str:
        """What an operand is called: outside, or inside of the region."""
        read = index < self.op.reads
        inside: list[Value] = []
        if self.op.region is not None:
            inside = [*self.op.region.arguments[: self.op.reads], *self.op.region.terminator.operands]
        name = self.given(index).name or (inside[index].name if index < len(inside) else "")
        return name or ("in" if read else "out")

    def _ask(
        self, kind: str, index: int, name: str, type: str, why: str, keep: bool = False, map: TensorMap | None = None
    ) -> str:
        key = (kind, index, map)
        if key not in self._asked:
            self._asked[key] = name if keep else self.unique(name)
            self.lines.append(Line(declaration=f"{type}{self._asked[key]}", why=why))
            self.arguments.append(Argument(kind, index, map))
        return self._asked[key]


def storage(op: Kernel, index: int) -> str:
    """C++ type of the elements of an operand."""
    dtype = op.operands[index].type.dtype
    if dtype not in STORAGE:
        known = ", ".join(d.value for d in STORAGE)
        raise UnsupportedError(
            f"{op.symbol}: {op.operands[index].type} has no form in a kernel; element types: {known}"
        )
    return STORAGE[dtype]


def _shape(value: Value) -> str:
    return f"[{', '.join(map(str, value.type.shape))}]"
