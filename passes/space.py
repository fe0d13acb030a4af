"""What may be chosen for a kernel: the parameters of its template as data, and which points of them a target can run.

A *point* says a value for each parameter that the kernel has. The rule's point (``specialize``) is always one of the
space, and works on every target. Nothing here changes what a row's results are, bit by bit:

- A row program adds up in one order whatever its lanes, and every way of selecting gives the same picks.
- A tile of a product adds up in the order of the sum, in steps that belong to the kind of instruction (``simt``,
  ``mma``, ``wgmma``). So the kind stays that of the rule, and the space is about sizes, stages and the schedule; of
  wgmma, that its operands are swapped is a schedule, too: each product of two elements stays what it is. Where
  rows are summed after a product, threads and depth stay as they are, too: they decide the order of that sum. So do
  columns, but for tiles by wgmma, of which the same four lanes have all columns of a row.
- Sums over tokens (losses, gradients of biases) are no row's result: they follow the number of blocks, as they do
  between two GPUs. But a gradient of a weight that takes its sum in parts (``split_wgrads.py``) has those of the rule's
  tile, whichever tile it takes.

A dispatch has one choice, and the kernels that finish sums are too short to matter: both are left to the rule.
"""

from __future__ import annotations

import functools
import math as python_math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moesaic.ir.core import BlockArgument, Value
from moesaic.ir.errors import UnsupportedError, UsageError
from moesaic.ir.ops import row, slot
from moesaic.ir.ops.kernel import SUM_COLUMNS, narrow_columns
from moesaic.ir.ops.launch import Kernel
from moesaic.passes.product_shape import (
    SWAPPED_MATRIX,
    SWAPPED_ROWS,
    TAIL_ROWS,
    TOKEN_BYTES,
    Lines,
    ProductShape,
    swapped_bytes,
    swaps_matrix,
    swaps_operands,
    why_no_tail,
)
from moesaic.passes.row_layout import Layout, infer_layouts
from moesaic.passes.specialize import Specialize, point_text

Point = Mapping[str, str]
"""A value for each parameter by name."""


class Limits(Protocol):
    """What a space asks of a target; ``codegen.Target`` knows all of it. Sizes in bytes, registers of 32 bits."""

    @property
    def shared_optin(self) -> int: ...

    @property
    def shared_per_sm(self) -> int: ...

    @property
    def registers_per_sm(self) -> int: ...

    @property
    def max_threads_per_sm(self) -> int: ...

    @property
    def max_blocks_per_sm(self) -> int: ...


@dataclass(frozen=True)
class Parameter:
    """One choice: its name in a configuration, the values there are, and what it means."""

    name: str
    values: tuple[str, ...]
    meaning: str


@dataclass(frozen=True)
class Family:
    """The parameters of a template.

    Attributes:
        version: of what the parameters mean; what was found for another version is not used. Raise it when a template
            changes so much that its fastest point may be another.
        parameters: in the order in which they are tried.
    """

    version: int
    parameters: tuple[Parameter, ...]


def _numbers(*values: int) -> tuple[str, ...]:
    return tuple(map(str, values))


_TILES = (
    Parameter(
        "schedule",
        ("cooperative", "pingpong", "swapped"),
        "of wgmma: one tile for two warpgroups, tiles in turn, or one with its operands swapped",
    ),
    Parameter("rows", _numbers(64, 128, SWAPPED_ROWS, 256), "of a tile; with operands swapped, at most"),
    Parameter("columns", _numbers(32, 64, 128, 256), "of a tile, of each of two parts"),
    Parameter("depth", _numbers(16, 32, 64), "elements of a row in a stage"),
    Parameter("stages", _numbers(2, 3, 4, 5, 6, 7, 8), "of the pipeline that fetches"),
    Parameter("threads", _numbers(64, 128, 256, 384), "of a block"),
    Parameter("blocks", _numbers(1, 2, 3), "of a multiprocessor, which bounds registers"),
)
_TAIL = Parameter("tail", _numbers(0, TAIL_ROWS), "rows that an expert's last pair of tiles has besides, at most")
_THREADS = Parameter("threads", _numbers(64, 128, 256, 512), "of a block")

FAMILIES: Mapping[str, Family] = {
    "row_program": Family(
        1,
        (
            Parameter("lanes", _numbers(1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "that share a token"),
            Parameter("select", ("merge", "rounds", "radix", "sort"), "how picks are found"),
            Parameter("listed", _numbers(1, 2, 4, 8, 16), "of its values a lane lists for merging"),
            Parameter("threads", _numbers(32, 64, 128, 256, 512), "of a block"),
            Parameter("prefetch", ("off", "on"), "whether the next token's row is fetched meanwhile"),
            Parameter("resident", _numbers(1, 2, 4, 6, 8, 12, 16), "blocks a multiprocessor, which bounds registers"),
        ),
    ),
    "product": Family(2, (*_TILES, _TAIL)),
    "wgrad": Family(3, _TILES),
    "combine": Family(1, (_THREADS,)),
    "slot_rows": Family(1, (_THREADS,)),
}
"""By template. Those that are not here have nothing to choose."""

_FEWEST_REGISTERS = 24  # of a thread of a row program, beside its part of the row
_TILE_REGISTERS = 56  # of a thread of a product, beside the sums of its tile
_MOST_SUMS = 128  # of a thread in registers
_WGMMA_COLUMNS = (64, 128, 256)
_OF_WGMMA = {"depth": "64", "threads": "384", "blocks": "1"}
_SWAPPED_COLUMNS = 256  # of all parts together
_LEAST_FILLED = 128  # threads a multiprocessor that a bound on registers may be for


@dataclass(frozen=True)
class Space:
    """The points of one kernel.

    Attributes:
        op: the kernel, as planned.
        specialize: the rule: target, token bucket, alignment of inputs, and what the user has decided.
        limits: of the target.
        aligned: bytes that the function's inputs are known to be aligned to.
    """

    op: Kernel
    specialize: Specialize
    limits: Limits
    aligned: Mapping[Value, int]
    _configs: dict[str, dict[str, str]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def family(self) -> Family | None:
        """Of the template; None if it has nothing to choose."""
        return FAMILIES.get(self.op.template)

    @functools.cached_property
    def default(self) -> Point:
        """The rule's point."""
        return self._point(self.config({}))

    def config(self, point: Point) -> dict[str, str]:
        """The configuration at a point.

        Raises:
            UsageError, UnsupportedError: there is none.
        """
        key = point_text("", point)  # a search asks for each of them again and again
        found = self._configs.get(key)
        if found is None:
            found = self._configs[key] = self.specialize.config(self.op, self.aligned, point, self._layouts)
        return found

    @functools.cached_property
    def _layouts(self) -> dict[Value, Layout] | None:
        assert self.op.region is not None
        return infer_layouts(self.op.region) if self.op.template == "row_program" else None

    def problem(self, point: Point) -> str:
        """Why a point cannot be; empty if it can. Values need not be those of the family: what an older version, or a
        person, has written is held against the same limits."""
        family = self.family
        if family is None:
            return f"{self.op.template} has nothing to choose"
        known = {p.name: p.values for p in family.parameters}
        unknown = point.keys() - known.keys()
        if unknown:
            return f"unknown parameters {', '.join(sorted(unknown))}"
        if not all(v.isdigit() == known[n][0].isdigit() for n, v in point.items()):
            return "a number stands where a word belongs, or a word for a number"
        try:
            config = self.config(point)
        except (UsageError, UnsupportedError, ValueError) as error:
            return str(error)
        other = {n: config.get(n, "") for n, v in point.items() if config.get(n) != v}
        if other:
            return "the kernel takes " + ", ".join(f"{n}={v or 'none'}" for n, v in other.items())
        if self.op.template == "row_program":
            return self._row_program(config)
        if self.op.template in ("product", "wgrad"):
            return self._product(ProductShape.parse(config))
        return ""

    def points(self) -> list[Point]:
        """Every point that can be, the rule's first."""
        if self.family is None:
            return []
        found = [self.default]
        found += [p for p in self._below({}, 0) if p != self.default]
        return found

    def _below(self, chosen: dict[str, str], number: int) -> Iterator[Point]:
        assert self.family is not None
        if number == len(self.family.parameters):
            if not self.problem(chosen):
                yield chosen
            return
        parameter = self.family.parameters[number]
        known = self._config_or_none(chosen)
        if known is None:
            return
        if parameter.name not in known:  # such as the length of lists where nothing is merged
            yield from self._below(chosen, number + 1)
            return
        for value in self._values(parameter):
            yield from self._below({**chosen, parameter.name: value}, number + 1)

    def _values(self, parameter: Parameter) -> tuple[str, ...]:
        """Those that any point has: of tiles by wgmma, some are fixed."""
        by_wgmma = self.op.template in ("product", "wgrad") and self._rule.fetches
        return (_OF_WGMMA[parameter.name],) if by_wgmma and parameter.name in _OF_WGMMA else parameter.values

    def _config_or_none(self, chosen: Point) -> dict[str, str] | None:
        try:
            return self.config(chosen)
        except (UsageError, UnsupportedError):
            return None

    def _point(self, config: Mapping[str, str]) -> Point:
        return (
            {} if self.family is None else {p.name: config[p.name] for p in self.family.parameters if p.name in config}
        )

    # ------------------------------------------------------------------------------------------------- row programs

    def _row_program(self, config: Mapping[str, str]) -> str:
        experts = longest_row(self.op)
        lanes, vec, threads, resident = (int(config[n]) for n in ("lanes", "vec", "threads", "resident"))
        chunks = 1 << (-(-experts // vec) - 1).bit_length()
        if "cluster" in config and resident > 1:
            return "the blocks of one cluster leave multiprocessors to spare"
        if lanes > chunks:
            return f"{lanes} lanes share {chunks} chunks of a row"
        if threads < min(lanes, 32):
            return f"{lanes} lanes are more than a block has"
        if resident > self.limits.max_blocks_per_sm or resident * threads > self.limits.max_threads_per_sm:
            return f"a multiprocessor does not hold {resident} blocks of {threads} threads"
        slots = -(-chunks // lanes) * vec
        registers = self.limits.registers_per_sm // (resident * threads)
        if resident > 1 and slots + _FEWEST_REGISTERS > registers:
            return f"{resident} blocks of {threads} threads leave {registers} registers for {slots} values of a row"
        if 1 < resident < 1 + _LEAST_FILLED // threads:
            return "so few blocks bound nothing"
        return ""

    # ------------------------------------------------------------------------------------------------- products

    def _product(self, shape: ProductShape) -> str:
        rule = self._rule
        if shape == rule:  # which works on every target, if not with as many blocks as it would like
            return ""
        if shape.tile != rule.tile and not (shape.fetches and rule.fetches):
            return f"tiles by {rule.tile} and by {shape.tile} round differently"
        rows = SWAPPED_ROWS if self.op.template == "product" else SWAPPED_MATRIX[0]
        if shape.swapped and shape.rows != rows:
            return f"with operands swapped, a tile has {rows} rows"
        if shape.rows == SWAPPED_ROWS and not shape.swapped:
            return f"{SWAPPED_ROWS} rows are those of a tile with its operands swapped"
        region = self.op.region
        assert region is not None
        size, parts, width, across, summed = self._operands
        if summed:
            # Four neighbouring lanes have a row of a tile by wgmma, and add up each partial sum by itself.
            same = (
                shape.columns % SUM_COLUMNS == rule.columns % SUM_COLUMNS == 0
                if shape.fetches
                else shape.columns == rule.columns
            )
            if not same or (shape.threads, shape.depth) != (rule.threads, rule.depth):
                return "the order of sums over columns would be another"
        if shape.columns > max(64, rule.columns, 1 << (width - 1).bit_length()):
            return f"tiles of {shape.columns} columns are wider than {width}"
        wide = parts * shape.columns
        problem = self._wgmma(shape, wide, across) if shape.fetches else self._by_warps(shape, size, wide)
        if problem:
            return problem
        lines = Lines(across, 16)
        shared = shape.shared_bytes(size, parts, Lines(self.op.template == "wgrad", 16), lines)
        shared += self._table_bytes(shape) + shape.queue_bytes + (swapped_bytes(region) if shape.swapped else 0)
        shared += TOKEN_BYTES if self.op.template == "wgrad" and shape.fetches else 0
        shared += shape.tail_bytes
        if shared > self.limits.shared_optin or shared * shape.blocks > self.limits.shared_per_sm:
            return f"{shape.blocks} blocks need {shared} bytes of shared memory each"
        return ""

    def _wgmma(self, shape: ProductShape, wide: int, across: bool) -> str:
        config = shape.config()
        if any(config[name] != value for name, value in _OF_WGMMA.items()):
            return "tiles by wgmma have two warpgroups beside the one that fetches, and stages of 64"
        if shape.columns not in _WGMMA_COLUMNS:
            return f"{shape.columns} columns are none of {_WGMMA_COLUMNS}"
        if shape.tail not in (0, TAIL_ROWS):
            return f"an expert's last tiles have {TAIL_ROWS} rows besides, or none"
        assert self.op.region is not None
        if shape.tail and (problem := why_no_tail(self.op.region, shape)):
            return problem
        if shape.swapped:
            return self._swapped(wide)
        rows = shape.rows if shape.pingpong else shape.rows // 2
        if rows % 64 != 0:
            return "a warpgroup has blocks of 64 rows"
        if rows * wide > _MOST_SUMS * 128:
            return f"{rows * wide // 128} sums a thread"
        if (across and wide < 128) or (self.op.template == "wgrad" and shape.rows < 128):
            return "a pair of blocks has two boxes of the operand that they share"
        return ""

    def _swapped(self, wide: int) -> str:
        region = self.op.region
        assert region is not None
        if self.op.template == "wgrad":
            if not swaps_matrix(region):
                return "with operands swapped, a gradient's right operand is gathered, and its rows leave in 16 bits"
            return "" if wide == SWAPPED_MATRIX[1] else f"with operands swapped, a tile has {SWAPPED_MATRIX[1]} columns"
        if not swaps_operands(region, narrow_columns(region)):
            return "with operands swapped, only what is elementwise may follow a product, and leaves in rows of 16 bits"
        if wide != _SWAPPED_COLUMNS:
            return f"with operands swapped, a warpgroup has {_SWAPPED_COLUMNS // 2} columns of all parts together"
        return ""

    def _by_warps(self, shape: ProductShape, size: int, wide: int) -> str:
        simt = shape.tile == "SimtTile"
        warps = shape.threads // 32
        unit = 16
        if simt and (shape.depth, shape.stages, shape.blocks) != (16, 2, 1):
            return "tiles by multiply-adds have two stages of 16 steps"
        if not simt and shape.depth * size not in (64, 128):
            return f"a stage of {shape.depth} steps is neither 64 nor 128 bytes of a row"
        sums = shape.rows * wide // shape.threads
        if not 16 <= sums <= (64 if simt else _MOST_SUMS):
            return f"{sums} sums a thread"
        fits = any(
            warps % c == 0 and shape.columns % (c * unit) == 0 and shape.rows % (warps // c * unit) == 0
            for c in range(1, warps + 1)
        )
        if not fits:
            return f"{warps} warps cannot share {shape.rows} x {shape.columns}"
        registers = self.limits.registers_per_sm // (shape.blocks * shape.threads)
        if sums + _TILE_REGISTERS > registers:
            return f"{shape.blocks} blocks of {shape.threads} threads leave {registers} registers for {sums} sums"
        return ""

    @functools.cached_property
    def _rule(self) -> ProductShape:
        return ProductShape.parse(self.config({}))

    @functools.cached_property
    def _operands(self) -> tuple[int, int, int, bool, bool]:
        """Bytes of an element, parts, columns of a part, whether the right operand lies across the sum, and whether
        rows are summed afterwards."""
        assert self.op.region is not None
        summed = any(isinstance(o, row.Sum) for o in self.op.region.ops)
        for op in self.op.region.ops:
            if isinstance(op, slot.Product):
                outer = op.sizes()[1]
                in_turn = any(o.interleaved for o in self.op.region.ops if isinstance(o, slot.Split | slot.Join))
                parts = 2 if outer != narrow_columns(self.op.region) and not in_turn else 1
                return op.x.type.dtype.bytes, parts, outer // parts, op.transposed, summed
            if isinstance(op, slot.Outer):
                return op.a.type.dtype.bytes, 1, op.sizes()[1], True, summed
        raise UnsupportedError(f"{self.op.symbol}: a product kernel without a product")

    def _table_bytes(self, shape: ProductShape) -> int:
        """Of shared memory, for where the tiles of each expert begin."""
        return 4 * (experts_of(self.op) + 1 + shape.threads // 32) + 16


def longest_row(op: Kernel) -> int:
    """Columns of the longest rows of tokens that a row program reads or writes: E."""
    rows = [v.type.shape[-1] for v in op.operands if v.type.rank == 2 and v.type.leading == "T"]
    inner = [] if op.region is None else [o.size for o in op.region.ops if isinstance(o, row.Scatter | row.Membership)]
    return max([n for n in (*rows, *inner) if isinstance(n, int)], default=1)


def experts_of(op: Kernel) -> int:
    """E of a kernel whose products go by experts; 1 of any other."""
    for inner in op.region.ops if op.region is not None else ():
        if isinstance(inner, slot.GroupedLinear | slot.GroupedWgrad):
            experts = inner.counts.type.shape[0]
            assert isinstance(experts, int)
            return experts
    return 1


def parts_of(op: Kernel) -> int:
    """Parts that a kernel takes the sum over all tokens in; 1 where it has no such sum, or it stays whole."""
    inner = [] if op.region is None else op.region.ops
    return next((o.parts for o in inner if isinstance(o, slot.WgradParts)), 1)


def known_alignment(op: Kernel, aligned: Mapping[Value, int]) -> tuple[int, ...]:
    """Bytes that the rows of each operand read are known to be aligned to."""
    return tuple(aligned.get(v, 16) if isinstance(v, BlockArgument) else _natural(v) for v in op.operands[: op.reads])


def _natural(value: Value) -> int:
    last = value.type.shape[-1] if value.type.rank > 1 else 16
    return python_math.gcd(16, last * value.type.dtype.bytes) if isinstance(last, int) else 16


def spaces_of(
    kernels: Sequence[Kernel], specialize: Specialize, limits: Limits, aligned: Mapping[Value, int]
) -> list[Space]:
    """The spaces of a function's kernels that have more than nothing to choose."""
    return [Space(op, specialize, limits, aligned) for op in kernels if op.template in FAMILIES]
