"""The gradient of a weight: from a ``launch.kernel`` of that template to CUDA text.

Persistent blocks go over the tiles of every expert's matrix; the sum of a tile is over the expert's rows, so that an
expert without any writes zeros at once. Parts of the sum over all tokens are handled as experts are, with the rows that
``parts.cuh`` gives each. Sums of an operand's rows, the gradient of a bias, are taken by the blocks
that have the first tile beside them, from rows that lie in the cache. Where the tile has warps of its own that fetch
(``fetching.py``), these go over the same tiles.
"""

from __future__ import annotations

import math as python_math

from moesaic.codegen.elementwise import is_store_cast
from moesaic.codegen.epilogue import TILE_NAMES, check_target
from moesaic.codegen.fetching import Boxes, Fetch, InTurn, Queued, in_two_roles, order_over_experts, tile_type
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.lines import STORAGE, Line, comment, fused_ops
from moesaic.codegen.names import short_name
from moesaic.codegen.parameters import Parameters
from moesaic.codegen.render import banner, indented, render
from moesaic.codegen.staging import Staging
from moesaic.ir.core import BlockArgument, OpResult, Value, columns_of
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops import math, slot
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.product_shape import TOKEN_BYTES, Lines, ProductShape, pairs_lie_beside, rows_lie_inside


def generate(op: Kernel) -> GeneratedKernel:
    """CUDA of one gradient of a weight.

    Raises:
        UnsupportedError: the region holds something the template family has no form for; names the op.
    """
    return _Emitter(op).generate()


class _Emitter:
    def __init__(self, op: Kernel) -> None:
        self.op = op
        self.parameters = Parameters(op, (*TILE_NAMES, "part", "rows_of_part"))
        self.region = self.parameters.region
        self.shape = ProductShape.parse(op.configuration)
        target = check_target(op, self.shape)
        wgrads = [o for o in self.region.ops if isinstance(o, slot.Outer)]
        if len(wgrads) != 1:
            raise InternalError(f"{op.symbol}: expected one gradient of a weight in the region, found {len(wgrads)}")
        self.wgrad = wgrads[0]
        self.y = self.wgrad.result
        self.grouped = isinstance(self.wgrad, slot.GroupedWgrad)
        self.parts = self.wgrad.parts if isinstance(self.wgrad, slot.WgradParts) else 0
        # What there is a matrix for, and how many.
        self.of, self.matrices = ("part", "kParts") if self.parts else ("expert", "kExperts")
        self.sums = [o for o in self.region.ops if isinstance(o, slot.ExpertSums)]
        self.fetched = self._ways()
        self.pair = 2 if Fetch.SHARED in self.fetched else 1
        size = self.wgrad.a.type.dtype.bytes
        self.left, self.right = (Lines(True, self._aligned(value, size)) for value in (self.wgrad.a, self.wgrad.b))
        self.tile_bytes = self.shape.shared_bytes(size, 1, self.left, self.right)
        value, _, onto = self._after(self.y, "")
        self.index = op.reads + self.region.terminator.operands.index(value)
        self.staging: Staging | None = None
        if onto is None:
            beside = self._table_bytes + self.shape.queue_bytes + (TOKEN_BYTES if self._of_tokens is not None else 0)
            room = target.shared_optin - self.tile_bytes - beside
            self.staging = Staging.of_matrices(self.parameters, self.index, self.shape, self.shape.columns, room)
            self.tile_bytes += self.staging.bytes if self.staging is not None else 0
        if self.shape.swapped and self.staging is None:
            raise UnsupportedError(f"{op.symbol}: its rows have no room to leave a tile with swapped operands by")

    def generate(self) -> GeneratedKernel:
        body = self._body()
        shape = self.shape.cuda(1, self.left, self.right)
        source = render(
            "over_tiles.cu.j2",
            {
                "banner": banner(self.op, "the gradient of a weight: sums over rows of outer products"),
                "symbol": self.op.symbol,
                "early": self.op.early,
                "headers": [
                    self.shape.header,
                    "epilogue.cuh",
                    *(["items.cuh"] if self.shape.fetches and self.grouped else []),
                    *(["parts.cuh"] if self.parts else []),
                ],
                "bounds": self.shape.bounds,
                "cluster": self.pair,
                "constants": self._constants(),
                "aliases": [
                    Line("Element", definition=STORAGE[self.wgrad.a.type.dtype]),
                    Line("Shape", definition=f"moesaic::TileShape<{shape}>"),
                    *([Line("Staged", definition=self.staging.type)] if self.staging is not None else []),
                    Line("Tile", definition=tile_type(self.shape, *self.fetched, self.staging is not None)),
                ],
                "tile_bytes": self.tile_bytes,
                "parameters": self.parameters.lines,
                "body": indented(body, 2),
            },
        )
        return GeneratedKernel(
            symbol=self.op.symbol,
            source=source,
            arguments=tuple(self.parameters.arguments),
            threads=self.shape.threads,
            rows_per_block=1,
            grid="device",
            shared_bytes=self.tile_bytes,
            cluster=self.pair,
            ops=fused_ops(self.region, self._name),
        )

    @property
    def _told(self) -> bool:
        """Whether blocks are told their next item of an expert."""
        return self.grouped and self.shape.told

    @property
    def _table_bytes(self) -> int:
        """Of shared memory that a kernel has of its own, for which experts are long."""
        if not self._told:
            return 0
        experts = self.y.type.shape[0]
        assert isinstance(experts, int)
        return -(-2 * (experts + 1 + self.shape.threads // 32) // 16) * 16

    def _constants(self) -> list[Line]:
        matrices = self.y.type.shape[0] if self.grouped or self.parts else 1
        return [
            Line("kThreads", str(self.shape.threads)),
            Line(self.matrices, str(matrices), why="of the sum over tokens" if self.parts else ""),
            Line("kRows", str(columns_of(self.wgrad.a)), why="of each matrix"),
            Line("kColumns", str(columns_of(self.wgrad.b))),
            Line("kTileRows", str(self.shape.rows)),
            Line("kTileColumns", str(self.shape.columns)),
            Line("kRowTiles", "(kRows + kTileRows - 1) / kTileRows"),
            Line("kColumnTiles", "(kColumns + kTileColumns - 1) / kTileColumns"),
        ]

    def _ways(self) -> tuple[Fetch, Fetch]:
        """How the operands are fetched: rows that follow one another by the copy engine."""
        if not self.shape.fetches:
            return Fetch.LINES, Fetch.LINES
        left, right = (
            _source(v) is v and self.parameters.align(self.parameters.index(v)) == 16
            for v in (self.wgrad.a, self.wgrad.b)
        )
        if left and right:
            beside = pairs_lie_beside(*self.shape.tiles_of_matrix(*self.wgrad.sizes()))
            return (Fetch.SHARED, Fetch.BOXES) if beside else (Fetch.BOXES, Fetch.SHARED)
        if right:
            return Fetch.LINES, Fetch.SHARED
        return (Fetch.SHARED if left else Fetch.LINES), Fetch.LINES

    def _aligned(self, value: Value, size: int) -> int:
        index = self.parameters.index(_source(value))
        return python_math.gcd(self.parameters.align(index), columns_of(value) * size)

    # --------------------------------------------------------------------------------------------------------- body

    def _body(self) -> list[str]:
        lines = [*self.parameters.zeroed(), "MOESAIC_DYNAMIC_SHARED(unsigned char, shared);"]
        if self.shape.fetches:
            roles = in_two_roles(self._order(), self._fetch(), self._multiply(), self.staging is not None)
            return [*lines, *self._items(), *roles]
        tile = ["const int rest = static_cast<int>(n % (kRowTiles * kColumnTiles));"]
        tile += [
            "const int first_row = rest / kColumnTiles * kTileRows;",
            "const int first_column = rest % kColumnTiles * kTileColumns;",
            *self._slots("n / (kRowTiles * kColumnTiles)"),
            "",
            *self._lines("left", self.wgrad.a, "", "first_row"),
            *self._lines("right", self.wgrad.b, "int /*part*/, ", "first_column"),
            "",
            f"Tile tile;  // {comment(self.wgrad, self._name)}",
            "tile.clear();",
            "tile.multiply(left, right, slots, kRows - first_row, kColumns - first_column, shared);",
            "",
            *self._store(),
            *self._bias(),
        ]
        loop = (
            f"for (long long n = blockIdx.x; n < static_cast<long long>({self.matrices}) * kRowTiles * kColumnTiles; "
            "n += gridDim.x) {"
        )
        return [*lines, "", loop, *indented(tile, 2), "}"]

    def _slots(self, expert: str) -> list[str]:
        """The rows that are summed: of an expert, of a part of all tokens, or of all."""
        if self.parts:
            tokens = self.parameters.tokens()
            part = f"moesaic::part_of<kParts, /*rows=*/{slot.PART_ROWS}>({tokens}, part)"
            return [
                f"const int part = static_cast<int>({expert});",
                f"const moesaic::Part rows_of_part = {part};",
                "const int slots = rows_of_part.count;",
                "const long long first_slot = rows_of_part.first;",
            ]
        if not isinstance(self.wgrad, slot.GroupedWgrad):
            return [
                "const int expert = 0;",
                f"const int slots = static_cast<int>({self.parameters.tokens()});",
                "const long long first_slot = 0;",
            ]
        counts, offsets = self._counts_and_offsets()
        return [
            f"const int expert = static_cast<int>({expert});",
            f"const int slots = moesaic::load_one({counts} + expert);",
            f"const long long first_slot = moesaic::load_one({offsets} + expert);",
        ]

    # ---------------------------------------------------------------------------------------- warps that fetch

    def _items(self) -> list[str]:
        """A pair of blocks has two tiles beside each other that have the shared operand in common."""
        rows, columns = ("Tile::kPair" if how is Fetch.SHARED else "1" for how in (self.fetched[1], self.fetched[0]))
        lines = [
            f"constexpr int kRowItems = (kRowTiles + {rows} - 1) / {rows};",
            f"constexpr int kColumnItems = (kColumnTiles + {columns} - 1) / {columns};",
            "constexpr int kItems = kRowItems * kColumnItems;  // of each matrix",
        ]
        if not self.grouped:
            lines.append(f"constexpr long long items = static_cast<long long>({self.matrices}) * kItems;")
        if self._told:
            counts, offsets = self._counts_and_offsets()
            lines += [
                "__shared__ unsigned short long_before[kExperts + 1 + kThreads / 32];",
                f"moesaic::count_long<kExperts, kThreads>({counts}, {offsets}, long_before);",
            ]
        return lines

    @property
    def _rows_lie_inside(self) -> bool:
        """Whether items that follow one another lie below each other."""
        below, beside = self.shape.tiles_of_matrix(*self.wgrad.sizes())
        rows, columns = (2 if how is Fetch.SHARED else 1 for how in (self.fetched[1], self.fetched[0]))
        return rows_lie_inside(-(-below // rows), -(-beside // columns))

    def _order(self) -> InTurn | Queued:
        """In which order blocks take items."""
        if not self.grouped:
            return InTurn("long long", "items")
        return order_over_experts(self.shape, self._found(), "kExperts * kItems", self.parameters.counter())

    def _found(self) -> str:
        """Where item `n` lies."""
        given = [*(["long_before"] if self._told else []), *self._counts_and_offsets()]
        return f"moesaic::find_item<kExperts, kItems>(n, {', '.join(given)})"

    def _counts_and_offsets(self) -> tuple[str, str]:
        assert isinstance(self.wgrad, slot.GroupedWgrad)
        return self.parameters.counts_and_offsets(self.wgrad)

    def _place(self) -> list[str]:
        of_row, of_column = (
            " * Tile::kPair + Tile::rank()" if how is Fetch.SHARED else "" for how in (self.fetched[1], self.fetched[0])
        )
        found = [f"const auto next = {self._found()};"] if self.grouped and not self.shape.told else []
        told = ["const int expert = next.expert;", "const int slots = next.rows;"]
        told.append("const long long first_slot = next.first_slot;")
        row, column = "rest / kColumnItems", "rest % kColumnItems"
        if self._rows_lie_inside:
            row, column = "rest % kRowItems", "rest / kRowItems"
        return [
            *found,
            f"const int rest = {'next.number' if self.grouped else 'static_cast<int>(n % kItems)'};",
            f"const int first_row = ({row}{of_row}) * kTileRows;",
            f"const int first_column = ({column}{of_column}) * kTileColumns;",
            *(told if self.grouped else self._slots("n / kItems")),
        ]

    def _fetch(self) -> list[str]:
        lines = [*self._place(), ""]
        for name, value, part, start, how in (
            ("left", self.wgrad.a, "", "first_row", self.fetched[0]),
            ("right", self.wgrad.b, "int /*part*/, ", "first_column", self.fetched[1]),
        ):
            if how is Fetch.LINES:
                lines += (
                    self._token_rows(name, start) if value is self._of_tokens else self._lines(name, value, part, start)
                )
                continue
            boxes = Boxes(self.parameters.index(value), 64, start, step="static_cast<int>(first_slot)")
            lines += boxes.lines(name, self.parameters)
        return [*lines, "tile.fetch(left, right, slots, kRows - first_row, kColumns - first_column, true);"]

    @property
    def _of_tokens(self) -> Value | None:
        """The operand of tokens' rows that comes line by line in every stage, if any does: of two, one."""
        ways = zip((self.wgrad.a, self.wgrad.b), self.fetched, strict=True)
        gathered = [v for v, how in ways if how is Fetch.LINES and _source(v) is not v]
        return gathered[0] if gathered and self.shape.fetches else None

    def _token_rows(self, name: str, start: str) -> list[str]:
        """The rows of its tokens, whose numbers come ahead of them."""
        assert isinstance(self._of_tokens, OpResult) and isinstance(self._of_tokens.op, slot.Gather)
        gather = self._of_tokens.op
        rows, tokens = self.parameters.index(gather.x), self.parameters.index(gather.tokens)
        pointer, stride = self.parameters.pointer(rows), self.parameters.stride(rows)
        given = f"{pointer} + {start}, {stride}, {self.parameters.pointer(tokens)} + first_slot"
        return [f"const moesaic::TokenRows<Element> {name}{{{given}}};"]

    def _multiply(self) -> list[str]:
        passes = ["if (tile.passes(slots)) continue;  // the other warpgroup's"] if self.shape.pingpong else []
        return [
            *self._place(),
            *passes,
            "",
            "const int rows = first_column < kColumns ? kRows - first_row : 0;",
            f"tile.multiply(slots, rows);  // {comment(self.wgrad, self._name)}",
            "",
            *self._store(),
            *self._bias(),
        ]

    # ------------------------------------------------------------------------------------------------ operands

    def _lines(self, name: str, value: Value, part: str, start: str) -> list[str]:
        """The function that says where an operand's rows are."""
        return [
            f"const auto {name} = [&]({part}int k) -> const Element* {{ return {self._row(value, 'k')} + {start}; }};"
        ]

    def _row(self, value: Value, number: str) -> str:
        """The address of an operand's row of the expert's slot of that number."""
        source = _source(value)
        index = self.parameters.index(source)
        pointer, stride = self.parameters.pointer(index), self.parameters.stride(index)
        if source is value:
            return f"{pointer} + (first_slot + {number}) * {stride}"
        assert isinstance(value, OpResult) and isinstance(value.op, slot.Gather)
        tokens = self.parameters.pointer(self.parameters.index(value.op.tokens))
        return f"moesaic::token_row({pointer}, {stride}, {tokens} + first_slot + {number})"

    def _store(self) -> list[str]:
        of_thread = "tile.values[b][j][2 * r + v]" if self.shape.swapped else "tile.values[0][i][j][v]"
        value, expression, onto = self._after(self.y, of_thread)
        if self.staging is not None:
            compute = [
                "float values[2];",
                "#pragma unroll",
                f"for (int v = 0; v < 2; ++v) values[v] = {expression};",
                "staged.put(0, r, w, values);",
            ]
            return self.staging.leave(self.parameters, compute, "first_row", self.of)
        pointer = self.parameters.pointer(self.index)
        size = value.type.dtype.bytes
        align = python_math.gcd(16, columns_of(self.wgrad.b) * size, self.shape.vector * size)
        if onto is not None:
            align = python_math.gcd(align, self.parameters.align(self.parameters.index(onto)))
        whole = "true" if columns_of(self.wgrad.b) % self.shape.vector == 0 else "false"
        access = f"<Tile::kVector, {align}, {whole}>(out_row + column, left, "
        before: list[str] = []
        if onto is not None:
            before = ["    float before[Tile::kVector];", f"    moesaic::load_columns{access}before);"]
            expression = f"before[v] + {expression}"
        rows, columns = (
            f"(Tile::kPair * {count})" if how is Fetch.SHARED else count
            for how, count in ((self.fetched[1], "kTileRows"), (self.fetched[0], "kTileColumns"))
        )
        return [
            "#pragma unroll",
            "for (int i = 0; i < Tile::kOwnRows; ++i) {",
            "  const int row = first_row + tile.row(i);",
            f"  if (kRows % {rows} != 0 && row >= kRows) continue;",
            f"  auto* const out_row = {pointer} + (static_cast<long long>({self.of}) * kRows + row) * kColumns;",
            "#pragma unroll",
            "  for (int j = 0; j < Tile::kOwnVectors; ++j) {",
            "    const int column = first_column + tile.column(j);",
            f"    if (kColumns % {columns} != 0 && column >= kColumns) continue;",
            "    const int left = kColumns - column;",
            *before,
            "    float values[Tile::kVector];",
            "#pragma unroll",
            f"    for (int v = 0; v < Tile::kVector; ++v) values[v] = {expression};",
            f"    moesaic::store_columns{access}values);",
            "  }",
            "}",
        ]

    def _bias(self) -> list[str]:
        """The sums of an operand's rows, by the blocks at the edge of the matrix that has the operand's columns."""
        lines: list[str] = []
        owners = "Tile::kOwners" if self.shape.fetches else "kThreads"
        for op in self.sums:
            rows, factor = self._summed(op)
            beside, columns, first, tile = (
                ("first_column == 0", "kRows", "first_row", "kTileRows")
                if rows is self.wgrad.a or (rows is not self.wgrad.b and columns_of(rows) == columns_of(self.wgrad.a))
                else ("first_row == 0", "kColumns", "first_column", "kTileColumns")
            )
            value, expression, onto = self._after(op.y, "total")
            pointer = self.parameters.pointer(self.op.reads + self.region.terminator.operands.index(value))
            place = f"{pointer} + static_cast<long long>(expert) * {columns} + column"
            if onto is not None:
                expression = f"moesaic::load_one({place}) + {expression}"
            added = "moesaic::to_float(moesaic::load_one(row + column))"
            row = f"const auto* const row = {self._row(rows, 'k')};"
            inside = [row, f"total += {added};"]
            if factor is not None:
                top_k = columns_of(factor.x)
                picks = self.parameters.pointer(self.parameters.index(factor.picks))
                index = self.parameters.index(factor.x)
                weights, stride = self.parameters.pointer(index), self.parameters.stride(index)
                weight = f"moesaic::pick_number</*top_k=*/{top_k}>({weights}, {stride}, pick)"
                inside = [
                    row,
                    f"const int pick = moesaic::load_one({picks} + first_slot + k);",
                    f"total += {weight} * {added};",
                ]
            store = f"moesaic::from_float<{STORAGE[value.type.dtype]}>({expression})"
            lines += [
                "",
                f"if ({beside}) {{  // {comment(op, self._name)}",
                f"  for (int c = threadIdx.x % {owners}; c < {tile}; c += {owners}) {{",
                f"    const int column = {first} + c;",
                f"    if (column >= {columns}) break;",
                "    float total = 0.0f;",
                "    for (int k = 0; k < slots; ++k) {",
                *indented(inside, 6),
                "    }",
                f"    moesaic::store_one({place}, {store});",
                "  }",
                "}",
            ]
        return lines

    def _summed(self, op: slot.ExpertSums) -> tuple[Value, slot.OfPick | None]:
        """The rows that are summed, and the numbers of picks that they are multiplied with."""
        operands = (self.wgrad.a, self.wgrad.b)
        if op.x in operands or isinstance(op.x, BlockArgument):
            return op.x, None
        product = op.x.op if isinstance(op.x, OpResult) else None
        if isinstance(product, math.Mul):
            for rows, factor in ((product.a, product.b), (product.b, product.a)):
                if rows in operands and isinstance(factor, OpResult) and isinstance(factor.op, slot.OfPick):
                    return rows, factor.op
        raise UnsupportedError(f"{self.op.symbol}: sums rows that are no operand of the gradient beside them")

    def _after(self, value: Value, expression: str) -> tuple[Value, str, Value | None]:
        """What leaves of a value, after the elementwise ops that follow it, the C++ of an element, and the input that
        it is added to, which lies where it is written."""
        onto: Value | None = None
        while value not in self.region.terminator.operands:
            [user] = self.region.users(value)
            if isinstance(user, slot.Accumulate):
                onto = user.main
            elif isinstance(user, math.Elementwise) and len(user.operands) == 1:
                if not is_store_cast(self.region, user):
                    expression = user.cuda_expression(expression)
            else:
                raise UnsupportedError(f"{user.name} has no form after the gradient of a weight")
            value = user.results[0]
        return value, expression, onto

    def _name(self, value: Value) -> str:
        return value.name or short_name(value)


def _source(value: Value) -> Value:
    return value.op.x if isinstance(value, OpResult) and isinstance(value.op, slot.Gather) else value
