"""How the tiles of a product are cut, and by which kind of instruction they are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.ir.core import Block
from moesaic.ir.errors import InternalError
from moesaic.ir.ops import slot
from moesaic.ir.ops.kernel import narrow_columns
from moesaic.ir.types import DType

_ROWS = 128
_SIMT_ROWS = 64
_COLUMNS = 128  # of all parts together
_WARP = 32


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
        tile: ``SimtTile`` or ``MmaTile``.
        rows, columns: of a tile; columns of each of two parts, where gates and ups are computed at once.
        depth: elements of both operands that are in shared memory at a time, in a stage.
        stages: of the pipeline that fetches them.
        threads: of a block.
        blocks: that a multiprocessor should hold at least, which bounds registers.
    """

    tile: str
    rows: int
    columns: int
    depth: int
    stages: int
    threads: int
    blocks: int = 1

    @classmethod
    def of(cls, dtype: DType, parts: int, columns: int, allow_tf32: bool = False) -> ProductShape:
        """The rule: tensor cores for 16-bit operands; 128 columns in all parts together, or as few as there are.

        Float32 operands go there only if they may be rounded to tf32.

        Tiles on tensor cores have four warps of 64 x 64, which read the least of shared memory for each product; two
        such blocks share a multiprocessor, so that one multiplies while the other is at its epilogue. Others have 32
        elements a thread.
        """
        if dtype in (DType.BF16, DType.F16):
            fitting = min(_COLUMNS // parts, max(16, _power_of_two(columns)))
            return cls("MmaTile", _ROWS, fitting, 32, 4, 128, 2)
        fitting = min(_COLUMNS // parts, max(32, _power_of_two(columns)))
        if allow_tf32 and dtype is DType.F32:
            return cls("MmaTile", _ROWS, fitting, 16, 4, 128, 2)
        return cls("SimtTile", _SIMT_ROWS, fitting, 16, 2, _SIMT_ROWS * fitting * parts // 32)

    @property
    def vector(self) -> int:
        """Neighbouring columns that a thread holds."""
        return 4 if self.tile == "SimtTile" else 2

    def shared_bytes(self, size: int, parts: int, left: Lines, right: Lines) -> int:
        """Shared memory of a block for operands with elements of `size` bytes; the kernel asserts that it is so."""
        if self.tile == "MmaTile":
            return self.stages * self.depth * size * (self.rows + parts * self.columns)
        return 4 * self.stages * (self._floats(size, self.rows, left) + self._floats(size, parts * self.columns, right))

    def _floats(self, size: int, rows: int, lines: Lines) -> int:
        """Of an operand in a stage of a SimtTile: steps that are turned have gaps between them."""
        chunks = self.depth * size // lines.align
        gap = 0 if lines.across else 32 // chunks if chunks < 8 else 4
        return self.depth * -(-rows // _WARP) * _WARP + chunks * gap

    @classmethod
    def parse(cls, config: Mapping[str, str]) -> ProductShape:
        """The shape that `config` says."""
        numbers = {name: int(config[name]) for name in ("rows", "columns", "depth", "stages", "threads", "blocks")}
        return cls(config["tile"], **numbers)

    def cuda(self, parts: int, left: Lines, right: Lines) -> str:
        """The arguments of ``TileShape``."""
        numbers = (self.rows, self.columns, self.depth, self.stages, parts)
        flags = ("true" if lines.across else "false" for lines in (left, right))
        return ", ".join(map(str, (*numbers, *flags, left.align, right.align, self.threads)))

    def config(self) -> dict[str, str]:
        """What `parse` reads."""
        return {
            "tile": self.tile,
            "rows": str(self.rows),
            "columns": str(self.columns),
            "depth": str(self.depth),
            "stages": str(self.stages),
            "threads": str(self.threads),
            "blocks": str(self.blocks),
        }


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def product_shape(region: Block, allow_tf32: bool = False) -> ProductShape:
    """The tile of a ``kernel.product`` or ``kernel.wgrad``."""
    for op in region.ops:
        if isinstance(op, slot.Product):
            columns = op.sizes()[1]
            halves = columns != narrow_columns(region)
            in_turn = any(o.interleaved for o in region.ops if isinstance(o, slot.Split | slot.Join))
            parts = 2 if halves and not in_turn else 1
            return ProductShape.of(op.x.type.dtype, parts, columns // parts, allow_tf32)
        if isinstance(op, slot.GroupedWgrad | slot.Wgrad):
            outer = op.b.type.shape[-1]
            assert isinstance(outer, int)
            return ProductShape.of(op.a.type.dtype, 1, outer, allow_tf32)
    raise InternalError("a product kernel without a product")
