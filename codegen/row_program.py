"""The row program: from a ``launch.kernel`` of that template to CUDA text.

Each op of the region emits its own lines. Elementwise ops in one layout that follow one another share a loop over the
slots of a lane; collectives call the helpers of ``row.cuh`` and ``select.cuh``. The template itself knows no op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moesaic.codegen.kernel import Argument, GeneratedKernel
from moesaic.codegen.lines import INTEGERS, STORAGE, Line, comment, fused_ops, literal, register
from moesaic.codegen.names import short_name
from moesaic.codegen.render import banner, indented, render
from moesaic.codegen.target import WARP_THREADS, Target
from moesaic.ir.core import BlockArgument, Constant, Op, OpResult, Value
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops import col, math, row
from moesaic.ir.ops.kernel import Ticket, segments_of
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType
from moesaic.passes.row_layout import Layout, experts_columns, infer_layouts, read_in_registers, sparse_results
from moesaic.passes.specialize import DIGIT_WORDS, RadixShape, exchanged_bytes, padded_columns

_MAY_BE_AWAY = ", /*kMayBeAway=*/true"
"""For picks that may be -1."""


@dataclass
class RowProgramParameters:
    """Everything the template prints, already decided."""

    banner: str
    symbol: str
    header: str = "select.cuh"
    segments: str = ""
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
        self.segments = segments_of(op.region)
        self.experts = experts_columns(self.layouts)
        self.vec = int(self.config["vec"])
        self.lanes = int(self.config["lanes"])
        self.threads = int(self.config["threads"])
        self.prefetch = self.config["prefetch"] == "on"
        # 16-bit values that are ranked as they lie in memory.
        self.stored_rows = {
            o.x
            for o in op.region.ops
            if isinstance(o, row.TopK) and isinstance(o.x, BlockArgument) and o.x.type.dtype in (DType.BF16, DType.F16)
        }
        self.alignment = [int(a) for a in self.config["alignment"].split(",")] if self.config["alignment"] else []
        title = banner(op, "every step between a token's logits and its routing")
        self.out = RowProgramParameters(title, op.symbol, segments=self.segments)
        self.names: dict[Value, str] = {}
        self.taken: set[str] = set(_RESERVED)
        self.kept: set[Value] = set()  # values whose register array outlives the loop that fills it
        self.block = self.lanes > WARP_THREADS  # one token a block, shared by all of its lanes
        self.tables: dict[str, str] = {}
        self.dynamic: list[_DynamicTable] = []
        self.shared_bytes = 0
        self.selections: dict[Op, tuple[str, str, str]] = {}  # rank type, keys and last pick of a top-k
        self.members: dict[Op, str] = {}  # of a top-k by radix: a bit for each slot that is picked
        self.runs: dict[Value, tuple[str, str]] = {}  # by what is allowed: keys, and the best of each chunk
        self.stored: dict[Value, str] = {}  # rows that are also needed as they lie in memory
        self.parameter_of: dict[Value, str] = {}
        self.sparse = sparse_results(op.region)
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
            "setup": indented(_spaced(self.out.setup), 2),
            "body": [line for section in self.out.body for line in indented(["", *section], 4)],
            "finish": indented(self.out.finish, 2),
            # Blocks of the next kernel come to where this one's happen to end first. That costs grouped routers, whose
            # blocks all run at once, more than the launch: 6.14 us for 5.40 at T = 4096 (an H100, one after another).
            "next_early": not any(isinstance(op, row.GroupLimit) for op in self.region.ops),
        }
        return GeneratedKernel(
            symbol=self.op.symbol,
            source=render("row_program.cu.j2", parameters),
            arguments=arguments,
            threads=self.threads,
            rows_per_block=self.threads // self.lanes,
            grid=self.config["grid"],
            by_sequence=bool(self.segments),
            shared_bytes=self.shared_bytes,
            ops=fused_ops(self.region, self._name),
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
        for layout in sorted({x for x in self.layouts.values() if x.kind in ("picks", "bytes")}, key=str):
            row_type = f"moesaic::Row</*columns=*/{layout.columns}, kLanes, /*vec=*/1>"
            self.out.aliases.append(Line(self._rows(layout), definition=row_type))

    def _parameters(self) -> tuple[Argument, ...]:
        arguments: list[Argument] = []
        operands = [*self.region.arguments, *self._written()]
        for index, value in enumerate(operands):
            read = index < self.op.reads
            if read and not self._is_loaded(value):
                continue  # only its number of rows is asked for
            name = self._parameter_name(value, index)
            storage = self._storage(value)
            shape = f"[{', '.join(map(str, self.op.operands[index].type.shape))}]"
            pointer = f"{'const ' if read else ''}{storage}* __restrict__ {name}"
            self.out.parameters.append(Line(declaration=pointer, why=shape))
            arguments.append(Argument("pointer", index))
            if read and self._has_stride(value):
                self._stride(index, f"{name}_stride", arguments)
        self.out.parameters.append(Line(declaration="long long tokens"))
        arguments.append(Argument("tokens"))
        by_sequence = [i for i, a in enumerate(self.region.arguments) if a.type.leading == "N"]
        if by_sequence:
            self.out.parameters.append(Line(declaration="long long sequences"))
            arguments.append(Argument("rows", by_sequence[0]))
        return tuple(arguments)

    def _stride(self, index: int, name: str, arguments: list[Argument]) -> None:
        """Elements between the rows of an operand: an input's are told, what a kernel before has written is dense."""
        given = self.op.operands[index]
        if isinstance(given, BlockArgument):
            self.out.parameters.append(Line(declaration=f"long long {name}", why="elements between rows"))
            arguments.append(Argument("stride", index))
        else:
            self.out.constants.append(Line(name, str(given.type.shape[1]), definition="long long"))

    def _is_loaded(self, value: Value) -> bool:
        gathered = any(isinstance(o, row.Gather) and value is o.x for o in self.region.ops)
        return gathered or (isinstance(value, BlockArgument) and read_in_registers(self.region, value))

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
            kind = register(argument) if argument.type.dtype in INTEGERS else "float"
            sequence = f" + sequence * {pointer}_stride" if argument.type.leading == "N" else ""
            if layout.kind == "experts" and self.prefetch and kind == "float":
                section += self._prefetched(argument, self._align(argument, align))
                self.kept.add(argument)
            elif argument in self.stored_rows:
                where = f"{pointer} + token * {pointer}_stride"
                stored = self._as_stored(argument)
                section.append(f"{self._storage(argument)} {stored}[Experts::kSlots];  // %{argument.name}")
                section.append(
                    f"moesaic::load_stored<Experts, /*align=*/{self._align(argument, align)}>({where}, {stored}, lane);"
                )
                section += self._widened(argument)
                self.kept.add(argument)
            elif layout.is_row:
                rows = self._rows(layout)
                where = f"{pointer} + token * {pointer}_stride"
                section.append(f"{kind} {name}[{rows}::kSlots];  // %{argument.name}")
                load = "load_row" if kind == "float" else "load_stored"  # integers stay as they are
                section.append(
                    f"moesaic::{load}<{rows}, /*align=*/{self._align(argument, align)}>({where}, {name}, lane);"
                )
                self.kept.add(argument)
            elif layout.kind == "scalar":
                where = f"{pointer} + token{f' * {pointer}_stride' if self._has_stride(argument) else ''}"
                section.append(
                    f"const {register(argument)} {name} = {self._loaded(argument, where)};  // %{argument.name}"
                )
            elif layout.kind == "vector":
                rows = self._vector_rows(layout)
                whose = "of this block's sequence" if sequence else "the same for all tokens"
                self.out.setup.append(f"float {name}[{rows}::kSlots];  // %{argument.name}, {whose}")
                self.out.setup.append(
                    f"moesaic::load_row<{rows}, /*align=*/{self._align(argument, align)}>"
                    f"({pointer}{sequence}, {name}, lane);"
                )
                self.kept.add(argument)
            else:
                self.out.setup.append(f"const float {name} = {self._loaded(argument, pointer + sequence)};")
        if section:
            self.out.body.append(section)

    def _has_stride(self, argument: Value) -> bool:
        """Whether rows may be anywhere; numbers of single tokens follow one another."""
        return argument.type.rank == 2

    def _loaded(self, argument: BlockArgument, where: str) -> str:
        """One element of an input in the type it has in registers."""
        loaded = f"moesaic::load_one({where})"
        return f"moesaic::to_float({loaded})" if register(argument) == "float" else loaded

    def _prefetched(self, argument: BlockArgument, align: int) -> list[str]:
        """A row that was fetched during the token before; the next one's fetch is issued before its values are used."""
        pointer, name = self.parameter_of[argument], self._name(argument)
        ahead = self._unique(f"{name}_ahead")
        fetch = (
            f"moesaic::fetch_row<Experts, /*align=*/{align}>({pointer} + {{token}} * {pointer}_stride, {ahead}, lane);"
        )
        storage, stored = self._storage(argument), self._as_stored(argument)
        self.out.setup += [
            f"moesaic::Chunk<Experts, {storage}> {ahead}[Experts::kChunks];  // %{argument.name} of the next token",
            "if (tokens > 0) {",
            "  " + fetch.format(token="moesaic::at_most(first_token, tokens - 1)"),
            "}",
        ]
        arrived = [
            f"{storage} {stored}[Experts::kSlots];  // %{argument.name}",
            f"moesaic::unpack<Experts>({ahead}, {stored});",
            *self._widened(argument),
        ]
        return [
            *arrived,
            # Unconditional: behind a branch the compiler waits for the load. The last round fetches the last row again.
            fetch.format(token="moesaic::at_most(token + stride, tokens - 1)"),
        ]

    def _as_stored(self, argument: BlockArgument) -> str:
        if argument not in self.stored:
            self.stored[argument] = self._unique(f"{self._name(argument)}_stored")
        return self.stored[argument]

    def _widened(self, argument: BlockArgument) -> list[str]:
        """The floats of a row that is kept as it lies in memory, where anything wants them."""
        name = self._name(argument)
        return [f"float {name}[Experts::kSlots];", f"moesaic::widen({self._as_stored(argument)}, {name});"]

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
                if head not in self.sparse.values():
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
        """A rounding that only feeds a store, or another width of integers: the store converts."""
        if not isinstance(op, math.Cast) or op.y.type.dtype not in (DType.BF16, DType.F16, DType.I16, DType.I64):
            return False
        if op.y.type.dtype in INTEGERS and op.x.type.dtype not in INTEGERS:
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
                declared.append(f"{register(value)} {self._name(value)}[{self._rows(layout)}::kSlots];")
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
        self.out.setup += [f"{register(op.results[0])} {self._name(op.results[0])}[{rows}::kSlots];" for op in run]
        self.out.setup += ["#pragma unroll", f"for (int i = 0; i < {rows}::kSlots; ++i) {{"]
        self.out.setup += ["  " + self._assignment(op, "i", declare=False) for op in run] + ["}"]

    def _assignment(self, op: math.Elementwise, index: str, *, declare: bool) -> str:
        value = op.results[0]
        expression = op.cuda_expression(*(self._read(v, index) for v in op.operands))
        target = f"const {register(value)} {self._name(value)}" if declare else f"{self._name(value)}[{index}]"
        return f"{target} = {expression};  // {self._comment(op)}"

    def _read(self, value: Value, index: str) -> str:
        """A value inside a loop over `index`, or outside of loops."""
        if isinstance(value, Constant):
            return literal(value.value)
        name = self._name(value)
        return f"{name}[{index}]" if value in self.kept else name

    def _comment(self, op: Op) -> str:
        return comment(op, self._name)

    # --------------------------------------------------------------------------------------------- collectives

    def _collective(self, op: Op) -> list[str]:
        emit = _COLLECTIVES.get(type(op))
        if emit is None:
            raise UnsupportedError(f"{op.name} has no form in a row program")
        lines = emit(self, op)
        return [f"// {self._comment(op)}", *lines] if lines else []

    def _reduction(self, op: Op) -> list[str]:
        layout = self._layout(op.operands[0])
        [x] = op.operands
        name = self._name(x)
        function = "row_sum" if isinstance(op, row.Sum) else "row_max"
        if not layout.is_row:  # a row of one number
            return [f"const float {self._name(op.results[0])} = {self._read(op.operands[0], '')};"]
        if isinstance(op, row.Max) and x in self.stored_rows:
            name, function = self.stored[x], "row_max_of_stored"
        call = f"moesaic::{function}<{self._rows(layout)}>({name}, lane)"
        return [f"const float {self._name(op.results[0])} = {call};"]

    def _topk(self, op: Op) -> list[str]:
        assert isinstance(op, row.TopK)
        picks = self._rows(self.layouts[op.indices])
        raw = op.x in self.stored_rows
        rank = self._rank(op.x if raw else None)
        select = self.config["select"]
        picked, last = self._unique("picked"), self._unique("members" if select == "radix" else "last")
        if select == "merge" and not raw:
            select = "collect"  # values that fill a word are merged alone and collected with their columns
        numbers = f", /*listed=*/{self._listed(op)}" if select in ("merge", "collect") else ""
        arguments = ["lane", picked, last]
        if self._sorts_chunks(op):
            assert op.allowed is not None
            select = "collect_runs"
            keys, runs = self.runs[op.allowed]
            arguments = [keys, runs, self._name(op.allowed), *arguments]
            lines = []
        else:
            keys = self._unique("keys")
            arguments = [keys, *arguments]
            lines = [
                f"{rank}::Key {keys}[Experts::kSlots];",
                f"moesaic::rank_row<{rank}, Experts>({self.stored[op.x] if raw else self._array(op.x)}, {keys}, lane);",
            ]
            if op.allowed is not None:
                lines += [
                    "#pragma unroll",
                    "for (int i = 0; i < Experts::kSlots; ++i) {",
                    f"  {keys}[i] = {self._read(op.allowed, 'i')} ? {keys}[i] : 0;",
                    "}",
                ]
        # Top-ks of one kernel may rank different types, and pick different numbers.
        of_rank, of_picks, pick_bytes = rank.removeprefix("Rank"), picks.removeprefix("Picks"), 4 if raw else 8
        if select == "sort":
            places = padded_columns(self.experts, self.vec, self.lanes)
            size = pick_bytes * places
            arguments.append(self._table(f"sorted{of_rank}", f"{rank}::Pick", "Experts::kSlots * kLanes", size))
        elif select.startswith("collect"):
            arguments += [
                self._table("staged", "unsigned", "kExperts", 4 * self.experts),
                self._table(f"reached{of_picks}", "moesaic::Wide", f"{picks}::kColumns", 8 * op.k),
            ]
        elif select == "radix":
            shape = RadixShape.of(op, self.experts, self.vec, self.lanes)
            counted = str(shape.counted).lower()
            numbers = f", /*parts=*/{shape.parts}, /*places=*/{shape.places}, /*counted=*/{counted}"
            name, size = f"listed{of_rank}{of_picks}", pick_bytes * shape.length
            arguments += [
                self._table("digits", "unsigned", "moesaic::Digits::kWords", 4 * DIGIT_WORDS, zeroed=True),
                self._table(name, f"{rank}::Pick", str(shape.length), size, kept=True),
                self._table("staged", "unsigned", "kExperts", 4 * self.experts) if shape.bounded else "nullptr",
            ]
            self.out.header = "select_block.cuh"
        if select == "radix":
            self.members[op] = last
            declared = [f"{rank}::Pick {picked}[{picks}::kSlots];", f"unsigned {last};  // a bit for each slot"]
        else:
            self.selections[op] = (rank, keys, last)
            declared = [f"{rank}::Pick {picked}[{picks}::kSlots], {last};"]
        call = f"moesaic::top_k_{select}<{rank}, Experts, {picks}{numbers}>({', '.join(arguments)});"
        lines += [*declared, call]
        fills = []
        if self._used(op.indices):
            lines.append(f"int {self._name(op.indices)}[{picks}::kSlots];")
            none = -1 if op.may_fall_short else 0
            fills.append(f"  {self._name(op.indices)}[p] = here ? {rank}::column({picked}[p]) : {none};")
            self.kept.add(op.indices)
        if self._used(op.values):
            lines.append(f"float {self._name(op.values)}[{picks}::kSlots];")
            fills.append(f"  {self._name(op.values)}[p] = here ? {rank}::value({picked}[p]) : 0.0f;")
            self.kept.add(op.values)
        if fills:
            here = f"{picks}::live(p, lane)" + (f" && {rank}::is_pick({picked}[p])" if op.may_fall_short else "")
            fills.insert(0, f"  const bool here = {here};")
            lines += ["#pragma unroll", f"for (int p = 0; p < {picks}::kSlots; ++p) {{", *fills, "}"]
        return lines

    def _group_limit(self, op: Op) -> list[str]:
        assert isinstance(op, row.GroupLimit)
        name = self._name(op.allowed)
        self.kept.add(op.allowed)
        arguments = f"Experts, /*groups=*/{op.groups}, /*keep=*/{op.keep}, /*best=*/{op.best}"
        form = self.config["groups"]
        if form != "lanes":
            tables = [self._table("staged", "unsigned", "kExperts", 4 * self.experts)]
            if form == "shared":
                tables.append(self._table("kept_groups", "unsigned char", str(op.groups), op.groups))
            else:
                tables.append(self._table("group_scores", "unsigned", str(op.groups), 4 * op.groups, kept=True))
                self.out.header = "select_block.cuh"
            call = ", ".join([self._array(op.x), name, *tables, "lane"])
            return [f"bool {name}[Experts::kSlots];", f"moesaic::group_limit_{form}<{arguments}>({call});"]
        selection = next((o for o in self.region.ops if isinstance(o, row.TopK) and o.allowed is op.allowed), None)
        length = op.best
        keys, runs = self._unique("keys"), self._unique("runs")
        if selection is not None and self._sorts_chunks(selection):
            self.runs[op.allowed] = (keys, runs)
            length = self._listed(selection)
        return [
            f"unsigned {keys}[Experts::kSlots], {runs}[Experts::kChunks][{length}];",
            f"moesaic::rank_row<{self._rank(None)}, Experts>({self._array(op.x)}, {keys}, lane);",
            f"moesaic::sort_chunks<Experts>({keys}, {runs});",
            f"bool {name}[Experts::kSlots];",
            f"moesaic::group_limit_lanes<{arguments}>({runs}, {name}, lane);",
        ]

    def _sorts_chunks(self, op: row.TopK) -> bool:
        """Whether the groups that limit a top-k score what it ranks, so that both can use the same sorted chunks."""
        limit = op.allowed.op if isinstance(op.allowed, OpResult) else None
        return (
            isinstance(limit, row.GroupLimit)
            and limit.x is op.x
            and op.x not in self.stored_rows
            and (self.config["select"], self.config["groups"]) == ("merge", "lanes")
            and self._listed(op) >= limit.best
        )

    def _listed(self, op: row.TopK) -> int:
        """Values of a lane in a list. The choice is for the top-k with the most picks; more than picks never help."""
        return min(int(self.config["listed"]), 1 << (op.k - 1).bit_length())

    def _rank(self, stored: Value | None) -> str:
        """How values are ranked: of 16 bits as they are stored, or floats."""
        if stored is None:
            return self._alias("Rank", "moesaic::Rank<float>", "")
        storage = STORAGE[stored.type.dtype]
        return self._alias("Rank", f"moesaic::Rank<{storage}>", "16-bit values rank with their column in one word")

    def _gather(self, op: Op) -> list[str]:
        assert isinstance(op, row.Gather)
        picks = self._rows(self.layouts[op.y])
        name = self._name(op.y)
        self.kept.add(op.y)
        lines = [f"float {name}[{picks}::kSlots];"]
        indices = self._array(op.indices)
        away = _MAY_BE_AWAY if row.may_be_away(op.indices) else ""
        if isinstance(op.x, BlockArgument):
            pointer = self.parameter_of[op.x]
            where = pointer if op.x.type.rank == 1 else f"{pointer} + token * {pointer}_stride"
            return [*lines, f"moesaic::gather<{picks}{away}>({where}, {indices}, {name}, lane);"]
        staged = self._table("gathered_from", "float", "kExperts", 4 * self.experts)
        source = self._array(op.x)
        call = f"moesaic::gather_registers<Experts, {picks}{away}>({source}, {indices}, {name}, {staged}, lane);"
        return [*lines, call]

    def _scatter(self, op: Op) -> list[str]:
        assert isinstance(op, row.Scatter)
        picks = self._rows(self.layouts[op.indices])
        name = self._name(op.y)
        self.kept.add(op.y)
        source, lines = self._picks_array(op.x, picks)
        table = self._table("scattered", "float", "kExperts", 4 * self.experts, zeroed=True)
        function = "scatter_added" if row.are_given(op.indices) else "scatter"
        away = _MAY_BE_AWAY if function == "scatter" and row.may_be_away(op.indices) else ""
        return [
            *lines,
            f"float {name}[Experts::kSlots];",
            f"moesaic::{function}<Experts, {picks}{away}>({source}, {self._array(op.indices)}, {name}, {table}, lane);",
        ]

    def _given(self, op: Op) -> list[str]:
        assert isinstance(op, row.Given)
        picks = self._rows(self.layouts[op.y])
        name = self._name(op.y)
        self.kept.add(op.y)
        source = self._array(op.indices)
        allowed = f"{self._read(op.allowed, '')} && " if op.allowed is not None else ""
        return [
            f"int {name}[{picks}::kSlots];",
            "#pragma unroll",
            f"for (int p = 0; p < {picks}::kSlots; ++p) {{",
            f"  const bool here = {allowed}{source}[p] >= 0 && {source}[p] < {op.size};",
            f"  {name}[p] = here ? static_cast<int>({source}[p]) : -1;",
            "}",
        ]

    def _append(self, op: Op) -> list[str]:
        assert isinstance(op, row.Append)
        name, picks = self._name(op.y), self._rows(self.layouts[op.y])
        before = self.layouts[op.indices].columns
        source = self._array(op.indices)
        slots = f"{self._rows(self.layouts[op.indices])}::kSlots"
        self.kept.add(op.y)
        return [
            f"int {name}[{picks}::kSlots];",
            "#pragma unroll",
            f"for (int p = 0; p < {picks}::kSlots; ++p) {{",
            f"  const int place = {picks}::column(p, lane);",
            f"  {name}[p] = place < {before} ? {source}[p < {slots} ? p : 0] : {op.first} + place - {before};",
            "}",
        ]

    def _first(self, op: Op) -> list[str]:
        assert isinstance(op, row.First)
        name = self._name(op.y)
        self.kept.add(op.y)
        return [
            f"bool {name}[Experts::kSlots];",
            "#pragma unroll",
            f"for (int i = 0; i < Experts::kSlots; ++i) {name}[i] = Experts::column(i, lane) < {op.n};",
        ]

    def _bitmap(self, op: Op) -> list[str]:
        assert isinstance(op, row.Bitmap)
        picks = self._rows(self.layouts[op.indices])
        bytes = self._rows(self.layouts[op.y])
        name = self._name(op.y)
        self.kept.add(op.y)
        return [
            f"int {name}[{bytes}::kSlots];",
            f"moesaic::bitmap<{bytes}, {picks}>({self._array(op.indices)}, {name}, lane);",
        ]

    def _reshape(self, op: Op) -> list[str]:
        """One number a token, with or without an axis of columns: the same register."""
        value = op.results[0]
        return [f"const {register(value)} {self._name(value)} = {self._read(op.operands[0], '')};"]

    def _membership(self, op: Op) -> list[str]:
        assert isinstance(op, row.Membership)
        name = self._name(op.y)
        self.kept.add(op.y)
        lines = [f"bool {name}[Experts::kSlots];"]
        made_by = op.indices.op if isinstance(op.indices, OpResult) else None
        if isinstance(made_by, row.TopK):
            if made_by in self.members:
                return [
                    *lines,
                    "#pragma unroll",
                    f"for (int i = 0; i < Experts::kSlots; ++i) {name}[i] = ({self.members[made_by]} & 1u << i) != 0;",
                ]
            rank, keys, last = self.selections[made_by]
            lines.append(f"moesaic::picked_slots<{rank}, Experts>({keys}, {last}, {name}, lane);")
            also = ""
            if made_by.allowed in self.runs:  # these keys are of all experts
                also = f"{self._name(made_by.allowed)}[i]"
            elif made_by.may_fall_short:  # the last pick may be none, which every key reaches
                also = f"{keys}[i] != 0"
            if also:
                lines += [
                    "#pragma unroll",
                    f"for (int i = 0; i < Experts::kSlots; ++i) {name}[i] = {name}[i] && {also};",
                ]
            return lines
        picks = self._rows(self.layouts[op.indices])
        away = _MAY_BE_AWAY if row.may_be_away(op.indices) else ""
        return [*lines, f"moesaic::membership<Experts, {picks}{away}>({self._array(op.indices)}, {name}, lane);"]

    def _count(self, op: Op) -> list[str]:
        assert isinstance(op, col.Count)
        picks = self._rows(self.layouts[op.indices])
        name = self._name(op.y)
        indices = self._array(op.indices)
        here = f" && {indices}[p] >= 0" if row.may_be_away(op.indices) else ""
        if self.block:  # long rows leave no shared memory for it
            pointer = next(p for value, p in self.results if value is op.y)
            row_of_block = self._row_of_block(op.y, pointer)
            self.out.setup += [
                f"int* const {name} = {row_of_block};  // %{op.y.name or name}, picks of this block's tokens",
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
            f"  if (active && {picks}::live(p, lane){here}) atomicAdd(&{name}[{indices}[p]], 1);",
            "}",
        ]

    def _column_sum(self, op: Op) -> list[str]:
        assert isinstance(op, col.Sum)
        name = self._name(op.y)
        rows, index = self._summed_rows(op)
        if self._sums_in_shared(op):
            self.out.setup += [
                f"__shared__ moesaic::LaneSums<{rows}, kThreads> {name};  // %{op.y.name or name}, each lane's share",
                f"{name}.clear();",
            ]
            return [f"if (active) {name}.add({self._array(op.x)});"]
        self.out.setup += [
            f"float {name}[{rows}::kSlots];  // %{op.y.name or name}, this lane's share of the sums over tokens",
            "#pragma unroll",
            f"for (int i = 0; i < {rows}::kSlots; ++i) {name}[i] = 0.0f;",
        ]
        if not index:
            return [f"if (active) {name}[0] += {self._read(op.x, '')};"]
        return [
            "#pragma unroll",
            f"for (int i = 0; i < {rows}::kSlots; ++i) {{",
            f"  if (active) {name}[i] += {self._read(op.x, 'i')};",
            "}",
        ]

    def _sums_in_shared(self, op: col.Sum) -> bool:
        return self.config.get("sums") == "shared" and self._layout(op.x).kind == "experts"

    def _summed_rows(self, op: col.Sum) -> tuple[str, str]:
        """The row type of what is summed, and the index of its slots; a number per token is a row of one."""
        layout = self._layout(op.x)
        if layout.is_row:
            return self._rows(layout), "i"
        return self._alias("Single", "moesaic::Row</*columns=*/1, kLanes, /*vec=*/1>", "a number per token"), ""

    def _row_count(self, op: Op) -> list[str]:
        assert isinstance(op, col.Rows)
        count = "tokens" if op.x.type.leading == "T" else "sequences"
        self.out.setup.append(f"const float {self._name(op.y)} = static_cast<float>({count});  // {self._comment(op)}")
        return []

    def _spread(self, op: Op) -> list[str]:
        assert isinstance(op, col.Spread)
        name = self._name(op.y)
        layout = self.layouts[op.y]
        if not layout.is_row:
            return [f"const float {name} = {self._read(op.x, '')};"]
        self.kept.add(op.y)
        return [
            f"float {name}[{self._rows(layout)}::kSlots];",
            "#pragma unroll",
            f"for (int i = 0; i < {self._rows(layout)}::kSlots; ++i) {name}[i] = {self._read(op.x, 'i')};",
        ]

    def _ticket(self, op: Op) -> list[str]:
        return []  # a zero; see _outputs

    # ------------------------------------------------------------------------------------------------- outputs

    def _outputs(self) -> None:
        section: list[str] = []
        for value, pointer in self.results:
            layout = self._layout(value)
            name = self._name(value)
            if value in self.sparse:
                self.out.body.append(self._sparse(self.sparse[value], value, pointer))
            elif layout.kind == "column":
                self._finish(value, pointer)
            elif isinstance(value, OpResult) and isinstance(value.op, Ticket):
                self.out.finish += ["", f"if (blockIdx.x == 0 && threadIdx.x == 0) moesaic::store_one({pointer}, 0);"]
            elif layout.is_row:
                rows = self._rows(layout)
                where = f"{pointer} + token * {layout.columns}"
                align = self._result_align(layout, value)
                section.append(f"moesaic::store_row<{rows}, /*align=*/{align}>({where}, {name}, lane);")
            elif layout.kind == "scalar":
                cast = f"moesaic::from_float<{self._storage(value)}>({name})"
                section.append(f"if (lane == 0) moesaic::store_one({pointer} + token, {cast});")
            else:
                raise UnsupportedError(f"{self.op.symbol}: a row program cannot return {value.type}")
        if section:
            self.out.body.append(["if (active) {", *("  " + line for line in section), "}"])

    def _row_of_block(self, value: Value, pointer: str) -> str:
        """Where this block's partial row of a sum over tokens is."""
        return f"{pointer} + static_cast<long long>(blockIdx.x) * {self.layouts[value].columns}"

    def _result_align(self, layout: Layout, value: Value) -> int:
        vec = self.vec if layout.kind == "experts" else 1
        align = _power_of_two_factor(layout.columns * value.type.dtype.bytes)
        return min(16, align, vec * value.type.dtype.bytes)

    def _sparse(self, op: row.Scatter | row.Membership, value: Value, pointer: str) -> list[str]:
        """A result of zeros but for the picks, by way of a row of shared memory."""
        layout = self._layout(value)
        picks = self._rows(self.layouts[op.indices])
        if isinstance(op, row.Scatter):
            source, lines = self._picks_array(op.x, picks)
        else:
            source = self._unique("picked_ones")
            lines = [
                f"bool {source}[{picks}::kSlots];",
                "#pragma unroll",
                f"for (int p = 0; p < {picks}::kSlots; ++p) {source}[p] = true;",
            ]
        storage = self._storage(value)
        size = value.type.dtype.bytes * self.experts
        table = self._table(f"{self._name(value)}_row", storage, "kExperts", size, zeroed=True)
        where = f"{pointer} + token * {layout.columns}"
        away = _MAY_BE_AWAY if row.may_be_away(op.indices) else ""
        arguments = f"Experts, {picks}, /*align=*/{self._result_align(layout, value)}{away}"
        return [
            f"// {self._comment(op)}",
            *lines,
            f"moesaic::store_scattered<{arguments}>(",
            f"    {where}, {source}, {self._array(op.indices)}, {table}, lane, active);",
        ]

    def _finish(self, value: Value, pointer: str) -> None:
        assert isinstance(value, OpResult)
        name = self._name(value)
        row_of_block = self._row_of_block(value, pointer)
        if self.block and isinstance(value.op, col.Sum):  # each column is summed in one lane
            rows, _ = self._summed_rows(value.op)
            align = self._result_align(self._layout(value.op.x), value)
            call = f"moesaic::store_row<{rows}, /*align=*/{align}>({row_of_block}, {name}, lane);"
            self.out.finish += ["", call]
            return
        if self.block:  # counts are where they belong
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
        assert isinstance(value.op, col.Sum)
        rows, _ = self._summed_rows(value.op)
        scratch = self._unique(f"{name}_scratch")
        self.out.finish.append("")
        if self._sums_in_shared(value.op):
            collected = self._unique(f"{name}_collected")
            self.out.finish += [f"float {collected}[{rows}::kSlots];", f"{name}.read({collected});"]
            name = collected
        self.out.finish += [
            f"__shared__ float {scratch}[kThreads / 32 * {rows}::kColumns];",
            f"moesaic::store_column_sums<{rows}, kThreads>({name}, {scratch}, {row_of_block}, lane);",
        ]

    # ------------------------------------------------------------------------------------------------- details

    def _layout(self, value: Value) -> Layout:
        return Layout("uniform") if isinstance(value, Constant) else self.layouts[value]

    def _rows(self, layout: Layout) -> str:
        if layout.kind == "experts":
            return "Experts"
        several = len({x.columns for x in self.layouts.values() if x.kind == layout.kind}) > 1
        return f"{layout.kind.capitalize()}{layout.columns if several else ''}"

    def _vector_rows(self, layout: Layout) -> str:
        if layout.columns != self.experts:
            raise UnsupportedError(f"{self.op.symbol}: a vector of {layout.columns} in rows of {self.experts} experts")
        return "Experts"

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
                    f"moesaic::clear<kLanes, {length}>({self.tables[name]}, lane);",
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
        needed = self.shared_bytes + exchanged_bytes(self.region, self.lanes)
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
                base = short_name(value)
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
    row.Bitmap: _Emitter._bitmap,
    row.Given: _Emitter._given,
    row.Append: _Emitter._append,
    row.First: _Emitter._first,
    row.Squeeze: _Emitter._reshape,
    row.Unsqueeze: _Emitter._reshape,
    col.Count: _Emitter._count,
    col.Sum: _Emitter._column_sum,
    col.Rows: _Emitter._row_count,
    col.Spread: _Emitter._spread,
    Ticket: _Emitter._ticket,
}

# Names the kernel text uses itself, and C++ words that a value might be called.
_RESERVED = frozenset(
    """
    lane slot first first_token stride active token tokens i p e live here Experts Picks Bytes kExperts kLanes kVec
    kThreads kTokensPerBlock blocks sequence sequences length place moesaic int float double bool char long short
    signed unsigned const auto void for if else while do switch case default break continue return goto new delete
    this class struct union enum template typename using namespace static extern register volatile inline operator
    public private protected virtual try catch throw true false sizeof and or not xor min max exp log sqrt threadIdx
    blockIdx blockDim gridDim
    """.split()  # noqa: SIM905 - a list of strings would take a page
)


def _spaced(lines: Sequence[str]) -> list[str]:
    return ["", *lines] if lines else []


def _power_of_two_factor(n: int) -> int:
    return n & -n
