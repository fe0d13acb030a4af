"""What is computed from sums over tokens: one block's threads go over the elements of column values, [E] or [N, E], and
every thread holds the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moesaic.codegen.lines import STORAGE, comment, definition, literal, register
from moesaic.codegen.names import Names
from moesaic.ir.core import Block, Constant, Op, OpResult, Value, columns_of
from moesaic.ir.errors import UnsupportedError
from moesaic.ir.ops import col, math
from moesaic.passes.row_layout import operands_read


class ColumnValues:
    """Lines of the region of a ``kernel.col_finish``.

    Args:
        region: of the finish.
        sums: those of its arguments that are sums over tokens.
        names: of the kernel's values.
    """

    def __init__(self, region: Block, sums: Sequence[Value], names: Names) -> None:
        self.region = region
        self.sums = sums
        self.names = names
        self.ops = region.ops[:-1]
        self._pointers: Mapping[Value, str] = {}
        self._shared: Mapping[Value, str] = {}

    @property
    def loaded(self) -> set[Value]:
        """The values that ops read, and do not only ask for the number of their rows."""
        return {v for op in self.ops for v in op.operands[: operands_read(op)]}

    def lines(
        self, pointers: Mapping[Value, str], shared: Mapping[Value, str], results: Iterable[tuple[Value, str]]
    ) -> list[str]:
        """All of it: loads, what is computed, stores of the results but those that are sums.

        Args:
            pointers: of what is read in memory.
            shared: arrays in shared memory, of sums that are there.
            results: values and where they go.
        """
        self._pointers, self._shared = pointers, shared
        lines: list[str] = []
        for value in dict.fromkeys([*pointers, *shared]):
            if _is_number(value):
                lines.append(f"const {register(value)} {self._name(value)} = {self._load(value, '0')};")
        for op in self.ops:
            value = op.results[0]
            if isinstance(op, col.Rows):
                count = "tokens" if op.x.type.leading == "T" else "sequences"
                lines.append(f"const float {self._name(value)} = static_cast<float>({count});  // {self._comment(op)}")
            elif isinstance(op, col.Total):
                lines += self._total(op)
            elif not isinstance(op, math.Elementwise):
                raise UnsupportedError(f"{op.name} has no form over column values")
            elif _is_number(value):
                lines.append(definition(op, self._read, self._name))
        computed = [(v, p) for v, p in results if v not in self.sums]
        numbers = [(v, p) for v, p in computed if _is_number(v)]
        if numbers:
            lines.append("if (threadIdx.x == 0) {")
            lines += [f"  moesaic::store_one({p}, {self._stored(v)});" for v, p in numbers]
            lines.append("}")
        for value, pointer in computed:
            if not _is_number(value):
                lines += self._loop(value, f"moesaic::store_one({pointer} + i, {self._stored(value)});")
        return lines

    def _total(self, op: col.Total) -> list[str]:
        name = self._name(op.y)
        if _is_number(op.x):
            return [f"const float {name} = {self._name(op.x)};  // {self._comment(op)}"]
        return [
            f"float {name} = 0.0f;  // {self._comment(op)}",
            *self._loop(op.x, f"{name} += {self._name(op.x)};"),
            f"{name} = moesaic::block_sum<kThreads>({name});",
        ]

    def _loop(self, value: Value, last: str) -> list[str]:
        """A loop of the block's threads over the elements of a value, which `last` then uses."""
        columns = columns_of(value)
        end = f"sequences * {columns}" if value.type.leading == "N" else str(columns)
        inside: list[str] = []
        for needed in self._elements(value):
            if isinstance(needed, OpResult):
                assert isinstance(needed.op, math.Elementwise)
                inside.append(definition(needed.op, self._read, self._name))
            else:
                loaded = self._load(needed, _place(needed, value))
                inside.append(f"const {register(needed)} {self._name(needed)} = {loaded};")
        return [
            f"for (long long i = threadIdx.x; i < {end}; i += kThreads) {{",
            *("  " + line for line in [*inside, last]),
            "}",
        ]

    def _elements(self, value: Value) -> list[Value]:
        """What has to be there, element by element, for an element of a value: in order, itself last."""
        found: dict[Value, None] = {}

        def visit(v: Value) -> None:
            if isinstance(v, Constant) or _is_number(v) or v in found:
                return
            if isinstance(v, OpResult):
                for operand in v.op.operands[: operands_read(v.op)]:
                    visit(operand)
            found[v] = None

        visit(value)
        return list(found)

    def _read(self, value: Value) -> str:
        return literal(value.value) if isinstance(value, Constant) else self._name(value)

    def _load(self, value: Value, place: str) -> str:
        if value in self._shared:
            return f"{self._shared[value]}[{place}]"
        pointer = self._pointers[value]
        address = pointer if place == "0" else f"{pointer} + {place}"
        loaded = f"moesaic::{'load_written' if value in self.sums else 'load_one'}({address})"
        return loaded if register(value) == "bool" else f"moesaic::to_float({loaded})"

    def _stored(self, value: Value) -> str:
        return f"moesaic::from_float<{STORAGE[value.type.dtype]}>({self._name(value)})"

    def _comment(self, op: Op) -> str:
        return comment(op, self._name)

    def _name(self, value: Value) -> str:
        return self.names.of(value)


def _is_number(value: Value) -> bool:
    return value.type.leading == "" and columns_of(value) == 1


def _place(value: Value, loop: Value) -> str:
    """The element of a value that belongs to element i of another, by NumPy's rule."""
    columns = columns_of(loop)
    if value.type.shape == loop.type.shape:
        return "i"
    if value.type.leading == "N":
        return f"i / {columns}"
    return f"i % {columns}" if loop.type.leading == "N" else "i"
