"""A product of rows and a weight: from a ``launch.kernel`` of that template to CUDA text.

Persistent blocks go over tiles, columns inside rows, so that the tiles which share rows run at the same time. The tile
is a type of ``tile.cuh``; what is done with it afterwards is the region's own ops, see ``epilogue.py``.
"""

from __future__ import annotations

import math as python_math

from moesaic.codegen.epilogue import Epilogue, Parameters, check_target
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.render import banner, indented, render
from moesaic.codegen.row_program import STORAGE, Line, comment
from moesaic.ir.core import Op, OpResult, Value
from moesaic.ir.errors import InternalError
from moesaic.ir.ops import slot
from moesaic.ir.ops.kernel import SUM_COLUMNS, narrow_columns
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.product_shape import Lines, ProductShape


def generate(op: Kernel) -> GeneratedKernel:
    """CUDA of one product.

    Raises:
        UnsupportedError: the region holds something the template family has no form for; names the op.
    """
    return _Emitter(op).generate()


class _Emitter:
    def __init__(self, op: Kernel) -> None:
        self.op = op
        self.parameters = Parameters(op)
        self.region = self.parameters.region
        self.shape = ProductShape.parse(op.configuration)
        check_target(op, self.shape)
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

    def generate(self) -> GeneratedKernel:
        body = self._body()
        source = render(
            "over_tiles.cu.j2",
            {
                "banner": banner(self.op, self._title()),
                "symbol": self.op.symbol,
                "headers": [self.shape.header, "epilogue.cuh", "experts.cuh"],
                "bounds": f", {self.shape.blocks}" if self.shape.blocks > 1 else "",
                "constants": self._constants(),
                "aliases": self._aliases(),
                "tile_bytes": self.tile_bytes,
                "parameters": self.parameters.lines,
                "body": indented(body, 2),
            },
        )
        experts = self._experts() if self.grouped else 0
        tables = 4 * (experts + 1 + self.shape.threads // 32) if self.grouped else 0
        return GeneratedKernel(
            symbol=self.op.symbol,
            source=source,
            arguments=tuple(self.parameters.arguments),
            threads=self.shape.threads,
            rows_per_block=1,
            grid="device",
            shared_bytes=self.tile_bytes + -(-tables // 16) * 16,
        )

    def _title(self) -> str:
        return f"rows times {self.product.weight.name or 'a weight'}, and what is elementwise after it"

    def _experts(self) -> int:
        experts = self.product.weight.type.shape[0]
        assert isinstance(experts, int)
        return experts

    def _constants(self) -> list[Line]:
        tile_columns = self.shape.columns // (2 if self.halves and self.in_turn else 1)
        lines = [Line("kThreads", str(self.shape.threads))]
        if self.grouped:
            lines.append(Line("kExperts", str(self._experts())))
        lines += [
            Line("kDepth", str(self.depth), why="elements of a row that are multiplied"),
            Line("kColumns", str(self.columns), why="of each half" if self.halves else ""),
            Line("kTileRows", str(self.shape.rows)),
            Line("kTileColumns", str(tile_columns)),
            Line("kColumnTiles", "(kColumns + kTileColumns - 1) / kTileColumns"),
        ]
        return lines

    def _aliases(self) -> list[Line]:
        element = STORAGE[self.product.x.type.dtype]
        shape = self.shape.cuda(self.parts, self.left, self.right)
        return [
            Line("Element", definition=element),
            Line("Shape", definition=f"moesaic::TileShape<{shape}>"),
            Line("Tile", definition=f"moesaic::{self.shape.tile}<Element, Shape>"),
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

    # --------------------------------------------------------------------------------------------------------- body

    def _body(self) -> list[str]:
        lines = ["MOESAIC_DYNAMIC_SHARED(unsigned char, shared);"]
        if self.grouped:
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
            counts, offsets = (
                self.parameters.pointer(self.parameters.index(v)) for v in (self.product.counts, self.product.offsets)
            )
            lines += [
                "const int row_tile = static_cast<int>(n / kColumnTiles);",
                "const int expert = moesaic::expert_of_tile<kExperts>(first_tile, row_tile);",
                "const int first_row = (row_tile - first_tile[expert]) * kTileRows;",
                f"const int rows = moesaic::load_one({counts} + expert) - first_row;  // of the expert that are left",
                f"const long long first_slot = moesaic::load_one({offsets} + expert) + first_row;",
            ]
            first = "first_slot"
        else:
            lines += [
                "const long long first_token = n / kColumnTiles * kTileRows;",
                f"const long long rows = {self.parameters.tokens()} - first_token;",
            ]
            first = "first_token"
        lines += ["", *self._operands(first), "", "Tile tile;", "tile.clear();"]
        extent = "kColumns" if self.parts == 2 or not (self.halves and self.in_turn) else "2 * kColumns"
        start = "first_column" if extent == "kColumns" else "2 * first_column"
        lines += [
            f"tile.multiply(left, right, kDepth, moesaic::smaller(kTileRows, rows), {extent} - {start}, shared);"
            if self.grouped
            else f"tile.multiply(left, right, kDepth, static_cast<int>(moesaic::at_most(kTileRows, rows)), "
            f"{extent} - {start}, shared);",
            "",
        ]
        return lines + self._epilogue(first)

    def _operands(self, first: str) -> list[str]:
        """The functions that say where rows of both operands are."""
        rows = self.product.x
        source = self._rows_operand()
        index = self.parameters.index(source)
        x, stride = self.parameters.pointer(index), self.parameters.stride(index)
        if rows is source:
            where = f"{x} + ({first} + r) * {stride}"
        else:
            assert isinstance(rows, OpResult) and isinstance(rows.op, slot.Gather)
            tokens = self.parameters.pointer(self.parameters.index(rows.op.tokens))
            where = f"{x} + static_cast<long long>(moesaic::load_one({tokens} + {first} + r)) * {stride}"
        lines = [
            "const auto left = [&](int r) -> const Element* {",
            f"  return r < rows ? {where} : nullptr;",
            "};",
        ]
        weight = self.parameters.index(self.product.weight)
        w = self.parameters.pointer(weight)
        if self.grouped:
            row_stride = self.parameters.row_stride(weight)
            w = f"{w} + expert * {self.parameters.stride(weight)}"
        else:
            row_stride = self.parameters.stride(weight)
        lines.append(f"const Element* const weight = {w};")
        start = "2 * first_column" if self.halves and self.in_turn else "first_column"
        end = "2 * kColumns" if self.halves and self.in_turn else "kColumns"
        part = "part * kColumns + " if self.parts == 2 else ""
        unused = "part" if self.parts == 2 else "/*part*/"
        if self.product.transposed:
            lines += [
                f"const auto right = [&](int {unused}, long long k) -> const Element* {{",
                f"  return weight + k * {row_stride} + {part}{start};",
                "};",
            ]
        else:
            lines += [
                f"const auto right = [&](int {unused}, int c) -> const Element* {{",
                f"  return {start} + c < {end} ? weight + ({part}{start} + c) * {row_stride} : nullptr;",
                "};",
            ]
        return lines

    def _epilogue(self, first: str) -> list[str]:
        vector = self.shape.vector // (2 if self.halves and self.in_turn else 1)
        if not self.halves:
            read = ["tile.values[0][i][j][v]"]
        elif self.in_turn:
            read = ["tile.values[0][i][j][2 * v]", "tile.values[0][i][j][2 * v + 1]"]
        else:
            read = ["tile.values[0][i][j][v]", "tile.values[1][i][j][v]"]
        place = "slot" if self.grouped else "token"
        epilogue = Epilogue(self.parameters, self.columns, vector, (self.product.result, read), place)
        self.parameters.taken |= {place, "rows", "weight"}
        skip: list[Op] = [self.product]
        if isinstance(self.product.x, OpResult) and self.region.users(self.product.x) == [self.product]:
            skip.append(self.product.x.op)
        epilogue.emit(skip)
        step = "tile.column(j) / 2" if self.halves and self.in_turn else "tile.column(j)"
        lines = [f"// {comment(self.product, epilogue.name)}", f"constexpr int kVector = {vector};"]
        lines += [f"float {name}[Tile::kOwnRows] = {{}};" for name, _ in epilogue.sums]
        lines += [
            "#pragma unroll",
            "for (int i = 0; i < Tile::kOwnRows; ++i) {",
            "  if (tile.row(i) >= rows) continue;",
            f"  const long long {place} = {first} + tile.row(i);",
            *indented(epilogue.for_row, 2),
        ]
        if epilogue.row_stores:
            lines += ["  if (first_column == 0 && tile.column(0) == 0) {", *indented(epilogue.row_stores, 4), "  }"]
        lines += [
            "#pragma unroll",
            "  for (int j = 0; j < Tile::kOwnVectors; ++j) {",
            f"    const int column = first_column + {step};",
            "    if (column >= kColumns) continue;",
            *indented(epilogue.loads, 4),
            "#pragma unroll",
            "    for (int v = 0; v < kVector; ++v) {",
            *indented(epilogue.lines, 6),
            "    }",
            *indented(epilogue.stores, 4),
            "  }",
            "}",
        ]
        for name, value in epilogue.sums:
            parts = -(-self.columns // SUM_COLUMNS)
            pointer = epilogue.sum_pointer(value)
            lines += [
                f"tile.sum_rows({name}, shared, [&](int row, float total) {{",
                f"  const long long place = ({first} + row) * {parts}LL + n % kColumnTiles;",
                f"  if (row < rows) moesaic::store_one({pointer} + place, total);",
                "});",
            ]
        return lines
