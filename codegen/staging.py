"""What leaves a tile through shared memory, box by box; see ``staged.cuh``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.codegen.lines import STORAGE
from moesaic.codegen.parameters import Parameters
from moesaic.codegen.render import indented
from moesaic.ir.core import Block, OpResult, columns_of
from moesaic.ir.ops import row, slot
from moesaic.passes.product_shape import STAGED_MATRIX_ROWS, STAGED_ROWS, ProductShape, reads_columns

_GROUPS = 2
_BOX_COLUMNS = 64
# Columns that leave at a time, and buffers: rather as many with one wait as with two, and rather two buffers than one.
_FORMS = ((128, 1), (64, 2), (64, 1), (32, 2), (32, 1))
_TURNED_FORMS = ((3, 1), (2, 1), (1, 2), (1, 1))  # the same, for times so many rows


@dataclass(frozen=True)
class Output:
    """A part of an operand that leaves: `column` is that of its rows which a box begins with, in C++."""

    index: int
    column: str


@dataclass(frozen=True)
class Staging:
    """How the results of a tile leave.

    Attributes:
        outputs: what leaves at a time.
        columns: that leave at a time, in boxes of 64 at most.
        buffers: for each output.
        element: C++ type.
        rows: of a box.
        turned: whether threads hold neighbouring rows of a column.
    """

    outputs: tuple[Output, ...]
    columns: int
    buffers: int
    element: str
    rows: int = STAGED_MATRIX_ROWS
    turned: bool = False

    @classmethod
    def of(
        cls,
        parameters: Parameters,
        region: Block,
        columns: int,
        shape: ProductShape,
        tile_columns: int,
        room: int,
    ) -> Staging | None:
        """The way for a region's results of so many columns, if there is one.

        Results have 16 bits and rows of whole chunks of 16 bytes, and nothing is read in columns, which would want
        other columns with a thread. `room` is what a block can have of shared memory beside its tile.
        """
        results = region.terminator.operands
        wide = [v for v in results if columns_of(v) in (columns, 2 * columns)]
        numbers = [v for v in results if v not in wide and not (isinstance(v, OpResult) and isinstance(v.op, row.Sum))]
        elements = [STORAGE[v.type.dtype] for v in wide]
        fits = columns % 8 == 0 and all(v.type.dtype.bytes == 2 for v in wide) and len(set(elements)) == 1
        in_turn = any(o.interleaved for o in region.ops if isinstance(o, slot.Split | slot.Join))
        if not shape.fetches or not fits or numbers or in_turn or reads_columns(region, columns):
            return None
        outputs: list[Output] = []
        for value in wide:
            index = parameters.op.reads + results.index(value)
            outputs.append(Output(index, "box_column"))
            if columns_of(value) != columns:
                outputs.append(Output(index, "kColumns + box_column"))
        halves = any(columns_of(v) != columns for v in wide)
        if shape.swapped:
            return cls._of_columns(tuple(outputs), elements[0], STAGED_ROWS, shape.rows, room)
        return cls._fitting(tuple(outputs), elements[0], columns, tile_columns, halves, room, shape.tail_bytes)

    @classmethod
    def of_matrices(
        cls, parameters: Parameters, index: int, shape: ProductShape, tile_columns: int, room: int
    ) -> Staging | None:
        """The way for one operand [E, m, n], if there is one."""
        given = parameters.given(index)
        if not shape.fetches or given.type.dtype.bytes != 2 or columns_of(given) % 8 != 0:
            return None
        output, element = Output(index, "box_column"), STORAGE[given.type.dtype]
        if shape.swapped:
            return cls._of_columns((output,), element, STAGED_MATRIX_ROWS, shape.rows, room)
        return cls._fitting((output,), element, columns_of(given), tile_columns, False, room)

    @classmethod
    def _fitting(
        cls,
        outputs: tuple[Output, ...],
        element: str,
        columns: int,
        tile_columns: int,
        halves: bool,
        room: int,
        tail: int = 0,
    ) -> Staging | None:
        """The first form that shared memory has room for. Boxes do not reach from one half into the other, and of
        several none lies past the last column. `tail` are bytes that a pair's tail has there meanwhile, in one
        buffer."""
        for width, buffers in _FORMS:
            found = cls(outputs, width, buffers, element)
            ends = columns % width == 0 or (width <= _BOX_COLUMNS and not halves)
            if ends and tile_columns % width == 0 and tail <= found.bytes <= room and not (tail and buffers > 1):
                return found
        return None

    @classmethod
    def _of_columns(
        cls, outputs: tuple[Output, ...], element: str, rows: int, tile_rows: int, room: int
    ) -> Staging | None:
        """The same for threads that hold neighbouring rows; `rows` are the fewest that leave at a time."""
        for times, buffers in _TURNED_FORMS:
            found = cls(outputs, _BOX_COLUMNS, buffers, element, times * rows, turned=True)
            if tile_rows % found.rows == 0 and found.bytes <= room:
                return found
        return None

    @property
    def bytes(self) -> int:
        """Of shared memory, of a block."""
        return _GROUPS * len(self.outputs) * self.buffers * self.rows * self.columns * 2

    @property
    def type(self) -> str:
        """The definition of ``Staged``."""
        return self._type(self.columns, self.rows if self.turned else None)

    def _type(self, columns: int, turned_rows: int | None) -> str:
        arguments = (
            f"{self.element}, /*columns=*/{columns}, /*outputs=*/{len(self.outputs)}, /*buffers=*/{self.buffers}"
        )
        if turned_rows is None:
            return f"moesaic::StagedBoxes<{arguments}>"
        return f"moesaic::StagedColumns<{arguments}, /*rows=*/{turned_rows}>"

    def places(self, index: int) -> list[int]:
        """The numbers of the outputs that are parts of an operand."""
        return [n for n, output in enumerate(self.outputs) if output.index == index]

    def leave(self, parameters: Parameters, compute: Sequence[str], first_row: str, matrix: str = "") -> list[str]:
        """Goes over a warpgroup's part of a tile, as much as leaves at a time.

        Args:
            parameters: of the kernel.
            compute: puts what is in row i and vector j, vector w of what leaves; of threads that hold neighbouring
                rows, what is in columns r of two and rows j of the tile, rows w of what leaves.
            first_row: of the operand, that the tile begins with.
            matrix: the number of the matrix; empty where the operand has rows.
        """
        if self.turned:
            return self._leave_turned(parameters, compute, first_row, matrix)
        return [
            "#pragma unroll",
            "for (int b = 0; b < Tile::kBlocks; ++b) {",
            "  const long long valid = rows - tile.first_row() - Staged::kRows * b;  // rows of the box",
            "  if (valid <= 0) continue;",
            f"  const long long row = {first_row} + tile.first_row() + Staged::kRows * b;",
            "#pragma unroll",
            "  for (int c = 0; c < kTileColumns; c += Staged::kColumns) {",
            "    const int box_column = first_column + c;",
            "    if (kColumns % kTileColumns != 0 && box_column >= kColumns) continue;",
            "    staged.begin();",
            "#pragma unroll",
            "    for (int r = 0; r < 2; ++r) {",
            "      const int i = 2 * b + r;",
            "#pragma unroll",
            "      for (int w = 0; w < Staged::kVectors; ++w) {",
            "        const int j = c / 8 + w;",
            *indented(compute, 8),
            "      }",
            "    }",
            "    staged.written();",
            *indented(self._store(parameters, matrix), 4),
            "    staged.sent();",
            "  }",
            "}",
        ]

    def tail_type(self, rows: int) -> str:
        """The definition of ``StagedTail``, in the memory of ``Staged``."""
        return self._type(_BOX_COLUMNS, rows)

    def leave_tail(self, parameters: Parameters, rows: int) -> list[str]:
        """The rows that a pair of tiles has besides, which are nothing but products."""
        [output] = self.outputs
        map = parameters.tensor_map(output.index, rows, _BOX_COLUMNS)
        return [
            "if (tail_rows > 0) {",
            "#pragma unroll",
            "  for (int b = 0; b < Tile::kTailBlocks; ++b) {",
            "    const int box_column = first_column + tile.first_column() + StagedTail::kColumns * b;",
            "    if (kColumns % kTileColumns != 0 && box_column >= kColumns) continue;",
            "    staged_tail.begin();",
            "#pragma unroll",
            "    for (int w = 0; w < kTail / 8; ++w) {",
            "#pragma unroll",
            "      for (int r = 0; r < 2; ++r) {",
            "        const float pair[2] = {tile.tail[b][w][2 * r], tile.tail[b][w][2 * r + 1]};",
            "        staged_tail.put(0, r, w, pair);",
            "      }",
            "    }",
            "    staged_tail.written();",
            f"    staged_tail.store_rows(0, {map}, box_column, tail_slot, tail_rows);",
            "    staged_tail.sent();",
            "  }",
            "}",
        ]

    def _leave_turned(self, parameters: Parameters, compute: Sequence[str], first_row: str, matrix: str) -> list[str]:
        return [
            "#pragma unroll",
            "for (int b = 0; b < Tile::kColumnBlocks; ++b) {",
            "  const int box_column = first_column + tile.first_column() + Staged::kColumns * b;",
            "  if (kColumns % kTileColumns != 0 && box_column >= kColumns) continue;",
            "#pragma unroll",
            "  for (int s = 0; s < kTileRows; s += Staged::kRows) {",
            "    const long long valid = rows - s;  // rows of the box",
            "    if (valid <= 0) continue;",
            f"    const long long row = {first_row} + s;",
            "    staged.begin();",
            "#pragma unroll",
            "    for (int w = 0; w < Staged::kRows / 8; ++w) {",
            "      const int j = s / 8 + w;",
            "#pragma unroll",
            "      for (int r = 0; r < 2; ++r) {",
            *indented(compute, 8),
            "      }",
            "    }",
            "    staged.written();",
            *indented(self._store(parameters, matrix), 4),
            "    staged.sent();",
            "  }",
            "}",
        ]

    def _store(self, parameters: Parameters, matrix: str) -> list[str]:
        """Sends what has been put. The map leaves out what a matrix does not have."""
        of_rows = "static_cast<int>(moesaic::at_most(valid, Staged::kRows))"
        lines: list[str] = []
        for number, output in enumerate(self.outputs):
            map = parameters.tensor_map(output.index, self.rows, min(self.columns, _BOX_COLUMNS))
            where = f"{number}, {map}, {output.column}, static_cast<int>(row)"
            lines.append(f"staged.store({where}, {matrix});" if matrix else f"staged.store_rows({where}, {of_rows});")
        return lines
