"""How the tiles of a product are cut, and by which kind of instruction they are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.ir.core import Block
from moesaic.ir.errors import InternalError
from moesaic.ir.ops import slot
from moesaic.ir.ops.kernel import narrow_columns
from moesaic.ir.types import DType


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
    def of(cls, dtype: DType, parts: int) -> ProductShape:
        """The rule: tensor cores for 16-bit operands; 128 columns in all parts together."""
        if dtype in (DType.BF16, DType.F16):
            return cls("SimtTile", 64, 128 // parts, 16, 2, 256)
        return cls("SimtTile", 64, 128 // parts, 16, 2, 256)

    @property
    def vector(self) -> int:
        """Neighbouring columns that a thread holds."""
        return 4 if self.tile == "SimtTile" else 2

    def shared_bytes(
        self, size: int, parts: int, left_across: bool, right_across: bool, left_align: int, right_align: int
    ) -> int:
        """Shared memory of a block for operands with elements of `size` bytes: ``Tile::kSharedBytes``, as generated
        text asserts."""
        if self.tile != "SimtTile":
            return size * self.stages * self.depth * (self.rows + parts * self.columns)
        floats = self.depth * (_up(self.rows, 32) + _up(parts * self.columns, 32))
        for across, align in ((left_across, left_align), (right_across, right_align)):
            if not across:  # gaps, so that lines which are turned on their way go to different banks
                floats += max(32, 4 * (self.depth * size // align))
        return 4 * self.stages * floats

    @classmethod
    def parse(cls, config: Mapping[str, str]) -> ProductShape:
        """The shape that `config` says."""
        numbers = {name: int(config[name]) for name in ("rows", "columns", "depth", "stages", "threads", "blocks")}
        return cls(config["tile"], **numbers)

    def cuda(self, parts: int, left_across: bool, right_across: bool, left_align: int, right_align: int) -> str:
        """The arguments of ``TileShape``."""
        numbers = (self.rows, self.columns, self.depth, self.stages, parts)
        flags = ("true" if across else "false" for across in (left_across, right_across))
        return ", ".join(map(str, (*numbers, *flags, left_align, right_align, self.threads)))

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


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def product_shape(region: Block) -> ProductShape:
    """The tile of a ``kernel.product`` or ``kernel.wgrad``."""
    for op in region.ops:
        if isinstance(op, slot.Product):
            halves = op.sizes()[1] != narrow_columns(region)
            in_turn = any(o.interleaved for o in region.ops if isinstance(o, slot.Split | slot.Join))
            return ProductShape.of(op.x.type.dtype, 2 if halves and not in_turn else 1)
        if isinstance(op, slot.GroupedWgrad | slot.Wgrad):
            return ProductShape.of(op.a.type.dtype, 1)
    raise InternalError("a product kernel without a product")
