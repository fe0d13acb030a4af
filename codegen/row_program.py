"""The row program: from a ``launch.kernel`` of that template to CUDA text.

Each op of the region emits its own lines. Elementwise ops in one layout that follow one another share a loop over the
slots of a lane; collectives call the helpers of ``row.cuh`` and ``select.cuh``. The template itself knows no op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moesaic.codegen.kernel import Argument, GeneratedKernel
from moesaic.codegen.render import banner, render
from moesaic.codegen.target import WARP_THREADS, Target
from moesaic.ir.attributes import format_attributes, format_float
from moesaic.ir.core import BlockArgument, Constant, Op, OpResult, Value
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops import col, math, row
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType
from moesaic.passes.row_layout import Layout, experts_columns, infer_layouts, read_in_registers
from moesaic.passes.specialize import DIGIT_WORDS, RadixShape, exchanged_bytes, padded_columns

STORAGE = {
    DType.BF16: "__nv_bfloat16",
    DType.F16: "__half",
    DType.F32: "float",
    DType.U8: "unsigned char",
    DType.I32: "int",
}
"""C++ type of an element in memory."""


@dataclass(frozen=True)
class Line:
    """A named constant, alias or parameter, with the reason it is there."""

    name: str = ""
    value: str = ""
    definition: str = ""
    declaration: str = ""
    why: str = ""


@dataclass
class RowProgramParameters:
    """Everything the template prints, already decided."""

    banner: str
    symbol: str
    header: str = "select.cuh"
    constants: list[Line] = field(default_factory=list)
    aliases: list[Line] = field(default_factory=list)
    parameters: list[Line] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    body: list[list[str]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _DynamicTable:
    """A table in dynamic shared memory; `alone` if no other may have its place."""

    name: str
    type: str
    bytes: int
    alone: bool


def generate(op: Kernel) -> GeneratedKernel:
    """CUDA of one row program.

    Raises:
        UnsupportedError: the region holds something the template family has no form for; names the op.
    """
    return _Emitter(op).generate()


class _Emitter:
    def __init__(self, op: Kernel) -> None:
        if op.region is None:
            raise InternalError(f"{op.symbol}: a row program without a region")
        self.op = op
        self.region = op.region
        self.config = op.configuration
        self.layouts = infer_layouts(op.region)
        self.experts = experts_columns(self.layouts)
        self.vec = int(self.config["vec"])
        self.lanes = int(self.config["lanes"])
        self.threads = int(self.config["threads"])
        self.prefetch = self.config["prefetch"] == "on"
        self.alignment = [int(a) for a in self.config["alignment"].split(",")] if self.config["alignment"] else []
        self.out = RowProgramParameters(banner(op, "every step between a token's logits and its routing"), op.symbol)
        self.names: dict[Value, str] = {}
        self.taken: set[str] = set(_RESERVED)
        self.kept: set[Value] = set()  # values whose register array outlives the loop that fills it
        self.block = self.lanes > WARP_THREADS  # one token a block, shared by all of its lanes
        self.tables: dict[str, str] = {}
        self.dynamic: list[_DynamicTable] = []
        self.shared_bytes = 0
        self.selections: dict[Op, str] = {}  # of each top-k, whether it picked what slot i holds
        self.parameter_of: dict[Value, str] = {}
        self.results: list[tuple[Value, str]] = []

    # ------------------------------------------------------------------------------------------------- overall

    def generate(self) -> GeneratedKernel:
        self._constants()
        arguments = self._parameters()
        self._inputs()
        for section in self._schedule():
            self.out.body.append(section)
        self._outputs()
        self._place_tables()
        parameters = vars(self.out) | {
            "bounds": f"kThreads, /*blocks per multiprocessor, at least=*/{self.config['resident']}",
            "setup": _indented(_spaced(self.out.setup), 2),
            "body": [line for section in self.out.body for line in _indented(["", *section], 4)],
            "finish": _indented(self.out.finish, 2),
        }
        return GeneratedKernel(
            symbol=self.op.symbol,
            source=render("row_program.cu.j2", parameters),
            arguments=arguments,
            threads=self.threads,
            rows_per_block=self.threads // self.lanes,
            grid=self.config["grid"],
            shared_bytes=self.shared_bytes,
        )

    def _constants(self) -> None:
        rows_per_block = self.threads // self.lanes
        self.out.constants += [
            Line("kExperts", str(self.experts)),
            Line("kLanes", str(self.lanes), why="lanes that share a token"),
            Line("kVec", self.config["vec"], why="consecutive experts a lane holds"),
            Line("kThreads", str(self.threads)),
            Line("kTokensPerBlock", str(rows_per_block)),
        ]
        self.out.aliases.append(Line("Experts", definition="moesaic::Row<kExperts, kLanes, kVec>"))
        for columns in sorted({x.columns for x in self.layouts.values() if x.kind == "picks"}):
            self.out.aliases.append(
                Line(self._picks(columns), definition=f"moesaic::Row</*columns=*/{columns}, kLanes, /*vec=*/1>")
            )

    def _parameters(self) -> tuple[Argument, ...]:
        arguments: list[Argument] = []
        operands = [*self.region.arguments, *self._written()]
        for index, value in enumerate(operands):
            read = index < self.op.reads
            name = self._parameter_name(value, index)
            storage = self._storage(value)
            shape = f"[{', '.join(map(str, self.op.operands[index].type.shape))}]"
            pointer = f"{'const ' if read else ''}{storage}* __restrict__ {name}"
            self.out.parameters.append(Line(declaration=pointer, why=shape))
            arguments.append(Argument("pointer", index))
            if read and value.type.rank == 2:
                self.out.parameters.append(Line(declaration=f"long long {name}_stride", why="elements between rows"))
                arguments.append(Argument("stride", index))
        self.out.parameters.append(Line(declaration="long long tokens"))
        arguments.append(Argument("tokens"))
        return tuple(arguments)

    def _written(self) -> list[Value]:
        return self.region.terminator.operands

    def _parameter_name(self, value: Value, index: int) -> str:
        base = self.op.operands[index].name or value.name or ("in" if index < self.op.reads else "out")
        name = self._unique(f"{base}_ptr")
        if index < self.op.reads:
            self.parameter_of[value] = name
        else:
            self.results.append((value, name))
        return name

    def _storage(self, value: Value) -> str:
        storage = STORAGE.get(value.type.dtype)
        if storage is None:
            raise UnsupportedError(
                f"{self.op.symbol}: {value.type} cannot be kept in memory by a row program; "
                f"element types: {', '.join(d.value for d in STORAGE)}"
            )
        return storage

    # -------------------------------------------------------------------------------------------------- inputs

    def _inputs(self) -> None:
        section: list[str] = []
        for index, argument in enumerate(self.region.arguments):
            if not read_in_registers(self.region, argument):
                continue
            layout = self.layouts[argument]
            pointer = self.parameter_of[argument]
            name = self._name(argument)
            align = self.alignment[index] if index < len(self.alignment) else 16
            kind = "int" if argument.type.dtype is DType.I32 else "float"
            if layout.kind == "experts" and self.prefetch and kind == "float":
                section += self._prefetched(argument, self._align(argument, align))
                self.kept.add(argument)
            elif layout.is_row:
                rows = self._rows(layout)
                where = f"{pointer} + token * {pointer}_stride"
                section.append(f"{kind} {name}[{rows}::kSlots];  // %{argument.name}")
                section.append(
                    f"moesaic::load_row<{rows}, /*align=*/{self._align(argument, align)}>({where}, {name}, lane);"
                )
                self.kept.add(argument)
            elif layout.kind == "scalar":
                where = f"{pointer} + token * {pointer}_stride"
                section.append(
                    f"const float {name} = moesaic::to_float(moesaic::load_one({where}));  // %{argument.name}"
                )
            elif layout.kind == "vector":
                rows = self._vector_rows(layout)
                self.out.setup.append(f"float {name}[{rows}::kSlots];  // %{argument.name}, the same for all tokens")
                self.out.setup.append(
                    f"moesaic::load_row<{rows}, /*align=*/{self._align(argument, align)}>({pointer}, {name}, lane);"
                )
                self.kept.add(argument)
            else:
                self.out.setup.append(f"const float {name} = moesaic::to_float(moesaic::load_one({pointer}));")
        if section:
            self.out.body.append(section)

    def _prefetched(self, argument: BlockArgument, align: int) -> list[str]:
        """A row that was fetched during the token before; the next one's fetch is issued before its values are used."""
        pointer, name = self.parameter_of[argument], self._name(argument)
        ahead = self._unique(f"{name}_ahead")
        fetch = (
            f"moesaic::fetch_row<Experts, /*align=*/{align}>({pointer} + {{token}} * {pointer}_stride, {ahead}, lane);"
        )
        self.out.setup += [
            f"{self._storage(argument)} {ahead}[Experts::kSlots];  // %{argument.name} of the next token",
            "if (tokens > 0) {",
            "  " + fetch.format(token="moesaic::at_most(first_token, tokens - 1)"),
            "}",
        ]
        return [
            f"float {name}[Experts::kSlots];  // %{argument.name}",
            f"moesaic::widen({ahead}, {name});",
            # Unconditional: behind a branch the compiler waits for the load. The last round fetches the last row again.
            fetch.format(token="moesaic::at_most(token + stride, tokens - 1)"),
        ]

    def _align(self, value: Value, align: int) -> int:
        return max(align, value.type.dtype.bytes)

    # ------------------------------------------------------------------------------------------------ schedule

    def _schedule(self) -> list[list[str]]:
        """Sections of the loop body: runs of elementwise ops in one layout, and collectives on their own."""
        waiting = [op for op in self.region.ops[:-1] if not self._is_store_cast(op)]
        for op in self.region.ops[:-1]:
            if self._is_store_cast(op):
                self.names[op.results[0]] = self._name(op.operands[0])
        ready: set[Value] = set(self.region.arguments)
        sections: list[list[str]] = []
        while waiting:
            head = waiting[0]
            if not isinstance(head, math.Elementwise):
                sections.append(self._collective(head))
                waiting.pop(0)
                ready.update(head.results)
                continue
            layout = self.layouts[head.results[0]]
            run: list[math.Elementwise] = []
            rest: list[Op] = []
            for op in waiting:
                fits = isinstance(op, math.Elementwise) and self.layouts[op.results[0]] == layout
                if fits and all(v in ready or isinstance(v, Constant) for v in op.operands):
                    assert isinstance(op, math.Elementwise)
                    run.append(op)
                    ready.update(op.results)
                else:
                    rest.append(op)
            sections.append(self._elementwise(run, layout))
            waiting = rest
        return [section for section in sections if section]

    def _is_store_cast(self, op: Op) -> bool:
        """A rounding that only feeds a store: the store rounds."""
        if not isinstance(op, math.Cast) or op.results[0].type.dtype not in (DType.BF16, DType.F16):
            return False
        users = [u for u in self.region.ops if op.results[0] in u.operands]
        return all(u is self.region.terminator for u in users) and not isinstance(op.operands[0], Constant)

    def _elementwise(self, run: Sequence[math.Elementwise], layout: Layout) -> list[str]:
        if layout.kind in ("vector", "uniform"):
            self._before_the_loop(run, layout)
            return []
        if not layout.is_row:
            return [self._assignment(op, "", declare=True) for op in run]
        inside = set(run)
        index = "i" if layout.kind == "experts" else "p"
        declared: list[str] = []
        body: list[str] = []
        for op in run:
            value = op.results[0]
            users = [u for u in self.region.ops if value in u.operands]
            stored = any(self._is_store_cast(u) for u in users)
            if stored or any(u not in inside for u in users):
                self.kept.add(value)
                declared.append(f"{_register(value)} {self._name(value)}[{self._rows(layout)}::kSlots];")
                body.append("  " + self._assignment(op, index, declare=False))
            else:
                body.append("  " + self._assignment(op, index, declare=True))
        rows = self._rows(layout)
        return [
            *declared,
            "#pragma unroll",
            f"for (int {index} = 0; {index} < {rows}::kSlots; ++{index}) {{",
            *body,
            "}",
        ]

    def _before_the_loop(self, run: Sequence[math.Elementwise], layout: Layout) -> None:
        """What is the same for all tokens is computed once."""
        if layout.kind == "uniform":
            self.out.setup += [self._assignment(op, "", declare=True) for op in run]
            return
        rows = self._vector_rows(layout)
        self.kept.update(op.results[0] for op in run)
        self.out.setup += [f"{_register(op.results[0])} {self._name(op.results[0])}[{rows}::kSlots];" for op in run]
        self.out.setup += ["#pragma unroll", f"for (int i = 0; i < {rows}::kSlots; ++i) {{"]
        self.out.setup += ["  " + self._assignment(op, "i", declare=False) for op in run] + ["}"]

    def _assignment(self, op: math.Elementwise, index: str, *, declare: bool) -> str:
        value = op.results[0]
        expression = op.cuda_expression(*(self._read(v, index) for v in op.operands))
        target = f"const {_register(value)} {self._name(value)}" if declare else f"{self._name(value)}[{index}]"
        return f"{target} = {expression};  // {self._comment(op)}"

    def _read(self, value: Value, index: str) -> str:
        """A value inside a loop over `index`, or outside of loops."""
        if isinstance(value, Constant):
            return _literal(value.value)
        name = self._name(value)
        return f"{name}[{index}]" if value in self.kept else name

    def _comment(self, op: Op) -> str:
        results = ", ".join("%" + self._name(r) for r in op.results)
        operands = ", ".join(
            format_float(v.value) if isinstance(v, Constant) else "%" + self._name(v) for v in op.operands
        )
        attributes = f" {format_attributes(op.attributes)}" if op.attributes else ""
        return f"{results} = {op.name} {operands}{attributes}"

    # --------------------------------------------------------------------------------------------- collectives

    def _collective(self, op: Op) -> list[str]:
        emit = _COLLECTIVES.get(type(op))
        if emit is None:
            raise UnsupportedError(f"{op.name} has no form in a row program")
        return [f"// {self._comment(op)}", *emit(self, op)]

    def _reduction(self, op: Op) -> list[str]:
        layout = self._layout(op.operands[0])
        function = "row_sum" if isinstance(op, row.Sum) else "row_max"
        if not layout.is_row:  # a row of one number
            return [f"const float {self._name(op.results[0])} = {self._read(op.operands[0], '')};"]
        call = f"moesaic::{function}<{self._rows(layout)}>({self._name(op.operands[0])}, lane)"
        return [f"const float {self._name(op.results[0])} = {call};"]

    def _topk(self, op: Op) -> list[str]:
        assert isinstance(op, row.TopK)
        picks = self._rows(self.layouts[op.indices])
        raw = isinstance(op.x, BlockArgument) and op.x.type.dtype in (DType.BF16, DType.F16)
        rank = self._alias(
            "Rank",
            f"moesaic::Rank<{STORAGE[op.x.type.dtype] if raw else 'float'}>",
            "16-bit values rank with their column in one word" if raw else "",
        )
        picked = self._unique("picked")
        lines = (self._by_radix if self.config["select"] == "radix" else self._by_keys)(
            op, rank, picked, 4 if raw else 8
        )
        fills = []
        if self._used(op.indices):
            lines.append(f"int {self._name(op.indices)}[{picks}::kSlots];")
            fills.append(f"  {self._name(op.indices)}[p] = {picks}::live(p, lane) ? {rank}::column({picked}[p]) : 0;")
            self.kept.add(op.indices)
        if self._used(op.values):
            lines.append(f"float {self._name(op.values)}[{picks}::kSlots];")
            fills.append(f"  {self._name(op.values)}[p] = {picks}::live(p, lane) ? {rank}::value({picked}[p]) : 0.0f;")
            self.kept.add(op.values)
        if fills:
            lines += ["#pragma unroll", f"for (int p = 0; p < {picks}::kSlots; ++p) {{", *fills, "}"]
        return lines

    def _by_keys(self, op: row.TopK, rank: str, picked: str, pick_bytes: int) -> list[str]:
        """Selection from the keys of all slots."""
        picks = self._rows(self.layouts[op.indices])
        keys, last = self._unique("keys"), self._unique("last")
        self.selections[op] = f"{rank}::reaches({keys}[i], Experts::column(i, lane), {last})"
        select = self.config["select"]
        if select == "merge" and pick_bytes == 8:
            select = "collect"  # values that fill a word are merged alone and collected with their columns
        tables = []
        # top-ks of one kernel may rank different types, and pick different numbers
        if select == "sort":
            places = padded_columns(self.experts, self.vec, self.lanes)
            name = f"sorted{rank.removeprefix('Rank')}"
            tables.append(self._table(name, f"{rank}::Pick", "Experts::kSlots * kLanes", pick_bytes * places))
        elif select == "collect":
            name = f"reached{picks.removeprefix('Picks')}"
            tables += [
                self._table("staged", "unsigned", "kExperts", 4 * self.experts),
                self._table(name, "moesaic::Wide", f"{picks}::kColumns", 8 * op.k),
            ]
        call = ", ".join([keys, "lane", picked, last, *tables])
        return [
            f"{rank}::Key {keys}[Experts::kSlots];",
            "#pragma unroll",
            "for (int i = 0; i < Experts::kSlots; ++i) {",
            f"  const bool live = {self._may_be_picked(op)};",
            f"  {keys}[i] = live ? {rank}::make({self._read(op.x, 'i')}, Experts::column(i, lane)) : 0;",
            "}",
            f"{rank}::Pick {picked}[{picks}::kSlots], {last};",
            f"moesaic::top_k_{select}<{rank}, Experts, {picks}>({call});",
        ]

    def _by_radix(self, op: row.TopK, rank: str, picked: str, pick_bytes: int) -> list[str]:
        """Selection that makes keys of what reaches a bound."""
        picks = self._rows(self.layouts[op.indices])
        live, members = self._unique("may_be_picked"), self._unique("members")
        self.selections[op] = f"({members} & 1u << i) != 0"
        self.out.header = "select_block.cuh"
        shape = RadixShape.of(op, self.experts, self.vec, self.lanes)
        name = f"listed{rank.removeprefix('Rank')}{picks.removeprefix('Picks')}"
        tables = [
            self._table("digits", "unsigned", "moesaic::Digits::kWords", 4 * DIGIT_WORDS, zeroed=True),
            self._table(name, f"{rank}::Pick", str(shape.length), pick_bytes * shape.length, kept=True),
            self._table("ranked", "float", "kExperts", 4 * self.experts) if shape.bounded else "nullptr",
        ]
        counted = str(shape.counted).lower()
        numbers = f"/*parts=*/{shape.parts}, /*places=*/{shape.places}, /*counted=*/{counted}"
        call = ", ".join([self._array(op.x), live, "lane", picked, members, *tables])
        return [
            f"const auto {live} = [&](int i) {{ return {self._may_be_picked(op)}; }};",
            f"{rank}::Pick {picked}[{picks}::kSlots];",
            f"unsigned {members};  // a bit for each slot",
            f"moesaic::top_k_radix<{rank}, Experts, {picks}, {numbers}>({call});",
        ]

    def _may_be_picked(self, op: row.TopK) -> str:
        return "Experts::live(i, lane)" + (f" && {self._name(op.allowed)}[i]" if op.allowed is not None else "")

    def _group_limit(self, op: Op) -> list[str]:
        assert isinstance(op, row.GroupLimit)
        name = self._name(op.allowed)
        self.kept.add(op.allowed)
        arguments = f"Experts, /*groups=*/{op.groups}, /*keep=*/{op.keep}, /*best=*/{op.best}"
        tables = ""
        form = self.config["groups"]
        if form != "lanes":
            tables = ", " + self._table("staged", "unsigned", "kExperts", 4 * self.experts)
        if form == "shared":
            tables += ", " + self._table("kept_groups", "unsigned char", str(op.groups), op.groups)
        elif form == "block":
            tables += ", " + self._table("group_scores", "unsigned", str(op.groups), 4 * op.groups, kept=True)
            self.out.header = "select_block.cuh"
        return [
            f"bool {name}[Experts::kSlots];",
            f"moesaic::group_limit_{form}<{arguments}>({self._array(op.x)}, {name}{tables}, lane);",
        ]

    def _gather(self, op: Op) -> list[str]:
        assert isinstance(op, row.Gather)
        picks = self._rows(self.layouts[op.y])
        name = self._name(op.y)
        self.kept.add(op.y)
        lines = [f"float {name}[{picks}::kSlots];"]
        indices = self._array(op.indices)
        if isinstance(op.x, BlockArgument):
            pointer = self.parameter_of[op.x]
            where = pointer if op.x.type.rank == 1 else f"{pointer} + token * {pointer}_stride"
            return [*lines, f"moesaic::gather<{picks}>({where}, {indices}, {name}, lane);"]
        staged = self._table("gathered_from", "float", "kExperts", 4 * self.experts)
        source = self._array(op.x)
        return [*lines, f"moesaic::gather_registers<Experts, {picks}>({source}, {indices}, {name}, {staged}, lane);"]

    def _scatter(self, op: Op) -> list[str]:
        assert isinstance(op, row.Scatter)
        picks = self._rows(self.layouts[op.indices])
        name = self._name(op.y)
        self.kept.add(op.y)
        source, lines = self._picks_array(op.x, picks)
        table = self._table("scattered", "float", "kExperts", 4 * self.experts, zeroed=True)
        return [
            *lines,
            f"float {name}[Experts::kSlots];",
            f"moesaic::scatter<Experts, {picks}>({source}, {self._array(op.indices)}, {name}, {table}, lane);",
        ]

    def _membership(self, op: Op) -> list[str]:
        assert isinstance(op, row.Membership)
        name = self._name(op.y)
        self.kept.add(op.y)
        lines = [f"bool {name}[Experts::kSlots];"]
        made_by = op.indices.op if isinstance(op.indices, OpResult) else None
        if isinstance(made_by, row.TopK):
            return [
                *lines,
                "#pragma unroll",
                "for (int i = 0; i < Experts::kSlots; ++i) {",
                f"  {name}[i] = {self.selections[made_by]};",
                "}",
            ]
        picks = self._rows(self.layouts[op.indices])
        return [*lines, f"moesaic::membership<Experts, {picks}>({self._array(op.indices)}, {name}, lane);"]

    def _count(self, op: Op) -> list[str]:
        assert isinstance(op, col.Count)
        picks = self._rows(self.layouts[op.indices])
        name = self._name(op.y)
        if self.block:  # long rows leave no shared memory for it
            [pointer] = [p for value, p in self.results if value is op.y]
            self.out.setup += [
                f"int* const {name} = {self._row_of_block(pointer)};  // %{op.y.name or name}, of this block's tokens",
                f"for (int e = lane; e < kExperts; e += kLanes) moesaic::store_one({name} + e, 0);",
                "__syncthreads();",
            ]
        else:
            self.out.setup += [
                f"__shared__ int {name}[kExperts];  // %{op.y.name or name}, picks of this block's tokens",
                f"for (int e = threadIdx.x; e < kExperts; e += kThreads) {name}[e] = 0;",
                "__syncthreads();",
            ]
        return [
            "#pragma unroll",
            f"for (int p = 0; p < {picks}::kSlots; ++p) {{",
            f"  if (active && {picks}::live(p, lane)) atomicAdd(&{name}[{self._array(op.indices)}[p]], 1);",
            "}",
        ]

    def _column_sum(self, op: Op) -> list[str]:
        assert isinstance(op, col.Sum)
        name = self._name(op.y)
        self.out.setup += [
            f"float {name}[Experts::kSlots];  // %{op.y.name or name}, this lane's share of the sums over tokens",
            "#pragma unroll",
            f"for (int i = 0; i < Experts::kSlots; ++i) {name}[i] = 0.0f;",
        ]
        return [
            "#pragma unroll",
            "for (int i = 0; i < Experts::kSlots; ++i) {",
            f"  if (active) {name}[i] += {self._read(op.x, 'i')};",
            "}",
        ]

    # ------------------------------------------------------------------------------------------------- outputs

    def _outputs(self) -> None:
        section: list[str] = []
        for value, pointer in self.results:
            layout = self._layout(value)
            name = self._name(value)
            if layout.kind == "column":
                self._finish(value, pointer)
            elif layout.is_row:
                rows = self._rows(layout)
                where = f"{pointer} + token * {layout.columns}"
                align = self._align_of_result(layout, value.type.dtype)
                section.append(f"moesaic::store_row<{rows}, /*align=*/{align}>({where}, {name}, lane);")
            elif layout.kind == "scalar":
                cast = f"moesaic::from_float<{self._storage(value)}>({name})"
                section.append(f"if (lane == 0) moesaic::store_one({pointer} + token, {cast});")
            else:
                raise UnsupportedError(f"{self.op.symbol}: a row program cannot return {value.type}")
        if section:
            self.out.body.append(["if (active) {", *("  " + line for line in section), "}"])

    def _align_of_result(self, layout: Layout, dtype: DType) -> int:
        vec = self.vec if layout.kind == "experts" else 1
        return min(16, _power_of_two_factor(layout.columns * dtype.bytes), vec * dtype.bytes)

    def _row_of_block(self, pointer: str) -> str:
        return f"{pointer} + static_cast<long long>(blockIdx.x) * kExperts"

    def _finish(self, value: Value, pointer: str) -> None:
        assert isinstance(value, OpResult)
        name = self._name(value)
        row_of_block = self._row_of_block(pointer)
        if self.block:
            if isinstance(value.op, col.Sum):  # each column is summed in one lane
                align = self._align_of_result(Layout("experts", self.experts), value.type.dtype)
                self.out.finish.append(f"moesaic::store_row<Experts, /*align=*/{align}>({row_of_block}, {name}, lane);")
            return
        if isinstance(value.op, col.Count):
            self.out.finish += [
                "",
                "__syncthreads();",
                "for (int e = threadIdx.x; e < kExperts; e += kThreads) {",
                f"  moesaic::store_one({row_of_block} + e, {name}[e]);",
                "}",
            ]
            return
        scratch = self._unique(f"{name}_scratch")
        self.out.finish += [
            "",
            f"__shared__ float {scratch}[kThreads / 32 * kExperts];",
            f"moesaic::store_column_sums<Experts, kThreads>({name}, {scratch}, {row_of_block}, lane);",
        ]

    # ------------------------------------------------------------------------------------------------- details

    def _layout(self, value: Value) -> Layout:
        return Layout("uniform") if isinstance(value, Constant) else self.layouts[value]

    def _rows(self, layout: Layout) -> str:
        return "Experts" if layout.kind == "experts" else self._picks(layout.columns)

    def _vector_rows(self, layout: Layout) -> str:
        if layout.columns != self.experts:
            raise UnsupportedError(f"{self.op.symbol}: a vector of {layout.columns} in rows of {self.experts} experts")
        return "Experts"

    def _picks(self, columns: int) -> str:
        several = len({x.columns for x in self.layouts.values() if x.kind == "picks"}) > 1
        return f"Picks{columns}" if several else "Picks"

    def _alias(self, base: str, definition: str, why: str) -> str:
        for alias in self.out.aliases:
            if alias.definition == definition:
                return alias.name
        name = self._unique(base)
        self.out.aliases.append(Line(name, definition=definition, why=why))
        return name

    def _array(self, value: Value) -> str:
        """A value as the register array a collective takes."""
        if value not in self.kept:
            raise InternalError(f"{self.op.symbol}: {self._name(value)} is no register array")
        return self._name(value)

    def _picks_array(self, value: Value, picks: str) -> tuple[str, list[str]]:
        """As :meth:`_array`, with a number per token spread over the picks; and the lines that does."""
        if value in self.kept:
            return self._name(value), []
        name = self._unique(f"{self._name(value) if not isinstance(value, Constant) else 'constant'}_picks")
        spread = [
            f"float {name}[{picks}::kSlots];",
            "#pragma unroll",
            f"for (int p = 0; p < {picks}::kSlots; ++p) {name}[p] = {self._read(value, '')};",
        ]
        return name, spread

    def _table(self, name: str, type: str, length: str, bytes: int, *, zeroed: bool = False, kept: bool = False) -> str:
        """The token's own row of a shared table; the table is declared once.

        In dynamic shared memory, which long rows need, tables share a place unless they are `zeroed` (and so again when
        a helper returns) or `kept` beside another: a helper waits for all lanes before it writes to its table.
        """
        if name not in self.tables:
            unique = self._unique(name)
            if self.config.get("tables") == "dynamic":
                self.tables[name] = unique
                self.dynamic.append(_DynamicTable(unique, type, bytes, alone=zeroed or kept))
            else:
                self.tables[name] = f"{unique}[slot]"
                self.out.setup.append(f"__shared__ __align__(16) {type} {unique}[kTokensPerBlock][{length}];")
            if zeroed:
                self.out.setup += [
                    f"for (int e = lane; e < {length}; e += kLanes) {self.tables[name]}[e] = 0;",
                    "moesaic::team_sync<kLanes>();",
                ]
        return self.tables[name]

    def _place_tables(self) -> None:
        """Declares the tables in dynamic shared memory: first those of their own, then those that share a place."""
        if not self.dynamic:
            return
        memory = self._unique("tables")
        lines = [f"MOESAIC_DYNAMIC_SHARED(unsigned char, {memory});"]
        offset = 0
        for table in sorted(self.dynamic, key=lambda t: not t.alone):
            lines.append(f"{table.type}* const {table.name} = reinterpret_cast<{table.type}*>({memory} + {offset});")
            self.shared_bytes = max(self.shared_bytes, offset + table.bytes)
            if table.alone:
                offset = -(-(offset + table.bytes) // 16) * 16
        self.out.setup[:0] = lines
        target = Target.parse(self.config["target"])
        needed = self.shared_bytes + exchanged_bytes(self.lanes)
        if needed > target.shared_optin:
            raise UnsupportedError(
                f"{self.op.symbol}: rows of {self.experts} experts need {needed} bytes of shared memory a block, but "
                f"{target} has {target.shared_optin}; up to half as many picks as experts, or 16-bit logits that are "
                "ranked as they are, need less"
            )

    def _used(self, value: Value) -> bool:
        return any(value in op.operands for op in self.region.ops)

    def _name(self, value: Value) -> str:
        if value not in self.names:
            base = "".join(c if c.isalnum() or c == "_" else "_" for c in value.name)
            if not base or base[0].isdigit():
                base = _short_name(value)
            self.names[value] = self._unique(base)
        return self.names[value]

    def _unique(self, base: str) -> str:
        name, number = base, 2
        while name in self.taken:
            name = f"{base}{number}"
            number += 1
        self.taken.add(name)
        return name


_COLLECTIVES: dict[type[Op], Callable[[Any, Op], list[str]]] = {
    row.Sum: _Emitter._reduction,
    row.Max: _Emitter._reduction,
    row.TopK: _Emitter._topk,
    row.GroupLimit: _Emitter._group_limit,
    row.Gather: _Emitter._gather,
    row.Scatter: _Emitter._scatter,
    row.Membership: _Emitter._membership,
    col.Count: _Emitter._count,
    col.Sum: _Emitter._column_sum,
}

# Names the kernel text uses itself, and C++ words that a value might be called.
_RESERVED = frozenset(
    """
    lane slot first first_token stride active token tokens i p e live Experts kExperts kLanes kVec kThreads
    kTokensPerBlock moesaic int float double bool char long short signed unsigned const auto void for if else while do
    switch case default break continue return goto new delete this class struct union enum template typename using
    namespace static extern register volatile inline operator public private protected virtual try catch throw true
    false sizeof and or not xor min max exp log sqrt threadIdx blockIdx blockDim gridDim
    """.split()  # noqa: SIM905 - a list of strings would take a page
)


def _short_name(value: Value) -> str:
    """A name for a value that has none: after the op that makes it."""
    if isinstance(value, OpResult):
        return {
            "add": "sum",
            "sub": "difference",
            "mul": "product",
            "div": "quotient",
            "safe_div": "quotient",
            "select": "chosen",
            "equal": "is_equal",
            "less": "is_less",
            "neg": "negated",
            "exp": "exponential",
            "sqrt": "root",
            "log": "logarithm",
            "max": "largest",
            "sum": "total",
            "cast": "rounded",
            "membership": "picked_here",
            "gather": "gathered",
            "scatter": "spread",
        }.get(value.op.name.split(".")[1], value.op.name.split(".")[1])
    return "x"


def _register(value: Value) -> str:
    if value.type.dtype in (DType.I1, DType.U8):
        return "bool"
    return "int" if value.type.dtype is DType.I32 else "float"


def _literal(value: float) -> str:
    if value != value:
        return "moesaic::not_a_number()"
    if value in (float("inf"), float("-inf")):
        return "moesaic::infinity()" if value > 0 else "-moesaic::infinity()"
    text = format_float(value)
    return f"{text}f" if value >= 0 and not text.startswith("-") else f"({text}f)"


def _spaced(lines: Sequence[str]) -> list[str]:
    return ["", *lines] if lines else []


def _indented(lines: Sequence[str], spaces: int) -> list[str]:
    """Preprocessor lines stay at the margin, as they do in the helpers."""
    return [line if not line or line.startswith("#") else " " * spaces + line for line in lines]


def _power_of_two_factor(n: int) -> int:
    return n & -n
