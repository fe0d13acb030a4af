"""Kernels in two roles: some warps fetch what the others multiply; see ``tile_wgmma.cuh``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from moesaic.codegen.parameters import Parameters
from moesaic.codegen.render import indented
from moesaic.passes.product_shape import ProductShape


class Fetch(Enum):
    """How an operand comes into shared memory."""

    LINES = "kLines"
    BOXES = "kBoxes"
    SHARED = "kShared"


@dataclass(frozen=True)
class Boxes:
    """Where the copy engine finds a tile's rows (or columns) of an operand, in C++; see ``moesaic::Boxes``.

    Attributes:
        index: of the operand.
        rows: of a box.
        matrix: the number of the matrix.
        first: its row along the sum, its column across it, that the tile begins with.
        step: its column, or row, that the sum begins with.
        apart: distance of two parts.
    """

    index: int
    rows: int
    matrix: str
    first: str
    step: str = "0"
    apart: str = "0"

    def expression(self, parameters: Parameters) -> str:
        name = parameters.tensor_map(self.index, self.rows)
        return f"moesaic::Boxes<{self.rows}>{{{name}, {self.matrix}, {self.first}, {self.step}, {self.apart}}}"

    def lines(self, name: str, parameters: Parameters) -> list[str]:
        """The declaration of an operand."""
        return [f"const {self.expression(parameters).replace('{', f' {name}{{', 1)};"]


def box_rows(rows: int, parts: int = 1) -> int:
    """Rows of a box of an operand along the sum, of which a tile has so many a part: two boxes at least, for a pair."""
    return min(128, rows, rows * parts // 2)


def tile_type(shape: ProductShape, left: Fetch, right: Fetch, staged: bool) -> str:
    """The C++ type of a tile."""
    ways = [f"moesaic::Fetch::{how.value}" for how in (left, right)] if shape.fetches else []
    ways += [str(shape.pingpong).lower()] if not shape.swapped and (shape.pingpong or staged) else []
    ways += ["Staged::kBytes"] if staged else []
    return f"moesaic::{shape.tile}<{', '.join(['Element', 'Shape', *ways])}>"


def in_two_roles(number: str, items: str, fetch: Sequence[str], multiply: Sequence[str], staged: bool) -> list[str]:
    """A kernel's body: both roles go over the same items, a pair of blocks having one at a time.

    `number` is the type of an item's number, `items` how many there are: what takes registers through all of a product.
    """
    begin, end = (["  Staged staged(tile.staged());"], ["  staged.finish();"]) if staged else ([], [])
    loop = f"for ({number} n = blockIdx.x / Tile::kPair; n < {items}; n += gridDim.x / Tile::kPair) {{"
    return [
        "Tile tile(shared);",
        "",
        "if (Tile::fetches()) {",
        "  moesaic::give_registers<Tile::kFetchRegisters>();",
        f"  {loop}",
        *indented(fetch, 4),
        "  }",
        "} else {",
        "  moesaic::take_registers<Tile::kWorkRegisters>();",
        *begin,
        f"  {loop}",
        *indented(multiply, 4),
        "  }",
        *end,
        "}",
        "tile.finish();",
    ]
