"""The text of a row program as it grows: names, register arrays, sections, and what one op leaves for another."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.codegen.lines import STORAGE, Line, comment, literal
from moesaic.codegen.parameters import Parameters
from moesaic.codegen.target import WARP_THREADS
from moesaic.ir.core import BlockArgument, Constant, Op, OpResult, Value
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops import col, math, row
from moesaic.ir.ops.kernel import finish_in, segments_of
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType
from moesaic.passes.row_layout import Layout, experts_columns, infer_layouts, sparse_results

MAY_BE_AWAY = ", /*kMayBeAway=*/true"
"""For picks that may be -1."""


@dataclass(frozen=True)
class ScatteredOnto:
    """The sum of a scattered row and of numbers that all tokens have in common.

    Attributes:
        add: the sum.
        broadcast: the op that makes a row of the numbers.
    """

    add: math.Add
    broadcast: math.Broadcast

    @property
    def base(self) -> Value:
        """The numbers."""
        return self.broadcast.x


class Text:
    """What has been written, and what there is to know for writing on.

    Attributes:
        op, region, config: the launch.
        layouts, segments, experts: of the region.
        finishing: what is done with sums by the first block of a cluster; `cluster`: how many blocks that has, or 0.
        vec, lanes, threads: as configured; `block`: whether a block's lanes share one token; `by_warps`: whether warps
            go through the tokens on their own.
        stored_rows: rows of 16-bit values that are ranked as they lie in memory; `stored`: their arrays.
        sparse: results of zeros but for the picks, and the ops that make them.
        parameters: of the kernel; `pointers`: those of what is read; `results`: of what is written.
        kept: values whose register array outlives the loop that fills it.
        shared: rows that all tokens have in common, and that lie in shared memory.
        header: of the helpers.
        constants, aliases: for the head of the file.
        setup, body, finish: ahead of the loop over tokens; its sections; after it.
    """

    def __init__(self, op: Kernel) -> None:
        if op.region is None:
            raise InternalError(f"{op.symbol}: a row program without a region")
        self.op = op
        self.region = op.region
        self.config = op.configuration
        self.layouts = infer_layouts(op.region)
        self.segments = segments_of(op.region)
        self.finishing = finish_in(op.region)
        self.cluster = int(self.config.get("cluster", "0"))
        self.experts = experts_columns(self.layouts)
        self.vec = int(self.config["vec"])
        self.lanes = int(self.config["lanes"])
        self.threads = int(self.config["threads"])
        self.block = self.lanes > WARP_THREADS
        self.by_warps = self.config.get("rounds") == "warps"
        self.stored_rows = {
            o.x
            for o in op.region.ops
            if isinstance(o, row.TopK) and isinstance(o.x, BlockArgument) and o.x.type.dtype in (DType.BF16, DType.F16)
        }
        self.stored: dict[Value, str] = {}
        self.sparse = sparse_results(op.region)
        self.parameters = Parameters(op, _RESERVED)
        self.pointers: dict[Value, str] = {}
        self.results: list[tuple[Value, str]] = []
        self.kept: set[Value] = set()
        self.shared: set[Value] = set()
        self.header = "select.cuh"
        self.constants: list[Line] = []
        self.aliases: list[Line] = []
        self.setup: list[str] = []
        self.body: list[list[str]] = []
        self.finish: list[str] = []

    # --------------------------------------------------------------------------------------------------- values

    def name(self, value: Value) -> str:
        return self.parameters.of(value)

    def unique(self, base: str) -> str:
        return self.parameters.unique(base)

    def comment(self, op: Op) -> str:
        return comment(op, self.name)

    def read(self, value: Value, index: str = "") -> str:
        """A value inside a loop over `index`, or outside of loops."""
        if isinstance(value, Constant):
            return literal(value.value)
        name = self.name(value)
        if value in self.shared:
            return f"{name}.at(lane, {index})"
        return f"{name}[{index}]" if value in self.kept else name

    def array(self, value: Value) -> str:
        """A value as the register array a collective takes."""
        if value not in self.kept:
            raise InternalError(f"{self.op.symbol}: {self.name(value)} is no register array")
        return self.name(value)

    def keep(self, value: Value) -> str:
        """The name of a value that becomes a register array."""
        self.kept.add(value)
        return self.name(value)

    def picks_array(self, value: Value, picks: str) -> tuple[str, list[str]]:
        """As `array`, with a number per token spread over the picks; and the lines that do that."""
        if value in self.kept:
            return self.name(value), []
        name = self.unique(f"{self.name(value) if not isinstance(value, Constant) else 'constant'}_picks")
        spread = [
            f"float {name}[{picks}::kSlots];",
            "#pragma unroll",
            f"for (int p = 0; p < {picks}::kSlots; ++p) {name}[p] = {self.read(value)};",
        ]
        return name, spread

    def quotient_of_sums(self, value: Value) -> math.SafeDiv | None:
        """The division of a row by a number of its token that makes a value, if sums over tokens are all it is for:
        they divide and add in one instruction, and the value itself is never there.

        Not where a token has a whole warp: with 896 experts that took 3 % longer, though it is fewer instructions.
        """
        if not isinstance(value, OpResult) or not isinstance(value.op, math.SafeDiv) or self.lanes >= WARP_THREADS:
            return None
        op, users = value.op, self.region.users(value)
        by_number = self.layout(op.a).is_row and not self.layout(op.b).is_row
        return op if by_number and users and all(isinstance(u, col.Sum) for u in users) else None

    def in_shared(self, op: col.Sum) -> bool:
        """Whether a lane's share of a sum over tokens is in shared memory."""
        return self.config.get("sums") == "shared" and self.layout(op.x).kind == "experts"

    def scattered_onto(self, op: Op) -> ScatteredOnto | None:
        """What a scatter is added to, if that is a number of each expert, the same for all tokens: it lies in shared
        memory then, where the scatter needs a row anyway, and takes no registers."""
        if not isinstance(op, row.Scatter) or op in self.sparse.values() or row.are_given(op.indices):
            return None
        users = self.region.users(op.y)
        if len(users) != 1 or not isinstance(users[0], math.Add):
            return None
        add = users[0]
        other = add.b if add.a is op.y else add.a
        broadcast = other.op if isinstance(other, OpResult) else None
        if not isinstance(broadcast, math.Broadcast) or self.region.users(other) != [add]:
            return None
        base, ops = broadcast.x, self.region.ops
        known = not isinstance(base, OpResult) or ops.index(base.op) < ops.index(op)
        # A row program has room for one table that scatters go through (`row_shape.py`), and this one is not zero.
        alone = [o for o in ops if isinstance(o, row.Scatter) and o not in self.sparse.values()] == [op]
        held = base not in self.shared  # which has a place of its own there
        return (
            ScatteredOnto(add, broadcast) if self.layout(base).kind == "vector" and known and alone and held else None
        )

    def storage(self, value: Value) -> str:
        """C++ type of a value's elements in memory."""
        return STORAGE[value.type.dtype]

    # -------------------------------------------------------------------------------------------------- layouts

    def layout(self, value: Value) -> Layout:
        return Layout("uniform") if isinstance(value, Constant) else self.layouts[value]

    def rows(self, layout: Layout) -> str:
        """The C++ type that says which lane has which columns."""
        if layout.kind == "experts":
            return "Experts"
        several = len({x.columns for x in self.layouts.values() if x.kind == layout.kind}) > 1
        return f"{layout.kind.capitalize()}{layout.columns if several else ''}"

    def rows_of(self, value: Value) -> str:
        return self.rows(self.layouts[value])

    def vector_rows(self, layout: Layout) -> str:
        if layout.columns != self.experts:
            raise UnsupportedError(f"{self.op.symbol}: a vector of {layout.columns} in rows of {self.experts} experts")
        return "Experts"

    def result_align(self, layout: Layout, value: Value) -> int:
        """Bytes that a lane's part of a row that is written is aligned to."""
        size = layout.columns * value.type.dtype.bytes
        vec = self.vec if layout.kind == "experts" else 1
        return min(16, size & -size, vec * value.type.dtype.bytes)

    def alias(self, base: str, definition: str, why: str) -> str:
        """The name of a C++ type, given to it here if it has none."""
        for alias in self.aliases:
            if alias.definition == definition:
                return alias.name
        name = self.unique(base)
        self.aliases.append(Line(name, definition=definition, why=why))
        return name


# What the template and the lines of collectives call their own.
_RESERVED = """
    lane slot of_warp first first_token first_of_warp block blocks stride active token tokens i p e live here Experts
    Picks Bytes kExperts kLanes kVec kThreads kTokensPerBlock kTokensPerWarp kBlocks sequence sequences length place
    """.split()  # noqa: SIM905 - a list of strings would take half a page
