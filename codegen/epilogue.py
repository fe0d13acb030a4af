"""What a kernel does with rows of slots or tokens, element by element: the epilogue of a product, or a kernel of its
own.

Values of a region have one of these shapes here. *Rows* [R, 1] are numbers of a row, computed once for it. *Columns*
[R, n] are the n columns that the kernel's tiles go over; *halves* [R, 2n] are as many gates and ups, of which a thread
holds those of the same column. What a row loads is written before the loop over its columns, what a column loads before
the loop over the neighbouring columns that a thread holds; in there, elementwise ops are lines.
"""

from __future__ import annotations

import math as python_math
from collections.abc import Callable, Sequence

from moesaic.codegen.elementwise import is_store_cast
from moesaic.codegen.lines import STORAGE, comment, literal, register
from moesaic.codegen.names import short_name
from moesaic.codegen.parameters import Parameters
from moesaic.codegen.target import Target
from moesaic.ir.core import BlockArgument, Constant, Op, OpResult, Value, columns_of
from moesaic.ir.errors import UnsupportedError
from moesaic.ir.ops import math, row, slot
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType
from moesaic.passes.product_shape import ProductShape

TILE_NAMES = (
    *("tile", "row", "column", "slot", "slots", "token", "expert"),
    *("left", "right", "i", "j", "v", "n"),
)
"""What else has a name in templates of tiles and rows."""


class Epilogue:
    """The lines of a region's elementwise ops, over a tile.

    Args:
        parameters: of the kernel.
        columns: n.
        vector: neighbouring columns that a thread holds at a time.
        computed: the value that the tile holds, and how its element is read: for each half.
        place: the C++ variable with a row's number: a slot, or a token.
        ahead: whether what a row reads is asked for as early as can be: its numbers, for all rows of a thread, before
            the product, and its columns all together. For tiles with registers to hold them.
        staged: the numbers of the boxes that an operand leaves by, if any does; see ``staging.py``.
        sum_parts: the partial sums of a row that are this tile's, each over as many of its columns.
    """

    def __init__(
        self,
        parameters: Parameters,
        columns: int,
        vector: int,
        computed: tuple[Value, Sequence[str]] | None,
        place: str = "slot",
        ahead: bool = False,
        staged: Callable[[int], Sequence[int]] | None = None,
        sum_parts: int = 1,
    ) -> None:
        self.parameters = parameters
        self.region = parameters.region
        self.columns = columns
        self.vector = vector
        self.whole = columns % vector == 0
        self.computed = computed
        self.place = place
        self.ahead = ahead
        self.staged = staged
        self.sum_parts = sum_parts
        self.names: dict[Value, str] = {}
        self.arrays: list[str] = []  # declarations of a number for each row, and what computes the numbers of a row
        self.numbers: list[str] = []
        self.for_row: list[str] = []
        self.held: list[str] = []  # declarations of what a row reads of its columns, and what reads a vector of it
        self.reads: list[str] = []
        self.loads: list[str] = []
        self.lines: list[str] = []
        self.stores: list[str] = []
        self.row_stores: list[str] = []
        self.sums: list[tuple[str, Value]] = []
        self.row_pointers: dict[str, str] = {}

    # --------------------------------------------------------------------------------------------------- values

    def is_row(self, value: Value) -> bool:
        return columns_of(value) == 1 and value.type.rank == 2 and not (self.columns == 1 and self._in_columns(value))

    def is_halves(self, value: Value) -> bool:
        return columns_of(value) == 2 * self.columns and self._has_halves

    def _in_columns(self, value: Value) -> bool:
        """Where there is one column only: whether a value is computed from the tile rather than from numbers of
        rows."""
        if self.computed is not None and value is self.computed[0]:
            return True
        if isinstance(value, BlockArgument) or not isinstance(value, OpResult):
            return isinstance(value, BlockArgument) and not self._is_number(value)
        if isinstance(value.op, slot.OfPick | row.Sum):
            return False
        return isinstance(value.op, slot.ExpertRows) or any(self._in_columns(v) for v in value.op.operands)

    def _is_number(self, value: Value) -> bool:
        given = self.parameters.given(self.parameters.index(value))
        return value.type.rank < 2 or given.type != value.type

    @property
    def _has_halves(self) -> bool:
        return any(isinstance(op, slot.Split | slot.Join) for op in self.region.ops)

    @property
    def in_turn(self) -> bool:
        """Whether gates and ups alternate."""
        return any(op.interleaved for op in self.region.ops if isinstance(op, slot.Split | slot.Join))

    def name(self, value: Value) -> str:
        if value not in self.names:
            self.names[value] = self.parameters.unique(value.name or short_name(value))
        return self.names[value]

    def parts(self, value: Value) -> list[str]:
        """The C++ of a value in the loop over neighbouring columns: one name, or that of the gate and of the up."""
        if isinstance(value, Constant):
            return [literal(value.value)]
        if self.computed is not None and value is self.computed[0]:
            return list(self.computed[1])
        if isinstance(value, OpResult) and isinstance(value.op, slot.Split):
            return [self.parts(value.op.x)[value.index]]
        if isinstance(value, OpResult) and isinstance(value.op, slot.Join):
            return [self.parts(value.op.gate)[0], self.parts(value.op.up)[0]]
        if isinstance(value, OpResult) and self._converted_by_store(value.op):
            return self.parts(value.op.operands[0])
        if self.is_row(value) or value.type.rank == 0:
            return [f"{self.name(value)}[i]" if self.ahead else self.name(value)]
        loaded = self._is_loaded(value)
        if self.is_halves(value):
            return [f"{self.name(value)}_{half}{'[v]' if loaded else ''}" for half in ("gate", "up")]
        return [f"{self.name(value)}{'[v]' if loaded else ''}"]

    def _is_loaded(self, value: Value) -> bool:
        return isinstance(value, BlockArgument) or (
            isinstance(value, OpResult) and isinstance(value.op, slot.ExpertRows | slot.Gather)
        )

    def _converted_by_store(self, op: Op) -> bool:
        return is_store_cast(self.region, op) and not self.is_row(op.results[0])

    # ----------------------------------------------------------------------------------------------------- emission

    def emit(self, skip: Sequence[Op]) -> None:
        """Writes the lines of all ops but `skip`, the product and its prologue."""
        read = {v for op in self.region.ops if op not in skip for v in op.operands[: _operands_read(op)]}
        for argument in self.region.arguments:
            if argument in read and self._belongs_to_rows(argument):
                self._load(argument)
        for op in self.region.ops[:-1]:
            if op in skip:
                continue
            if isinstance(op, slot.OfPick):
                self._of_pick(op)
            elif isinstance(op, slot.ExpertRows):
                self._expert_rows(op)
            elif isinstance(op, slot.Gather):
                self._gather(op)
            elif isinstance(op, row.Sum):
                self._sum(op)
            elif isinstance(op, math.Elementwise):
                self._elementwise(op)
            elif not isinstance(op, slot.Split | slot.Join):
                raise UnsupportedError(f"{op.name} has no form in the epilogue of a product")
        for number, value in enumerate(self.region.terminator.operands):
            self._store(number, value)

    def _belongs_to_rows(self, argument: BlockArgument) -> bool:
        """Whether an argument is loaded as it is: not through an op that says where."""
        users = self.region.users(argument)
        special = (slot.OfPick, slot.ExpertRows, slot.Gather, slot.Product, slot.Combine)
        return argument.type.dtype.is_float and any(not isinstance(u, special) for u in users)

    def row_pointer(self, index: int, place: str) -> str:
        """A pointer to an operand's row, made once a row."""
        pointer = self.parameters.pointer(index)
        key = f"{pointer}@{place}"
        if key not in self.row_pointers:
            name = self.parameters.unique(pointer.removesuffix("_ptr") + "_row")
            qualifier = "const " if index < self.parameters.op.reads else ""
            type = STORAGE[self.parameters.given(index).type.dtype]
            self.for_row.append(
                f"{qualifier}{type}* const {name} = {pointer} + {place} * {self.parameters.stride(index)};"
            )
            self.row_pointers[key] = name
        return self.row_pointers[key]

    def _load(self, value: BlockArgument) -> None:
        index = self.parameters.index(value)
        if value.type.rank == 0:
            self._number(value, f"moesaic::to_float(moesaic::load_one({self.parameters.pointer(index)}))")
        elif self.is_row(value):
            given = self.parameters.given(index)
            pointer = self.parameters.pointer(index)
            where = f"{pointer} + {self.place} * {self.parameters.stride(index)}"
            parts = columns_of(given)
            if parts == 1:
                self._number(value, f"moesaic::to_float(moesaic::load_one({where}))")
            else:  # in the order of the columns
                name = self._number(value, "0.0f", constant=False)
                to = self.numbers if self.ahead else self.for_row
                to.append(f"for (int p = 0; p < {parts}; ++p) {name} += moesaic::load_one({where} + p);")
        else:
            # A vector is the same for all rows.
            pointer = self.row_pointer(index, self.place) if value.type.leading else self.parameters.pointer(index)
            self._load_columns(value, pointer, self.parameters.align(index), value.type.dtype)

    def _number(self, value: Value, expression: str, note: str = "", constant: bool = True) -> str:
        """A number of a row, and how it is read."""
        name, type = self.name(value), register(value)
        if self.ahead:
            self.arrays.append(f"{type} {name}[Tile::kOwnRows];")
            self.numbers.append(f"{name}[i] = {expression};{note}")
            return f"{name}[i]"
        self.for_row.append(f"{'const ' if constant else ''}{type} {name} = {expression};{note}")
        return name

    def _load_columns(self, value: Value, pointer: str, align: int, held: DType | None = None) -> None:
        """Reads a vector of columns; where their type in memory is given, ahead of the others'."""
        # Biases of an expert beside it are numbers enough to hold.
        biased = any(isinstance(op, slot.ExpertRows) for op in self.region.ops)
        held = held if self.ahead and not biased else None
        base = f"{self.name(value)}_stored"
        if held is not None:
            base = self.parameters.unique(base)
            count = "2 * kVector" if self.is_halves(value) else "kVector"
            self.held.append(f"moesaic::Stored<{STORAGE[held]}, {count}> {base}[Tile::kOwnVectors];")
        if self.is_halves(value):
            gate, up = (f"{self.name(value)}_{half}" for half in ("gate", "up"))
            self.loads.append(f"float {gate}[kVector], {up}[kVector];")
            arguments = (
                f"kVector, /*align=*/{self._align_of_halves(value, align)}, /*whole=*/{_flag(self.whole)}, "
                f"/*half=*/kColumns, /*in_turn=*/{_flag(self.in_turn)}"
            )
            if held is None:
                self.loads.append(f"moesaic::load_halves<{arguments}>({pointer}, column, {gate}, {up});")
            else:
                self.reads.append(f"moesaic::read_halves<{arguments}>({pointer}, column, {base}[j]);")
                self.loads.append(
                    f"moesaic::take_halves<kVector, /*in_turn=*/{_flag(self.in_turn)}>({base}[j], {gate}, {up});"
                )
            return
        if columns_of(value) != self.columns:
            raise UnsupportedError(
                f"{self.parameters.op.symbol}: a value {value.type} beside tiles over {self.columns} columns"
            )
        name = self.name(value)
        self.loads.append(f"float {name}[kVector];")
        arguments = f"kVector, /*align=*/{self._align(value, align)}, /*whole=*/{_flag(self.whole)}"
        if held is None:
            self.loads.append(f"moesaic::load_columns<{arguments}>({pointer} + column, kColumns - column, {name});")
        else:
            self.reads.append(f"moesaic::read_columns<{arguments}>({pointer} + column, kColumns - column, {base}[j]);")
            self.loads.append(f"{base}[j].to_floats({name});")

    def _align(self, value: Value, align: int) -> int:
        return python_math.gcd(align, self.vector * value.type.dtype.bytes)

    def _align_of_halves(self, value: Value, align: int) -> int:
        size = value.type.dtype.bytes
        if self.in_turn:
            return python_math.gcd(align, 2 * self.vector * size)
        return python_math.gcd(self._align(value, align), self.columns * size)

    def _of_pick(self, op: slot.OfPick) -> None:
        weights, picks = self.parameters.index(op.x), self.parameters.index(op.picks)
        top_k = columns_of(op.x)
        pick = self.parameters.unique("pick")
        pointer = self.parameters.pointer(weights)
        to = self.numbers if self.ahead else self.for_row
        to.append(f"const int {pick} = moesaic::load_one({self.parameters.pointer(picks)} + slot);")
        stride = self.parameters.stride(weights)
        number = f"moesaic::pick_number</*top_k=*/{top_k}>({pointer}, {stride}, {pick})"
        self._number(op.y, number, f"  // {self._comment(op)}")

    def _expert_rows(self, op: slot.ExpertRows) -> None:
        index = self.parameters.index(op.x)
        pointer = f"{self.parameters.pointer(index)} + expert * {self.parameters.stride(index)}"
        # The storage type of the vector decides how it is aligned, not that of the value.
        align = python_math.gcd(self.parameters.align(index), 16)
        self._load_as(op.y, op.x.type.dtype, pointer, align)

    def _load_as(self, value: Value, dtype: DType, pointer: str, align: int) -> None:
        size, wide = dtype.bytes, value.type.dtype.bytes
        # `_align` counts in bytes of the value; what is loaded has elements of another size.
        scaled = align
        if size != wide:
            value_align = python_math.gcd(align, self.vector * size)
            scaled = python_math.gcd(value_align, self.columns * size) if self.is_halves(value) else value_align
        self._load_columns(value, pointer, scaled)

    def _gather(self, op: slot.Gather) -> None:
        tokens = self.parameters.pointer(self.parameters.index(op.tokens))
        key = f"token of {tokens}"
        if key not in self.row_pointers:
            name = self.parameters.unique("token")
            self.for_row.append(f"const long long {name} = moesaic::load_one({tokens} + slot);")
            self.row_pointers[key] = name
        index = self.parameters.index(op.x)
        pointer = self.row_pointer(index, self.row_pointers[key])
        self._load_columns(op.y, pointer, self.parameters.align(index), op.x.type.dtype)

    def _sum(self, op: row.Sum) -> None:
        name = self.name(op.y)
        total = " + ".join(self.parts(op.x))
        guard = "" if self.whole else "if (column + v < kColumns) "
        part = "" if self.sum_parts == 1 else f"[j / (Tile::kOwnVectors / {self.sum_parts})]"
        self.lines.append(f"{guard}{name}{part}[i] += {total};  // {self._comment(op)}")
        self.sums.append((name, op.y))

    def _elementwise(self, op: math.Elementwise) -> None:
        value = op.results[0]
        if self._converted_by_store(op):
            return
        operands = [self.parts(v) for v in op.operands]
        if self.is_row(value) or value.type.rank == 0:
            if any(isinstance(v, OpResult) and isinstance(v.op, row.Sum) for v in op.operands):
                raise UnsupportedError(f"{op.name} uses a sum of a row in the kernel that makes it")
            expression = op.cuda_expression(*(p[0] for p in operands))
            self._number(value, expression, f"  // {self._comment(op)}")
            return
        names = self.parts(value)
        for half, name in enumerate(names):
            expression = op.cuda_expression(*(p[half if len(p) > 1 else 0] for p in operands))
            note = f"  // {self._comment(op)}" if half == 0 else ""
            self.lines.append(f"const {register(value)} {name} = {expression};{note}")

    def _store(self, number: int, value: Value) -> None:
        index = self.parameters.op.reads + number
        if isinstance(value, OpResult) and isinstance(value.op, row.Sum):
            return  # after the tile, see `sums`
        boxes = self.staged(index) if self.staged is not None else ()
        pointer = "" if boxes else self.row_pointer(index, self.place)
        if self.is_row(value):
            stored = f"moesaic::from_float<{STORAGE[value.type.dtype]}>({self.parts(value)[0]})"
            self.row_stores.append(f"moesaic::store_one({pointer}, {stored});")
            return
        base = self.parameters.unique(f"{self.name(value)}_out")
        halves = self.is_halves(value)
        names = [f"{base}_{half}" for half in ("gate", "up")] if halves else [base]
        self.loads.append(f"float {', '.join(f'{n}[kVector]' for n in names)};")
        for name, part in zip(names, self.parts(value), strict=True):
            self.lines.append(f"{name}[v] = {part};")
        align = self.parameters.align(index)
        if boxes:
            for number, name in zip(boxes, names, strict=True):
                self.stores.append(f"staged.put({number}, r, w, {name});")
        elif halves:
            arguments = (
                f"kVector, /*align=*/{self._align_of_halves(value, align)}, /*whole=*/{_flag(self.whole)}, "
                f"/*half=*/kColumns, /*in_turn=*/{_flag(self.in_turn)}"
            )
            self.stores.append(f"moesaic::store_halves<{arguments}>({pointer}, column, {', '.join(names)});")
        else:
            arguments = f"kVector, /*align=*/{self._align(value, align)}, /*whole=*/{_flag(self.whole)}"
            self.stores.append(
                f"moesaic::store_columns<{arguments}>({pointer} + column, kColumns - column, {names[0]});"
            )

    def sum_pointer(self, value: Value) -> str:
        """The buffer that the partial sums of rows go to."""
        number = self.region.terminator.operands.index(value)
        return self.parameters.pointer(self.parameters.op.reads + number)

    def _comment(self, op: Op) -> str:
        return comment(op, self.name)


def _operands_read(op: Op) -> int:
    """How many of an op's operands are looked at; the others give a shape."""
    return 1 if isinstance(op, math.Broadcast) else len(op.operands)


def _flag(value: bool) -> str:
    return "true" if value else "false"


def check_target(op: Kernel, shape: ProductShape) -> Target:
    """The target of a product, which has the instructions of its tile.

    Raises:
        UnsupportedError: it has not.
    """
    name = op.configuration.get("target")
    target = Target.default() if name is None else Target.parse(name)
    if shape.fetches and not target.has_wgmma:
        raise UnsupportedError(f"{op.symbol}: tiles by wgmma need sm_90a, found {target}; leave tile to the rule")
    return target
