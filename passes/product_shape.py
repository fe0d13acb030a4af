"""How the tiles of a product are cut, and by which kind of instruction they are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moesaic.ir.core import Block, BlockArgument, Op, OpResult, Value, columns_of
from moesaic.ir.errors import InternalError
from moesaic.ir.ops import math, slot
from moesaic.ir.ops.kernel import narrow_columns
from moesaic.ir.types import DType

_ROWS = 128
_SIMT_ROWS = 64
_COLUMNS = 128  # of all parts together
_WARP = 32
SWAPPED_ROWS = 144
"""Of a product's ``SwappedTile``, at most: an instruction has as many columns as there are rows."""
TAIL_ROWS = 32
"""Rows that an expert's last pair of tiles may have besides (``WgmmaTile``): so few need no tile of their own."""
SWAPPED_MATRIX = (256, 128)
"""Rows and columns of a gradient's ``SwappedTile``."""
STAGED_ROWS = 16
"""That it puts into shared memory at a time, of 64 columns and each warpgroup, where they leave."""
STAGED_MATRIX_ROWS = 64
"""The same of a gradient, and of tiles whose operands are not swapped."""
TOKEN_BYTES = 3 * 64 * 4
"""Of shared memory that a gradient's kernel has of its own for numbers of tokens (``token_rows.cuh``)."""
_QUEUE_BYTES = 128  # of shared memory that an `ItemQueue` has of its own
_MOST_EXPERTS = 4096  # whose table has room beside any tile by wgmma
_MOST_MATRICES = 16384  # the same of a gradient's, whose table is shorter
_MOST_SWAPPED = 8192  # and beside what leaves its tile with operands swapped
_LARGE_WEIGHT = 16 << 20  # bytes of one matrix, of 50 MB that the L2 cache of Hopper has
_BAND = 8  # pairs; 66 of them run at once
_WIDE_MATRIX = 16  # items beside each other
_SWIZZLED_BLOCK = 1024  # bytes that a stage of wgmma is aligned to
_SIXTEEN_BITS = (DType.BF16, DType.F16)


@dataclass(frozen=True)
class Lines:
    """How the lines of a product's operand lie; see ``tile_common.cuh``.

    Attributes:
        across: the sum, or along it.
        align: bytes that the address of each, and what is valid of it, are a multiple of.
    """

    across: bool
    align: int


@dataclass(frozen=True)
class ProductShape:
    """A tile of ``tile.cuh``.

    Attributes:
        tile: ``SimtTile``, ``MmaTile``, ``WgmmaTile`` or ``SwappedTile``.
        rows, columns: of a tile; columns of each of two parts, where gates and ups are computed at once.
        depth: elements of both operands that are in shared memory at a time, in a stage.
        stages: of the pipeline that fetches them.
        threads: of a block.
        blocks: that a multiprocessor should hold at least, which bounds registers.
        pingpong: whether two warpgroups have tiles in turn, rather than one together (``WgmmaTile`` only).
        tail: rows that an expert's last pair of tiles may have besides; see `takes_tail`.
    """

    tile: str
    rows: int
    columns: int
    depth: int
    stages: int
    threads: int
    blocks: int = 1
    pingpong: bool = False
    tail: int = 0

    @classmethod
    def of(
        cls,
        dtype: DType,
        parts: int,
        columns: int,
        *,
        tile: str = "",
        hopper: bool = False,
        allow_tf32: bool = False,
        reads: bool = False,
        tall: bool = False,
        swaps: bool = False,
        alone: bool = False,
    ) -> ProductShape:
        """The rule: tensor cores for 16-bit operands; 128 columns in all parts together, or as few as there are.

        On Hopper, tiles by wgmma have two warpgroups that multiply, and four warps that fetch for them. They share a
        tile of 128 x 256, which needs the least of what it multiplies from the L2 cache, unless much is left to do
        after a product: then they have tiles of 64 x 256 in turn, or of 128 x 128 where there are no more columns. So
        they do where one weight of so few columns is all there is, a gate: tiles of 256 rows would be half as many.
        Where 256 rows and 128 columns are a tile, operands are swapped if they may be, to read less of shared memory.
        Tiles by mma.sync have four warps of 64 x 64, which read the least of shared memory for each product; two such
        blocks share a multiprocessor, so that one multiplies while the other is at its epilogue. Float32 operands go to
        tensor cores only if they may be rounded to tf32. Others have 32 elements a thread.

        Args:
            dtype: of the operands.
            parts: 2 where gates and ups are computed at once.
            columns: of a part.
            tile: ``simt``, ``mma``, a schedule of tiles by wgmma (``cooperative`` or ``pingpong``), or ``swapped``,
                where it is possible; empty: the rule.
            hopper: whether there is wgmma.
            allow_tf32: see above.
            reads: whether what follows the product reads as many columns as it has.
            tall: whether a tile that is shared has 256 rows and 128 columns, rather than 128 and 256: where the left
                operand is what a pair of blocks has in common.
            swaps: whether the operands of wgmma may be swapped; see `swaps_operands` and `swaps_matrix`.
            alone: whether all rows take the same weight.
        """
        whole = max(64, _power_of_two(columns))
        if swaps and dtype in _SIXTEEN_BITS and (tile == "swapped" or (tall and hopper and not tile)):
            if tall and whole >= 128:
                return cls("SwappedTile", *SWAPPED_MATRIX, 64, 4, 384, 1)
            if not tall and parts * whole >= 256:
                return cls("SwappedTile", SWAPPED_ROWS, 256 // parts, 64, 4, 384, 1)
        tile = "" if tile == "swapped" else tile
        wgmma = (hopper and not tile) or tile in ("cooperative", "pingpong")
        if wgmma and dtype in _SIXTEEN_BITS and parts * whole >= 128:
            if reads and not tile and parts * whole >= 256:
                return cls("WgmmaTile", 64, 256 // parts, 64, 5, 384, 1, True)
            narrow = parts * whole < 256
            if tile == "pingpong" or ((reads or (alone and narrow)) and not tile):
                return cls("WgmmaTile", 128, 128 // parts, 64, 6, 384, 1, True)
            if tall or narrow:
                return cls("WgmmaTile", 256, 128 // parts, 64, 4, 384, 1)
            return cls("WgmmaTile", 128, 256 // parts, 64, 4, 384, 1)
        if dtype in _SIXTEEN_BITS and tile != "simt":
            fitting = min(_COLUMNS // parts, max(16, _power_of_two(columns)))
            return cls("MmaTile", _ROWS, fitting, 32, 4, 128, 2)
        fitting = min(_COLUMNS // parts, max(32, _power_of_two(columns)))
        if allow_tf32 and dtype is DType.F32 and tile != "simt":
            return cls("MmaTile", _ROWS, fitting, 16, 4, 128, 2)
        return cls("SimtTile", _SIMT_ROWS, fitting, 16, 2, _SIMT_ROWS * fitting * parts // 32)

    @property
    def header(self) -> str:
        """The file of the tile."""
        return f"tile_{self.tile.removesuffix('Tile').lower()}.cuh"

    @property
    def fetches(self) -> bool:
        """Whether warps of its own fetch what the others multiply."""
        return self.tile in ("WgmmaTile", "SwappedTile")

    @property
    def told(self) -> bool:
        """Whether blocks of a product over experts are told their next item (``items.cuh``), and may take it by a
        count. Of warpgroups that have tiles in turn, one finds its next tile while the other multiplies."""
        return self.fetches and not self.pingpong

    @property
    def queue_bytes(self) -> int:
        """Of shared memory that a kernel has of its own beside its tile, to tell what is next."""
        return _QUEUE_BYTES if self.told else 0

    @property
    def swapped(self) -> bool:
        """Whether a thread holds neighbouring rows of a column. Tiles of a product then have `rows` at most, and share
        an expert's out evenly."""
        return self.tile == "SwappedTile"

    @property
    def bounds(self) -> str:
        """What ``__launch_bounds__`` has after the threads."""
        return f", {self.blocks}" if self.blocks > 1 or self.fetches else ""

    @property
    def vector(self) -> int:
        """Neighbouring columns that a thread holds; rows of a ``SwappedTile``."""
        return {"SimtTile": 4, "MmaTile": 2, "WgmmaTile": 8, "SwappedTile": 2}[self.tile]

    def tiles_of_matrix(self, rows: int, columns: int) -> tuple[int, int]:
        """Tiles of a gradient [rows, columns]: below each other, and beside each other."""
        return -(-rows // self.rows), -(-columns // self.columns)

    def blocks_of_matrix(self, rows: int, columns: int) -> int:
        """Blocks that have a tile of a gradient each, with those of pairs that have none."""
        below, beside = self.tiles_of_matrix(rows, columns)
        if not self.fetches:
            return below * beside
        if pairs_lie_beside(below, beside):
            return below * (beside + beside % 2)
        return (below + below % 2) * beside

    def shared_bytes(self, size: int, parts: int, left: Lines, right: Lines) -> int:
        """Shared memory of a block for operands with elements of `size` bytes; the kernel asserts that it is so."""
        stages = self.stages * self.depth * size * (self.rows + parts * self.columns)
        if self.tile == "MmaTile":
            return stages
        if self.fetches:  # with two barriers a stage, two more, and a gap before the first
            return stages + 16 * (self.stages + 1) + _SWIZZLED_BLOCK - 16
        return 4 * self.stages * (self._floats(size, self.rows, left) + self._floats(size, parts * self.columns, right))

    @property
    def tail_bytes(self) -> int:
        """Of shared memory that results leave by, at least: a tail's rows of all stages are there meanwhile. A power of
        two, as what leaves has."""
        return _power_of_two(self.stages * self.depth * 2 * self.tail) if self.tail else 0

    def _floats(self, size: int, rows: int, lines: Lines) -> int:
        """Of an operand in a stage of a SimtTile: steps that are turned have gaps between them."""
        chunks = self.depth * size // lines.align
        gap = 0 if lines.across else 32 // chunks if chunks < 8 else 4
        return self.depth * -(-rows // _WARP) * _WARP + chunks * gap

    @classmethod
    def parse(cls, config: Mapping[str, str]) -> ProductShape:
        """The shape that `config` says."""
        numbers = {name: int(config[name]) for name in ("rows", "columns", "depth", "stages", "threads", "blocks")}
        tail = int(config.get("tail", "0"))
        return cls(config["tile"], **numbers, pingpong=config.get("schedule") == "pingpong", tail=tail)

    @staticmethod
    def chosen(config: Mapping[str, str], point: Mapping[str, str]) -> dict[str, str]:
        """A configuration with the choices of a point: where operands are swapped, the tile is another one, and a tail
        is of the tile that it was chosen for."""
        schedule = point.get("schedule") if "schedule" in config else None
        tile = {} if schedule is None else {"tile": "SwappedTile" if schedule == "swapped" else "WgmmaTile"}
        other = "tail" in config and any(config.get(name) != value for name, value in point.items())
        return {**config, **({"tail": "0"} if other else {}), **point, **tile}

    def cuda(self, parts: int, left: Lines, right: Lines) -> str:
        """The arguments of ``TileShape``."""
        arguments: dict[str, int | bool] = {
            "rows": self.rows,
            "columns": self.columns,
            "depth": self.depth,
            "stages": self.stages,
            "parts": parts,
            "left_across": left.across,
            "right_across": right.across,
            "left_align": left.align,
            "right_align": right.align,
            "threads": self.threads,
            **({"tail": self.tail} if self.tail else {}),
        }
        return ", ".join(f"/*{name}=*/{str(value).lower()}" for name, value in arguments.items())

    def config(self) -> dict[str, str]:
        """What `parse` reads."""
        schedule = "swapped" if self.swapped else "pingpong" if self.pingpong else "cooperative"
        return {
            "tile": self.tile,
            **({"schedule": schedule} if self.fetches else {}),
            "rows": str(self.rows),
            "columns": str(self.columns),
            "depth": str(self.depth),
            "stages": str(self.stages),
            "threads": str(self.threads),
            "blocks": str(self.blocks),
        }


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def product_shape(region: Block, *, tile: str = "", hopper: bool = False, allow_tf32: bool = False) -> ProductShape:
    """The tile of a ``kernel.product`` or ``kernel.wgrad``; see `ProductShape.of`. It has a tail where it can.

    `hopper` is whether there is wgmma, and operands come in boxes.
    """
    for op in region.ops:
        if isinstance(op, slot.Product):
            outer = op.sizes()[1]
            columns = narrow_columns(region)
            in_turn = any(o.interleaved for o in region.ops if isinstance(o, slot.Split | slot.Join))
            parts = 2 if outer != columns and not in_turn else 1
            experts = op.weight.type.shape[0] if isinstance(op, slot.GroupedLinear) else 1
            boxes = hopper and isinstance(experts, int) and experts <= _MOST_EXPERTS
            shape = ProductShape.of(
                op.x.type.dtype,
                parts,
                outer // parts,
                tile=tile,
                hopper=boxes,
                allow_tf32=allow_tf32,
                reads=reads_columns(region, columns),
                swaps=swaps_operands(region, columns),
                alone=isinstance(op, slot.Linear),
            )
            has_tail = boxes and not why_no_tail(region, shape)
            return replace(shape, tail=TAIL_ROWS) if has_tail else shape
        if isinstance(op, slot.Outer):
            width = op.sizes()[1]
            matrices = op.result.type.shape[0] if isinstance(op, slot.GroupedWgrad) else 1
            assert isinstance(matrices, int)
            return ProductShape.of(
                op.a.type.dtype,
                1,
                width,
                tile=tile,
                hopper=hopper and matrices <= _MOST_MATRICES,
                allow_tf32=allow_tf32,
                tall=_gathers(op.b),
                swaps=swaps_matrix(region) and matrices <= _MOST_SWAPPED,
            )
    raise InternalError("a product kernel without a product")


def pairs_of_band(weight_bytes: int) -> int:
    """How many pairs of row tiles take the columns of a weight together, where one matrix has so many bytes.

    The 66 pairs of blocks of a card have neighbouring items. Columns inside rows, that is one pair's rows and 66 tiles
    of the weight, which are read again for the next rows, from memory if the L2 cache is too small for them. In bands,
    it is the rows of 8 pairs and 8 or 9 tiles.
    """
    return _BAND if weight_bytes > _LARGE_WEIGHT else 1


def rows_lie_inside(row_items: int, column_items: int) -> bool:
    """The same of a gradient's items, whose matrix is known: neighbours are below each other where many lie beside."""
    return column_items > _WIDE_MATRIX and row_items < column_items


def pairs_lie_beside(below: int, beside: int) -> bool:
    """Whether a pair of blocks has two tiles of a matrix beside each other, and so the left operand in common.

    Below each other, they have the right one in common, which is wider. But more tiles may have none below them than
    have none beside them.
    """
    return below % 2 * beside > beside % 2 * below


def swaps_operands(region: Block, columns: int) -> bool:
    """Whether a thread may hold neighbouring rows of a column in place of neighbouring columns of a row.

    What follows the product is then elementwise, on the product alone, and leaves in rows of 16 bits through shared
    memory: no columns are read, there are no numbers or sums of rows, and gates and ups do not alternate.
    """
    allowed = (slot.Gather, slot.GroupedLinear, slot.Split, slot.Join, math.Elementwise)
    ops = region.ops[:-1]
    plain = all(isinstance(op, allowed) for op in ops)
    in_turn = any(op.interleaved for op in ops if isinstance(op, slot.Split | slot.Join))
    alone = all(v.type.rank == 0 or not isinstance(v, BlockArgument) for op in ops for v in _computed_from(op))
    results = region.terminator.operands
    narrow = all(v.type.dtype in _SIXTEEN_BITS and v.type.shape[-1] in (columns, 2 * columns) for v in results)
    return plain and alone and narrow and not in_turn and columns % 8 == 0 and len({v.type.dtype for v in results}) == 1


def takes_tail(region: Block) -> bool:
    """Whether an expert's last tiles may have a few rows besides, if they have the shape for it: rows that follow one
    another, whose products are all there is, and leave in 16 bits."""
    products = [op for op in region.ops if isinstance(op, slot.GroupedLinear)]
    plain = all(isinstance(op, slot.GroupedLinear | math.Cast) for op in region.ops[:-1])
    results = region.terminator.operands
    if not plain or len(products) != 1 or len(results) != 1 or not isinstance(products[0].x, BlockArgument):
        return False
    return results[0].type.dtype in _SIXTEEN_BITS and columns_of(results[0]) % 8 == 0


def why_no_tail(region: Block, shape: ProductShape) -> str:
    """Why a product's tiles of that shape cannot have a tail; empty where they can."""
    if not takes_tail(region):
        return "a tail's rows follow one another, and their products are all there is, and leave in 16 bits"
    if shape.tile != "WgmmaTile" or shape.pingpong or shape.columns < 256:
        return "a tail is that of tiles of 256 columns, which two warpgroups share"
    [depth] = [op.sizes()[0] for op in region.ops if isinstance(op, slot.Product)]
    if depth <= shape.depth * (shape.stages - 1):
        return f"a tail's rows come for {shape.stages} stages at once, and {depth} elements have fewer"
    return ""


def swaps_matrix(region: Block) -> bool:
    """The same for a gradient: its right operand is gathered, so that a tile has 128 columns of it and 256 of the left
    one, and its rows leave in 16 bits."""
    [op] = (op for op in region.ops if isinstance(op, slot.Outer))
    accumulates = any(isinstance(o, slot.Accumulate) for o in region.ops)
    narrow = any(v.type.rank == 3 and v.type.dtype in _SIXTEEN_BITS for v in region.terminator.operands)
    return _gathers(op.b) and narrow and not accumulates and op.sizes()[1] % 8 == 0


def swapped_bytes(region: Block) -> int:
    """Shared memory that results need at least to leave a ``SwappedTile`` by, beside its stages."""
    rows, outputs = STAGED_MATRIX_ROWS, 1
    if not any(isinstance(op, slot.Outer) for op in region.ops):
        columns = narrow_columns(region)
        rows = STAGED_ROWS
        outputs = sum(2 if v.type.shape[-1] != columns else 1 for v in region.terminator.operands)
    return 2 * outputs * rows * 64 * 2


def _gathers(rows: Value) -> bool:
    return isinstance(rows, OpResult) and isinstance(rows.op, slot.Gather)


def _computed_from(op: Op) -> Sequence[Value]:
    return op.operands if isinstance(op, math.Elementwise | slot.Split | slot.Join) else ()


def reads_columns(region: Block, columns: int) -> bool:
    """Whether what follows a product reads rows of as many columns as it has, or twice as many."""
    elsewhere = (slot.OfPick, slot.ExpertRows, slot.Product)
    gathers = [o for o in region.ops if isinstance(o, slot.Gather)]
    rows = [a for a in region.arguments if a.type.rank == 2] + [g.y for g in gathers]
    return any(
        value.type.shape[-1] in (columns, 2 * columns)
        and any(not isinstance(user, (*elsewhere, slot.Gather)) for user in region.users(value))
        for value in rows
    )
