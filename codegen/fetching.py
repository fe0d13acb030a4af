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
        first: its row along the sum, its column across it, that the tile begins with.
        matrix: the number of the matrix; empty where the operand has rows, which belong to several.
        step: its column, or row, that the sum begins with.
        apart: distance of two parts.
    """

    index: int
    rows: int
    first: str
    matrix: str = ""
    step: str = "0"
    apart: str = "0"

    def lines(self, name: str, parameters: Parameters) -> list[str]:
        """The declaration of an operand."""
        map = parameters.tensor_map(self.index, self.rows)
        kind = f"/*rows=*/{self.rows}" + ("" if self.matrix else ", /*of_rows=*/true")
        place = f"{map}, {self.matrix or '/*matrix=*/0'}, {self.first}"
        if (self.step, self.apart) != ("0", "0"):
            place += f", /*step=*/{self.step}"
        if self.apart != "0":
            place += f", /*apart=*/{self.apart}"
        return [f"const moesaic::Boxes<{kind}> {name}{{{place}}};"]


def box_rows(rows: int, parts: int = 1) -> int:
    """Rows of a box of an operand along the sum, of which a tile has so many a part: two boxes at least, for a pair."""
    return min(128, rows, rows * parts // 2)


def tile_type(shape: ProductShape, left: Fetch, right: Fetch, staged: bool) -> str:
    """The C++ type of a tile."""
    ways = [f"moesaic::Fetch::{how.value}" for how in (left, right)] if shape.fetches else []
    ways += [f"/*ping_pong=*/{str(shape.pingpong).lower()}"] if not shape.swapped and (shape.pingpong or staged) else []
    ways += ["Staged::kBytes"] if staged else []
    return f"moesaic::{shape.tile}<{', '.join(['Element', 'Shape', *ways])}>"


@dataclass(frozen=True)
class InTurn:
    """Every block, or pair, has each so many-th item; its lines know an item's number `n`.

    Attributes:
        number: the type of `n`.
        count: how many items there are.
    """

    number: str
    count: str

    def setup(self) -> list[str]:
        return []

    def loop(self, lines: Sequence[str], fetches: bool) -> list[str]:
        begin = f"for ({self.number} n = blockIdx.x / Tile::kPair; n < {self.count}; n += gridDim.x / Tile::kPair) {{"
        return [begin, *indented(lines, 2), "}"]


@dataclass(frozen=True)
class Queued:
    """Who asks the copy engine finds what is next, and tells the others (``items.cuh``); lines know it as `next`.

    Attributes:
        find: the QueuedItem of number `n`.
        count: how many items there are.
        counter: the pointer to where items taken are counted; empty where blocks have them in turn.
    """

    find: str
    count: str
    counter: str

    def setup(self) -> list[str]:
        counted = "true" if self.counter else "false"
        arguments = f"Tile::kPair, kThreads / 32, /*kCounted=*/{counted}"
        return [f"moesaic::ItemQueue<{arguments}> queue({self.counter or 'nullptr'});"]

    def loop(self, lines: Sequence[str], fetches: bool) -> list[str]:
        loop = "for (auto next = queue.next(); next.is_one(); next = queue.next()) {"
        if not fetches:
            return [loop, *indented(lines, 2), "}"]
        return [
            f"const auto find = [&](int n) {{ return {self.find}; }};",
            "if (Tile::asks()) queue.tell(find);",
            loop,
            "  if (Tile::asks()) queue.tell(find);  // what comes after it",
            *indented(lines, 2),
            "}",
            *([f"if (Tile::asks()) queue.finish({self.count});"] if self.counter else []),
        ]


def order_over_experts(shape: ProductShape, find: str, count: str, counter: str) -> InTurn | Queued:
    """In which order blocks take the items of all experts; see `Queued` for what is given."""
    return Queued(find, count, counter) if shape.told else InTurn("int", count)


def in_two_roles(
    items: InTurn | Queued, fetch: Sequence[str], multiply: Sequence[str], staged: bool, tail: bool = False
) -> list[str]:
    """A kernel's body: both roles go over the same items, a pair of blocks having one at a time."""
    begin, end = (["  Staged staged(tile.staged());"], ["  staged.finish();"]) if staged else ([], [])
    begin += ["  StagedTail staged_tail(tile.staged());"] if tail else []
    return [
        *items.setup(),
        "Tile tile(shared);",
        "",
        "if (Tile::fetches()) {  // some warps of the block fetch operands, the others multiply them",
        "  moesaic::give_registers<Tile::kFetchRegisters>();",
        *indented(items.loop(fetch, fetches=True), 2),
        "} else {",
        "  moesaic::take_registers<Tile::kWorkRegisters>();",
        *begin,
        *indented(items.loop(multiply, fetches=False), 2),
        *end,
        "}",
        "tile.finish();",
    ]
