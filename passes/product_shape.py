"""How the tiles of a product are cut, and by which kind of instruction they are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.ir.core import Block
from moesaic.ir.errors import InternalError
from moesaic.ir.ops import row, slot
from moesaic.ir.ops.kernel import narrow_columns
from moesaic.ir.types import DType

_ROWS = 128
_SIMT_ROWS = 64
_COLUMNS = 128  # of all parts together
_WARP = 32
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
        tile: ``SimtTile``, ``MmaTile`` or ``WgmmaTile``.
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
    def of(
        cls, dtype: DType, parts: int, columns: int, *, tile: str = "", allow_tf32: bool = False, summed: bool = False
    ) -> ProductShape:
        """The rule: tensor cores for 16-bit operands; 128 columns in all parts together, or as few as there are.

        Float32 operands go there only if they may be rounded to tf32. Tiles by mma.sync have four warps of 64 x 64,
        which read the least of shared memory for each product; two such blocks share a multiprocessor, so that one
        multiplies while the other is at its epilogue. Those by wgmma have one warpgroup of 128 x 128, two blocks as
        well, or two of 64 x 256, which read less. Others have 32 elements a thread.

        Args:
            dtype: of the operands.
            parts: 2 where gates and ups are computed at once.
            columns: of a part.
            tile: ``simt``, ``mma``, ``wgmma`` or ``wgmma256``, where it is possible; empty: the rule.
            allow_tf32: see above.
            summed: whether sums of rows leave, a partial one for each 128 columns.
        """
        whole = max(64, _power_of_two(columns))
        if tile.startswith("wgmma") and dtype in _SIXTEEN_BITS and parts * min(whole, 128 // parts) >= 128:
            if tile == "wgmma256" and not summed and parts * min(whole, 256 // parts) == 256:
                return cls("WgmmaTile", _ROWS, 256 // parts, 64, 4, 256, 1)
            return cls("WgmmaTile", _ROWS, 128 // parts, 64, 3, 128, 2)
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
    def vector(self) -> int:
        """Neighbouring columns that a thread holds."""
        return 4 if self.tile == "SimtTile" else 2

    def shared_bytes(self, size: int, parts: int, left: Lines, right: Lines) -> int:
        """Shared memory of a block for operands with elements of `size` bytes; the kernel asserts that it is so."""
        if self.tile in ("MmaTile", "WgmmaTile"):
            stages = self.stages * self.depth * size * (self.rows + parts * self.columns)
            return stages + (_SWIZZLED_BLOCK - 16 if self.tile == "WgmmaTile" else 0)
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


def product_shape(region: Block, *, tile: str = "", allow_tf32: bool = False) -> ProductShape:
    """The tile of a ``kernel.product`` or ``kernel.wgrad``; see `ProductShape.of`."""
    for op in region.ops:
        if isinstance(op, slot.Product):
            columns = op.sizes()[1]
            halves = columns != narrow_columns(region)
            in_turn = any(o.interleaved for o in region.ops if isinstance(o, slot.Split | slot.Join))
            parts = 2 if halves and not in_turn else 1
            summed = any(isinstance(o, row.Sum) for o in region.ops)
            return ProductShape.of(
                op.x.type.dtype, parts, columns // parts, tile=tile, allow_tf32=allow_tf32, summed=summed
            )
        if isinstance(op, slot.GroupedWgrad | slot.Wgrad):
            outer = op.b.type.shape[-1]
            assert isinstance(outer, int)
            return ProductShape.of(op.a.type.dtype, 1, outer, tile=tile, allow_tf32=allow_tf32)
    raise InternalError("a product kernel without a product")
