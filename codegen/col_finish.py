"""The kernel after a row program: sums over tokens from its partial rows, and what is computed from them.

A block adds up 32 columns of one sum. Where something follows, one block computes it once all sums are there, the first
of a cluster, or the last of a grid to finish: its threads go over the elements of column values, [E] or [N, E], and
every thread holds the numbers.
"""

from __future__ import annotations

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.lines import STORAGE, comment, definition, fused_ops, literal, register
from moesaic.codegen.parameters import Parameters
from moesaic.codegen.render import banner, render
from moesaic.ir.core import Constant, Op, OpResult, Value, columns_of
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops import col, math
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.finish_in_cluster import tiles_of
from moesaic.passes.row_layout import operands_read


def generate(op: Kernel) -> GeneratedKernel:
    """CUDA of one finish kernel.

    Raises:
        UnsupportedError: the region holds something that has no form over column values; names the op.
    """
    return _Emitter(op).generate()


class _Emitter:
    def __init__(self, op: Kernel) -> None:
        if op.region is None:
            raise InternalError(f"{op.symbol}: a finish kernel without a region")
        self.op = op
        self.region = op.region
        self.threads = int(op.configuration["threads"])
        self.cluster = int(op.configuration.get("cluster", "0"))
        self.sums = op.region.arguments[: op.partials]
        self.ops = op.region.ops[:-1]
        self.parameters = Parameters(op, ("i", "tile", "number", "rows", "sequences", "kThreads"))
        self.pointers: dict[Value, str] = {}  # of what is read; of a sum, once it is finished
        self.shared: dict[Value, str] = {}  # of sums that the first block of a cluster has
        self.partials: list[str] = []
        self.results: list[tuple[Value, str]] = []
        self.ticket = ""

    def generate(self) -> GeneratedKernel:
        self._ask()
        body, blocks, per_sequence = self._summing()
        if self.ops:
            if self.cluster:
                body += self._collecting()
            elif self.sums:
                body += ["", f"if (!moesaic::is_last_block({self.ticket})) return;"]
            else:
                blocks = 1
            body += self._computing()
        source = render(
            "col_finish.cu.j2",
            {
                "banner": banner(self.op, "sums over tokens from partial rows, and what is computed from them"),
                "symbol": self.op.symbol,
                "threads": self.threads,
                "cluster": self.cluster,
                "parameters": self.parameters.lines,
                "body": ["  " + line if line and not line.startswith("#") else line for line in body],
            },
        )
        return GeneratedKernel(
            symbol=self.op.symbol,
            source=source,
            arguments=tuple(self.parameters.arguments),
            threads=self.threads,
            rows_per_block=1,
            grid="fixed",
            blocks=blocks,
            blocks_per_sequence=per_sequence,
            cluster=max(1, self.cluster),
            emulates_cluster=self.cluster > 1,
            ops=fused_ops(self.region, self._name),
        )

    # ------------------------------------------------------------------------------------------------ parameters

    def _ask(self) -> None:
        loaded = {v for op in self.ops for v in op.operands[: operands_read(op)]}
        for index, value in enumerate(self.region.arguments):
            if index < self.op.partials:
                self.partials.append(self.parameters.pointer(index))
            elif index == self.op.partials and self.sums and self.ops and not self.cluster:
                self.ticket = self.parameters.pointer(index, written=True)
            elif value in loaded:
                self.pointers[value] = self.parameters.pointer(index)
        for number, result in enumerate(self.region.terminator.operands):
            pointer = self.parameters.pointer(self.op.reads + number)
            self.results.append((result, pointer))
            if result in self.sums:
                self.pointers[result] = pointer
        if self.sums:
            self.parameters.rows("rows", 0, "partial rows: blocks of the kernel before")
        if any(isinstance(op, col.Rows) and op.x.type.leading == "T" for op in self.ops):
            self.parameters.tokens()
        by_sequence = [i for i, v in enumerate(self.op.operands) if v.type.leading == "N"]
        if by_sequence:
            self.parameters.rows("sequences", by_sequence[0])

    # ------------------------------------------------------------------------------------------------------ sums

    def _summing(self) -> tuple[list[str], int, int]:
        """Lines that add up partial rows, and how many blocks they need: in all, and for each sequence."""
        lines: list[str] = []
        if self.cluster:
            self.shared = {v: self.parameters.unique(f"{self._name(v)}_total") for v in self.sums}
        blocks = per_sequence = 0
        for number, (value, partial) in enumerate(zip(self.sums, self.partials, strict=True)):
            columns = columns_of(value)
            tiles = tiles_of(columns)
            total = self.pointers[value]
            last = number == len(self.sums) - 1
            summed = f"moesaic::sum_partial_rows<{columns}, kThreads>"
            if value.type.leading == "N":
                per_sequence += tiles
                own = [
                    f"const long long sequence = tile / {tiles}, own = rows / sequences;",
                    f"const auto total = {summed}({partial} + sequence * own * {columns}, own, tile % {tiles});",
                    f"moesaic::store_totals<{columns}>({total} + sequence * {columns}, tile % {tiles}, total);",
                ]
                size = f"{tiles} * sequences" if tiles > 1 else "sequences"
            elif self.cluster:
                blocks += tiles
                own = [f"moesaic::hand_to_first_block({self.shared[value]}, tile, {summed}({partial}, rows, tile));"]
                size = str(tiles)
            else:
                blocks += tiles
                own = [f"moesaic::store_totals<{columns}>({total}, tile, {summed}({partial}, rows, tile));"]
                size = str(tiles)
            lines.append(f"if (tile >= 0 && tile < {size}) {{  // %{value.name or 'sums'}")
            lines += ["  " + line for line in own] + ["}"]
            if not last:
                lines.append(f"tile -= {size};")
        if not self.cluster:
            return ["int tile = blockIdx.x;", *lines] if lines else [], blocks, per_sequence
        first = [f"__shared__ {register(v)} {name}[{columns_of(v)}];" for v, name in self.shared.items()]
        first.append("moesaic::cluster_wait();  // so do the others")
        if blocks <= self.cluster:
            return [*first, "int tile = blockIdx.x;", *lines], self.cluster, 0
        over_tiles = [
            f"for (int number = blockIdx.x; number < {blocks}; number += {self.cluster}) {{",
            "  int tile = number;",
            *("  " + line for line in lines),
            "  __syncthreads();  // the next tile's sums go where this one's were",
            "}",
        ]
        return [*first, *over_tiles], self.cluster, 0

    def _collecting(self) -> list[str]:
        """Lines after which the first block of the cluster has all sums, and the others have ended."""
        stores = [
            f"moesaic::store_sums<kThreads>({self.shared[value]}, {self.pointers[value]});" for value in self.sums
        ]
        return [
            "",
            "moesaic::sync_cluster();  // sums are with the first block",
            "if (blockIdx.x > 0) return;",
            *stores,
        ]

    # --------------------------------------------------------------------------------------------- computation

    def _computing(self) -> list[str]:
        lines: list[str] = [""]
        for value in self.pointers:
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
        numbers = [(v, p) for v, p in self.results if v not in self.sums and _is_number(v)]
        if numbers:
            lines.append("if (threadIdx.x == 0) {")
            lines += [f"  moesaic::store_one({p}, {self._stored(v)});" for v, p in numbers]
            lines.append("}")
        for value, pointer in self.results:
            if value not in self.sums and not _is_number(value):
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
        if value in self.shared:
            return f"{self.shared[value]}[{place}]"
        pointer = self.pointers[value]
        address = pointer if place == "0" else f"{pointer} + {place}"
        loaded = f"moesaic::{'load_written' if value in self.sums else 'load_one'}({address})"
        return loaded if register(value) == "bool" else f"moesaic::to_float({loaded})"

    def _stored(self, value: Value) -> str:
        return f"moesaic::from_float<{STORAGE[value.type.dtype]}>({self._name(value)})"

    def _comment(self, op: Op) -> str:
        return comment(op, self._name)

    def _name(self, value: Value) -> str:
        return self.parameters.of(value)


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
