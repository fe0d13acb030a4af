"""A product of rows and a weight: from a ``launch.kernel`` of that template to CUDA text.

Persistent blocks go over tiles, columns inside rows, so that the tiles which share rows run at the same time. The tile
is a type of ``tile.cuh``; what is done with it afterwards is the region's own ops, see ``epilogue.py``. Where the tile
has warps of its own that fetch (``fetching.py``), these go over the same tiles.
"""

from __future__ import annotations

import math as python_math

from moesaic.codegen.epilogue import TILE_NAMES, Epilogue, check_target
from moesaic.codegen.fetching import Boxes, Fetch, InTurn, Queued, box_rows, in_two_roles, order_over_experts, tile_type
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.lines import STORAGE, Line, comment, fused_ops
from moesaic.codegen.parameters import Parameters
from moesaic.codegen.render import banner, indented, render
from moesaic.codegen.staging import Staging
from moesaic.ir.core import Op, OpResult, Value
from moesaic.ir.errors import InternalError, UnsupportedError
from moesaic.ir.ops import slot
from moesaic.ir.ops.kernel import SUM_COLUMNS, narrow_columns
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.product_shape import TAIL_ROWS, Lines, ProductShape, pairs_of_band, why_no_tail

_OWN_TILE = "  // this block's tile, of an item that a pair may share"
_TAIL = "rows that an expert's last pair of tiles has besides, at most"


def generate(op: Kernel) -> GeneratedKernel:
    """CUDA of one product.

    Raises:
        UnsupportedError: the region holds something the template family has no form for; names the op.
    """
    return _Emitter(op).generate()


class _Emitter:
    def __init__(self, op: Kernel) -> None:
        self.op = op
        self.parameters = Parameters(op, TILE_NAMES)
        self.region = self.parameters.region
        self.shape = ProductShape.parse(op.configuration)
        target = check_target(op, self.shape)
        products = [o for o in self.region.ops if isinstance(o, slot.Product)]
        if len(products) != 1:
            raise InternalError(f"{op.symbol}: expected one product in the region, found {len(products)}")
        self.product = products[0]
        self.grouped = isinstance(self.product, slot.GroupedLinear)
        self.depth, self.outer = self.product.sizes()
        self.columns = narrow_columns(self.region)
        self.halves = self.outer == 2 * self.columns
        self.in_turn = any(o.interleaved for o in self.region.ops if isinstance(o, slot.Split | slot.Join))
        # In turn, gates and ups are neighbouring columns of one product; else they are two products.
        self.parts = 2 if self.halves and not self.in_turn else 1
        size = self.product.x.type.dtype.bytes
        left, right = self._aligned(size)
        self.left, self.right = Lines(False, left), Lines(self.product.transposed, right)
        self.tile_bytes = self.shape.shared_bytes(size, self.parts, self.left, self.right)
        self.fetched = (self._boxed(self._left_boxes()), self._boxed(self._right_boxes(), shared=True))
        self.pair = 2 if Fetch.SHARED in self.fetched else 1
        self.staging = Staging.of(
            self.parameters,
            self.region,
            self.columns,
            self.shape,
            self._tile_columns,
            target.shared_optin - self.tile_bytes - self._table_bytes - self.shape.queue_bytes,
        )
        if self.shape.swapped and self.staging is None:
            raise UnsupportedError(f"{op.symbol}: results have no room to leave a tile with swapped operands by")
        if self.shape.tail:
            problem = why_no_tail(self.region, self.shape)
            boxed = Fetch.LINES not in self.fetched and self.staging is not None
            if not problem and not (boxed and self.shape.tail == TAIL_ROWS):
                problem = f"tiles have {TAIL_ROWS} rows besides, which come and leave in boxes, found {self.shape.tail}"
            if problem:
                raise UnsupportedError(f"{op.symbol}: {problem}; leave tail to the rule")
        self.tile_bytes += self.staging.bytes if self.staging is not None else 0
        shared = self.tile_bytes + self._table_bytes + self.shape.queue_bytes
        if shared > target.shared_optin:
            raise UnsupportedError(
                f"{op.symbol}: tiles and where those of {self._experts()} experts begin need {shared} bytes of shared "
                f"memory a block, but {target} has {target.shared_optin}; leave tile to the rule"
            )

    def generate(self) -> GeneratedKernel:
        body = self._body()
        source = render(
            "over_tiles.cu.j2",
            {
                "banner": banner(self.op, self._title()),
                "symbol": self.op.symbol,
                "early": self.op.early,
                "headers": [
                    self.shape.header,
                    "epilogue.cuh",
                    "items.cuh" if self.shape.fetches and self.grouped else "experts.cuh",
                ],
                "bounds": self.shape.bounds,
                "cluster": self.pair,
                "constants": self._constants(),
                "aliases": self._aliases(),
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
            shared_bytes=self.tile_bytes + self._table_bytes,
            cluster=self.pair,
            ops=fused_ops(self.region, self.epilogue.name),
        )

    def _title(self) -> str:
        return f"rows times {self.product.weight.name or 'a weight'}, and what is elementwise after it"

    def _experts(self) -> int:
        experts = self.product.weight.type.shape[0]
        assert isinstance(experts, int)
        return experts

    @property
    def _table_bytes(self) -> int:
        """Of shared memory, for where the tiles of each expert begin."""
        return -(-4 * (self._experts() + 1 + self.shape.threads // 32) // 16) * 16 if self.grouped else 0

    @property
    def _tile_columns(self) -> int:
        return self.shape.columns // (2 if self.halves and self.in_turn else 1)

    @property
    def _sum_parts(self) -> int:
        """How many of a row's partial sums are a tile's."""
        return max(1, self._tile_columns // SUM_COLUMNS)

    def _constants(self) -> list[Line]:
        lines = [Line("kThreads", str(self.shape.threads))]
        if self.grouped:
            lines.append(Line("kExperts", str(self._experts())))
        lines += [
            Line("kDepth", str(self.depth), why="elements of a row that are multiplied"),
            Line("kColumns", str(self.columns), why="of each half" if self.halves else ""),
            Line("kTileRows", str(self.shape.rows)),
            *([Line("kTail", str(self.shape.tail), why=_TAIL)] if self.shape.tail else []),
            Line("kTileColumns", str(self._tile_columns)),
            Line("kColumnTiles", "(kColumns + kTileColumns - 1) / kTileColumns"),
        ]
        if self.shape.fetches and self._band > 1:
            lines.append(Line("kBand", str(self._band), why="pairs of row tiles that take columns together"))
        return lines

    @property
    def _band(self) -> int:
        return pairs_of_band(self.depth * self.outer * self.product.weight.type.dtype.bytes)

    @property
    def _item_of(self) -> str:
        return f"moesaic::item_of<Tile::kPair{', kBand' if self._band > 1 else ''}>"

    def _aliases(self) -> list[Line]:
        element = STORAGE[self.product.x.type.dtype]
        shape = self.shape.cuda(self.parts, self.left, self.right)
        staged = []
        if self.staging is not None:
            staged = [Line("Staged", definition=self.staging.type)]
            if self.shape.tail:
                staged.append(Line("StagedTail", definition=self.staging.tail_type(self.shape.tail)))
        return [
            Line("Element", definition=element),
            Line("Shape", definition=f"moesaic::TileShape<{shape}>"),
            *staged,
            Line("Tile", definition=tile_type(self.shape, *self.fetched, self.staging is not None)),
        ]

    def _aligned(self, size: int) -> tuple[int, int]:
        """Bytes that the rows of both operands, and what is read of them, are aligned to."""
        source = self._rows_operand()
        left = python_math.gcd(self.parameters.align(self.parameters.index(source)), self.depth * size)
        right = self.parameters.align(self.parameters.index(self.product.weight))
        if self.product.transposed:
            right = python_math.gcd(right, (self.columns if self.parts == 2 else self.outer) * size)
        else:
            right = python_math.gcd(right, self.depth * size)
        return left, right

    def _rows_operand(self) -> Value:
        rows = self.product.x
        return rows.op.x if isinstance(rows, OpResult) and isinstance(rows.op, slot.Gather) else rows

    def _left_boxes(self) -> Boxes | None:
        """How the copy engine finds rows, if they follow one another."""
        rows = self.product.x
        if self._rows_operand() is not rows:
            return None
        first = "first_slot" if self.grouped else "static_cast<int>(first_token)"
        # Of a tile that may have few rows, boxes without any do not come.
        tall = self.shape.rows // 3 if self.shape.swapped else box_rows(self.shape.rows)
        return Boxes(self.parameters.index(rows), tall, first=first)

    def _tail_boxes(self) -> Boxes:
        """How it finds the rows that a pair of tiles has besides."""
        return Boxes(self.parameters.index(self.product.x), self.shape.tail, first="tail_slot")

    def _right_boxes(self) -> Boxes | None:
        """How it finds the weight's, if both parts begin at columns where boxes may."""
        if self.product.transposed and self.parts == 2 and self.columns % 8 != 0:
            return None
        rows = box_rows(self.shape.columns, self.parts) if not self.product.transposed else 64
        return Boxes(
            self.parameters.index(self.product.weight),
            rows,
            matrix="expert" if self.grouped else "0",
            first="2 * first_column" if self.halves and self.in_turn else "first_column",
            apart="kColumns" if self.parts == 2 else "0",
        )

    def _boxed(self, boxes: Boxes | None, shared: bool = False) -> Fetch:
        """The way an operand is fetched: by the copy engine where the tile can, and address and strides allow it."""
        if not self.shape.fetches or boxes is None or self.parameters.align(boxes.index) < 16:
            return Fetch.LINES
        return Fetch.SHARED if shared else Fetch.BOXES

    # --------------------------------------------------------------------------------------------------------- body

    def _body(self) -> list[str]:
        lines = [*self.parameters.zeroed(), "MOESAIC_DYNAMIC_SHARED(unsigned char, shared);"]
        if self.shape.fetches:
            staged = self.staging is not None
            roles = in_two_roles(self._order(), self._fetch(), self._multiply(), staged, self.shape.tail > 0)
            return [*lines, *self._items(), *roles]
        if isinstance(self.product, slot.GroupedLinear):
            counts = self.parameters.pointer(self.parameters.index(self.product.counts))
            lines += [
                "int* const first_tile = reinterpret_cast<int*>(shared + Tile::kSharedBytes);",
                f"moesaic::count_row_tiles<kExperts, kTileRows, kThreads>({counts}, first_tile);",
                "const int row_tiles = first_tile[kExperts];",
            ]
        else:
            tokens = self.parameters.tokens()
            lines.append(f"const long long row_tiles = ({tokens} + kTileRows - 1) / kTileRows;")
        loop = "for (long long n = blockIdx.x; n < static_cast<long long>(row_tiles) * kColumnTiles; n += gridDim.x) {"
        return [*lines, "", loop, *indented(self._tile(), 2), "}"]

    def _tile(self) -> list[str]:
        lines = ["const int first_column = static_cast<int>(n % kColumnTiles) * kTileColumns;"]
        if self.grouped:
            counts, offsets = self._counts_and_offsets()
            lines += [
                "const int row_tile = static_cast<int>(n / kColumnTiles);",
                "const int expert = moesaic::expert_of_tile<kExperts>(first_tile, row_tile);",
                "const int first_row = (row_tile - first_tile[expert]) * kTileRows;",
                f"const int rows = moesaic::load_one({counts} + expert) - first_row;  // of the expert that are left",
                f"const int first_slot = moesaic::load_one({offsets} + expert) + first_row;",
            ]
        else:
            lines += [
                "const long long first_token = n / kColumnTiles * kTileRows;",
                f"const long long rows = {self.parameters.tokens()} - first_token;",
            ]
        lines += ["", *self._left_lines(), *self._right_lines(), "", "Tile tile;"]
        epilogue, before = self._region()
        lines += [
            f"tile.clear();  // {comment(self.product, epilogue.name)}",
            f"tile.multiply(left, right, kDepth, {self._extents()}, shared);",
            "",
        ]
        return [*lines, *before, *self._epilogue(epilogue)]

    def _extents(self) -> str:
        """How many rows and columns there are in a tile, for what is fetched line by line."""
        rows = (
            "moesaic::smaller(kTileRows, rows)"
            if self.grouped
            else "static_cast<int>(moesaic::at_most(kTileRows, rows))"
        )
        in_turn = self.halves and self.in_turn
        return f"{rows}, {'2 * kColumns - 2 * first_column' if in_turn else 'kColumns - first_column'}"

    @property
    def _first(self) -> str:
        """The slot or token of a tile's first row."""
        return "first_slot" if self.grouped else "first_token"

    def _counts_and_offsets(self) -> tuple[str, str]:
        assert isinstance(self.product, slot.GroupedLinear)
        return self.parameters.counts_and_offsets(self.product)

    # ---------------------------------------------------------------------------------------- warps that fetch

    def _items(self) -> list[str]:
        if not self.grouped:
            return [
                f"const long long row_tiles = ({self.parameters.tokens()} + kTileRows - 1) / kTileRows;",
                "const long long items = moesaic::items_of<Tile::kPair>(row_tiles, kColumnTiles);",
            ]
        counts, _ = self._counts_and_offsets()
        return [
            "int* const first_item = reinterpret_cast<int*>(shared + Tile::kSharedBytes);",
            f"moesaic::count_before<kExperts, kThreads>({counts}, first_item, [](int rows) {{",
            f"  const int row_tiles = {self._row_tiles('rows')};",
            "  return static_cast<int>(moesaic::items_of<Tile::kPair>(row_tiles, kColumnTiles));",
            "});",
        ]

    def _order(self) -> InTurn | Queued:
        """In which order blocks take items."""
        if not self.grouped:
            return InTurn("long long", "items")
        return order_over_experts(self.shape, self._found(), "first_item[kExperts]", self.parameters.counter())

    def _found(self) -> str:
        """Where item `n` lies."""
        counts, offsets = self._counts_and_offsets()
        return f"moesaic::find_item<kExperts>(n, first_item, {counts}, {offsets})"

    def _row_tiles(self, rows: str) -> str:
        """How many tiles of an expert lie below each other."""
        if self.shape.swapped:
            return f"moesaic::even_tiles<kTileRows, Tile::kPair>({rows}).count"
        if self.shape.tail:
            return f"moesaic::tiles_with_tail<kTileRows, kTail>({rows})"
        return f"({rows} + kTileRows - 1) / kTileRows"

    def _place(self) -> list[str]:
        """Where the tile lies that a block of a pair has of an item."""
        if not self.grouped:
            return [
                f"const auto item = {self._item_of}(n, Tile::rank(), row_tiles, kColumnTiles);{_OWN_TILE}",
                "const long long first_token = item.row_tile * kTileRows;",
                f"const long long rows = item.idle ? 0 : {self.parameters.tokens()} - first_token;",
                "const int first_column = item.column_tile * kTileColumns;",
            ]
        if self.shape.swapped:
            tiles = [
                "const auto tiles = moesaic::even_tiles<kTileRows, Tile::kPair>(next.rows);",
                "const int row_tiles = tiles.count;",
            ]
            first_row = "const int first_row = static_cast<int>(item.row_tile) * tiles.rows;"
            rows = ["const int rows = item.idle ? 0 : moesaic::smaller(tiles.rows, next.rows - first_row);"]
        else:
            tiles = [f"const int row_tiles = {self._row_tiles('next.rows')};"]
            first_row = "const int first_row = static_cast<int>(item.row_tile) * kTileRows;"
            rows = ["const int rows = item.idle ? 0 : next.rows - first_row;  // of the expert that are left"]
        tail = []
        if self.shape.tail:
            tail = [
                "const int tail_rows = moesaic::rows_of_tail<kTileRows>(next.rows, row_tiles, item.row_tile);",
                "const int tail_slot = next.first_slot + row_tiles * kTileRows;",
            ]
        return [
            *([] if self.shape.told else [f"const auto next = {self._found()};"]),
            "const int expert = next.expert;",
            *tiles,
            f"const auto item = {self._item_of}(next.number, Tile::rank(), row_tiles, kColumnTiles);{_OWN_TILE}",
            first_row,
            *rows,
            "const int first_slot = next.first_slot + first_row;",
            "const int first_column = item.column_tile * kTileColumns;",
            *tail,
        ]

    def _fetch(self) -> list[str]:
        lines = [*self._place(), ""]
        for name, boxes, how, copied in (
            ("left", self._left_boxes(), self.fetched[0], self._left_lines),
            ("right", self._right_boxes(), self.fetched[1], self._right_lines),
        ):
            if how is Fetch.LINES or boxes is None:
                lines += copied()
            else:
                lines += boxes.lines(name, self.parameters)
        tail = self._tail_boxes().lines("tail", self.parameters) if self.shape.tail else []
        besides = ", tail, tail_rows" if tail else ""
        return [*lines, *tail, f"tile.fetch(left, right, kDepth, {self._extents()}, item.together{besides});"]

    def _multiply(self) -> list[str]:
        epilogue, before = self._region()
        passes = ["if (tile.passes(kDepth)) continue;  // the other warpgroup's"] if self.shape.pingpong else []
        vacated = ["if (tail_rows > 0) tile.vacate(staged);"] if self.shape.tail else []
        besides = ", tail_rows" if self.shape.tail else ""
        product = [*vacated, f"tile.multiply(kDepth, rows{besides});  // {comment(self.product, epilogue.name)}"]
        return [*passes, *self._place(), "", *before, *product, "", *self._epilogue(epilogue)]

    # ------------------------------------------------------------------------------------------------ operands

    def _left_lines(self) -> list[str]:
        """The function that says where a tile's rows are."""
        rows, first = self.product.x, self._first
        source = self._rows_operand()
        index = self.parameters.index(source)
        x, stride = self.parameters.pointer(index), self.parameters.stride(index)
        if rows is source:
            where = f"{x} + ({first} + r) * {stride}"
        else:
            assert isinstance(rows, OpResult) and isinstance(rows.op, slot.Gather)
            tokens = self.parameters.pointer(self.parameters.index(rows.op.tokens))
            where = f"moesaic::token_row({x}, {stride}, {tokens} + {first} + r)"
        return [f"const auto left = [&](int r) -> const Element* {{ return {where}; }};"]

    def _right_lines(self) -> list[str]:
        """The function that says where the weight's are."""
        weight = self.parameters.index(self.product.weight)
        w = self.parameters.pointer(weight)
        if self.grouped:
            row_stride = self.parameters.row_stride(weight)
            w = f"{w} + expert * {self.parameters.stride(weight)}"
        else:
            row_stride = self.parameters.stride(weight)
        start = "2 * first_column" if self.halves and self.in_turn else "first_column"
        start = f"part * kColumns + {start}" if self.parts == 2 else start
        part = "part" if self.parts == 2 else "/*part*/"
        if self.product.transposed:
            number, where = "long long k", f"weight + k * {row_stride} + {start}"
        else:
            number, where = "int c", f"weight + ({start} + c) * {row_stride}"
        return [
            f"const Element* const weight = {w};",
            f"const auto right = [&](int {part}, {number}) -> const Element* {{ return {where}; }};",
        ]

    # ------------------------------------------------------------------------------------------------ epilogue

    def _region(self) -> tuple[Epilogue, list[str]]:
        """What follows the product, as lines; and those that come before it."""
        if self.shape.swapped:
            read = [f"tile.values[{part}][j][2 * r + v]" for part in (("0", "1") if self.halves else ("b",))]
        elif not self.halves:
            read = ["tile.values[0][i][j][v]"]
        elif self.in_turn:
            read = ["tile.values[0][i][j][2 * v]", "tile.values[0][i][j][2 * v + 1]"]
        else:
            read = ["tile.values[0][i][j][v]", "tile.values[1][i][j][v]"]
        place = "slot" if self.grouped else "token"
        computed = (self.product.result, read)
        staged = self.staging.places if self.staging is not None else None
        epilogue = Epilogue(
            self.parameters,
            self.columns,
            self._vector,
            computed,
            place,
            ahead=self.shape.fetches,
            staged=staged,
            sum_parts=self._sum_parts,
        )
        self.epilogue = epilogue
        self.parameters.taken |= {place, "rows", "weight"}
        skip: list[Op] = [self.product]
        if isinstance(self.product.x, OpResult) and self.region.users(self.product.x) == [self.product]:
            skip.append(self.product.x.op)
        epilogue.emit(skip)
        before = list(epilogue.arrays)
        if epilogue.numbers:
            before += [*self._rows(place), *indented(epilogue.numbers, 2), "}", ""]
        return epilogue, before

    @property
    def _vector(self) -> int:
        if self.staging is not None:
            return 2
        return self.shape.vector // (2 if self.halves and self.in_turn else 1)

    def _rows(self, place: str) -> list[str]:
        """The beginning of a loop over the rows that a thread holds."""
        return [
            "#pragma unroll",
            "for (int i = 0; i < Tile::kOwnRows; ++i) {",
            "  if (tile.row(i) >= rows) continue;",
            f"  const long long {place} = {self._first} + tile.row(i);",
        ]

    def _epilogue(self, epilogue: Epilogue) -> list[str]:
        first, place = self._first, epilogue.place
        step = "tile.column(j) / 2" if self.halves and self.in_turn else "tile.column(j)"
        columns = [
            "#pragma unroll",
            "for (int j = 0; j < Tile::kOwnVectors; ++j) {",
            f"  const int column = first_column + {step};",
            "  if (kColumns % kTileColumns != 0 && column >= kColumns) continue;",
        ]
        lines = [f"constexpr int kVector = {self._vector};{'  // rows' if self.shape.swapped else ''}"]
        several = f"[{self._sum_parts}]" if self._sum_parts > 1 else ""
        lines += [f"float {name}{several}[Tile::kOwnRows] = {{}};" for name, _ in epilogue.sums]
        compute = [
            *epilogue.loads,
            "#pragma unroll",
            "for (int v = 0; v < kVector; ++v) {",
            *indented(epilogue.lines, 2),
            "}",
            *epilogue.stores,
        ]
        if self.staging is not None:
            # What a box has past the last column leaves nobody: all threads put it even so, four vectors at a time.
            last = ["if (kColumns % Staged::kColumns != 0) column = moesaic::smaller(column, kColumns - kVector);"]
            where = [] if self.staging.turned else ["int column = first_column + tile.column(j);", *last]
            lines += self.staging.leave(self.parameters, [*where, *compute], first)
            if self.shape.tail:
                lines += self.staging.leave_tail(self.parameters, self.shape.tail)
        else:
            lines += [*self._rows(place), *indented(epilogue.for_row, 2)]
            if epilogue.row_stores:
                lines += ["  if (first_column == 0 && tile.column(0) == 0) {", *indented(epilogue.row_stores, 4), "  }"]
            over = [*columns, *indented(compute, 2), "}"]
            if epilogue.reads:
                over = [*epilogue.held, *columns, *indented(epilogue.reads, 2), "}", *over]
            lines += [*indented(over, 2), "}"]
        for name, value in epilogue.sums:
            lines += self._partial_sums(name, epilogue.sum_pointer(value), first)
        return lines

    def _partial_sums(self, name: str, pointer: str, first: str) -> list[str]:
        """Adds up a row's sums over the threads that share it, and stores them."""
        every = -(-self.columns // SUM_COLUMNS)  # partial sums of a row
        lines = []
        for number in range(self._sum_parts):
            own, part, there = name, "first_column / kTileColumns", ""
            if self._sum_parts > 1:
                own, part = f"{name}[{number}]", f"first_column / {SUM_COLUMNS} + {number}"
                there = f" && {part} < {every}" if number else ""
            lines += [
                f"tile.sum_rows({own}, shared, [&](int row, float total) {{",
                f"  const long long place = ({first} + row) * {every}LL + {part};",
                f"  if (row < rows{there}) moesaic::store_one({pointer} + place, total);",
                "});",
            ]
        return lines
